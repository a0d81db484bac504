"""The super-learners of one process: their turns, and the averages around them.

`VirtualLearners` knows weights and time, but neither data nor optimizers. In a turn,
the module holds the weights of one super-learner. The caller begins the turn, computes
a gradient in the module, and makes the optimizer step through `update`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_adpsgd.dials import Dials
from lightning_adpsgd.mixing.averages import all_finite
from lightning_adpsgd.mixing.communication import averaging_closure
from lightning_adpsgd.mixing.consensus import Consensus, all_diverged
from lightning_adpsgd.mixing.statistics import Statistics, Tally
from lightning_adpsgd.mixing.synchronous import Rounds
from lightning_adpsgd.virtual.row_exchanges import CommunicationSide, RowExchanges
from lightning_adpsgd.virtual.row_rounds import RowMixer, stretch_length
from lightning_adpsgd.virtual.rows import Rows
from lightning_adpsgd.virtual.timeline import (
    Asynchronous,
    Begun,
    Ended,
    Event,
    Lockstep,
    Scenario,
    Stepped,
    Waited,
)
from lightning_adpsgd.weights.replica import averaging_dtype
from lightning_adpsgd.weights.worker import InlineWorker

Closure = Callable[[], Any]


class VirtualLearners(ABC):
    """S super-learners; the module holds the weights of one of them at a time.

    The module must be on its final device and in its final dtype.

    Attributes:
        rows: weights, a row per super-learner and then one for the consensus model.
        seconds: simulated time of the last step.
        steps: optimizer steps of each super-learner.
    """

    def __init__(self, module: nn.Module, scenario: Scenario) -> None:
        self._consensus_row = scenario.num_super_learners
        self._all = list(range(scenario.num_super_learners))
        size = scenario.super_learner_size
        self.rows = Rows(module, scenario.num_super_learners + 1, shards=size)
        self.seconds = 0.0
        self.steps = [0] * scenario.num_super_learners
        self._scenario = scenario

    # --- the step

    @abstractmethod
    def turn(self) -> int:
        """Begins the next turn, and returns the number of its super-learner.

        The module then holds the weights at which to compute the gradient. A turn that
        an error has ended before its step begins again.
        """

    @abstractmethod
    def update(self, step: Callable[[Closure], Any], closure: Closure) -> Any:
        """Makes the optimizer step of this turn, with its averages."""

    # --- the state of all

    @property
    def between_rounds(self) -> bool:
        """Whether all have made as many steps, in lockstep; otherwise always true."""
        return True

    @abstractmethod
    def totals(self) -> Statistics:
        """The summed counters of all super-learners, in simulated seconds.

        An exchange counts at both of its ends, and a round in each super-learner.
        """

    def shown(self, index: int) -> list[Tensor]:
        """The weights of a super-learner that its peers see, x = w + d."""
        return [
            torch.cat([rows[0] for _, rows in self._in_stretches([index], number)])
            for number in range(len(self.rows.matrices))
        ]

    # --- the consensus model

    @torch.no_grad()
    def consensus(self) -> Consensus:
        """Computes the mean of all super-learners whose weights are finite.

        It is the mean of the weights that peers see. No exchange changes their sum, so
        this mean equals that of the weights after all merges. Training is unaffected.

        Raises:
            FloatingPointError: No super-learner has finite weights.
        """
        found = self._average(self._all)
        if not math.isfinite(found.relative_distance):
            finite = [i for i in self._all if all_finite(self.shown(i))]
            if not finite:
                raise all_diverged("super-learners")
            found = self._average(finite)
        self.rows.copy_beside(0, self._consensus_row)
        return found

    def hold_consensus(self) -> None:
        """Puts the last computed mean into the module, until the next turn."""
        self.rows.hold(self._consensus_row)

    def hold(self, index: int) -> None:
        """Puts the weights of a super-learner into the module."""
        self.rows.hold(index)

    def _average(self, chosen: list[int]) -> Consensus:
        """Writes the mean of these super-learners into the consensus row.

        It works in stretches, so that each element is read from memory once, both for
        the mean and for the distances from it.
        """
        squares = norm = 0.0
        for number, matrix in enumerate(self.rows.matrices):
            for begin, seen in self._in_stretches(chosen, number):
                mean = seen.mean(0)
                matrix[self._consensus_row, begin : begin + len(mean)] = mean
                squares += _square(seen - mean)
                norm += _square(mean)
        return Consensus.of(squares / len(chosen), norm)

    def _in_stretches(
        self, chosen: list[int], number: int
    ) -> Iterator[tuple[int, Tensor]]:
        """The stretches of a matrix as `_seen` gives them, each with its begin."""
        matrix = self.rows.matrices[number]
        length = stretch_length(len(chosen), matrix.device)
        for begin in range(0, matrix.shape[1], length):
            yield begin, self._seen(chosen, number, begin, length)

    def _seen(self, chosen: list[int], number: int, begin: int, length: int) -> Tensor:
        """The weights that peers see, in a stretch of a matrix, [chosen, element]."""
        matrix = self.rows.matrices[number]
        stretch = matrix[:, begin : begin + length]
        rows = stretch[: len(chosen)] if chosen == self._all else stretch[chosen]
        return rows.to(averaging_dtype(matrix.dtype))


class LockstepLearners(VirtualLearners):
    """Super-learners in lockstep: all make step k before any makes the next."""

    def __init__(self, module: nn.Module, dials: Dials, scenario: Scenario) -> None:
        super().__init__(module, scenario)
        size = scenario.num_super_learners
        matrices = [matrix[:size] for matrix in self.rows.matrices]
        hidden = dials.effective_order == "average_then_step"
        self._mixer = RowMixer(matrices, scenario.schedule(), hidden)
        mode = "sync" if dials.communication == "sync" else "delay_by_one"
        order, every = dials.effective_order, dials.gossip_every
        self._communication = Rounds(self._mixer, mode, order, every, InlineWorker())
        num_bytes = sum(
            matrix.shape[1] * averaging_dtype(matrix.dtype).itemsize
            for matrix in matrices
        )
        from_start = hidden and dials.communication == "sync"
        self._ends = Lockstep(scenario, num_bytes, hidden, from_start)
        self._turn, self._started = 0, False

    @property
    @override
    def between_rounds(self) -> bool:
        return self._turn == 0

    @override
    def turn(self) -> int:
        if not self._started:
            self._communication.start()
            self._started = True
        if self._turn == 0:
            # Joins the round that ran beside these gradients. Each row takes in its
            # change of the round when its own gradient is ready.
            self._communication.before_update()
        self.hold(self._turn)
        return self._turn

    @override
    def update(self, step: Callable[[Closure], Any], closure: Closure) -> Any:
        row = self._turn
        output = step(averaging_closure(closure, lambda: self._mixer.take_in(row)))
        self.rows.take_assigned()
        self.steps[row] += 1
        self._turn = (row + 1) % self._scenario.num_super_learners
        if self.between_rounds:
            self._communication.after_update()
            self.seconds = max(next(self._ends))
        return output

    @override
    def totals(self) -> Statistics:
        done, size = self._communication.statistics(), self._scenario.num_super_learners
        staleness = {steps: size * count for steps, count in done.staleness.items()}
        # Its exposed seconds are real ones of this process, and not simulated.
        return replace(done, staleness=staleness, exposed_seconds=0.0)


class AsynchronousLearners(VirtualLearners):
    """Super-learners that step as fast as they compute, with concurrent exchanges.

    In "ready_pairs", both ends make and merge an exchange at a step boundary.
    """

    def __init__(self, module: nn.Module, dials: Dials, scenario: Scenario) -> None:
        super().__init__(module, scenario)
        self._in_pairs = dials.communication == "ready_pairs"
        order, size = dials.effective_order, scenario.super_learner_size
        self._sides = [
            CommunicationSide(self.rows.vectors(index), order, size, dials.looks_ahead)
            for index in self._all
        ]
        wire_dtype = dials.wire_dtype
        assert wire_dtype != "auto"  # `dials_and_scenario` refuses it
        self._exchanges = RowExchanges(self._sides, wire_dtype)
        self._timeline = Asynchronous(
            scenario,
            sum(vector.nbytes for vector in self.rows.vectors(0)),
            self._sides[0].message_bytes(wire_dtype),
            dials.max_staleness,
            self._in_pairs,
            dials.max_wait,
        )
        self._turn = -1

    @override
    def turn(self) -> int:
        while self._turn < 0:
            if isinstance(event := next(self._timeline), Stepped):
                self.seconds, self._turn = event
            else:
                self._follow(event)
        self._exchanges.before_change(self._turn)  # the forward may change buffers
        self.hold(self._turn)
        return self._turn

    @override
    def update(self, step: Callable[[Closure], Any], closure: Closure) -> Any:
        side = self._sides[self._turn]
        output = step(averaging_closure(closure, side.before_update))
        self.rows.take_assigned()
        side.after_update()
        self.steps[self._turn] += 1
        self._turn = -1
        return output

    @override
    def totals(self) -> Statistics:
        return Tally.total([side.tally for side in self._sides]).snapshot()

    @override
    def _seen(self, chosen: list[int], number: int, begin: int, length: int) -> Tensor:
        # It may be a view of the weights.
        seen = super()._seen(chosen, number, begin, length).clone()
        for row, index in enumerate(chosen):
            self._sides[index].add_awaiting(seen[row], number, begin)
        return seen

    def _follow(self, event: Event) -> None:
        match event:
            case Begun(_, exchange):
                self._exchanges.begin(exchange)
            case Ended(_, exchange):
                self._exchanges.end(exchange)
                if self._in_pairs:
                    for end in exchange.ends:
                        self._sides[end].merge_at_once()
            case Waited(_, index, waited, met):
                self._sides[index].tally.partner_seconds += waited
                self._sides[index].tally.skipped += not met


def make_learners(
    module: nn.Module, dials: Dials, scenario: Scenario
) -> VirtualLearners:
    """Makes the super-learners that communicate as the options say."""
    kind = LockstepLearners if dials.in_lockstep else AsynchronousLearners
    return kind(module, dials, scenario)


def _square(numbers: Tensor) -> float:
    """The sum of squares, in double precision if single precision overflows."""
    flat = numbers.flatten()
    found = torch.dot(flat, flat).item()
    return found if math.isfinite(found) else flat.double().square().sum().item()
