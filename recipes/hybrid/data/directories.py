"""The splits as data directories of Kaldi's, in `kaldi/` of stage `prepare`."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from lightning_adpsgd.asr.corpora.corpus import Utterance
from lightning_adpsgd.asr.corpora.hub5 import PARTS
from lightning_adpsgd.asr.kaldi.directories import write_directory

HUB5 = "eval2000"


def write_directories(output: Path, splits: Mapping[str, list[Utterance]]) -> None:
    """Writes a directory for each split; both parts of Hub5'00 share `eval2000`.

    Args:
        output: Folder of the stage, with `eval.stm` and `eval.glm` where there are any.
        splits: Utterances of each split.
    """
    together: dict[str, list[Utterance]] = {}
    for split, utterances in splits.items():
        name = HUB5 if split in PARTS else split
        together.setdefault(name, []).extend(utterances)
    for name, utterances in together.items():
        write_directory(output / "kaldi" / name, utterances)
    if HUB5 in together:
        _copy_references(output, output / "kaldi" / HUB5)


def _copy_references(output: Path, folder: Path) -> None:
    for name in ("stm", "glm"):
        source = output / f"eval.{name}"
        if source.exists():
            shutil.copyfile(source, folder / name)
