"""How learners at different steps take one action together when learner 0 finds it due.

Learners that gossip are at different steps, and some may already be waiting for the
others at a meeting, such as the end of an epoch. When the clock of learner 0 calls for
an action, it cannot happen at a step number fixed in advance. A learner that acted
alone would come to a different meeting than the rest. So learner 0 proposes the action,
and each learner answers once:

    ready, with its plan       it is at a step boundary, or where it comes to the same
    busy                       it waits at a meeting, which has to come first

The action happens if and only if all learners are ready with the same plan. A plan
contains the number of meetings that its learner has returned from. Learners that agree
are therefore between the same two meetings, none has left the later one, and the
sequence of meetings stays the same for all. A refused proposal is repeated after the
meeting that blocked it.

No wait is in vain: a ready learner enters no meeting before the decision. Every other
learner therefore reaches either a boundary, where it answers, or a meeting, where it
waits and answers. Between two epochs it may also wait in a collective of the program or
of a metric, for learner 0 too. So learners say when they are away there. Learner 0
proposes nothing meanwhile, and withdraws a proposal if one stays away.
"""

import time

from torch._C._distributed_c10d import Store

from lightning_adpsgd.coordination.store import Coordinator

# A look at the store takes a round trip: the pause after it is at least so long, and a
# look takes no more than this part of the time.
_SECONDS_BETWEEN_LOOKS, _PART_OF_TRAINING = 0.02, 0.05
# How long learner 0 waits for the answer of one that is between two epochs.
_SECONDS_AWAY = 1.0
_AWAY = "agreement/away"


class Agreement:
    """Proposals of learner 0 and this learner's answers, in its training thread."""

    def __init__(
        self, store: Store, num_learners: int, coordinator: Coordinator
    ) -> None:
        self._store, self._num_learners = store, num_learners
        self._coordinator = coordinator
        self._number, self._proposal, self._answered = 0, None, False
        self._next_look, self._refused_at = 0.0, -1
        self._is_away = self._is_mine = self._is_withdrawn = False
        self._last_back = 0.0

    @property
    def position(self) -> int:
        """The number of meetings that this learner has returned from."""
        return self._coordinator.num_meetings

    def propose(self, what: str) -> None:
        """Proposes an action, for learner 0; does nothing while none can be decided."""
        if self._proposal is not None or self._refused_at == self.position:
            return
        if not self._num_away():
            self._store.set(self._key("what"), what)
            self._proposal, self._is_mine = what, True

    def note_away(self, away: bool) -> None:
        """Notes whether this learner comes to no boundary or meeting for a while."""
        if away != self._is_away:
            self._store.add(_AWAY, 1 if away else -1)
            self._is_away = away

    def pending(self, at_once: bool = False) -> str | None:
        """The proposal to answer, if any; looks for one when due, or `at_once`."""
        due = at_once or time.monotonic() >= self._next_look
        if self._proposal is None and due and self._is_proposed():
            self._proposal = self._store.get(self._key("what")).decode()
        return None if self._answered else self._proposal

    def agree(self, plan: str) -> bool:
        """Answers that this learner is ready, and waits for the decision."""
        self._compare(plan)
        if self._is_mine:
            # Its own answer is the last, so that nobody has acted if it withdraws.
            self._last_back = time.monotonic()
            self._coordinator.wait_until(self._knows_others)
        self._count()
        self._coordinator.wait_until(lambda: self._decision() is not None)
        return self.decided() is True

    def answer(self, plan: str | None) -> None:
        """Answers with this learner's plan; None: it is busy. Does not wait."""
        self._compare(plan)
        self._count()

    def _compare(self, plan: str | None) -> None:
        mine = f"{self.position} {plan}"
        first = plan and self._store.compare_set(self._key("plan"), "", mine).decode()
        if first != mine:
            self._store.add(self._key("busy"), 1)

    def _count(self) -> None:
        self._store.add(self._key("answers"), 1)
        self._answered = True

    def _knows_others(self) -> bool:
        """Whether no further answer matters, or one is not to be waited for."""
        answers = self._store.add(self._key("answers"), 0)
        if answers == self._num_learners - 1 or self._store.add(self._key("busy"), 0):
            return True
        if not self._num_away():
            self._last_back = time.monotonic()
        self._is_withdrawn = time.monotonic() - self._last_back > _SECONDS_AWAY
        if self._is_withdrawn:
            self._store.add(self._key("busy"), 1)
        return self._is_withdrawn

    def _num_away(self) -> int:
        return self._store.add(_AWAY, 0)

    def decided(self) -> bool | None:
        """Whether the action happens; None while that is undecided."""
        decision = self._decision() if self._answered else None
        if decision is not None:
            self._close(decision)
        return decision

    def give_up(self) -> None:
        """Cancels an undecided proposal, because a meeting came first.

        The learner that arrived last has not answered, and will answer from a later
        position.
        """
        if self._answered:
            self._close(decision=False)

    def _close(self, decision: bool) -> None:
        if not decision and not self._is_withdrawn:
            self._refused_at = self.position
        self._number += 1
        self._proposal, self._answered = None, False
        self._is_mine = self._is_withdrawn = False

    def _decision(self) -> bool | None:
        # In this order: a busy learner says so before it counts as an answer.
        answers = self._store.add(self._key("answers"), 0)
        if self._store.add(self._key("busy"), 0):
            return False
        return True if answers == self._num_learners else None

    def _is_proposed(self) -> bool:
        begin = time.monotonic()
        found = self._store.check([self._key("what")])
        took = time.monotonic() - begin
        pause = max(_SECONDS_BETWEEN_LOOKS, took / _PART_OF_TRAINING)
        self._next_look = begin + took + pause
        return found

    def _key(self, what: str) -> str:
        return f"agreement/{self._number}/{what}"
