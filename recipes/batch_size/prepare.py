"""Speech to train on: of a finished recipe, or generated and aligned."""

from pathlib import Path

from recipes.generated.corpus import write_corpus
from recipes.hybrid.pipeline.runner import run_stages
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.stages import STAGES


def prepared_speech(
    data: Path | None, out: Path, minutes: float, cores: int
) -> tuple[Path, Path]:
    """Folders of features and alignment, prepared if they are not there.

    Args:
        data: folder of a finished `recipes.demo` or `recipes.switchboard`; none:
            generate.
        out: folder of the generated corpus and its stages.
        minutes: minutes of training speech to generate.
        cores: number of processes.

    Raises:
        ValueError: `data` has no features or no alignment.
    """
    if data is None:
        data = out / "speech"
        _generate(data, minutes, cores)
    folders = (data / "exp" / "features", data / "exp" / "align")
    for folder in folders:
        if not (folder / ".done").exists():
            raise ValueError(
                f"`data` must be the folder of a finished recipes.demo, but {folder} "
                "is not finished"
            )
    return folders


def _generate(out: Path, minutes: float, cores: int) -> None:
    corpus = out / "corpus"
    write_corpus(corpus, minutes=minutes, test_minutes=1.0, seed=1, processes=cores)
    settings = Settings(corpus=corpus, out=out, seed=1, cores=cores)
    run_stages(settings, STAGES, last="align")
