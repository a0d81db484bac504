"""Stage `graph`: states, phones, words and sentences as one search graph.

It leaves `HCLG.fst` and `words.txt`. With `kaldi.experiment` they are Kaldi's, over
pdfs, with `pairs.npy` and Kaldi's `phones` beside them.
"""

import shutil
from pathlib import Path

from lightning_adpsgd.asr.hmm.states import Topology, read_topology
from lightning_adpsgd.asr.kaldi import graph as kaldi_graphs
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.model import Transitions
from lightning_adpsgd.asr.language.arpa import check_arpa
from lightning_adpsgd.asr.language.lexicon import read_lexicon
from lightning_adpsgd.asr.search.arcs import arcs_of
from lightning_adpsgd.asr.search.graph_files import write_graph
from lightning_adpsgd.asr.search.graphs import decoding_graph, symbols_of
from lightning_adpsgd.files import written_whole
from recipes.hybrid.data.kaldi import find_kaldi
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError
from recipes.hybrid.planning.graph_size import free_memory, problem, projected


def graph(settings: Settings, output: Path) -> None:
    """Makes the search graph, or reads Kaldi's.

    Raises:
        StageError: What it is made from is damaged, or does not belong together.
    """
    (_of_kaldi if settings.uses_kaldi else _own)(settings, output)


def _own(settings: Settings, output: Path) -> None:
    """Composes HMM states, pronunciations and n-grams into one search graph.

    Raises:
        StageError: The language model or the lexicon cannot be used.
    """
    try:
        lexicon = read_lexicon(settings.directory("lexicon"))
        topology = read_topology(settings.directory("mixtures") / "tree.json")
        _check_size(settings, topology)
        hclg = decoding_graph(
            lexicon,
            topology,
            settings.directory("lm") / "lm.arpa",
            silence_probability=settings.graph.silence_probability,
        )
    except (ValueError, OSError) as error:
        raise StageError(str(error)) from error
    words = symbols_of(lexicon, topology).words
    table = "".join(f"{word} {label}\n" for word, label in words.items())
    with written_whole(output / "words.txt") as file:
        file.write(table)
    write_graph(hclg, output / "HCLG.fst")
    arcs = int(arcs_of(hclg).source.size)
    print(f"  {hclg.num_states} states, {arcs} arcs", flush=True)


def _check_size(settings: Settings, topology: Topology) -> None:
    """Says what composing will take, before it begins.

    Raises:
        ValueError: It does not fit into the memory; names the setting that does.
    """
    counts = check_arpa(settings.directory("lm") / "lm.arpa")
    in_context = topology.context_width > 1
    if reason := problem(counts, in_context, free_memory()):
        raise ValueError(reason)
    print(f"  projected: {projected(counts, in_context)}", flush=True)


def _of_kaldi(settings: Settings, output: Path) -> None:
    """Reads Kaldi's search graph as one over pdfs.

    Raises:
        StageError: It is damaged, or does not belong to the model.
    """
    folder = find_kaldi(settings)[0].graph
    states = settings.directory("mixtures") / "transitions.npz"
    try:
        transitions = Transitions.load(states)
        hclg = kaldi_graphs.read_hclg(folder / "HCLG.fst")
        over_pdfs = kaldi_graphs.over_pdfs(hclg, transitions, folder / "HCLG.fst")
    except (KaldiError, ValueError) as error:
        raise StageError(str(error)) from error
    kaldi_graphs.save(over_pdfs, output)
    shutil.copyfile(folder / "words.txt", output / "words.txt")
    (output / "phones").mkdir(exist_ok=True)
    for name in ("word_boundary.int", "align_lexicon.int"):
        if (folder / "phones" / name).exists():
            shutil.copyfile(folder / "phones" / name, output / "phones" / name)
    print(f"  {over_pdfs.fst.num_states} states", flush=True)
