"""A stage, and how it says what it found and why it cannot run."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from lightning_adpsgd.files import printable
from recipes.hybrid.pipeline.settings import Settings

Together = Literal["leader", "machines", "all"]


class StageError(RuntimeError):
    """A stage cannot run: missing inputs, changed settings, or another process.

    Args:
        problem: what is wrong.
        remedy: what to do, by options of `command.py`. A command that has none of them
            replaces it.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem + remedy)
        self.problem, self.remedy = problem, remedy


class Stage(NamedTuple):
    """One step of the way from audio to word error rate.

    Attributes:
        name: name of the stage and of its folder below `exp`.
        purpose: one line for the screen.
        run: function that writes the stage's files into the given folder.
        inputs: names of the stages whose output it reads. `lm/lm.arpa` means: of stage
            `lm`, only that file.
        depends: names of the settings that it depends on, besides its inputs:
            `kaldi`, a group, or `kaldi.graph`, one value.
        wanted: whether the settings ask for the stage; it is skipped otherwise.
        together: who of a crew runs it: "leader", "machines" (the first process of
            each, which does a share) or "all".
        edition: label to change when its code makes other output from the same inputs;
            finished stages of another edition count as changed.
        is_last: whether no other stage reads it, so that it can be run again alone.
        apart: single values, such as `kaldi.graph`, of the groups in `depends` that it
            does not read.
        needs: names of stages that must be finished, and that may be made again
            without making this one out of date.
        of_corpus: function for the files of the corpus that it reads beside sound;
            none: all files of the corpus count.
        of_sound: function for the files of sound that the corpus names, wherever they
            are or were; none: they are all in the corpus.
        work: glob pattern of the files from which an interrupted one continues, where
            they are hours of work; empty: starting over is cheap.
    """

    name: str
    purpose: str
    run: Callable[[Settings, Path], None]
    inputs: tuple[str, ...] = ()
    depends: tuple[str, ...] = ()
    wanted: Callable[[Settings], bool] = lambda _: True
    together: Together = "leader"
    edition: str = ""
    is_last: bool = False
    apart: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    of_corpus: Callable[[Path], Iterable[Path]] | None = None
    of_sound: Callable[[Path], Iterable[Path]] | None = None
    work: str = ""


def stage_in(name: str) -> str:
    """The stage of an element of `Stage.inputs`, which may name one of its files."""
    return name.partition("/")[0]


def say(lines: Iterable[str]) -> None:
    """Print the lines of a stage's report; undecodable bytes of a path are escaped."""
    text = "\n".join(f"  {line}" for line in lines)
    print(printable(text), flush=True)
