"""What the card of an exported model says, from the files of a run."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from recipes.hybrid.pipeline.overrides import override
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.recognition.model_card import model_card
from recipes.hybrid.stages import STAGES

PART = {"wer": 0.125, "wer_low": 0.1, "wer_high": 0.15, "num_words": 8}


def leave(settings: Settings, stage: str, file: str, content: Any) -> None:
    folder = settings.directory(stage)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(json.dumps(content))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    train = dataclasses.replace(
        Settings(corpus=tmp_path, out=tmp_path).train, strategy="hadpsgd"
    )
    settings = Settings(
        corpus=tmp_path / "calls", out=tmp_path, run="mine", train=train
    )
    report = ["train: 39 utterances, 37 conversation sides, 277 words, 0.02 h"]
    leave(settings, "prepare", "summary.json", {"report": report})
    score = {"parts": {"SWB": PART}, "scorer": "hubscr.pl"}
    leave(settings, "score", "score.json", score)
    figures = {"num_learners": 4, "frame_loss": 1.2345, "frame_accuracy": 0.5}
    leave(settings, "train", "summary.json", figures)
    return settings


def test_the_card_tells_speech_errors_and_training(settings: Settings) -> None:
    card = model_card(settings)
    for words in (
        "# Acoustic model `mine`",
        "with the strategy `hadpsgd`",
        "- train: 39 utterances, 37 conversation sides",
        "- corpus: `calls`",
        "with 95 % by a bootstrap over speakers:",
        "| SWB | 12.5% | 10.0% to 15.0% | 8 |",
        "Counted by hubscr.pl.",
        "- learners: 4",
        "nats: 1.23",
        "- commit: ",
        "The licence of lightning-adpsgd covers the program, not these weights",
    ):
        assert words in card
    assert "synthetic" not in card


def test_a_model_of_generated_speech_says_that_it_recognises_nobody(
    settings: Settings,
) -> None:
    (settings.corpus / ".generated").mkdir(parents=True)
    card = model_card(settings)
    assert "**Its training speech is synthetic**" in card
    assert "generated speech: `calls`" in card


def test_what_was_not_measured_is_not_told(settings: Settings) -> None:
    plain = {name: PART[name] for name in ("wer", "num_words")}
    leave(settings, "score", "score.json", {"parts": {"CH": plain}, "scorer": "own"})
    assert "| CH | 12.5% | unknown | 8 |" in model_card(settings)
    (settings.directory("score") / "score.json").unlink()
    assert "Not scored: there was no test set." in model_card(settings)


def test_rates_after_rescoring_are_told_from_those_of_the_folder(
    settings: Settings,
) -> None:
    decoded = {"acoustic_scale": 0.1, "dev_wer": {"0.08": 0.33, "0.1": 0.25}}
    leave(settings, "decode", "decode.json", decoded)
    assert "rescoring" not in model_card(settings)
    rescored = {"dev_wer": 0.2, "large": 1.0, "word_penalty": 0.0}
    leave(settings, "decode", "decode.json", decoded | {"rescored": rescored})
    settings = override(settings, "decode.nbest=100", "lm.large_order=4")
    card = model_card(settings)
    assert "Word error rates after rescoring, with" in card
    assert "**`transcribe` does not rescore.**" in card
    assert "from the 100 best of each utterance" in card
    assert "a 4-gram that this folder does not hold" in card
    assert "On `dev` its search graph alone had a WER of 25.0%" in card
    assert "rescoring brought that to 20.0%." in card


def test_a_new_score_makes_a_new_card() -> None:
    (export,) = (stage for stage in STAGES if stage.name == "export")
    assert {"prepare", "decode", "score"} <= set(export.inputs)
