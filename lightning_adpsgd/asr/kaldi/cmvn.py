"""Kaldi's normalisation of features by speaker (`cmvn.scp`), applied as they are read.

    x'(t) = x(t) - m,    with variances: x'(t) = (x(t) - m) / s

A speaker's statistics are a matrix [2, dims + 1]: sums and number of frames, then sums
of squares. Those of `compute_cmvn_stats.sh --fake` leave features as they are.
"""

from pathlib import Path

import numpy as np

from lightning_adpsgd.asr.kaldi.archives import read_matrices
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.tables import read_speakers

_LEAST_VARIANCE = 1e-20  # as Kaldi's
_STATISTICS = 2
# As Kaldi's programs read them: `--norm-vars` alone is true.
_TRUE, _FALSE = ("true", "t", "1", ""), ("false", "f", "0")


class Cmvn:
    """The means and deviations of the speakers of a data directory.

    Args:
        folder: Folder with `cmvn.scp`, and `utt2spk` if speakers are not utterances.
        with_variance: Whether deviations are normalised too, `--norm-vars=true`.

    Raises:
        KaldiError: A file is damaged.
    """

    def __init__(self, folder: Path, *, with_variance: bool = False) -> None:
        self._table = folder / "cmvn.scp"
        has_speakers = (folder / "utt2spk").exists()
        self._speakers = read_speakers(folder) if has_speakers else {}
        self._with_variance = with_variance
        self._statistics = dict(read_matrices(self._table))

    def apply(self, utterance: str, features: np.ndarray) -> np.ndarray:
        """Normalises features [frames, dims] of an utterance, float32.

        Raises:
            KaldiError: Its speaker has no statistics, or of other dimensions.
        """
        speaker = self._speakers.get(utterance, utterance)
        sums = self._statistics.get(speaker)
        if sums is None:
            beside = "" if self._speakers else ", and no utt2spk is beside it"
            raise KaldiError(
                f"{self._table}: no statistics for the speaker {speaker} of utterance "
                f"{utterance}{beside}; remove the table if features "
                "are already normalised"
            )
        if sums.shape != (_STATISTICS, features.shape[1] + 1):
            wanted = [_STATISTICS, features.shape[1] + 1]
            raise KaldiError(
                f"{self._table}: statistics of {speaker} must be {wanted}, got "
                f"{list(sums.shape)}"
            )
        return self._normalised(sums.astype(np.float64), features)

    def _normalised(self, sums: np.ndarray, features: np.ndarray) -> np.ndarray:
        count = max(1.0, sums[0, -1])
        mean = sums[0, :-1] / count
        centred = features - mean
        if self._with_variance:
            variance = sums[1, :-1] / count - mean**2
            centred /= np.sqrt(np.maximum(variance, _LEAST_VARIANCE))
        return centred.astype(np.float32)


def cmvn_beside(source: str | Path, options: Path | None = None) -> Cmvn | None:
    """The statistics next to a table `feats.scp`; None if there are none.

    Args:
        source: Table or archive, as for `archives.read_matrices`.
        options: `cmvn_opts` of an experiment; without it means alone are normalised.
            With `--norm-means=false` nothing is, as in `apply-cmvn`.

    Raises:
        KaldiError: A file is damaged, or variances are to be normalised without means.
    """
    table = Path(str(source).removeprefix("scp:"))
    if table.name != "feats.scp" or not (table.parent / "cmvn.scp").exists():
        return None
    with_variance = _option(options, "--norm-vars", False)
    if _option(options, "--norm-means", True):
        return Cmvn(table.parent, with_variance=with_variance)
    if with_variance:
        raise KaldiError(
            f"{options}: `--norm-vars` must be false with `--norm-means=false`, got "
            "true"
        )
    return None


def _option(options: Path | None, name: str, default: bool) -> bool:
    """An option of `cmvn_opts` in any of Kaldi's spellings, the last one if several."""
    text = options.read_text("utf-8") if options and options.exists() else ""
    given = [word.lower().partition("=") for word in text.split()]
    values = [value for found, _, value in given if found.replace("_", "-") == name]
    for value in values:
        if value not in _TRUE + _FALSE:
            raise KaldiError(
                f"{options}: `{name}` must be true or false, got {value!r}"
            )
    return values[-1] in _TRUE if values else default
