"""Sources: files are known by their names, whatever the folders and mounts are."""

from pathlib import Path

import pytest

from lightning_adpsgd.asr.corpora.corpus import CorpusError, Skipped
from lightning_adpsgd.asr.corpora.discs import find_files
from lightning_adpsgd.asr.corpora.sources import find_discs, missing_numbers
from tests.asr.tiny import write_callhome_call, write_corpus, write_fisher_call


def test_all_sources_are_found_below_any_folders(tmp_path: Path):
    write_corpus(tmp_path, conversations=2)
    write_fisher_call(tmp_path, 5851, ["0.5 1.0 A: yes"])
    write_callhome_call(tmp_path, 4065, ["0.5 1.0 A: yes"])
    discs = find_discs([tmp_path], skipped := Skipped())
    assert {name: set(h.recordings) for name, h in discs.holdings.items()} == {
        "switchboard": {"sw02001", "sw02002"},
        "fisher": {"fe_03_05851"},
        "callhome": {"en_4065"},
        "hub5": {"sw_4390", "en_4156"},
    }
    assert len(discs.holding("switchboard").transcripts["sw02001"]) == 2
    assert None not in (discs.dictionary, discs.pem, discs.stm, discs.glm)
    assert not skipped.counts


def test_what_is_absent_is_none(tmp_path: Path):
    discs = find_discs([tmp_path], Skipped())
    assert not discs.holding("fisher").recordings
    assert (discs.dictionary, discs.pem, discs.stm, discs.glm) == (None,) * 4


def test_without_references_folders_tell_callhome_from_the_test(tmp_path: Path):
    for name in ("LDC97S42/data/devtest/en_4065.sph", "hub5/english/en_4156.sph"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    discs = find_discs([tmp_path], Skipped())
    assert set(discs.holding("callhome").recordings) == {"en_4065"}
    assert set(discs.holding("hub5").recordings) == {"en_4156"}


def test_transcripts_of_the_test_are_not_callhomes(tmp_path: Path):
    write_corpus(tmp_path)
    text = tmp_path / "LDC2002T43/reference/english/en_4156.txt"
    text.parent.mkdir()
    text.write_text("0.5 1.0 A: yes\n")
    assert not find_discs([tmp_path], Skipped()).holding("callhome").transcripts


def test_a_transcript_that_is_there_twice_is_used_once(tmp_path: Path):
    write_corpus(tmp_path)
    first = next(tmp_path.rglob("sw2001A-ms98-a-trans.text"))
    second = tmp_path / "zz" / first.name
    second.parent.mkdir()
    second.write_text("")
    skipped = Skipped()
    discs = find_discs([tmp_path], skipped)
    files = discs.holding("switchboard").transcripts["sw02001"]
    assert first in [file.path for file in files]
    assert skipped.examples == {"second transcript of the same name": [str(second)]}


def test_of_two_copies_of_a_transcript_the_one_with_lines_is_used(tmp_path: Path):
    write_corpus(tmp_path)
    good = next(tmp_path.rglob("sw2001A-ms98-a-trans.text"))
    empty = tmp_path / "AA" / good.name
    empty.parent.mkdir()
    empty.write_text("\n")
    skipped = Skipped()
    files = find_discs([tmp_path], skipped).holding("switchboard").transcripts
    used = [file.path for file in files["sw02001"]]
    assert good in used
    assert empty not in used
    assert skipped.examples == {"second transcript of the same name": [str(empty)]}
    assert str(good) in skipped.report()[0]


@pytest.mark.parametrize(
    "name", ["sw02001.sph", "SW02001.SPH;1", "Sw2001.sph.", "SW02001.SPH.;12"]
)
def test_names_are_compared_as_an_iso_mount_shows_them(tmp_path: Path, name: str):
    (tmp_path / name).touch()
    recordings = find_discs([tmp_path], Skipped()).holding("switchboard").recordings
    assert recordings == {"sw02001": (tmp_path / name,)}


def test_hidden_files_are_passed_over(tmp_path: Path):
    (tmp_path / ".Trash").mkdir()
    (tmp_path / ".Trash/sw02001.sph").touch()
    (tmp_path / "._sw02001.sph").touch()
    assert find_files([tmp_path], Skipped()) == []


def test_a_corpus_that_is_no_folder_is_refused(tmp_path: Path):
    with pytest.raises(CorpusError, match="expected the folder of a corpus"):
        find_files([tmp_path / "gone"], Skipped())


def test_gaps_in_numbers_are_runs():
    stems = ["fe_03_00001", "fe_03_00004", "fe_03_00005"]
    assert missing_numbers(stems, range(1, 8)) == [(2, 3), (6, 7)]
