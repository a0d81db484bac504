"""Statistics of speakers are applied as Kaldi's `apply-cmvn` does it."""

from pathlib import Path

import kaldi_native_io
import numpy as np
import pytest

from lightning_adpsgd.asr.kaldi.cmvn import Cmvn, cmvn_beside
from lightning_adpsgd.asr.kaldi.errors import KaldiError

FEATURES = np.random.default_rng(0).normal(3, 2, (50, 4)).astype(np.float32)


def statistics(features: np.ndarray) -> np.ndarray:
    sums = [*features.sum(axis=0), len(features)]
    return np.array([sums, [*(features**2).sum(axis=0), 0]], np.float32)


def write(folder: Path, tables: dict[str, np.ndarray]) -> Path:
    target = f"ark,scp:{folder / 'cmvn.ark'},{folder / 'cmvn.scp'}"
    with kaldi_native_io.FloatMatrixWriter(target) as writer:
        for speaker, sums in tables.items():
            writer.write(speaker, sums)
    (folder / "utt2spk").write_text("u1 s1\nu2 s2\n")
    return folder


@pytest.mark.parametrize("with_variance", [False, True])
def test_a_speaker_has_mean_zero_and_deviation_one(tmp_path, with_variance):
    folder = write(tmp_path, {"s1": statistics(FEATURES)})
    found = Cmvn(folder, with_variance=with_variance).apply("u1", FEATURES)
    expected = 1.0 if with_variance else FEATURES.std(axis=0)
    assert found.mean(axis=0) == pytest.approx(0, abs=1e-5)
    assert found.std(axis=0) == pytest.approx(expected, rel=1e-4)


def test_fake_statistics_change_nothing(tmp_path):
    fake = np.array([[0, 0, 0, 0, 1], [1, 1, 1, 1, 0]], np.float32)
    cmvn = Cmvn(write(tmp_path, {"s1": fake}), with_variance=True)
    assert np.array_equal(cmvn.apply("u1", FEATURES), FEATURES)


@pytest.mark.parametrize(
    ("utterance", "features", "problem"),
    [
        ("u2", FEATURES, "no statistics for the speaker s2 of utterance u2"),
        ("u1", FEATURES[:, :3], r"statistics of s1 must be \[2, 4\], got \[2, 5\]"),
    ],
)
def test_statistics_that_do_not_fit_are_refused(tmp_path, utterance, features, problem):
    cmvn = Cmvn(write(tmp_path, {"s1": statistics(FEATURES)}))
    with pytest.raises(KaldiError, match=problem):
        cmvn.apply(utterance, features)


def test_speakers_that_nobody_names_are_said_to_be_missing(tmp_path):
    write(tmp_path, {"s1": statistics(FEATURES)})
    (tmp_path / "utt2spk").unlink()
    with pytest.raises(KaldiError, match=r"speaker u1 .*no utt2spk is beside it"):
        Cmvn(tmp_path).apply("u1", FEATURES)


def test_they_are_found_beside_a_table_with_the_options_of_the_experiment(tmp_path):
    write(tmp_path, {"s1": statistics(FEATURES)})
    options = tmp_path / "cmvn_opts"
    options.write_text("--norm-means=true --norm-vars=true\n")
    source = f"scp:{tmp_path / 'feats.scp'}"
    found = cmvn_beside(source, options)
    assert found is not None
    assert found.apply("u1", FEATURES).std(axis=0) == pytest.approx(1, rel=1e-4)
    assert cmvn_beside(tmp_path / "ivector_online.scp", options) is None
    (tmp_path / "cmvn.scp").unlink()
    assert cmvn_beside(source, options) is None


def test_without_means_nothing_is_normalised(tmp_path):
    write(tmp_path, {"s1": statistics(FEATURES)})
    options = tmp_path / "cmvn_opts"
    options.write_text("--norm-means=false --norm-vars=false\n")
    assert cmvn_beside(tmp_path / "feats.scp", options) is None
    options.write_text("--norm-means=false --norm-vars=true\n")
    with pytest.raises(KaldiError, match=r"cmvn_opts: `--norm-vars` must be false"):
        cmvn_beside(tmp_path / "feats.scp", options)


@pytest.mark.parametrize(
    "written",
    ["--norm-vars", "--norm-vars=T", "--norm-vars=1", "--norm_vars", "--Norm-Vars=t"],
)
def test_variances_are_normalised_by_all_of_kaldis_words_for_it(tmp_path, written):
    write(tmp_path, {"s1": statistics(FEATURES)})
    options = tmp_path / "cmvn_opts"
    options.write_text(f"--norm-vars=false {written}\n")
    found = cmvn_beside(tmp_path / "feats.scp", options)
    assert found is not None
    assert found.apply("u1", FEATURES).std(axis=0) == pytest.approx(1, rel=1e-4)
    options.write_text("--norm-means=f\n")
    assert cmvn_beside(tmp_path / "feats.scp", options) is None
    options.write_text("--norm-means=no\n")
    with pytest.raises(KaldiError, match=r"`--norm-means` must be true or false.*no"):
        cmvn_beside(tmp_path / "feats.scp", options)


def test_a_broken_line_is_named(tmp_path):
    folder = write(tmp_path, {"s1": statistics(FEATURES)})
    (folder / "utt2spk").write_text("u1 s1\nu2\n")
    with pytest.raises(KaldiError, match=r"utt2spk:2: expected `utterance speaker`"):
        Cmvn(folder)
