"""The searches of a stage, divided among machines and their cores."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from lightning_adpsgd.asr.parallel import fork_map
from lightning_adpsgd.asr.search.decoding import Search
from recipes.hybrid.data.inputs import Load
from recipes.hybrid.pipeline.crew import shared
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.recognition.scorers import Scorer

_MATRICES_PER_CORE = 4

Result = TypeVar("Result")


class Task(NamedTuple):
    """The common inputs of all searches of a stage.

    Attributes:
        settings: settings of the experiment.
        output: folder of the stage.
        within: name of a folder in `output` for the words, or "".
        scorer: log-likelihoods of an utterance.
        decoder: search for words.
    """

    settings: Settings
    output: Path
    within: str
    scorer: Scorer
    decoder: Search

    @property
    def leads(self) -> bool:
        """Whether this process writes and prints the results."""
        return self.settings.crew.leads

    def name_of(self, work: str) -> str:
        """The unique name of a unit of work within the stage."""
        return f"{self.within}-{work}" if self.within else work

    @property
    def folder(self) -> Path:
        """The folder of the words."""
        return self.output / self.within


def searched(
    task: Task,
    name: str,
    loads: Sequence[Load],
    search: Callable[[np.ndarray], Result],
    to_all: bool = False,
) -> Iterator[tuple[int, Result, float]]:
    """Yields each utterance's index, its search result and the seconds that it took.

    Machines share the utterances, and the processes of each share its part.

    Args:
        task: scorer, and place of this process among the machines.
        name: unique name of the work.
        loads: readers of the utterances' inputs.
        search: function of log-likelihoods [time, num_states].
        to_all: whether all machines get the results, or only the leader.
    """

    def work(share: Iterator[int]) -> Iterator[tuple[int, Result, float]]:
        places = list(share)
        for place, (found, seconds) in _found(task, [loads[p] for p in places], search):
            yield places[place], found, seconds

    crew, items = task.settings.crew, range(len(loads))
    return shared(crew, task.output, task.name_of(name), items, work, to_all)


def _found(
    task: Task, loads: Sequence[Load], search: Callable[[np.ndarray], Result]
) -> Iterator[tuple[int, tuple[Result, float]]]:
    """Yields this machine's results in the order in which they arrive.

    Only this process can use a network on a GPU. It scores a block of utterances before
    they are searched.
    """
    scorer, cores = task.scorer, task.settings.cores

    def both(load: Load) -> tuple[Result, float]:
        begin = time.perf_counter()
        found = search(scorer(load()))
        return found, time.perf_counter() - begin

    if not getattr(scorer, "needs_this_process", False):
        yield from fork_map(both, loads, cores)
        return
    block = cores * _MATRICES_PER_CORE
    for first in range(0, len(loads), block):
        begin = time.perf_counter()
        matrices = [scorer(load()) for load in loads[first : first + block]]
        scored_s = (time.perf_counter() - begin) / len(matrices)

        def one(matrix: np.ndarray, scored_s: float = scored_s) -> tuple[Result, float]:
            begin = time.perf_counter()
            found = search(matrix)
            return found, time.perf_counter() - begin + scored_s

        for index, found in fork_map(one, matrices, cores):
            yield first + index, found
