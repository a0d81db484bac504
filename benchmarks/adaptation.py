"""Frames per second and core of speaker adaptation: fMLLR sums, mixture, i-vectors.

Frames of 40 numbers, drawn at random, with mixtures of the sizes of a real experiment;
what is computed does not depend on the values. Each work runs on one thread, and its
seconds are those of the processor. The floating-point operations of its matrix products
are counted and put beside a product of two large matrices in float32. The rest up to 1
is the time of exponentials, of copies between the products, and of products in float64.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.results import Report, Row
from benchmarks.timing import Spread, print_row, processor_seconds, spread
from lightning_adpsgd.asr.hmm.gmm import GaussianMixtures
from lightning_adpsgd.asr.speakers import fmllr
from lightning_adpsgd.asr.speakers.ivectors import IVectorExtractor
from lightning_adpsgd.asr.speakers.ubm import occupancy

DIMS, IVECTOR, PERIOD = 40, 100, 10
FRAMES = 6_000  # a minute of one conversation side
STATES, PER_STATE = 2_000, 16
SQUARE = 1_024


class Work(NamedTuple):
    """A computation on a minute of speech.

    Attributes:
        name: Its name in the table.
        run: Function that does it once.
        operations: Operations of its matrix products per frame.
    """

    name: str
    run: Callable[[], object]
    operations: float


def measure(quick: bool = False) -> Report:
    """Rates of the works, and their share of a matrix product's speed."""
    torch.set_num_threads(1)
    turns = 3 if quick else 9
    report = Report(
        f"Speaker adaptation, {DIMS} numbers a frame, one thread, "
        f"{FRAMES} frames of a conversation side at a time.",
        limit="operations per second of a float32 matrix product",
        notes=[
            f"fMLLR sums: of {STATES} states with {PER_STATE} Gaussians each. A side's "
            "i-vector includes the occupancy of its frames; online i-vectors are one "
            f"every {PERIOD} frames. A map is found from the sums of a side, however "
            "many frames they are of.",
        ],
    )
    speed = _product_speed(turns)
    for work in works():
        _, *taken = [processor_seconds(work.run) for _ in range(turns + 1)]
        rate = spread(taken).per(FRAMES / 1000)
        ratio = rate.median * 1000 * work.operations / speed
        details = {"Mflop a frame": work.operations / 1e6}
        report.rows.append(
            Row({"work": work.name}, rate, "k frames/s", ratio, details=details)
        )
        print_row(work.name, f"{rate:.1f} k frames/s", f"{ratio:.2f} of a product")
    report.rows.append(_map_row(turns))
    return report


def works() -> Iterator[Work]:
    """All computations, with their inputs prepared."""
    random = np.random.default_rng(0)
    frames = random.standard_normal((FRAMES, DIMS)).astype(np.float32)
    states = random.integers(STATES, size=FRAMES)
    mixtures = _mixtures(STATES, PER_STATE)
    start = fmllr.identity(DIMS)
    yield Work(
        f"fMLLR sums, {STATES} x {PER_STATE} Gaussians",
        lambda: fmllr.accumulate(mixtures, frames, states, start),
        2 * DIMS * ((DIMS + 1) * (DIMS + 2) / 2 + DIMS + 1) + 8 * PER_STATE * DIMS,
    )
    for gaussians in (64, 512, 2048):
        yield from _ivector_works(frames, gaussians)


def _ivector_works(frames: np.ndarray, gaussians: int) -> Iterator[Work]:
    ubm = _mixtures(1, gaussians)
    shared = 6 * gaussians * DIMS
    name = f"{gaussians} Gaussians"
    yield Work(f"occupancy, {name}", lambda: occupancy(ubm, frames), shared)
    random = np.random.default_rng(1)
    shape = (gaussians, DIMS, IVECTOR)
    model = IVectorExtractor(np.zeros(shape[:2]), 0.03 * random.standard_normal(shape))
    solved = _operations_to_solve(gaussians)
    heard = occupancy(ubm, frames)
    yield Work(
        f"a side's i-vector, {name}",
        lambda: model.posterior(heard.counts[None], occupancy(ubm, frames)[1][None]),
        shared + solved / FRAMES,
    )
    yield Work(
        f"online i-vectors, {name}",
        lambda: model.online(ubm, frames, PERIOD, model.nothing_heard()),
        shared + solved / PERIOD,
    )


def _operations_to_solve(gaussians: int) -> float:
    """The operations from N and F to an i-vector."""
    pulls = 2 * gaussians * DIMS * IVECTOR
    precision = gaussians * IVECTOR * (IVECTOR + 1)
    return pulls + precision + IVECTOR**3 / 3


def _mixtures(num_states: int, per_state: int) -> GaussianMixtures:
    random = np.random.default_rng(2)
    size = (num_states * per_state, DIMS)
    return GaussianMixtures(
        np.repeat(np.arange(num_states), per_state),
        np.full(size[0], 1 / per_state),
        random.standard_normal(size),
        np.ones(size),
        np.full(DIMS, 1e-2),
    )


def _map_row(turns: int) -> Row:
    random = np.random.default_rng(3)
    frames = random.standard_normal((FRAMES, DIMS)).astype(np.float32)
    states = random.integers(STATES, size=FRAMES)
    start = fmllr.identity(DIMS)
    sums = fmllr.accumulate(_mixtures(STATES, 1), frames, states, start)
    solve = partial(fmllr.improved, start, sums)
    taken = spread(processor_seconds(solve) for _ in range(turns))
    rate: Spread = taken.per(1)
    print_row("fMLLR map, 10 sweeps", f"{rate:.1f} maps/s")
    return Row({"work": "fMLLR map, 10 sweeps"}, rate, "maps/s", table="map")


def _product_speed(turns: int) -> float:
    """Operations per second of the product of two square matrices."""
    left, right = torch.rand(SQUARE, SQUARE), torch.rand(SQUARE, SQUARE)
    taken = spread(processor_seconds(lambda: left @ right) for _ in range(turns + 2))
    return 2 * SQUARE**3 / taken.median
