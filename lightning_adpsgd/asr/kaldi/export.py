"""Log-likelihoods for Kaldi's own decoders."""

import shlex
from collections.abc import Iterable
from pathlib import Path

import kaldi_native_io
import numpy as np

from lightning_adpsgd.asr.kaldi.errors import KaldiError


def write_likelihoods(
    archive: Path, utterances: Iterable[tuple[str, np.ndarray]], num_pdfs: int
) -> Path:
    """Writes an archive and the table of it.

    Args:
        archive: `loglikes.ark`; the table `loglikes.scp` is written next to it.
        utterances: Log-likelihoods [frames, pdfs], by the names Kaldi knows.
        num_pdfs: Number of pdfs of the model that will decode them.

    Returns:
        The table.

    Raises:
        KaldiError: A matrix has another number of columns, a value is not finite, or
            the disk is full.
    """
    table = archive.with_suffix(".scp")
    target = f"ark,scp:{archive.resolve()},{table.resolve()}"
    with kaldi_native_io.FloatMatrixWriter(target) as writer:
        for name, matrix in utterances:
            if matrix.ndim != 2 or matrix.shape[1] != num_pdfs:
                shape = list(matrix.shape)
                problem = f"expected [frames, {num_pdfs}], got {shape}"
                raise KaldiError(f"{archive}, utterance {name}: {problem}")
            if not np.isfinite(matrix).all():
                raise KaldiError(f"{archive}, utterance {name}: a value is not finite")
            try:
                writer.write(name, np.ascontiguousarray(matrix, np.float32))
            except RuntimeError as error:  # in which only the place in Kaldi's code is
                raise KaldiError(
                    f"{archive}, utterance {name!r}: it could not be written; see "
                    "that the disk has room and the name no blank"
                ) from error
    return table


def latgen_command(
    model: Path,
    graph: Path,
    table: Path,
    *,
    acoustic_scale: float,
    beam: float,
    max_active: int,
) -> str:
    """The command that makes lattices of a table written by `write_likelihoods`.

    Args:
        model: `final.mdl`, whose pdfs are the columns.
        graph: The folder of `HCLG.fst` and `words.txt`.
        table: Table from `write_likelihoods`.
        acoustic_scale: Acoustic scale of the search.
        beam: Beam of the search.
        max_active: Maximum number of active states in the search.
    """
    lattices = table.with_name(f"{table.stem}.lat.gz")
    words = [
        "latgen-faster-mapped",
        f"--max-active={max_active}",
        f"--beam={beam:g}",
        "--lattice-beam=6.0",
        f"--acoustic-scale={acoustic_scale:g}",
        "--allow-partial=true",
        f"--word-symbol-table={graph / 'words.txt'}",
        str(model),
        str(graph / "HCLG.fst"),
        f"scp:{table}",
        f"ark:|gzip -c > {shlex.quote(str(lattices))}",
    ]
    return " ".join(shlex.quote(word) for word in words)
