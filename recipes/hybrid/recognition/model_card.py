"""The card of an exported model: what made it, of what speech, how often it errs."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning_adpsgd
from recipes.hybrid.pipeline.provenance import provenance
from recipes.hybrid.pipeline.settings import Settings

NAME = "MODEL_CARD.md"
_GENERATED = ".generated"  # a folder that `recipes.generated` leaves in a corpus

_USE = """\
Transcribe a recording:

    python -m lightning_adpsgd.asr transcribe call.wav --model FOLDER

The folder holds the network, the search graph and the lexicon, and where the model
adapts to speakers, what finds their streams. `recogniser.json` has its features."""
_OF_SPEECH = """\
- It knows the words of its lexicon alone, and serves speech like that of its training.
- Other channels, noises, accents and subjects were not measured.
- The confidence of a word was not compared with speech from elsewhere."""
_OF_GENERATED = """\
- **Its training speech is synthetic**: a synthesiser read sentences of a small grammar.
  The test speech was made in the same way, with other voices. It does not recognise
  people. The rates below show that the recipe works, and compare methods; no more."""
_LICENCE = """\
The licence of lightning-adpsgd covers the program, not these weights. What may be done
with them follows from the terms of the training speech, of the lexicon and of the text
of the language model. State yours here before you pass the folder on."""


def model_card(settings: Settings) -> str:
    """The card in Markdown, from what the stages of the run have left."""
    return "\n".join(_lines(settings)) + "\n"


def _lines(settings: Settings) -> Iterator[str]:
    yield f"# Acoustic model `{settings.run}`"
    yield ""
    yield (
        "A hybrid recogniser: a bidirectional LSTM names HMM states, and a search "
        f"graph makes words of them. lightning-adpsgd {lightning_adpsgd.__version__} "
        f"trained it with the strategy `{settings.train.strategy}`."
    )
    yield from _section("Use", _USE)
    limits = [_OF_GENERATED] * is_generated(settings.corpus) + [_OF_SPEECH]
    yield from _section("Limits", "\n".join(limits))
    yield from _section("Speech", "\n".join(_speech(settings)))
    yield from _section("Errors", "\n".join(_errors(settings)))
    yield from _section("Training", "\n".join(_training(settings)))
    yield from _section("Licence", _LICENCE)


def _section(title: str, text: str) -> Iterator[str]:
    yield from ("", f"## {title}", "", text)


def is_generated(corpus: Path) -> bool:
    """Whether `recipes.generated` wrote a corpus."""
    return (corpus / _GENERATED).is_dir()


def _speech(settings: Settings) -> Iterator[str]:
    summary = _read(settings.directory("prepare") / "summary.json")
    yield from (f"- {line}" for line in summary.get("report", ()))
    kind = "generated speech" if is_generated(settings.corpus) else "corpus"
    yield f"- {kind}: `{settings.corpus.name}`"


def _errors(settings: Settings) -> Iterator[str]:
    score = _read(settings.directory("score") / "score.json")
    if not score:
        yield "Not scored: there was no test set."
        return
    decoded = _read(settings.directory("decode") / "decode.json")
    kind = " after rescoring" if "rescored" in decoded else ""
    yield f"Word error rates{kind}, with 95 % by a bootstrap over speakers:"
    yield from ("", "| test set | WER | interval | words |", "|---|---|---|---|")
    for part, figures in score["parts"].items():
        wer, words = figures["wer"], figures["num_words"]
        yield f"| {part} | {wer:.1%} | {_interval(figures)} | {words} |"
    yield ""
    yield f"Counted by {score['scorer']}."
    if "rescored" in decoded:
        yield from ("", _without_rescoring(settings, decoded))


def _without_rescoring(settings: Settings, decoded: Mapping[str, Any]) -> str:
    before = decoded["dev_wer"][str(decoded["acoustic_scale"])]
    after = decoded["rescored"]["dev_wer"]
    return (
        "**`transcribe` does not rescore.** The words counted above were chosen from "
        f"the {settings.decode.nbest} best of each utterance with a larger language "
        f"model, a {settings.lm.large_order}-gram that this folder does not hold. On "
        f"`dev` its search graph alone had a WER of {before:.1%}, and rescoring "
        f"brought that to {after:.1%}."
    )


def _interval(figures: Mapping[str, Any]) -> str:
    low, high = figures.get("wer_low"), figures.get("wer_high")
    return "unknown" if low is None or high is None else f"{low:.1%} to {high:.1%}"


def _training(settings: Settings) -> Iterator[str]:
    summary = _read(settings.directory("train") / "summary.json")
    told = {
        "learners": summary.get("num_learners"),
        "epochs": settings.train.epochs,
        "held-out loss of a frame, in nats": _rounded(summary.get("frame_loss")),
        "held-out accuracy of frames": _rounded(summary.get("frame_accuracy")),
        **provenance(),
    }
    yield from (f"- {name}: {value}" for name, value in told.items() if value)


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}
