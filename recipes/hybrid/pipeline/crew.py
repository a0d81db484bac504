"""The processes, on one machine or many, that run one recipe together.

All see the same folders. One leads: it begins stages, and finishes them. The others
wait for its stamp. In some stages the first process of each machine does a share of the
work and leaves it in a file (`shared`). In `train` all are learners.
"""

import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from lightning_adpsgd.files import bytes_written_whole

Item = TypeVar("Item")
Result = TypeVar("Result")
_POLL_S = 0.5
PARTS = ".parts"


class CrewError(RuntimeError):
    """Another process of the crew did not do what this one waits for."""


class FinishedError(Exception):
    """The leader has finished the stage: what this process does is needed no more."""


def finished(output: Path) -> Callable[[], bool]:
    """Whether the leader has finished the stage, by the folder in which it runs.

    That folder gets its final name then.
    """
    return lambda: not output.exists()


@dataclass(frozen=True)
class Crew:
    """The place of this process among those that run the recipe.

    Attributes:
        rank: number of this process; 0 leads.
        size: number of processes.
        per_node: number of processes on each machine, of consecutive ranks.
        patience_s: seconds for which a process waits for another one.
        trains: whether the processes can train together.
    """

    rank: int = 0
    size: int = 1
    per_node: int = 1
    patience_s: float = 24 * 3600.0
    trains: bool = True

    def __post_init__(self) -> None:
        if self.per_node < 1 or self.size % self.per_node:
            raise ValueError(
                f"`per_node` must divide the {self.size} processes, got {self.per_node}"
            )
        if not 0 <= self.rank < self.size:
            raise ValueError(f"`rank` must be in [0, {self.size}), got {self.rank}")

    @property
    def leads(self) -> bool:
        """Whether this process begins and finishes stages."""
        return self.rank == 0

    @property
    def node(self) -> int:
        """The number of this machine."""
        return self.rank // self.per_node

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return self.size // self.per_node

    @property
    def shares(self) -> bool:
        """Whether this process does its machine's share of a stage."""
        return self.rank % self.per_node == 0

    def await_until(
        self,
        is_so: Callable[[], bool],
        what: str,
        is_done: Callable[[], bool] | None = None,
    ) -> None:
        """Waits until something is so.

        Args:
            is_so: function that is asked twice a second.
            what: whom and what it waits for, for the error.
            is_done: function that says whether the stage is finished, which may come
                first.

        Raises:
            CrewError: It is not so in time.
            FinishedError: The stage is finished.
        """
        deadline = time.monotonic() + self.patience_s
        while not is_so():
            if is_done is not None and is_done():
                raise FinishedError
            if time.monotonic() > deadline:
                raise CrewError(
                    f"process {self.rank} of {self.size} waited {self.patience_s:g} s "
                    f"for {what}; see what that process printed, and run the same "
                    "command on all machines again"
                )
            time.sleep(_POLL_S)


ALONE = Crew()


def crew_of(environment: Mapping[str, str], num_nodes: int) -> Crew:
    """The place that torchrun or SLURM gives this process.

    Args:
        environment: variables of the process.
        num_nodes: number of machines that the user asks for.

    Raises:
        ValueError: Neither has started it, or on another number of machines.
    """
    if num_nodes == 1:
        return ALONE
    if "TORCHELASTIC_RUN_ID" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        rank, size, per_node = (int(environment[name]) for name in names)
    elif "SLURM_PROCID" in environment:
        rank, size = (int(environment[f"SLURM_{n}"]) for n in ("PROCID", "NTASKS"))
        per_node = size // int(environment.get("SLURM_NNODES", size))
    else:
        raise ValueError(
            f"`nodes` must be 1 without torchrun or srun, got {num_nodes}; start the "
            "command with one of them on every machine"
        )
    crew = Crew(rank, size, max(1, per_node))
    if crew.num_nodes != num_nodes:
        raise ValueError(
            f"`nodes` must be {crew.num_nodes}, the machines of this job, got "
            f"{num_nodes}"
        )
    return crew


def shard_of(written: str) -> Crew:
    """The share that `--shard k/n` gives this process, k from 0.

    Raises:
        ValueError: It is written otherwise, or k is not below n.
    """
    share, slash, number = written.partition("/")
    if not slash or not share.isdecimal() or not number.isdecimal() or number == "0":
        raise ValueError(f"`shard` must be written k/n, such as 0/4, got {written!r}")
    return Crew(int(share), int(number), trains=False)


def shared(
    crew: Crew,
    output: Path,
    name: str,
    items: Iterable[Item],
    work: Callable[[Iterator[Item]], Iterator[Result]],
    to_all: bool = False,
) -> Iterator[Result]:
    """The results of all items, for the leader or for all; otherwise none.

    Item i is of machine i modulo their number. What a machine has left in an earlier
    attempt is taken again.

    Args:
        crew: place of this process.
        output: folder of the stage, the leader's in every process.
        name: name of the work, of its own within the stage.
        items: all items, the same in every process.
        work: function that does a share, several results or none for an item.
        to_all: whether all machines get the results, to continue from the same ones.

    Raises:
        CrewError: A share does not come.
        FinishedError: The stage was finished without this one.
    """
    if crew.num_nodes == 1:
        yield from work(iter(items))
        return
    nodes, is_done = range(crew.num_nodes), finished(output)
    files = [output / PARTS / f"{name}-{n}-of-{crew.num_nodes}.pickle" for n in nodes]
    own = files[crew.node]
    if not own.exists():
        if is_done():
            raise FinishedError
        _write(own, work(islice(items, crew.node, None, crew.num_nodes)))
    if not (crew.leads or to_all):
        return
    for node, file in enumerate(files):
        crew.await_until(file.exists, f"machine {node} to leave {file}", is_done)
        try:
            yield from _read(file)
        except FileNotFoundError:  # removed meanwhile, as the leader needs it no more
            raise FinishedError from None


def _write(path: Path, results: Iterator[object]) -> None:
    with bytes_written_whole(path) as file:
        for result in results:
            pickle.dump(result, file)


def _read(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        while file.peek(1):
            yield pickle.load(file)


def environment_crew(num_nodes: int) -> Crew:
    """The place of this very process."""
    return crew_of(os.environ, num_nodes)
