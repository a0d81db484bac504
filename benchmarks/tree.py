"""The cost of states in context: statistics, growing the tree, composing the graph.

All data are generated, in the sizes of Switchboard. Phones in random order last 8
frames on average, and the Gaussians of contexts depend on the phones around them. There
are 30,000 words, and n-grams of them drawn by Zipf's law. Seconds are those of the
processor, of one process with one thread; each measurement has a process of its own, so
that its peak of memory is its own.
"""

import resource
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.results import Report, Row
from benchmarks.timing import Spread, print_row
from lightning_adpsgd.asr.frames.front_end import FrontEnd
from lightning_adpsgd.asr.hmm.contexts import ContextStatistics, context_statistics
from lightning_adpsgd.asr.hmm.gmm import Statistics
from lightning_adpsgd.asr.hmm.growing import TreeOptions, grow
from lightning_adpsgd.asr.hmm.states import Topology
from lightning_adpsgd.asr.hmm.tree import DecisionTree
from lightning_adpsgd.asr.language.lexicon import Lexicon
from lightning_adpsgd.asr.search.arcs import arcs_of
from lightning_adpsgd.asr.search.graphs import decoding_graph

SILENCES = 4
DIMENSION = 39
WORDS = 30_000
GIGA = 1e9


class Cost(NamedTuple):
    """Seconds of the processor, growth of the peak memory in bytes, and a size."""

    seconds: float
    bytes: float
    size: int


def measure(quick: bool = False) -> Report:
    """Measures frames, leaves and arcs per second of one core, and memory."""
    report = Report(
        "States in context: statistics of frames, decision trees, decoding graphs "
        "(1 process, 1 thread).",
        limit="",
        notes=["The corpora are made up; sizes are those of Switchboard."],
    )
    million = 100_000 if quick else 1_000_000
    for frames in (million, 4 * million):
        for name in ("slopes", "nine frames projected"):
            cost = _apart(_statistics, frames, name)
            case = {"frames": frames, "front end": name}
            _note(report, "statistics", case, cost, frames, "frames/s")
    num_phones = 30 if quick else 70
    for leaves in (600,) if quick else (600, 9_000, 32_000):
        cost = _apart(_growth, leaves, num_phones)
        case = {"contexts": 3 * num_phones**3, "leaves": leaves}
        _note(report, "tree", case, cost, leaves, "leaves/s")
    for grams in (10_000,) if quick else (100_000, 200_000):
        cost = _apart(_graph, grams, 1_000 if quick else 9_000)
        case = {"n-grams up to 4 words": grams, "arcs": cost.size}
        _note(report, "graph", case, cost, cost.size, "arcs/s")
    return report


def _apart(work: Callable[..., Iterator[int]], *arguments: float | str) -> Cost:
    context = get_context("fork")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_cost, work, *arguments).result()


def _cost(work: Callable[..., Iterator[int]], *arguments: float | str) -> Cost:
    """The cost of a generator from its first `yield` to the one with the size."""
    steps = work(*arguments)
    next(steps)
    before, begin = _peak(), time.process_time()
    size = next(steps)
    return Cost(time.process_time() - begin, _peak() - before, size)


def _peak() -> float:
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _note(
    report: Report,
    table: str,
    case: Mapping[str, str | float],
    cost: Cost,
    amount: float,
    unit: str,
) -> None:
    rate = amount / cost.seconds
    details = {"s": cost.seconds, "GB": cost.bytes / GIGA}
    value = Spread(rate, rate, rate)
    report.rows.append(Row(case, value, unit, table=table, details=details))
    words = ", ".join(f"{name} {value}" for name, value in case.items())
    told = f"{cost.seconds:.1f} s, {cost.bytes / GIGA:.2f} GB"
    print_row(f"{table}: {words}", f"{rate:.0f} {unit}", told)


def _phones(count: int) -> Topology:
    return Topology(tuple(f"p{index}" for index in range(count)))


def _statistics(num_frames: int, name: str) -> Iterator[int]:
    """Utterances of 500 frames, in shards of 256."""
    random = np.random.default_rng(0)
    topology = _phones(46)
    front_end = FrontEnd()
    if name != "slopes":
        front_end = FrontEnd(13, 4, random.normal(size=(117, 40)))
    log_mel = random.normal(size=(500, 40)).astype(np.float16)
    lengths = 1 + random.poisson(5 / 3, size=200)

    def load(shard: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        draw = np.random.default_rng(shard)
        for _ in range(min(256, num_frames // 500 - 256 * shard)):
            chain = 3 * draw.integers(0, 46, (67, 1)) + np.arange(3)
            states = np.repeat(chain.ravel()[:200], lengths)[:500]
            yield front_end(log_mel[: len(states)]), states

    yield 0
    shards = range(-(-num_frames // 500 // 256))
    yield len(context_statistics(shards, load, topology).root)


def _contexts(num_phones: int) -> ContextStatistics:
    random = np.random.default_rng(0)
    index = np.arange(3 * num_phones**3)
    root, left, right = (
        index // num_phones**2,
        index // num_phones % num_phones,
        index % num_phones,
    )
    frames = 50 * random.pareto(0.8, len(index)) + 1
    shape = len(index), DIMENSION
    mean = random.normal(size=(3 * num_phones, DIMENSION))[root]
    for beside in (left, right):
        mean += 0.5 * random.normal(size=(num_phones, DIMENSION))[beside]
    mean += 0.3 * random.normal(size=shape)
    first = frames[:, None] * mean
    sums = Statistics(frames, first, first * mean + frames[:, None])
    return ContextStatistics(root, left, right, sums)


def _growth(num_leaves: int, num_phones: int) -> Iterator[int]:
    statistics = _contexts(num_phones)
    yield 0
    options = TreeOptions(num_leaves=num_leaves)
    tree = grow(statistics, _phones(num_phones), SILENCES, options)
    yield tree.num_states


def _graph(num_grams: int, num_leaves: int) -> Iterator[int]:
    random = np.random.default_rng(0)
    topology = Topology(_phones(46).phones, 3, _any_tree(num_leaves, random))
    with tempfile.TemporaryDirectory() as folder:
        lexicon = _lexicon(topology, random)
        arpa = Path(folder) / "lm.arpa"
        _write_arpa(arpa, sorted(lexicon.pronunciations), num_grams, random)
        yield 0
        graph = decoding_graph(lexicon, topology, arpa)
        yield len(arcs_of(graph).source)


def _any_tree(num_leaves: int, random: np.random.Generator) -> DecisionTree:
    """Leaves of all but the silences split in turn, by questions about half of all."""
    num_roots = 3 * 46
    questions = random.random((90, 46)) < 0.5
    leaves = deque(range(3 * SILENCES, num_roots))
    splits = []
    for number in range(num_leaves - num_roots):
        question = random.integers(0, len(questions))
        splits.append((leaves.popleft(), number // 2 % 2, question))
        leaves += [num_roots + 2 * number, num_roots + 2 * number + 1]
    return DecisionTree.of(num_roots, questions, splits)


def _lexicon(topology: Topology, random: np.random.Generator) -> Lexicon:
    """Words of 2 to 10 phones, of which frequent beginnings are shared."""
    phones = topology.phones
    spoken = phones[SILENCES:]
    share = 1 / np.arange(1, len(spoken) + 1)
    words = {}
    for number in range(WORDS):
        length = 2 + random.binomial(8, 0.5)
        drawn = random.choice(len(spoken), length, p=share / share.sum())
        words[f"w{number}"] = (tuple(spoken[index] for index in drawn),)
    return Lexicon(words, phones[:SILENCES], spoken)


def _write_arpa(
    path: Path, words: list[str], num_grams: int, random: np.random.Generator
) -> None:
    """All words, and half, a third and a sixth of `num_grams` of orders 2, 3, 4."""
    share = 1 / np.arange(1, len(words) + 1)
    share /= share.sum()
    orders = [np.arange(len(words))[:, None]]
    for part in (2, 3, 6):
        known, count = orders[-1], num_grams // part
        if part == 2:
            known = random.choice(len(words), (count, 1), p=share)
        before = known[random.integers(0, len(known), count)]
        last = random.choice(len(words), (count, 1), p=share)
        orders.append(np.unique(np.hstack([before, last]), axis=0))
    with path.open("w") as file:
        file.write("\\data\\\n")
        sizes = [len(words) + 2, *(len(grams) for grams in orders[1:])]
        file.writelines(f"ngram {n}={size}\n" for n, size in enumerate(sizes, 1))
        for order, grams in enumerate(orders, 1):
            file.write(f"\n\\{order}-grams:\n")
            if order == 1:
                file.write("-99 <s> -0.5\n-1.5 </s>\n")
            backoff = " -0.3" if order < 4 else ""
            for gram in grams:
                said = " ".join(words[index] for index in gram)
                file.write(f"-{5 - order} {said}{backoff}\n")
        file.write("\n\\end\\\n")
