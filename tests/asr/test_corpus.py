"""Utterances survive a file, and the files of a corpus are found by their names."""

from pathlib import Path

import pytest

from lightning_adpsgd.asr.corpus import (
    CorpusError,
    Skipped,
    Utterance,
    find_tree,
    read_utterances,
    utterance_id,
    write_utterances,
)
from tests.asr.tiny import write_corpus

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


def test_the_tree_is_found_below_any_folders(tmp_path: Path):
    tree = find_tree(write_corpus(tmp_path, conversations=2))
    assert set(tree.recordings) == {"sw02001", "sw02002", "sw_4390", "en_4156"}
    assert len(tree.transcripts) == 4
    assert tree.dictionary is not None
    assert tree.pem is not None
    assert tree.stm is not None
    assert tree.glm is not None


def test_what_is_absent_is_none(tmp_path: Path):
    (tmp_path / "LDC97S62").mkdir()
    tree = find_tree(tmp_path)
    assert tree.recordings == {}
    assert (tree.dictionary, tree.pem, tree.stm, tree.glm) == (None,) * 4


def test_a_recording_that_is_there_twice_is_reported(tmp_path: Path):
    write_corpus(tmp_path, conversations=1)
    copy = tmp_path / "LDC97S62/swb1_d2/sw02001.sph"
    copy.parent.mkdir()
    copy.write_bytes(b"")
    tree = find_tree(tmp_path)
    assert tree.duplicates == (copy,)
    assert tree.recordings["sw02001"] != copy


def test_a_corpus_that_is_no_folder_is_refused(tmp_path: Path):
    with pytest.raises(CorpusError, match="expected the folder of a corpus"):
        find_tree(tmp_path / "gone")


def test_what_is_skipped_is_summed_up_by_reason():
    skipped = Skipped()
    skipped.add("too short", "a:1", 36.0)
    for line in range(5):
        skipped.add("malformed", f"b:{line}")
    assert skipped.report() == [
        "malformed: 5, for example b:0, b:1, b:2",
        "too short: 1 (0.01 h), for example a:1",
    ]
