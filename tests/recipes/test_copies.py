"""Copies of the training speech at other speeds go through all stages after prepare."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from lightning_adpsgd.asr.corpora.corpus import Utterance, write_utterances
from lightning_adpsgd.asr.frames.store import FrameStore
from lightning_adpsgd.asr.language.lexicon import write_lexicon
from recipes.hybrid.data.labels import stored_utterances
from recipes.hybrid.data.speakers import Speakers
from recipes.hybrid.data.splits import speeds_of, with_copies
from recipes.hybrid.pipeline.groups import AlignSettings, FeatureSettings
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.stages.align import align
from tests.asr import digits
from tests.recipes.experiments import digits_and_noises, run_stage, write_frames

UTTERANCES = {"train": 24, "dev": 3}
SPEEDS = (0.9, 1.1)


def _spoken(split: str, speaker: digits.Speaker) -> list[Utterance]:
    return [
        Utterance(
            id=f"sw_{split}-A_{number:06d}",
            recording=Path(f"sw_{split}.sph"),
            channel=0,
            start_s=10.0 * number,
            end_s=10.0 * number + 5,
            words=tuple(speaker.sentence(4)),
            speaker=split,
        )
        for number in range(UTTERANCES[split])
    ]


@pytest.fixture(scope="module")
def states() -> dict[str, np.ndarray]:
    """Which states were spoken, by utterance; filled in by `settings`."""
    return {}


@pytest.fixture(scope="module")
def settings(tmp_path_factory, states: dict[str, np.ndarray]) -> Settings:
    """Digits, spoken anew in every copy, aligned."""
    settings = Settings(
        corpus=Path("corpus"),
        out=tmp_path_factory.mktemp("copies"),
        features=FeatureSettings(speeds=SPEEDS),
        align=AlignSettings(num_iterations=4, num_gaussians=60),
    )
    for stage in ("prepare", "lexicon", "features"):
        settings.directory(stage).mkdir(parents=True)
    lexicon = digits_and_noises()
    speaker = digits.Speaker(lexicon, noise=0.3)
    write_lexicon(settings.directory("lexicon"), lexicon)
    speaker.lexicon = digits.lexicon()  # says digits only
    for split in UTTERANCES:
        spoken = _spoken(split, speaker)
        write_utterances(settings.directory("prepare") / f"{split}.jsonl", spoken)
        said = {
            u.id: speaker.states(list(u.words)) for u in with_copies(settings, split)
        }
        states |= said
        frames = {name: speaker.frames(own) for name, own in said.items()}
        write_frames(settings.directory("features") / split, frames)
    run_stage(align, settings, "align")
    return settings


def test_copies_come_after_what_was_recorded_and_of_train_alone(settings: Settings):
    names = [utterance.id for utterance in with_copies(settings, "train")]
    recorded = names[: UTTERANCES["train"]]
    assert names == [
        *recorded,
        *(f"sp0.9-{name}" for name in recorded),
        *(f"sp1.1-{name}" for name in recorded),
    ]
    assert speeds_of(settings, "dev") == ()
    assert len(list(with_copies(settings, "dev"))) == UTTERANCES["dev"]


def test_copies_are_aligned_by_what_is_heard_in_them(
    settings: Settings, states: dict[str, np.ndarray]
):
    """Which is said at other times than in the recording."""
    labels = settings.directory("align") / "train" / "labels.npy"
    store = FrameStore(settings.directory("features") / "train", labels)
    assert len(store) == 3 * UTTERANCES["train"]
    assert store.labelled.all()
    for speed in (1.0, *SPEEDS):
        names = [
            u.id for u, _ in stored_utterances(settings, "train") if u.speed == speed
        ]
        right = [
            np.mean(store.labels(store.position(name)).numpy() == states[name])
            for name in names
        ]
        assert np.mean(right) > 0.4  # of so many states; by chance 0.02


def test_labels_of_copies_count_among_the_states(settings: Settings):
    counts = json.loads((settings.directory("align") / "states.json").read_text())
    store = FrameStore(settings.directory("features") / "train")
    assert sum(counts["counts"]) == store.num_frames


def test_the_copies_of_a_side_are_a_speaker_of_their_own(settings: Settings):
    speakers = Speakers.of(settings, "train", None)
    count = UTTERANCES["train"]
    assert {side.name: side.positions for side in speakers.sides} == {
        "sw_train.sph A": [*range(count)],
        "sw_train.sph A sp0.9": [*range(count, 2 * count)],
        "sw_train.sph A sp1.1": [*range(2 * count, 3 * count)],
    }


def test_copies_whose_side_could_not_be_read_are_passed_over(settings: Settings):
    """Whoever reads features asks for those that are there."""
    more = dataclasses.replace(settings, features=FeatureSettings(speeds=(0.8, 0.9)))
    found = {u.speed for u, _ in stored_utterances(more, "train")}
    assert found == {1.0, 0.9}
