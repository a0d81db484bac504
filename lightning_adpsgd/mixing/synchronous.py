"""Averaging in rounds, either exposed at the step boundary or hidden by the gradient.

At the boundary, the average is taken after the step (SD-PSGD). A hidden average is
computed during the gradient of the next step and joined just before the update
(delay-by-one, arXiv 2110.11199): ``w_i <- sum_j T[j, i] w_j(k) - lr g_i(w_i(k))``.
"""

import time
from concurrent.futures import Future
from typing import Literal

from typing_extensions import override

from lightning_adpsgd.mixing.communication import Communication
from lightning_adpsgd.mixing.rounds import Mixer
from lightning_adpsgd.mixing.statistics import Statistics
from lightning_adpsgd.weights.worker import BackgroundWorker, InlineWorker

Order = Literal["step_then_average", "average_then_step"]


class Rounds(Communication):
    """One round of averaging every `every` steps, for all super-learners alike.

    One before the step needs only the weights of the last step, and is hidden by the
    gradient; one after it is exposed. "sync" hides it from the first step on.
    "delay_by_one" begins after the first step, because weights that start equal need no
    average.

    The worker uses the mixer from the launch of a round until its join, and the
    training thread otherwise.

    Args:
        mixer: what computes a round, as `RoundMixer` does.
        worker: thread for hidden rounds; None: a new thread.
    """

    def __init__(
        self,
        mixer: Mixer,
        communication: Literal["sync", "delay_by_one"],
        order: Order,
        every: int = 1,
        worker: BackgroundWorker | InlineWorker | None = None,
    ) -> None:
        self._mixer, self._every = mixer, every
        self._hidden = order == "average_then_step"
        if self._hidden and worker is None:
            worker = BackgroundWorker("adpsgd-average", mixer.device)
        self._worker = worker or InlineWorker()
        self._round: Future[None] | None = None
        # The number of steps, and one more if a round runs during the first gradient:
        # one is launched if `every` divides it.
        self._step = int(self._hidden and communication == "sync")
        self._goes_on = False

    @override
    def start(self) -> None:
        if self._step and not self._goes_on:
            self._launch_if_due()

    @override
    def before_update(self) -> None:
        self._join(staleness=1)

    @override
    def after_update(self) -> None:
        self._step += 1
        begin = time.perf_counter()
        self._launch_if_due()
        if not self._hidden and self._round is not None:
            self._mixer.tally.exposed_seconds += time.perf_counter() - begin
            self._join(staleness=0)

    @override
    def settle(self) -> None:
        self._join(staleness=0)

    @override
    def stop(self) -> None:
        self._worker.stop(None)

    @override
    def abort(self) -> None:
        self._worker.stop(2.0)

    @property
    @override
    def step_and_round(self) -> tuple[int, int]:
        return self._step, self._mixer.round

    @override
    def go_on_from(self, step: int, round: int) -> None:
        # The round in flight was joined before the checkpoint was written.
        self._step, self._mixer.round, self._goes_on = step, round, True

    @override
    def statistics(self) -> Statistics:
        mixer = self._mixer
        return mixer.tally.snapshot(refused=int(mixer.refused))  # waits for the GPU

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
