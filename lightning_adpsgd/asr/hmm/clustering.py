"""Clusters of frames, each described by one Gaussian, and the sets that they form.

The log-likelihood of n frames with mean μ and variance s² (per dimension) under their
own Gaussian, whose variance is v = max(s², floor):

    L = -n/2 · Σ_d (log 2π v_d + s²_d / v_d)

With v, L is the most that any Gaussian above the floor reaches, so two clusters apart
never fit worse than together. Joining a and b costs L(a) + L(b) - L(a + b) ≥ 0.
"""

from collections.abc import Iterator

import numpy as np

from lightning_adpsgd.asr.hmm.gmm import Statistics


def log_likelihood(sums: Statistics, floor: np.ndarray) -> np.ndarray:
    """L of each cluster; 0 for one without frames.

    Args:
        sums: Sums over the frames of each cluster.
        floor: Least variance, [dimension].

    Returns:
        float64 [clusters].
    """
    count = np.maximum(sums.frames, 1e-10)[:, None]
    variance = np.maximum(sums.second / count - (sums.first / count) ** 2, 0.0)
    floored = np.maximum(variance, floor)
    terms = np.log(2 * np.pi * floored) + variance / floored
    return -0.5 * sums.frames * terms.sum(axis=1)


def joined(
    sums: Statistics, floor: np.ndarray, max_loss: float = np.inf
) -> Iterator[tuple[int, int]]:
    """Joins clusters, each time the two that cost least to join.

    Args:
        sums: Sums over the frames of each cluster.
        floor: Least variance, [dimension].
        max_loss: Cost of a joining above which to stop.

    Yields:
        (a, b), a < b: cluster b becomes part of a.
    """
    frames, first, second = (np.array(part, float) for part in sums)
    clusters = Statistics(frames, first, second)
    own = log_likelihood(clusters, floor)
    size = len(own)
    loss = np.full((size, size), np.inf)
    for a in range(size):
        loss[a, a + 1 :] = _losses(clusters, own, a, floor)[a + 1 :]
    for _ in range(size - 1):
        a, b = divmod(int(loss.argmin()), size)
        if loss[a, b] > max_loss:
            return
        yield a, b
        for part in clusters:
            part[a] += part[b]
        own[a] = log_likelihood(_taken(clusters, [a]), floor)[0]
        loss[b], loss[:, b] = np.inf, np.inf
        again = _losses(clusters, own, a, floor)
        # only pairs that are still there, each once: those above the diagonal
        loss[a] = np.where(np.isfinite(loss[a]), again, np.inf)
        loss[:, a] = np.where(np.isfinite(loss[:, a]), again, np.inf)


def _losses(
    clusters: Statistics, own: np.ndarray, a: int, floor: np.ndarray
) -> np.ndarray:
    """The cost of joining cluster a with each other one."""
    together = Statistics(*(part[a] + part for part in clusters))
    return own[a] + own - log_likelihood(together, floor)


def _taken(sums: Statistics, rows: list[int]) -> Statistics:
    return Statistics(*(part[rows] for part in sums))


def questions(sums: Statistics, floor: np.ndarray) -> np.ndarray:
    """Sets of similar phones: all sets that arise while phones are joined.

    Args:
        sums: Sums over the frames of each phone.
        floor: Least variance, [dimension].

    Returns:
        bool [questions, phones]: single phones first, then 2, 3 ... in the order of
        their joining, without the set of all.
    """
    size = len(sums.frames)
    sets = np.eye(size, dtype=bool)
    found = list(sets.copy())
    for a, b in joined(sums, floor):
        sets[a] |= sets[b]
        found.append(sets[a].copy())
    return np.array(found[:-1] if size > 1 else found).reshape(-1, size)
