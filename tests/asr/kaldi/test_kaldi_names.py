"""Names as Kaldi's own preparation scripts make them find the utterances they mean."""

import random
from pathlib import Path

import pytest

from lightning_adpsgd.asr.corpora.corpus import Utterance, utterance_id
from lightning_adpsgd.asr.frames.store import FrameStore
from lightning_adpsgd.asr.frames.writing import FrameWriter
from lightning_adpsgd.asr.kaldi.alignments import import_labels
from lightning_adpsgd.asr.kaldi.directories import write_directory
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.model import read_transitions
from lightning_adpsgd.asr.kaldi.names import (
    Names,
    Side,
    Span,
    check_coverage,
    parse_name,
    read_spans,
    side_of,
)
from tests.asr.kaldi_files import binary_model, write_alignments


def fisher_name(call: str, side: str, start: str, end: str) -> str:
    """fisher_data_prep.sh: `sprintf("%06d", $1 * 100.0)`, hyphens between."""
    return f"{call}-{side}-{int(float(start) * 100):06d}-{int(float(end) * 100):06d}"


def switchboard_name(call: str, side: str, start: str, end: str) -> str:
    """swbd1_data_prep.sh: `%06.0f` of `int(100*stime+0.5)`."""
    times = (int(100 * float(time) + 0.5) for time in (start, end))
    return "{}-{}_{:06d}-{:06d}".format(call, side, *times)


def hub5_name(call: str, side: str, start: str, end: str) -> str:
    """eval2000_data_prep.sh: `%06d` of `$4*100`."""
    times = (int(float(time) * 100) for time in (start, end))
    return "{}-{}_{:06d}-{:06d}".format(call, side, *times)


CORPORA = [
    ("fe_03_00001", fisher_name, 2),
    ("sw02001", switchboard_name, 3),
    ("en_4156", hub5_name, 2),
    ("sw_4390", hub5_name, 3),
]


@pytest.mark.parametrize(("call", "kaldi_name", "digits"), CORPORA)
def test_every_name_of_a_recipe_finds_its_utterance(call, kaldi_name, digits):
    dice = random.Random(0)
    here, kaldi = [], []
    begin = 0.0
    for _ in range(2000):
        begin += dice.uniform(0.3, 2)
        end = begin + dice.uniform(0.2, 9)
        start, stop = f"{begin:.{digits}f}", f"{end:.{digits}f}"
        side = dice.choice("AB")
        here.append(utterance_id(call, "AB".index(side), float(start), float(stop)))
        kaldi.append(kaldi_name(call, side, start, stop))
    names = Names(here)
    assert [names.find(name) for name in kaldi] == here
    assert sum(a == b for a, b in zip(here, kaldi, strict=True)) < len(here)


def test_halves_are_rounded_up_there_and_to_even_here():
    here = utterance_id("sw02001", 0, 0.125, 7.625)
    assert here == "sw02001-A_000012-000762"
    there = switchboard_name("sw02001", "A", "0.125", "7.625")
    assert there == "sw02001-A_000013-000763"
    assert Names([here]).find(there) == here


@pytest.mark.parametrize(
    ("name", "span"),
    [
        ("fe_03_00001-A-000398-000476", Span(Side("fe_03_00001", 0), 398, 476)),
        ("sw02001-A_000098-001156", Span(Side("sw2001", 0), 98, 1156)),
        ("sw2001-B_000098-001156", Span(Side("sw2001", 1), 98, 1156)),
        ("en_4156_A_030185-030248", Span(Side("en_4156", 0), 30185, 30248)),
        ("EN_4156-2_030185_030248", Span(Side("en_4156", 1), 30185, 30248)),
        ("sp0.9-sw02001-A_000098-001156", Span(Side("sw2001", 0, "sp0.9-"), 98, 1156)),
        ("1272-128104-A_000000-000585", Span(Side("1272-128104", 0), 0, 585)),
        ("1272-128104-0000", None),
        ("u1", None),
    ],
)
def test_a_name_is_taken_apart(name, span):
    assert parse_name(name) == span


def test_more_than_ten_milliseconds_are_another_utterance():
    names = Names(["sw02001-A_000100-000200"])
    assert names.find("sw02001-A_000101-000199") is not None
    for other in (
        "sw02001-A_000102-000200",
        "sw02001-A_000100-000198",
        "sw02001-B_000100-000200",
        "sw02002-A_000100-000200",
        "sp1.1-sw02001-A_000100-000200",
        "nothing",
    ):
        assert names.find(other) is None


def test_of_two_near_ones_the_nearest_is_meant():
    names = Names(["sw02001-A_000100-000200", "sw02001-A_000101-000201"])
    assert names.find("sw2001-A-000101-000201") == "sw02001-A_000101-000201"
    assert names.find("sw2001-A-000100-000200") == "sw02001-A_000100-000200"


def test_other_names_are_looked_up_in_the_segments(tmp_path: Path):
    (tmp_path / "segments").write_text(
        "spk7-call1-0001 call1 3.984 4.761\nspk7-0002 sw02001-B 1 2.5\n"
    )
    (tmp_path / "reco2file_and_channel").write_text("call1 fe_03_00001 A\n")
    names = Names(
        ["fe_03_00001-A_000398-000476", "sw02001-B_000100-000250"],
        read_spans(tmp_path),
    )
    assert names.find("spk7-call1-0001") == "fe_03_00001-A_000398-000476"
    assert names.find("spk7-0002") == "sw02001-B_000100-000250"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("u1 sw02001-A 1.0", "expected `utterance recording start end`, got"),
        ("u1 sw02001-A one 2.0", "expected two times"),
        ("u1 sw02001-A 2.0 1.0", "expected 0 <= start < end, got 2.0 1.0"),
        ("u1 sw02001 1.0 2.0", "no side in the recording 'sw02001'"),
    ],
)
def test_segments_that_cannot_be_read_are_named(tmp_path: Path, line, problem):
    (tmp_path / "segments").write_text(f"u0 sw02001-A 0 1\n{line}\n")
    with pytest.raises(KaldiError, match=rf"segments:2: {problem}"):
        read_spans(tmp_path)


def test_a_segment_without_an_end_tells_no_times(tmp_path: Path):
    (tmp_path / "segments").write_text("u0 sw02001-A 0 -1\nu1 sw02001-A 1 2\n")
    assert [*read_spans(tmp_path)] == ["u1"]


def test_a_directory_without_segments_is_said(tmp_path: Path):
    with pytest.raises(KaldiError, match=r"segments: No such file"):
        read_spans(tmp_path)


def test_too_few_stop_with_the_first_ten():
    missing = [f"u{number}" for number in range(12)]
    with pytest.raises(KaldiError) as caught:
        check_coverage("labels", missing, 100)
    said = str(caught.value)
    assert "88 of 100 utterances (88.0%) have labels, at least 95% must" in said
    assert "missing: u0, u1, u2, u3, u4, u5, u6, u7, u8, u9 and 2 more." in said
    assert "kaldi.least_coverage" in said


def test_enough_are_told_by_their_share():
    said = check_coverage("labels", ["u1"] * 5, 100)
    assert said == "95 of 100 utterances (95.0%) have labels"


def test_alignments_with_names_of_fisher_label_the_store(tmp_path: Path):
    ids = ["fe_03_00001-A_000398-000401", "fe_03_00001-B_000400-000404"]
    writer = FrameWriter(tmp_path / "store", ids, [3, 4], 1)
    writer.create()
    writer.finish()
    (tmp_path / "final.mdl").write_bytes(binary_model())
    store = FrameStore(tmp_path / "store")
    named = {
        "fe_03_00001-A-000398-000401": [2, 1, 4],
        "fe_03_00001-B-000399-000404": [2, 1, 4, 3],
    }
    write_alignments(tmp_path / "ali.1", named)
    labels = tmp_path / "labels.npy"
    transitions = read_transitions(tmp_path / "final.mdl")
    imported = import_labels([tmp_path / "ali.1"], transitions, store, labels)
    assert imported.num_labelled == 7
    del named["fe_03_00001-B-000399-000404"]
    write_alignments(tmp_path / "ali.1", named)
    with pytest.raises(KaldiError, match=r"missing: fe_03_00001-B_000400-000404"):
        import_labels([tmp_path / "ali.1"], transitions, store, labels)


def utterance(name: str, recording: str, start_s: float) -> Utterance:
    channel = "AB".index(name.rsplit("-", 2)[1][0])
    words = ("yes", "[noise]")
    end_s = start_s + 2
    return Utterance(name, Path(recording), channel, start_s, end_s, words, "1005")


def test_a_directory_has_the_files_of_kaldi_sorted(tmp_path: Path):
    write_directory(
        tmp_path,
        [
            utterance("sw02001-B_000100-000300", "/d 1/sw02001.sph", 1.0),
            utterance("sw02001-A_000250-000450", "/d 1/sw02001.sph", 2.5),
            utterance("sw02001-A_000050-000250", "/d 1/sw02001.sph", 0.4996),
            utterance("84-1-A_000000-000200", "/libri/84-1.flac", 0.0),
        ],
    )

    def lines(name: str) -> list[str]:
        return (tmp_path / name).read_text().splitlines()

    assert lines("wav.scp") == [
        "84-1-A sox /libri/84-1.flac -r 8000 -b 16 -t wav - remix 1 |",
        "sw02001-A sph2pipe -f wav -p -c 1 '/d 1/sw02001.sph' |",
        "sw02001-B sph2pipe -f wav -p -c 2 '/d 1/sw02001.sph' |",
    ]
    assert lines("segments")[1:3] == [
        "sw02001-A_000050-000250 sw02001-A 0.500 2.500",
        "sw02001-A_000250-000450 sw02001-A 2.500 4.500",
    ]
    assert lines("spk2utt")[1] == (
        "sw02001-A sw02001-A_000050-000250 sw02001-A_000250-000450"
    )
    assert lines("utt2spk")[3] == "sw02001-B_000100-000300 sw02001-B"
    assert lines("text")[3] == "sw02001-B_000100-000300 yes [noise]"
    assert lines("reco2file_and_channel")[2] == "sw02001-B sw02001 B"
    # What is written is read back as the same utterances.
    names = Names([line.split()[0] for line in lines("text")], read_spans(tmp_path))
    assert names.find("sw2001-A-000049-000249") == "sw02001-A_000050-000250"
    spans = read_spans(tmp_path)
    assert spans["sw02001-B_000100-000300"] == Span(side_of("sw02001", "B"), 100, 300)


@pytest.mark.parametrize("name", ["SW02001.SPH;1", "sw02001.sph.", "011C0201.WV1"])
def test_sphere_files_of_a_mounted_disc_are_read_by_sph2pipe(tmp_path: Path, name: str):
    spoken = utterance("sw02001-A_000000-000200", f"/cdrom/{name}", 0.0)
    write_directory(tmp_path, [spoken])
    [line] = (tmp_path / "wav.scp").read_text().splitlines()
    assert line.startswith("sw02001-A sph2pipe -f wav -p -c 1 ")


def test_the_name_of_a_recording_with_several_utterances_means_none_of_them():
    several = Names(["anna-A_000000-000100", "anna-A_000200-000300"])
    assert several.find("anna") is None
    assert Names(["anna-A_000000-000100"]).find("anna") == "anna-A_000000-000100"
