"""How learners that are apart do one thing together, when learner 0 thinks it is time.

Learners that gossip are at different steps, and some may already wait for the others at
a meeting: at the end of an epoch, say. What the clock of learner 0 calls for cannot be
done at a step that is fixed beforehand, and a learner that did it on its own would come
to another meeting than the rest. So learner 0 proposes it, and each answers once:

    ready, with its plan       it is at a step boundary, or where it comes to the same
    busy                       it waits at a meeting, which has to come first

It is done if and only if all are ready with one plan. A plan names how many meetings
its learner has come back from, so that all who agree stand between the same two, and
no learner has left the later one: the sequence of meetings stays the same for all. A
refused proposal is made again after the meeting that was in its way.

Nobody waits in vain: a learner that is ready comes to no meeting before the decision,
so that every other learner reaches a boundary, where it answers, or a meeting at which
it waits and answers.
"""

import time

from torch._C._distributed_c10d import Store

from lightning_adpsgd.coordination.store import Coordinator

_SECONDS_BETWEEN_LOOKS = 0.1


class Agreement:
    """Proposals of learner 0 and answers of this learner, in its training thread."""

    def __init__(
        self, store: Store, rank: int, num_learners: int, coordinator: Coordinator
    ) -> None:
        self._store, self._rank, self._num_learners = store, rank, num_learners
        self._coordinator = coordinator
        self._number, self._proposal, self._answered = 0, None, False
        self._next_look, self._refused_at = 0.0, -1

    @property
    def position(self) -> int:
        """Between which two meetings this learner is."""
        return self._coordinator.num_meetings

    def propose(self, what: str) -> None:
        """Called by learner 0; without effect where it cannot be decided yet."""
        if self._proposal is None and self._refused_at != self.position:
            self._store.set(self._key("what"), what)
            self._proposal = what

    def pending(self, at_once: bool = False) -> str | None:
        """What waits for this learner's answer; looks now and then, or `at_once`."""
        looks = self._proposal is None and (at_once or self._may_look())
        if looks and self._store.check([self._key("what")]):
            self._proposal = self._store.get(self._key("what")).decode()
        return None if self._answered else self._proposal

    def agree(self, plan: str) -> bool:
        """Answers that this learner is ready, and waits for the decision."""
        self.answer(plan)
        self._coordinator.wait_until(lambda: self._decision() is not None)
        return self.decided() is True

    def answer(self, plan: str | None) -> None:
        """Says what this learner would do next; None: it is busy. Does not wait."""
        mine = f"{self.position} {plan}"
        first = plan and self._store.compare_set(self._key("plan"), "", mine).decode()
        if first != mine:
            self._store.add(self._key("busy"), 1)
        self._store.add(self._key("answers"), 1)
        self._answered = True

    def decided(self) -> bool | None:
        """Whether what was answered will be done; None as long as that is open."""
        decision = self._decision() if self._answered else None
        if decision is not None:
            self._close(decision)
        return decision

    def give_up(self) -> None:
        """When the meeting has come first: what is still open will not be done.

        The learner that came last has not answered, and will from another position.
        """
        if self._answered:
            self._close(decision=False)

    def _close(self, decision: bool) -> None:
        if not decision:
            self._refused_at = self.position
        self._number += 1
        self._proposal, self._answered = None, False

    def _decision(self) -> bool | None:
        # In this order: a busy learner says so before it counts as an answer.
        answers = self._store.add(self._key("answers"), 0)
        if self._store.add(self._key("busy"), 0):
            return False
        return True if answers == self._num_learners else None

    def _may_look(self) -> bool:
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + _SECONDS_BETWEEN_LOOKS
        return True

    def _key(self, what: str) -> str:
        return f"agreement/{self._number}/{what}"
