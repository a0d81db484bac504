"""How probable a recognised word is, among all paths of a lattice.

The posterior of a link is the share of paths over it, each weighed by exp(-cost):

    γ(l) = Σ_{paths over l} exp(-cost(path)) / Σ_{paths} exp(-cost(path))

The confidence of a word is the sum of the posteriors of the links that say the same
word at about the same time.
"""

from collections.abc import Iterator

import numpy as np

from lightning_adpsgd.asr.search.lattice import Lattice

_NEAR_FRAMES = 30


def link_posteriors(lattice: Lattice) -> np.ndarray:
    """The posterior of each link, float64 [links]."""
    groups = list(_groups(lattice))
    ahead = np.full(len(lattice.finals), -np.inf)
    ahead[0] = 0.0
    for links in groups:
        source, target = lattice.source[links], lattice.target[links]
        np.logaddexp.at(ahead, target, ahead[source] - lattice.cost[links])
    behind = -lattice.finals
    for links in reversed(groups):
        source, target = lattice.source[links], lattice.target[links]
        np.logaddexp.at(behind, source, behind[target] - lattice.cost[links])
    through = ahead[lattice.source] - lattice.cost + behind[lattice.target]
    return np.exp(np.minimum(through - behind[0], 0.0))


def _groups(lattice: Lattice) -> Iterator[np.ndarray]:
    """The links in an order in which all that enter a node come before it is left."""
    level = _levels(lattice)
    most = int(level.max(initial=0)) + 1
    place = np.where(lattice.reads, most, level[lattice.source])
    key = lattice.frame * (most + 1) + place
    order = np.argsort(key, kind="stable")
    edges = np.flatnonzero(np.diff(key[order])) + 1
    yield from np.split(order, edges) if len(order) else ()


def _levels(lattice: Lattice) -> np.ndarray:
    """The largest number of links that read no frame from another node to each."""
    silent = ~lattice.reads
    source, target = lattice.source[silent], lattice.target[silent]
    level = np.zeros(len(lattice.finals), int)
    for _ in range(len(source) + 1):
        further = level.copy()
        np.maximum.at(further, target, level[source] + 1)
        if np.array_equal(further, level):
            return level
        level = further
    raise ValueError("`lattice` must have no cycle of links that read no frame")


def confidences(lattice: Lattice, words: np.ndarray, path: np.ndarray) -> list[float]:
    """The confidence of each word along a path, in [0, 1].

    Args:
        lattice: The lattice.
        words: Word of each link, 0 for none.
        path: Links of the path, for instance `lattice.best()`.
    """
    spoken = path[words[path] > 0]
    says = np.flatnonzero(words)
    posteriors = link_posteriors(lattice)[says]
    frames, said = lattice.frame[says], words[says]
    sums = [
        posteriors[(said == word) & (abs(frames - at) <= reach)].sum()
        for word, at, reach in _places(lattice.frame[spoken], words[spoken])
    ]
    return [min(1.0, float(one)) for one in sums]


def _places(frames: np.ndarray, words: np.ndarray) -> Iterator[tuple[int, int, float]]:
    """Each word, its frame, and how far its repetitions on other paths may lie.

    That is less than half of the way to the same word on the best path, so that none
    counts for both.
    """
    for place, (word, frame) in enumerate(zip(words, frames, strict=True)):
        others = np.delete(frames, place)[np.delete(words, place) == word]
        nearest = abs(others - frame).min(initial=4 * _NEAR_FRAMES)
        yield int(word), int(frame), min(_NEAR_FRAMES, (nearest - 1) / 2)
