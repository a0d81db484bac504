"""A search that keeps alternatives: a beam search whose width is bounded, as a lattice.

kaldi-decoder's lattice search has only a beam. With a weak model, thousands of states
lie within it, and one utterance takes minutes. So this search also has the bound
`max_active` of the search for the best path. All paths of a frame are advanced
together, in numpy.

A node of the lattice is a state of the graph after a frame. A link is an arc of the
graph; it reads a frame, or none. Costs are negative logarithms: of the graph, and of
the scaled likelihoods.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import kaldifst
import numpy as np

from lightning_adpsgd.asr.search.arcs import Arcs, arcs_of

_SLACK = 1e-6  # tolerance of costs that were added in another order


@dataclass(frozen=True, kw_only=True)
class LatticeOptions:
    """The width of a search, and how much of it is kept.

    Attributes:
        beam: Distance from the best path, in scaled log-likelihood.
        max_active: Maximum number of graph states that survive a frame.
        lattice_beam: Distance from the best path beyond which paths are left out.

    Raises:
        ValueError: `max_active` is below 2, or `lattice_beam` not in (0, `beam`].
    """

    beam: float = 13.0
    max_active: int = 2000
    lattice_beam: float = 6.0

    def __post_init__(self) -> None:
        if self.max_active < 2:
            raise ValueError(f"`max_active` must be at least 2, got {self.max_active}")
        if not 0 < self.lattice_beam <= self.beam:
            raise ValueError(
                f"`lattice_beam` must lie in (0, `beam` {self.beam}], got "
                f"{self.lattice_beam}"
            )


class _Rows(NamedTuple):
    """Arcs sorted by the state that they leave: those of state s begin at first[s]."""

    first: np.ndarray
    number: np.ndarray
    target: np.ndarray
    weight: np.ndarray

    def of(self, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows of all arcs that leave `states`, and the place of each one's state.

        Args:
            states: [n].

        Returns:
            Rows and places in `states`, both [arcs].
        """
        begin = self.first[states]
        counts = self.first[states + 1] - begin
        places = np.repeat(np.arange(len(states)), counts)
        before = np.cumsum(counts) - counts
        return np.arange(len(places)) + (begin - before)[places], places


class SearchGraph:
    """A graph as the lattice search reads it: arcs that read a frame, and others.

    Args:
        fst: Reads input label i + 1 for column i of the likelihoods.
    """

    def __init__(self, fst: kaldifst.StdFst) -> None:
        arcs = arcs_of(fst)
        self.start, self.finals = arcs.start, arcs.finals.astype(np.float64)
        self.inputs = arcs.ilabel.astype(np.int32)
        self.outputs = arcs.olabel.astype(np.int32)
        self.weights = arcs.weight
        self.reading = _rows(arcs, np.flatnonzero(arcs.ilabel))
        self.silent = _rows(arcs, np.flatnonzero(arcs.ilabel == 0))

    @property
    def num_states(self) -> int:
        """Number of states."""
        return len(self.finals)


def _rows(arcs: Arcs, number: np.ndarray) -> _Rows:
    counts = np.bincount(arcs.source[number], minlength=arcs.num_states)
    first = np.concatenate([[0], np.cumsum(counts)])
    number = number[np.argsort(arcs.source[number], kind="stable")]
    return _Rows(first, number, arcs.target[number], arcs.weight[number])


class _Links(NamedTuple):
    """Links from nodes of one frame: their places, the arcs, and the costs.

    `excess` is how much more the best path over a link costs than the best path.
    """

    source: np.ndarray
    target: np.ndarray
    arc: np.ndarray
    cost: np.ndarray
    excess: np.ndarray

    def kept(self, mask: np.ndarray) -> "_Links":
        return _Links(*(column[mask] for column in self))


def _links(
    source: np.ndarray, target: np.ndarray, arc: np.ndarray, cost: np.ndarray
) -> _Links:
    return _Links(source, target, arc, cost, np.zeros(len(arc)))


class _Frame(NamedTuple):
    """The nodes after a frame, with the links into them and among them.

    `into` comes from nodes of the frame before, `within` reads no frame.
    """

    states: np.ndarray
    costs: np.ndarray
    into: _Links
    within: _Links


class Lattice(NamedTuple):
    """The paths near the best one, as columns of links.

    Nodes are numbered in the order of frames; node 0 is the first.

    Attributes:
        source: Node that a link leaves, [links].
        target: Node that it enters.
        arc: Number of the graph's arc.
        cost: Graph and scaled acoustic cost of the link, float64.
        frame: Number of frames before `target` is reached, less one; for a link that
            reads no frame, that of its node.
        reads: Whether the link reads a frame.
        excess: Distance of the best path over the link from the best path of all.
        finals: Cost of ending in each node, [nodes]; infinite for most.
        is_complete: Whether a path ends in a final state of the graph.
    """

    source: np.ndarray
    target: np.ndarray
    arc: np.ndarray
    cost: np.ndarray
    frame: np.ndarray
    reads: np.ndarray
    excess: np.ndarray
    finals: np.ndarray
    is_complete: bool

    def near(self, beam: float, most_links: int) -> np.ndarray:
        """Mask of the links within `beam` of the best path, about `most_links` at most.

        Links of the best path are among them.
        """
        if len(self.excess) > most_links:
            beam = min(beam, float(np.partition(self.excess, most_links)[most_links]))
        return self.excess <= max(beam, _SLACK)

    def best(self) -> np.ndarray:
        """The numbers of the links along the best path."""
        order = np.lexsort((self.excess, self.source))
        nodes, first = np.unique(self.source[order], return_index=True)
        onward = dict(zip(nodes.tolist(), order[first].tolist(), strict=True))
        path, node = [], 0
        while (link := onward.get(node)) is not None and self.excess[link] <= _SLACK:
            path.append(link)
            node = int(self.target[link])
        return np.array(path, int)


class LatticeSearch:
    """Searches a graph for the paths near the best one.

    Args:
        graph: The graph.
        options: Width of the search.
    """

    def __init__(self, graph: SearchGraph, options: LatticeOptions) -> None:
        self._graph, self._options = graph, options

    @cached_property
    def _best(self) -> np.ndarray:
        """Cost of each state in this frame; infinite outside a frame."""
        return np.full(self._graph.num_states, np.inf)

    @cached_property
    def _place(self) -> np.ndarray:
        """Place of each state among a frame's nodes; -1 outside a frame."""
        return np.full(self._graph.num_states, -1)

    def lattice(
        self, log_likelihoods: np.ndarray, acoustic_scale: float = 1.0
    ) -> Lattice | None:
        """The lattice of log-likelihoods [time, columns].

        They are scaled frame by frame, without a copy of all.

        Returns:
            The lattice; None if there are no frames, or if all paths within the beam
            have ended before the last one.
        """
        if not len(log_likelihoods):
            return None
        frames = list(self._frames(log_likelihoods, acoustic_scale))
        if not len(frames[-1].states):
            return None
        return _pruned(frames, self._graph.finals, self._options.lattice_beam)

    def _frames(
        self, log_likelihoods: np.ndarray, acoustic_scale: float
    ) -> Iterator[_Frame]:
        none = np.zeros(0, int)
        nothing = _links(none, none, none, np.zeros(0))
        start = np.array([self._graph.start])
        frame = self._settled(start, np.zeros(1), nothing)
        yield frame
        for row in log_likelihoods:
            frame = self._advanced(frame, row.astype(float) * acoustic_scale)
            yield frame
            if not len(frame.states):
                return

    def _advanced(self, frame: _Frame, row: np.ndarray) -> _Frame:
        """The nodes after one more frame, whose scaled likelihoods are `row`."""
        reading = self._graph.reading
        rows, places = reading.of(frame.states)
        arcs = reading.number[rows]
        cost = reading.weight[rows] - row[self._graph.inputs[arcs] - 1]
        total = frame.costs[places] + cost
        near = total <= total.min(initial=np.inf) + self._options.beam
        states = reading.target[rows[near]]
        links = _links(places[near], states, arcs[near], cost[near])
        return self._settled(states, total[near], links)

    def _settled(self, states: np.ndarray, totals: np.ndarray, into: _Links) -> _Frame:
        """The nodes at these states and those that no frame separates from them.

        Args:
            states: State that each of `into` reaches; the first one without any.
            totals: Cost until then.
            into: Links whose targets are states still.
        """
        if not len(states):
            return _Frame(states, totals, into, into)
        best, place = self._best, self._place
        np.minimum.at(best, states, totals)
        reached = self._closed(self._distinct(states))
        nodes = self._survivors(reached)
        costs = best[nodes]
        place[nodes] = np.arange(len(nodes))
        within = self._within(nodes, costs)
        into = self._near(into, totals[: len(into.target)])
        place[nodes], best[reached] = -1, np.inf
        return _Frame(nodes, costs, into, within)

    def _closed(self, states: np.ndarray) -> np.ndarray:
        """These states, and all states reached from them without another frame."""
        best, silent = self._best, self._graph.silent
        limit = best[states].min() + self._options.beam
        several, frontier = [states], states
        while len(frontier):
            rows, places = silent.of(frontier)
            total = best[frontier][places] + silent.weight[rows]
            targets = silent.target[rows]
            better = (total < best[targets]) & (total <= limit)
            total, targets = total[better], targets[better]
            several.append(self._distinct(targets[np.isinf(best[targets])]))
            np.minimum.at(best, targets, total)
            frontier = self._distinct(targets)
        return np.concatenate(several)

    def _distinct(self, states: np.ndarray) -> np.ndarray:
        """Each of the states once, found without sorting."""
        numbers = np.arange(len(states))
        self._place[states] = numbers
        kept = states[self._place[states] == numbers]
        self._place[states] = -1
        return kept

    def _survivors(self, states: np.ndarray) -> np.ndarray:
        costs, most = self._best[states], self._options.max_active
        limit = costs.min() + self._options.beam
        if len(costs) > most:
            limit = min(limit, np.partition(costs, most - 1)[most - 1])
        return states[costs <= limit]

    def _near(self, into: _Links, totals: np.ndarray) -> _Links:
        """The links to nodes that survive, near the best way there, to their places."""
        beam = self._options.lattice_beam
        near = totals <= self._best[into.target] + beam
        kept = into.kept(near & (self._place[into.target] >= 0))
        return kept._replace(target=self._place[kept.target])

    def _within(self, nodes: np.ndarray, costs: np.ndarray) -> _Links:
        silent = self._graph.silent
        rows, places = silent.of(nodes)
        cost = silent.weight[rows].astype(float)
        links = _links(places, silent.target[rows], silent.number[rows], cost)
        return self._near(links, costs[places] + cost)


class _Kept(NamedTuple):
    """The survivors of a frame: a mask of its nodes, and its links."""

    nodes: np.ndarray
    into: _Links
    within: _Links


def _pruned(frames: list[_Frame], finals: np.ndarray, lattice_beam: float) -> Lattice:
    """The links on paths that are within `lattice_beam` of the best one."""
    last = frames[-1]
    ends = finals[last.states]
    is_complete = bool(np.isfinite(ends).any())
    if not is_complete:
        ends = np.zeros(len(last.states))
    best = float((last.costs + ends).min())
    kept = list(_backward(frames, ends, best, lattice_beam))[::-1]
    return _joined(kept, ends, is_complete)


def _backward(
    frames: list[_Frame], onward: np.ndarray, best: float, lattice_beam: float
) -> Iterator[_Kept]:
    """Yields the survivors of each frame, the last frame first.

    Args:
        frames: All frames.
        onward: Cost from each node of the last frame to the end.
        best: Cost of the best path.
        lattice_beam: Greatest distance from it.
    """
    beam = lattice_beam + _SLACK
    for position in range(len(frames) - 1, -1, -1):
        frame = frames[position]
        onward = _relaxed(onward, frame.within)
        within = _near(frame.within, frame.costs - best, onward, beam)
        before = frames[position - 1].costs if position else frame.costs
        into = _near(frame.into, before - best, onward, beam)
        yield _Kept(frame.costs - best + onward <= beam, into, within)
        earlier = np.full(len(before), np.inf)
        np.minimum.at(earlier, into.source, into.cost + onward[into.target])
        onward = earlier


def _relaxed(onward: np.ndarray, within: _Links) -> np.ndarray:
    """The cost to the end, with links that read no frame."""
    while True:
        shorter = onward.copy()
        np.minimum.at(shorter, within.source, within.cost + onward[within.target])
        if np.array_equal(shorter, onward):
            return onward
        onward = shorter


def _near(links: _Links, before: np.ndarray, onward: np.ndarray, beam: float) -> _Links:
    excess = before[links.source] + links.cost + onward[links.target]
    return links._replace(excess=excess).kept(excess <= beam)


def _joined(kept: list[_Kept], ends: np.ndarray, is_complete: bool) -> Lattice:
    """One numbering of the nodes of all frames, and one list of their links."""
    numbers, free = [], 0
    for one in kept:
        numbers.append(free + np.cumsum(one.nodes) - 1)
        free += int(one.nodes.sum())
    parts = [
        (links, numbers[position - reads], numbers[position], position - reads, reads)
        for position, one in enumerate(kept)
        for links, reads in ((one.into, position > 0), (one.within, False))
    ]
    sizes = [len(links.arc) for links, *_ in parts]
    finals = np.full(free, np.inf)
    finals[free - int(kept[-1].nodes.sum()) :] = ends[kept[-1].nodes]
    return Lattice(
        source=np.concatenate([before[links.source] for links, before, *_ in parts]),
        target=np.concatenate([after[links.target] for links, _, after, *_ in parts]),
        arc=np.concatenate([links.arc for links, *_ in parts]),
        cost=np.concatenate([links.cost for links, *_ in parts]),
        frame=np.repeat([frame for *_, frame, _ in parts], sizes),
        reads=np.repeat([reads for *_, reads in parts], sizes),
        excess=np.concatenate([links.excess for links, *_ in parts]),
        finals=finals,
        is_complete=is_complete,
    )
