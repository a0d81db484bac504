"""What Weights & Biases shows of a scored run: rates by part, and every utterance."""

import html
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_adpsgd.asr.corpora.corpus import Utterance, read_utterances
from lightning_adpsgd.asr.scoring import score_files
from lightning_adpsgd.asr.scoring.aligner import CORRECT, Pair
from lightning_adpsgd.asr.scoring.scorer import ScoredSegment
from lightning_adpsgd.asr.scoring.utterances import marks_of
from lightning_adpsgd.asr.scoring.words import Word
from lightning_adpsgd.asr.sound.sphere import SAMPLE_RATE
from lightning_adpsgd.report import collect, page_of
from recipes.hybrid.pipeline.settings import TEST_SPLITS, Settings
from recipes.hybrid.recognition.scoring import PART_NAMES, read_rules
from recipes.hybrid.recognition.worst import Sides, Sound, sound_of, worst
from recipes.hybrid.training.saving import BEST

MOST_ROWS = 5000
MOST_AUDIO = 10
COLUMNS = (
    *("part", "file", "channel", "begin", "end", "words", "errors"),
    *("reference", "hypothesis", "aligned"),
)


def sides_of(settings: Settings) -> Sides:
    """The recordings of the test sets, by file and channel as a reference has them."""
    prepared = settings.directory("prepare")
    splits = [split for split in settings.splits() if split in TEST_SPLITS]
    return {
        _side(one): Sound(PART_NAMES.get(split, split), one.recording, one.channel)
        for split in splits
        for one in read_utterances(prepared / f"{split}.jsonl")
    }


def _side(utterance: Utterance) -> tuple[str, str]:
    return utterance.conversation.lower(), "ab"[utterance.channel]


def figures_of(settings: Settings, scored: Path) -> dict[str, Any]:
    """What `wandb.Run.log` takes of the finished score in a folder."""
    import wandb

    rules = read_rules(settings)
    files = scored / "reference.stm", scored / "hypothesis.ctm"
    scores = score_files(*files, rules, marks_of(rules))
    sides = sides_of(settings)
    segments = [one for one in scores.segments if one.segment.side in sides]
    table = wandb.Table([*COLUMNS], rows(segments, sides))
    # Beside the table: what a table holds is not in the folder of an offline run.
    worst_ones = audio_of(segments, sides)
    best = scored / BEST / "score.json"
    others = rates(_read(best), "score/best_epoch") if best.exists() else {}
    return {
        **others,
        **rates(_read(scored / "score.json")),
        "score/utterances": table,
        **({"score/worst": worst_ones} if worst_ones else {}),
        "score/report": wandb.Html(_report(scored), inject=False),
        "score/page": wandb.Html(page_of(collect([scored])), inject=False),
    }


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def rates(score: Mapping[str, Any], group: str = "score") -> dict[str, float]:
    """The word error rate of each part, its interval, and what was best on dev."""
    figures = {"wer": "wer_{}", "wer_low": "wer_{}_low", "wer_high": "wer_{}_high"}
    parts = {
        f"{group}/{written.format(part)}": one[figure]
        for part, one in score["parts"].items()
        for figure, written in (figures | {"cer": "cer_{}"}).items()
        if one.get(figure) is not None
    }
    kept = ("frame_accuracy", "acoustic_scale")
    return parts | {f"{group}/{name}": score[name] for name in kept if name in score}


def rows(segments: Iterable[ScoredSegment], sides: Sides) -> list[list[Any]]:
    """A row for each utterance, that with most errors first, at most `MOST_ROWS`."""
    return [
        _row(one, sides[one.segment.side].part) for one in worst(segments)[:MOST_ROWS]
    ]


def _row(one: ScoredSegment, part: str) -> list[Any]:
    segment, errors = one.segment, one.errors
    return [
        *(part, *segment.side, segment.start_s, segment.end_s),
        *(errors.num_words, errors.num_errors),
        *aligned(one.pairs),
    ]


def aligned(pairs: Iterable[Pair]) -> tuple[str, str, str]:
    """Reference, hypothesis, and one over the other with a letter for each error."""
    columns = [(_text(one.reference), _text(one.hypothesis), one.kind) for one in pairs]
    widths = [max(1, len(said), len(heard)) for said, heard, _ in columns]
    said, heard, kinds = ([column[row] for column in columns] for row in range(3))
    marks = ["" if kind == CORRECT else kind for kind in kinds]
    padded = (_padded(line, widths) for line in (said, heard, marks))
    return _joined(said), _joined(heard), "\n".join(padded)


def _text(word: Word | None) -> str:
    return "" if word is None else word.text


def _joined(words: Iterable[str]) -> str:
    return " ".join(word for word in words if word)


def _padded(words: Iterable[str], widths: Iterable[int]) -> str:
    cells = zip(words, widths, strict=True)
    return " ".join(f"{word:{width}}" for word, width in cells).rstrip()


def audio_of(segments: Iterable[ScoredSegment], sides: Sides) -> list[Any]:
    """The sound of the utterances of most errors, with what was said and heard."""
    import wandb

    found = []
    for one in worst(segments)[:MOST_AUDIO]:
        samples = sound_of(one, sides)
        if samples.size:
            text = _caption(one)
            found.append(wandb.Audio(samples, sample_rate=SAMPLE_RATE, caption=text))
    return found


def _caption(one: ScoredSegment) -> str:
    file, channel = one.segment.side
    said, heard, _ = aligned(one.pairs)
    return f"{file} {channel} {one.segment.start_s:.2f} s: {said} | heard: {heard}"


def _report(scored: Path) -> io.StringIO:
    names = ("speakers.txt", "confusions.txt")
    texts = (scored / name for name in names)
    parts = (html.escape(text.read_text("utf-8")) for text in texts if text.exists())
    return io.StringIO("\n".join(f"<pre>{part}</pre>" for part in parts))
