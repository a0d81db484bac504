"""References of made-up test sets."""

from lightning_adpsgd.asr.corpora.corpus import read_utterances
from recipes.hybrid.pipeline.settings import Settings


def write_reference(settings: Settings) -> None:
    """An `eval.stm` of what the utterances of the test sets say."""
    prepared = settings.directory("prepare")
    lines = [
        " ".join((u.conversation, "A", "x", f"{u.start_s} {u.end_s}", "<O>", *u.words))
        for split in set(settings.splits()) & {"swb", "ch"}
        for u in read_utterances(prepared / f"{split}.jsonl")
    ]
    (prepared / "eval.stm").write_text("".join(f"{line}\n" for line in lines))
