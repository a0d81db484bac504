"""The splits for other programs: `kaldi/` and `lhotse/` of stage `prepare`."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from lightning_adpsgd.asr.corpora.corpus import Skipped, Utterance
from lightning_adpsgd.asr.corpora.hub5 import PARTS
from lightning_adpsgd.asr.corpora.lhotse import write_manifests
from lightning_adpsgd.asr.kaldi.directories import write_directory

HUB5 = "eval2000"


def write_directories(output: Path, splits: Mapping[str, list[Utterance]]) -> None:
    """Writes a directory of Kaldi and lhotse's manifests for each split.

    Both parts of Hub5'00 share `eval2000`.

    Args:
        output: Folder of the stage, with `eval.stm` and `eval.glm` where there are any.
        splits: Utterances of each split.
    """
    together: dict[str, list[Utterance]] = {}
    for split, utterances in splits.items():
        name = HUB5 if split in PARTS else split
        together.setdefault(name, []).extend(utterances)
    skipped = Skipped()
    for name, utterances in together.items():
        write_directory(output / "kaldi" / name, utterances)
        write_manifests(output / "lhotse" / name, utterances, skipped)
    for line in skipped.report():
        print(f"  WARNING: {line}", flush=True)
    if HUB5 in together:
        _copy_references(output, output / "kaldi" / HUB5)


def _copy_references(output: Path, folder: Path) -> None:
    for name in ("stm", "glm"):
        source = output / f"eval.{name}"
        if source.exists():
            shutil.copyfile(source, folder / name)
