"""What would stop a late stage, said before the first one: packages, devices, files."""

import importlib.util
from collections.abc import Iterable, Iterator
from operator import attrgetter

from recipes.hybrid.pipeline.settings import Settings

# Names of modules, of which each distribution of the extra `asr` has one; eSpeak is
# needed where it is asked for, and torch by all of the package.
SPEECH = (
    *("kaldi_decoder", "kaldi_native_io", "kaldifst", "kaldilm", "matplotlib"),
    *("numpy", "rapidfuzz", "soundfile", "torchaudio", "torchmetrics", "tqdm"),
)
_TEXT_ALONE = {"check", "prepare"}
# Of settings, by the stage that reads them; `check` looks for those of Kaldi.
_FILES = {
    "lexicon.cmudict": "lexicon",
    "lm.text": "lm",
    "lm.arpa": "lm",
    "features.noise_files": "features",
}


def problems(settings: Settings, stages: Iterable[str]) -> Iterator[str]:
    """What is missing for these stages, with the remedy.

    Args:
        settings: settings of the experiment.
        stages: names of the stages that will run.
    """
    wanted = set(stages)
    if wanted - _TEXT_ALONE:
        yield from _missing(SPEECH, "asr")
    if "lexicon" in wanted and settings.lexicon.synthesise:
        yield from _missing(["espeakng_loader"], "asr")
    if "export" in wanted and settings.export.onnx:
        yield from _missing(["onnx"], "onnx")
    if "train" in wanted and not settings.crew.trains:
        yield (
            "shares cannot train together: stop them with --to baseline, train without "
            "--shard, and continue with --from decode"
        )
    if "train" in wanted and settings.train.accelerator == "gpu":
        yield from _devices(settings.train.num_learners)
    for name, stage in _FILES.items():
        path = attrgetter(name)(settings)
        is_read = name != "features.noise_files" or settings.features.noise_share
        if stage in wanted and is_read and path is not None and not path.exists():
            yield f"`{name}`: {path} does not exist; correct it, or leave it out"


def _missing(modules: Iterable[str], extra: str) -> Iterator[str]:
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        yield (
            f"packages are missing: {', '.join(absent)}; pip install "
            f"'lightning-adpsgd[{extra}]'"
        )


def _devices(num_learners: int) -> Iterator[str]:
    import torch

    found = torch.cuda.device_count()
    if found < num_learners:
        yield (
            f"`train.num_learners` must be at most the {found} GPUs of this machine, "
            f"got {num_learners}; with train.accelerator=cpu learners are processes"
        )
