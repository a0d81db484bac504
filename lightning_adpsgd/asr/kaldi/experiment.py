"""A Kaldi experiment on disk: which of its files are used, and whether they fit."""

from pathlib import Path
from typing import NamedTuple

from lightning_adpsgd.asr.kaldi.alignments import alignment_files
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.language import read_boundaries, read_words
from lightning_adpsgd.asr.kaldi.model import Transitions, read_transitions


class Experiment(NamedTuple):
    """The files of an experiment.

    Attributes:
        model: `final.mdl`.
        alignments: `ali.*.gz`, of one or several folders, in order.
        graph: Folder of `HCLG.fst`, `words.txt` and `phones`.
    """

    model: Path
    alignments: tuple[Path, ...]
    graph: Path


def find_experiment(
    folder: Path, graph: Path | None = None, more: tuple[Path, ...] = ()
) -> Experiment:
    """The experiment in a folder such as `exp/tri4_ali_nodup`.

    Args:
        folder: Folder with `final.mdl` and `ali.*.gz`.
        graph: Folder of the search graph; the one in `folder` if there is only one.
        more: Folders with further alignments by the same model.

    Raises:
        KaldiError: A file is missing; all that are missing are named.
    """
    problems: list[str] = []
    alignments = []
    for place in (folder, *more):
        try:
            alignments += alignment_files(place)
        except KaldiError as error:
            problems.append(str(error))
    if not (folder / "final.mdl").exists():
        problems.append(f"{folder}: expected the model final.mdl")
    graph = graph or _only_graph(folder, problems)
    if graph is not None:
        problems += _missing_of(graph)
    if problems or graph is None:
        raise KaldiError(
            "the Kaldi experiment is not complete; copy or make what it lacks:\n"
            + "\n".join(problems)
        )
    return Experiment(folder / "final.mdl", tuple(alignments), graph)


def _only_graph(folder: Path, problems: list[str]) -> Path | None:
    found = sorted(path.parent for path in folder.glob("graph*/HCLG.fst"))
    if len(found) == 1:
        return found[0]
    problems.append(
        f"{folder}: expected one graph*/HCLG.fst, found {len(found)}; name the folder "
        "with kaldi.graph=DIR"
    )
    return None


def _missing_of(graph: Path) -> list[str]:
    problems = [
        f"{graph}: expected {name}"
        for name in ("HCLG.fst", "words.txt")
        if not (graph / name).exists()
    ]
    try:
        read_boundaries(graph / "phones")
    except KaldiError as error:
        problems.append(str(error))
    return problems


def check_experiment(experiment: Experiment) -> Transitions:
    """Reads the small files and compares them; returns the model's transitions.

    Raises:
        KaldiError: A file is damaged, or they do not belong together.
    """
    transitions = read_transitions(experiment.model)
    read_words(experiment.graph / "words.txt")
    path = experiment.graph / "num_pdfs"
    number = path.read_text().strip() if path.exists() else ""
    if number.isdecimal() and int(number) != transitions.num_pdfs:
        raise KaldiError(
            f"{path}: the graph is for {number} pdfs, {experiment.model} has "
            f"{transitions.num_pdfs}; they do not belong together"
        )
    return transitions
