"""A function of many items, which machines share, and the cores of each its part."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from lightning_adpsgd.asr.parallel import fork_map
from recipes.hybrid.pipeline.crew import finished, shared
from recipes.hybrid.pipeline.settings import Settings

Item = TypeVar("Item")
Result = TypeVar("Result")


def spread(
    settings: Settings,
    output: Path,
    name: str,
    items: Sequence[Item],
    function: Callable[[Item], Result],
    to_all: bool = False,
) -> Iterator[tuple[int, Result]]:
    """The function's results with the indices of their items, in any order.

    A process that does not lead gets none, if they are not `to_all`.

    Args:
        settings: settings with the cores, and the place of this process.
        output: folder of the stage.
        name: name of the work, of its own within the stage.
        items: all items, the same in every process.
        function: function that one of the processes applies to an item.
        to_all: whether all machines get the results.

    Raises:
        CrewError: A machine does not leave its share.
        FinishedError: The stage was finished without this process.
    """

    def work(share: Iterator[int]) -> Iterator[tuple[int, Result]]:
        places = list(share)
        mine = [items[place] for place in places]
        for index, result in fork_map(function, mine, settings.cores):
            yield places[index], result

    return shared(settings.crew, output, name, range(len(items)), work, to_all)


def await_file(settings: Settings, output: Path, path: Path) -> None:
    """Waits, in a process that does not lead, for a file that the leader writes.

    Raises:
        CrewError: It does not come.
        FinishedError: The stage was finished without this process.
    """
    if not settings.crew.leads:
        about = f"process 0 to write {path}"
        settings.crew.await_until(path.exists, about, finished(output))
