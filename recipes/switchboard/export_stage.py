"""Stage `export`: a trained model with all that turns sound into words, in one folder.

What is in it is described in `lightning_adpsgd.asr.recogniser`.
"""

import json
from pathlib import Path

from lightning_adpsgd.asr.decoding import SearchOptions
from lightning_adpsgd.asr.model import AcousticModel
from lightning_adpsgd.asr.recogniser import Parts, write_files
from recipes.switchboard.pipeline import StageError
from recipes.switchboard.settings import Settings


def export(settings: Settings, output: Path) -> None:
    """Gathers the files of the run; the acoustic scale is the one chosen on `dev`.

    Raises:
        StageError: The package `onnx` is asked for and not installed.
    """
    decoded = json.loads((settings.directory("decode") / "decode.json").read_text())
    checkpoint = settings.directory("train") / "model.ckpt"
    search = SearchOptions(
        beam=settings.decode.beam, max_active=settings.decode.max_active
    )
    parts = Parts(
        model=AcousticModel.load_from_checkpoint(checkpoint, map_location="cpu"),
        num_mels=settings.features.num_mels,
        acoustic_scale=decoded["acoustic_scale"],
        search=search,
        lexicon=settings.directory("lexicon"),
        tree=settings.directory("mixtures") / "tree.json",
        graph=settings.directory("graph"),
    )
    try:
        write_files(parts, output, settings.export.onnx)
    except ModuleNotFoundError as error:
        raise StageError(f"`export.onnx`: {error}") from error
