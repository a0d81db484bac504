"""The summary of a training run as one row, which is written to a file and read back.

Each run writes its own file, `<name>.run.csv`. So any number of processes can finish at
the same time without a lock, on one machine or on a shared file system.
"""

import csv
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lightning_adpsgd.files import written_whole

SUFFIX = ".run.csv"
PREFIX = "run/"
"""Prefix of the fields of a `Run` in a logger."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The settings and results of a run; what is unknown is None.

    The settings come first, up to `seed`; the rest are results.

    Attributes:
        name: Name of the run and of its file.
        algorithm: Name in the papers, such as "adpsgd", or "ddp".
        communication: "allreduce", "sync", "delay_by_one", "async" or "ready_pairs";
            "none" for a single learner.
        num_super_learners: S; 1 for an island, whose row covers its own learners only.
        super_learner_size: N; 0 where super-learners differ in size.
        global_batch: B, samples per step of all learners.
        local_batch: Samples per step of one learner.
        lr: Highest learning rate of the run.
        epochs: Number of epochs trained, with a fraction for a partial epoch.
        global_samples: Number of samples of all learners.
        train_seconds: Training time without validation.
        best_loss: Lowest held-out loss of the consensus model.
        best_loss_samples: Global samples when `best_loss` was measured.
        last_loss: Held-out loss of the last validation.
        wer: Word error rate as a fraction.
        samples_per_second: Samples of all learners per second.
        exposed_share: Share of training time spent waiting for communication, mean over
            learners.
        diverged: Whether the last loss was at chance level or non-finite.
    """

    name: str
    algorithm: str
    topology: str
    communication: str
    num_super_learners: int
    super_learner_size: int
    global_batch: int | None = None
    local_batch: int | None = None
    lr: float | None = None
    seed: int | None = None
    epochs: float | None = None
    global_samples: float | None = None
    train_seconds: float | None = None
    best_loss: float | None = None
    best_loss_samples: float | None = None
    last_loss: float | None = None
    wer: float | None = None
    samples_per_second: float | None = None
    exposed_share: float | None = None
    diverged: bool = False


_NAMES = [field.name for field in fields(Run)]
_SETTINGS = _NAMES[: _NAMES.index("epochs")]


def settings_of(run: Run) -> dict[str, Any]:
    """The settings for a logger's hyperparameters, without those that are None."""
    return _known(run, _SETTINGS)


def results_of(run: Run) -> dict[str, float]:
    """The results for a logger's metrics, without those that are None."""
    found = _known(run, _NAMES[len(_SETTINGS) :])
    return {name: float(value) for name, value in found.items()}


def _known(run: Run, names: Iterable[str]) -> dict[str, Any]:
    found = ((PREFIX + name, getattr(run, name)) for name in names)
    return {name: value for name, value in found if value is not None}


def write_run(run: Run, folder: str | Path) -> Path:
    """Writes `folder/<name>.run.csv` whole or not at all; replaces an older one."""
    check_name("name", run.name)
    path = Path(folder, run.name + SUFFIX)
    with written_whole(path, newline="") as file:
        writer = csv.DictWriter(file, _NAMES)
        writer.writeheader()
        writer.writerow(asdict(run))
    return path


def check_name(argument: str, name: str) -> None:
    """Raises ValueError unless a run's name or a part of it is a valid file name."""
    if not name or Path(name).name != name:
        raise ValueError(
            f"`{argument}` of a run must be the name of a file, got {name!r}"
        )


def read_runs(folder: str | Path) -> list[Run]:
    """All runs below a folder, in the order of their names.

    Raises:
        ValueError: A file does not hold a run; the message names its path.
    """
    runs = map(_read_file, sorted(Path(folder).rglob("*" + SUFFIX)))
    return sorted(runs, key=lambda run: run.name)


def fetch_runs(project: str) -> list[Run]:
    """The runs of a project on the server of Weights & Biases, as `entity/project`.

    It leaves out runs with an incomplete row, such as those that have just begun, and
    warns. Without the package, a network or an account, it warns and returns [].
    """
    try:
        import wandb

        found = wandb.Api(timeout=20).runs(project)
        tables = [{**run.config, **dict(run.summary)} for run in found]
    except Exception as error:  # the package, the network, the server or the account
        warnings.warn(f"no runs from Weights & Biases: {error}", stacklevel=2)
        return []
    return list(_runs_in(tables))


def _read_file(path: Path) -> Run:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    try:
        [row] = rows
        return _run_of(row)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not hold the row of a run: {error}") from error


def _run_of(row: Mapping[str, Any]) -> Run:
    known = {
        field.name: _value(str(field.type), row[field.name])
        for field in fields(Run)
        if row.get(field.name) not in (None, "")
    }
    return Run(**known)


def _value(kind: str, given: Any) -> Any:
    if "bool" in kind:
        return str(given) in ("True", "1", "1.0")
    if "str" in kind:
        return str(given)
    return int(given) if "int" in kind else float(given)


def _runs_in(tables: Iterable[Mapping[str, Any]]) -> Iterator[Run]:
    for table in tables:
        row = {
            name.removeprefix(PREFIX): value
            for name, value in table.items()
            if name.startswith(PREFIX)
        }
        if not {"name", "algorithm"} <= row.keys():
            continue
        try:
            yield _run_of(row)
        except (TypeError, ValueError) as error:
            warnings.warn(f"left out run {row['name']!r}: {error}", stacklevel=3)
