"""A look ahead: where weights will be when an exchange that reads them is merged.

An exchange that hides behind a gradient is merged after the next update of the
optimizer. Two ends that average where they are come together one update late, which
costs loss and lowers the stable learning rate. So each end reads its weights where the
next update is expected to take them::

    u = w - (w before the last step)    without what exchanges have changed
    x + c u,  c = <u, u'> / <u', u'>    u' is the update before u

c, the best multiple of an update as a forecast of the next one, is nearly the momentum
of the optimizer; without momentum it is nearly zero. Both ends average the same
messages, so that their sum stays as it is, whatever c is.

To find u of a part costs the training thread as much as a step of SGD with momentum.
Parts take turns where that is a noticeable share of a step. If u was found k steps
ago, c^(k + 1) of it is expected.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_adpsgd.weights.replica import Part, Replica
from lightning_adpsgd.weights.streams import wait_for_stream

# c is measured on runs of elements from all over the weights.
_NUM_RUNS, _RUN_ELEMENTS = 64, 256
# The weight of the last one in the running means of c and of the time for a part.
_NEWEST = 0.2
_MOST_OF_STEP = 0.02
# An update is not used if it is older in steps, or so many times as long as the last;
# nor are so many that follow, since accidents come in rows.
_OLDEST, _MOST_LONGER, _NUM_AFTER = 16, 10.0, 3


class LookAhead:
    """The last update of a replica, and how far ahead an exchange reads.

    The training thread finds the update; any thread asks for `factors`. As in merges,
    training does not wait for the lock: where it is busy, an older update stays.

    Args:
        replica: weights that the optimizer updates.
        most_of_step: largest share of the time of a step that finding u may take of
            the processor; one part is found in each step all the same.
    """

    def __init__(self, replica: Replica, most_of_step: float = _MOST_OF_STEP) -> None:
        self._replica, self._most_of_step = replica, most_of_step
        self._parts = [part for chunk in replica.chunks for part in chunk.parts]
        self._memory = [
            torch.empty(len(part), dtype=part.dtype, device=replica.device)
            for part in self._parts
        ]
        some = self._parts[:: -(-len(self._parts) // _NUM_RUNS) or 1]
        num = _NUM_RUNS // (len(some) or 1)
        self._runs = [run for part in some for run in part.runs(num, _RUN_ELEMENTS)]
        self._before: Tensor | None = None
        self._last = torch.zeros_like(self._sample(), dtype=torch.float32)
        # c, and the number of updates that it follows from; the last one's square.
        self._found, self._square = self._last.new_zeros(2), self._last.new_zeros(())
        self._chosen, self._num_found = list[tuple[Part, Tensor]](), 0
        self._hidden = dict[Part, Tensor]()  # found, while the lock was busy
        self._began_at = time.perf_counter()
        self._seconds = self._seconds_of_one = 0.0

    def factors(self) -> Sequence[float]:
        """The multiple of u that is expected next, by the age of u in steps.

        A super-learner of several learners merges one update later. To add that one,
        c + c^2, is worse in simulations: it repeats the noise of u, too (docs/log.md).
        """
        with self._replica.guard:
            found = self._found.clamp(min=0.0)
        wait_for_stream(self._replica.device)
        c, num = found.tolist()
        return [c ** (age + 1) * (age < num - _NUM_AFTER) for age in range(_OLDEST)]

    @torch.no_grad()
    def begin_update(self) -> None:
        """Before the optimizer step, and after the merge if that comes first."""
        begin, now = time.thread_time(), time.perf_counter()
        chosen = self._choose(step_seconds=now - self._began_at)
        self._began_at, self._before, self._chosen = now, self._sample(), []
        if self._replica.guard.try_enter():
            for part, _ in chosen:
                part.hide_update()
                self._hidden.pop(part, None)  # a step may fail before its end
            self._replica.guard.leave()
            for part, memory in chosen:
                part.begin_update(memory)
            self._chosen, self._num_found = chosen, self._num_found + len(chosen)
        self._seconds = time.thread_time() - begin

    @torch.no_grad()
    def end_update(self) -> None:
        """After the optimizer step, and before the merge if that comes then.

        An optimizer that has not called its closure has no beginning; nothing is found.
        """
        begin, before, self._before = time.thread_time(), self._before, None
        for part in self._parts:
            part.step_on()
        for part, memory in self._chosen:
            part.end_update(memory)
        self._hidden.update(self._chosen)
        if self._hidden and self._replica.guard.try_enter():
            for part, memory in self._hidden.items():
                part.show_update(memory)
            self._replica.guard.leave()
            self._hidden.clear()
        if before is not None:
            self._measure((self._sample() - before).float())
        if self._chosen:
            seconds = self._seconds + time.thread_time() - begin
            newest = _NEWEST if self._seconds_of_one else 1.0
            of_one = seconds / len(self._chosen)
            self._seconds_of_one += newest * (of_one - self._seconds_of_one)
            self._chosen = []

    def _choose(self, step_seconds: float) -> list[tuple[Part, Tensor]]:
        """The parts whose turn it is, as many as the share of a step allows."""
        of_one, all_parts = self._seconds_of_one, len(self._parts)
        may_take = self._most_of_step * max(step_seconds, 1e-9)
        num = all_parts if of_one * all_parts <= may_take else int(may_take / of_one)
        first = self._num_found
        turns = range(first, first + max(num, 1)) if all_parts else ()
        numbers = (turn % all_parts for turn in turns)
        return [(self._parts[number], self._memory[number]) for number in numbers]

    def _sample(self) -> Tensor:
        if not self._runs:
            return torch.zeros(0, device=self._replica.device)
        return torch.cat(self._runs)

    def _measure(self, update: Tensor) -> None:
        """Takes an update into c, or begins anew after an accident.

        An update that is not finite, or far longer than the last, is not to be
        repeated: a program may well put the weights back. No u up to then is used.
        """
        (last, self._last), square = (self._last, update), self._square
        c, self._square = update.dot(last) / square, update.dot(update)
        is_usual = c.isfinite() & (self._square <= square * _MOST_LONGER**2)
        mean, num = self._found.unbind()
        found = torch.stack([mean.lerp(c.clamp(-1.0, 1.0), _NEWEST), num + 1.0])
        # Both written at once: `factors` finds the old ones or the new ones.
        self._found.copy_(torch.where(is_usual, found, 0.0))
