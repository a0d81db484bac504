import gzip
import tracemalloc
from pathlib import Path

import kaldi_native_io as kio
import numpy as np
import pytest

from lightning_adpsgd.asr.kaldi.archives import read_alignments, read_matrices
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from tests.asr.kaldi_files import (
    binary_alignment,
    read_by_kaldi_native_io,
    text_alignment,
    write_alignments,
)

ALIGNED = {"u1": [4, 3, 3], "u2": [], "u3": [10] * 70000}


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("name", ["ali.1.gz", "ali.1"])
def test_alignments_are_read_in_text_and_binary(tmp_path, name, text):
    write_alignments(tmp_path / name, ALIGNED, text=text)
    found = {u: ids.tolist() for u, ids in read_alignments(tmp_path / name)}
    assert found == ALIGNED


def test_alignments_of_kaldis_own_writer_are_read(tmp_path):
    path = tmp_path / "ali.1"
    with kio.Int32VectorWriter(f"ark:{path}") as writer:
        for name, ids in ALIGNED.items():
            writer.write(name, ids)
    assert {u: ids.tolist() for u, ids in read_alignments(path)} == ALIGNED


MATRICES = {
    "u1": np.random.default_rng(0).normal(size=(30, 5)).astype(np.float32),
    "u2": np.linspace(-4, 9, 24, dtype=np.float32).reshape(8, 3),
}


def read_all(source) -> dict[str, np.ndarray]:
    return dict(read_matrices(source))


@pytest.mark.parametrize("kind", ["ark", "ark,t"])
def test_matrices_are_read_in_text_and_binary(tmp_path, kind):
    archive = tmp_path / "feats.ark"
    with kio.FloatMatrixWriter(f"{kind}:{archive}") as writer:
        for name, values in MATRICES.items():
            writer.write(name, values)
    for source in (archive, f"ark:{archive}"):
        found = read_all(source)
        assert found.keys() == MATRICES.keys()
        for name, values in MATRICES.items():
            assert found[name] == pytest.approx(values, abs=1e-4)


def test_double_matrices_and_vectors_are_read_as_matrices(tmp_path):
    with kio.DoubleMatrixWriter(f"ark:{tmp_path / 'double.ark'}") as writer:
        writer.write("u", MATRICES["u2"].astype(float))
    assert np.array_equal(read_all(tmp_path / "double.ark")["u"], MATRICES["u2"])
    with kio.FloatVectorWriter(f"ark:{tmp_path / 'vector.ark'}") as writer:
        writer.write("spk", MATRICES["u2"][0])
    assert read_all(tmp_path / "vector.ark")["spk"].shape == (1, 3)


METHODS = ["kSpeechFeature", "kTwoByteAuto", "kOneByteAuto"]


@pytest.mark.parametrize("method", METHODS)
def test_compressed_matrices_are_those_that_kaldi_reads(tmp_path, method):
    archive = tmp_path / "feats.ark"
    with kio.CompressedMatrixWriter(f"ark:{archive}") as writer:
        for name, values in MATRICES.items():
            writer.write(name, values, getattr(kio.CompressionMethod, method))
    found = read_all(archive)
    for name, values in read_by_kaldi_native_io(f"ark:{archive}").items():
        assert found[name] == pytest.approx(values, abs=1e-5)
        assert found[name] == pytest.approx(MATRICES[name], abs=0.06)


def test_a_table_points_into_archives(tmp_path):
    target = f"ark,scp:{tmp_path / 'feats.ark'},{tmp_path / 'feats.scp'}"
    with kio.FloatMatrixWriter(target) as writer:
        for name, values in MATRICES.items():
            writer.write(name, values)
    lines = (tmp_path / "feats.scp").read_text().replace(f"{tmp_path}/", "")
    (tmp_path / "feats.scp").write_text("".join(sorted(lines.splitlines(True))[::-1]))
    marked = tmp_path / "marked.scp"
    marked.write_bytes(b"\xef\xbb\xbf" + (tmp_path / "feats.scp").read_bytes())
    for source in (tmp_path / "feats.scp", f"scp:{tmp_path / 'feats.scp'}", marked):
        found = read_all(source)
        assert list(found) == ["u2", "u1"]
        assert np.array_equal(found["u1"], MATRICES["u1"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("u1 gunzip -c x.gz |", "copy-feats"),
        ("u1 feats.ark:3[0:5]", "copy-feats"),
        ("u1", "expected `utterance file"),
        (
            "u1 nowhere.ark:3",
            "the file nowhere.ark does not exist; if the experiment was",
        ),
    ],
)
def test_a_line_of_a_table_that_cannot_be_used_is_named(tmp_path, line, message):
    (tmp_path / "feats.scp").write_text(f"\n{line}\n")
    with pytest.raises(KaldiError, match=rf"feats\.scp:2: .*{message}"):
        read_all(tmp_path / "feats.scp")


def damaged(path: Path) -> tuple[list[str], str]:
    """The utterances that are read before the error, and what it says."""
    names: list[str] = []
    try:
        names.extend(name for name, _ in read_alignments(path))
    except KaldiError as error:
        return names, str(error)
    raise AssertionError(f"{path} was read to its end")


@pytest.mark.parametrize("text", [True, False])
def test_an_archive_that_is_cut_short_gives_what_it_holds(tmp_path, text):
    entry = text_alignment if text else binary_alignment
    first, second = entry("u1", [1, 2, 3]), entry("u2", [4, 5, 6])
    path = tmp_path / "ali.3"
    path.write_bytes(first + second[:-4])
    names, said = damaged(path)
    assert names == ["u1"]
    assert f"{path}: byte " in said
    assert "after the utterance u1" in said


def test_a_gzip_that_is_cut_short_gives_what_it_holds(tmp_path):
    data = b"".join(binary_alignment(f"u{n}", [n + 1] * 5000) for n in range(40))
    ids = np.random.default_rng(0).integers(1, 9999, 9999).tolist()
    noise = binary_alignment("last", ids)
    path = tmp_path / "ali.1.gz"
    packed = gzip.compress(data + noise)
    path.write_bytes(packed[: len(packed) - 2000])
    names, said = damaged(path)
    assert names[:3] == ["u0", "u1", "u2"]
    assert f"after the utterance {names[-1]}" in said
    assert "ended before the end-of-stream" in said


def test_a_gzip_with_wrong_bytes_is_named(tmp_path):
    packed = bytearray(gzip.compress(binary_alignment("u1", list(range(1, 3000)))))
    packed[len(packed) // 2] ^= 0xFF
    (tmp_path / "ali.1.gz").write_bytes(packed)
    names, said = damaged(tmp_path / "ali.1.gz")
    assert names == []
    assert "ali.1.gz: byte" in said
    assert "in the first utterance" in said


def test_archives_of_another_kind_are_told_apart(tmp_path):
    with kio.FloatMatrixWriter(f"ark:{tmp_path / 'feats.ark'}") as writer:
        writer.write("u1", MATRICES["u1"])
    assert "expected whole numbers" in damaged(tmp_path / "feats.ark")[1]
    write_alignments(tmp_path / "ali.1", ALIGNED)
    with pytest.raises(KaldiError, match="expected a matrix, found whole numbers"):
        read_all(tmp_path / "ali.1")
    (tmp_path / "words").write_text("u1 one two three\n")
    assert "expected whole numbers, found b'one two" in damaged(tmp_path / "words")[1]
    (tmp_path / "garbage").write_bytes(bytes(range(256)) * 4)
    assert "expected" in damaged(tmp_path / "garbage")[1]


def test_an_impossible_size_is_no_reason_to_ask_for_memory(tmp_path):
    (tmp_path / "ali.1").write_bytes(b"u1 \0B\x04\xff\xff\xff\x7f" + b"\x04" * 50)
    assert "2147483647 values" in damaged(tmp_path / "ali.1")[1]


@pytest.mark.parametrize("kind", ["FM ", "CM ", "CM2 "])
def test_a_matrix_that_cannot_be_is_no_reason_to_ask_for_memory(tmp_path, kind):
    number = (1 << 27).to_bytes(4, "little")
    sizes = (b"\x04" + number) * 2 if kind == "FM " else bytes(8) + number * 2
    data = b"u1 \0B" + kind.encode() + sizes + bytes(50)
    (tmp_path / "feats.ark").write_bytes(data)
    with pytest.raises(
        KaldiError, match="a matrix cannot have 134217728 rows and 134217728 columns"
    ):
        read_all(tmp_path / "feats.ark")


def test_a_matrix_larger_than_its_file_takes_no_memory(tmp_path):
    tracemalloc.start()
    sizes = b"\x04" + (1 << 13).to_bytes(4, "little")
    (tmp_path / "feats.ark").write_bytes(b"u1 \0BFM " + 2 * sizes + bytes(50))
    with pytest.raises(KaldiError, match="the archive ends 268435406 bytes too soon"):
        read_all(tmp_path / "feats.ark")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 26


def test_a_tab_ends_a_name_too(tmp_path):
    (tmp_path / "ali.1").write_text("u1\t7 8 9\nu2 1\n")
    found = {name: own.tolist() for name, own in read_alignments(tmp_path / "ali.1")}
    assert found == {"u1": [7, 8, 9], "u2": [1]}


def test_a_number_that_is_too_large_is_named(tmp_path):
    (tmp_path / "ali.1").write_text(f"u1 7 8\nu2 {2**31}\n")
    names, said = damaged(tmp_path / "ali.1")
    assert names == ["u1"]
    assert "after the utterance u1: expected whole numbers, found b'2147483648" in said
