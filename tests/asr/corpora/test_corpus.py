"""Utterances survive a file; what is left out is counted."""

import dataclasses
from pathlib import Path

import pytest

from lightning_adpsgd.asr.corpora.corpus import (
    CorpusError,
    Skipped,
    Utterance,
    read_utterances,
    utterance_id,
    write_utterances,
)

SPOKEN = Utterance(
    "sw02001-A_000030-000773",
    Path("disc/sw02001.sph"),
    0,
    0.3,
    7.732,
    ("naïve", "[noise]", "uh-huh"),
    "sw02001-A",
    "a.text:2",
)


def test_utterances_survive_a_file(tmp_path: Path):
    write_utterances(tmp_path / "train.jsonl", [SPOKEN, SPOKEN])
    assert read_utterances(tmp_path / "train.jsonl") == [SPOKEN, SPOKEN]


def test_a_failed_writing_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "train.jsonl"
    write_utterances(path, [SPOKEN])

    def broken():
        yield SPOKEN
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_utterances(path, broken())
    assert read_utterances(path) == [SPOKEN]


@pytest.mark.parametrize("line", ["{", '{"id": "a"}', '["a"]', ""])
def test_a_line_that_is_no_utterance_is_named(tmp_path: Path, line: str):
    path = tmp_path / "train.jsonl"
    write_utterances(path, [SPOKEN])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(CorpusError, match=r"train\.jsonl:2: not an utterance"):
        read_utterances(path)


def test_the_id_holds_side_and_times_in_hundredths():
    assert utterance_id("sw02001", 1, 0.3, 7.732) == "sw02001-B_000030-000773"


def test_the_conversation_is_known_from_the_id_whatever_the_file_is_called():
    spoken = dataclasses.replace(SPOKEN, recording=Path("SW02001.SPH;1"))
    assert spoken.conversation == "sw02001"


def test_a_copy_at_another_speed_is_another_speakers():
    copy = SPOKEN.at_speed(0.9)
    assert copy.id == f"sp0.9-{SPOKEN.id}"
    assert (copy.speaker, copy.words) == ("sp0.9-sw02001-A", SPOKEN.words)
    assert copy.duration_s == pytest.approx(SPOKEN.duration_s / 0.9)
    assert (SPOKEN.side, copy.side) == (
        "disc/sw02001.sph A",
        "disc/sw02001.sph A sp0.9",
    )


def test_an_utterance_of_a_file_without_speeds_is_as_it_was_spoken(tmp_path: Path):
    write_utterances(tmp_path / "train.jsonl", [SPOKEN])
    text = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text(text.replace(', "speed": 1.0', ""))
    assert read_utterances(tmp_path / "train.jsonl") == [SPOKEN]


def test_counts_of_several_are_added():
    one, other = Skipped(), Skipped()
    one.add("cut", "a:1", 1.0, "copy it")
    other.add("cut", "b:1", 2.0)
    other.add("empty", "c:1")
    one.merge(other)
    assert one.counts == {"cut": 2, "empty": 1}
    assert one.seconds == {"cut": 3.0, "empty": 0.0}
    assert one.report()[0] == "cut: 2 (0.00 h), for example a:1, b:1; copy it"


def test_what_is_skipped_is_summed_up_by_reason():
    skipped = Skipped()
    skipped.add("too short", "a:1", 36.0)
    for line in range(5):
        skipped.add("malformed", f"b:{line}")
    assert skipped.report() == [
        "malformed: 5, for example b:0, b:1, b:2",
        "too short: 1 (0.01 h), for example a:1",
    ]
