"""Averaging in rounds: waited for at the step boundary, or hidden behind the gradient.

`AtBoundary` takes the average at the step boundary, after the step (SD-PSGD);
`BehindGradient` computes it behind the gradient of the next step and joins it at the
last moment, before the update (delay-by-one, arXiv 2110.11199):
``w_i <- sum_j T[j, i] w_j(k) - lr g_i(w_i(k))``. Both keep to the interface
`Communication`, as the asynchronous engine in `gossip` does.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Literal

from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.mixing.communication import Communication
from lightning_adpsgd.mixing.rounds import Mixer
from lightning_adpsgd.mixing.statistics import Statistics
from lightning_adpsgd.weights.worker import AtOnce, Worker

Order = Literal["step_then_average", "average_then_step"]


class AtBoundary(Communication):
    """The average after the step, at the step boundary: everyone waits.

    Args:
        mixer: Applies a round.
        every: Optimizer steps per round.
    """

    def __init__(self, mixer: Mixer, every: int = 1) -> None:
        self._mixer, self._every = mixer, every
        self._step = 0

    @override
    def start(self) -> None:
        """There is nothing to start: averaging happens in the training thread."""

    @property
    @override
    def step_and_round(self) -> tuple[int, int]:
        return self._step, self._mixer.round

    @override
    def go_on_from(self, step: int, round: int) -> None:
        self._step, self._mixer.round = step, round

    @override
    def before_update(self) -> None:
        """The average comes after the update."""

    @override
    def after_update(self) -> None:
        self._step += 1
        if self._step % self._every:
            return
        begin = time.perf_counter()
        self._mixer.take_snapshot()
        self._mixer.mix()
        self._mixer.tally.exposed_seconds += time.perf_counter() - begin
        self._mixer.finish()
        self._mixer.tally.merged(staleness=0)

    @override
    def pause(self) -> None:
        """Nothing runs between two boundaries."""

    @override
    def settle(self) -> None:
        """Nothing is ever pending."""

    @override
    def set_aside(self, vectors: Sequence[Tensor]) -> None:
        """Peers see nothing before the next round."""

    @override
    def resume(self) -> None:
        """Nothing was interrupted."""

    @override
    def stop(self) -> None:
        """No thread was started."""

    @override
    def abort(self) -> None:
        """No thread was started."""

    @override
    def release(self) -> None:
        """Peers wait for this learner's rounds alone, and see its end."""

    @override
    def statistics(self) -> Statistics:
        return self._mixer.statistics()


class BehindGradient(Communication):
    """The average of the weights, hidden behind the gradient that is taken at them.

    It begins when a step has ended and is joined before the update of the next one.
    That is delay-by-one; and, from the first step on, also the synchronous order
    "average_then_step", ``T W - lr G(W)``, which is the same equation.

    The mixer is used by the worker thread from the launch of a round until its join,
    and by the training thread otherwise.

    Args:
        mixer: Applies a round.
        every: Optimizer steps per round.
        from_start: Whether the first gradient has a round behind it. Weights that are
            equal at the start need none.
        worker: Mixes; by default a thread of its own.
    """

    def __init__(
        self,
        mixer: Mixer,
        every: int = 1,
        from_start: bool = False,
        worker: Worker | AtOnce | None = None,
    ) -> None:
        self._mixer, self._every = mixer, every
        self._worker = worker or Worker("adpsgd-average", mixer.device)
        self._round: Future[None] | None = None
        # Steps, counted so that a round is launched whenever `every` divides them.
        self._step, self._goes_on = int(from_start), False

    @override
    def start(self) -> None:
        if self._step and not self._goes_on:
            self._launch_if_due()

    @property
    @override
    def step_and_round(self) -> tuple[int, int]:
        return self._step, self._mixer.round

    @override
    def go_on_from(self, step: int, round: int) -> None:
        # The round in flight was joined before the checkpoint was written.
        self._step, self._mixer.round, self._goes_on = step, round, True

    @override
    def before_update(self) -> None:
        self._join(staleness=1)

    @override
    def after_update(self) -> None:
        self._step += 1
        self._launch_if_due()

    @override
    def pause(self) -> None:
        """The round in flight is joined by `settle`."""

    @override
    def settle(self) -> None:
        self._join(staleness=0)

    @override
    def set_aside(self, vectors: Sequence[Tensor]) -> None:
        """Peers see nothing before the next round."""

    @override
    def resume(self) -> None:
        """The next step launches the next round."""

    @override
    def stop(self) -> None:
        self._worker.stop(None)

    @override
    def abort(self) -> None:
        self._worker.stop(2.0)

    @override
    def release(self) -> None:
        """Peers wait for this learner's rounds alone, and see its end."""

    @override
    def statistics(self) -> Statistics:
        return self._mixer.statistics()

    def _launch_if_due(self) -> None:
        if self._step % self._every == 0 and self._round is None:
            self._mixer.take_snapshot()
            self._round = self._worker.submit(self._mixer.mix)

    def _join(self, staleness: int) -> None:
        if self._round is None:
            return
        begin = time.perf_counter()
        round, self._round = self._round, None
        round.result()
        self._mixer.tally.exposed_seconds += time.perf_counter() - begin
        self._mixer.finish()
        self._mixer.tally.merged(staleness)


def synchronous(
    mixer: Mixer,
    order: Order,
    every: int = 1,
    worker: Worker | AtOnce | None = None,
) -> Communication:
    """Averaging in which everyone waits, in the given order.

    After the step the average needs the result of the step, and is exposed; before it
    the average needs the weights of the last step alone, and is hidden.
    """
    if order == "step_then_average":
        return AtBoundary(mixer, every)
    return BehindGradient(mixer, every, from_start=True, worker=worker)
