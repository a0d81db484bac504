"""One pool of batches for all islands: a ledger for each epoch, in the rendezvous.

A thread of its own keeps this island's part of the ledger (`ledger`) and claims ahead
of need; the training thread takes what is there.

An epoch ends when nothing is left and everybody has asked in vain for more: until then
what a dead island held may come back. So the training thread waits once in an epoch,
with one batch still in hand, for those who have not come as far. It waits for no dead
one (the roll tells), for no rendezvous, and not for ever.

Where the rendezvous cannot be reached, an island goes on alone: the epoch is cut into
stretches, which belong to the islands on the roll in turn, and of what it knows to be
left it takes its own from the end backwards, while those who have the pool take from
the beginning. Once it is back, each tells what it has done.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from lightning_adpsgd.epochs.claims import Pace
from lightning_adpsgd.epochs.lease import Holding, Plan
from lightning_adpsgd.epochs.ledger import (
    Ledger,
    OtherTerms,
    Terms,
    as_ranges,
    union,
)
from lightning_adpsgd.epochs.work_units import Ranges
from lightning_adpsgd.islands.following import Members
from lightning_adpsgd.islands.rendezvous import Rendezvous, RendezvousAway

_log = logging.getLogger(__name__)

_TRIES = 200


@dataclass(frozen=True)
class Times:
    """For how long the pool waits, and for what.

    Args:
        look_s: Between two looks at the ledger without need.
        wait_s: Between two looks while the training thread waits for something.
        answer_s: Without an answer of the rendezvous, after which the training goes on
            alone.
        end_s: The same near the end of an epoch, where what it takes alone is soon
            taken by others too; and for one whom nobody has seen on the roll.
        start_s: At the first epoch, for the ledger that the others have.
        slowest_s: For those who do not come to the end of an epoch though they live.
    """

    look_s: float = 0.5
    wait_s: float = 0.05
    answer_s: float = 0.25
    end_s: float = 3.0
    start_s: float = 20.0
    slowest_s: float = 300.0


_TIMES = Times()


class IslandPool:
    """This island's part in the pool; of the first learner of the island alone.

    Everything below `_state` is shared by the training thread and the thread of the
    pool, which alone uses the rendezvous.

    Args:
        rendezvous: Used by the thread alone.
        members: The roll.
        raise_if_failed: Called while the training thread waits.
        times: For how long to wait.

    Attributes:
        num_twice: Portions that this island has trained on though another had, too.
        away: Why the pool cannot be reached at present; empty if it can.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        members: Members,
        raise_if_failed: Callable[[], None],
        times: Times = _TIMES,
    ) -> None:
        self._rendezvous, self._members, self._times = rendezvous, members, times
        self._raise_if_failed, self._pace = raise_if_failed, Pace()
        self._state = threading.Condition()
        self._holding: Holding | None = None
        self._closed: list[Holding] = []
        self._asked, self._ending = False, False
        self._is_alone, self._told_alone = False, False
        self._last_turn = 0.0
        self.num_twice, self.away = 0, ""
        self._store: Store | None = None
        self._written = set[int]()
        self._seen, self._absent_since = set[str](), dict[str, float]()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.name = "adpsgd-pool"

    @property
    def name(self) -> str:
        """Of this island in the ledger: its incarnation."""
        return self._members.member.incarnation

    # --- the training thread's

    def start(self) -> None:
        """Begins to look; the island is on the roll."""
        self._thread.start()

    def open(
        self,
        number: int,
        terms: Terms,
        num_portions: Callable[[Terms], int],
        num_finished: Callable[[], int],
    ) -> Terms:
        """Begins an epoch, and ends the one before.

        Args:
            number: Of the epoch.
            terms: That this island would have.
            num_portions: Of the epoch on any terms.
            num_finished: How many portions were trained on to the end.

        Returns:
            The terms that all have.
        """
        ledger = Ledger(uuid.uuid4().hex, terms, _all(num_portions(terms)))
        is_first = self._holding is None
        with self._state:
            self._close(leaves=False)
            holding = Holding(number, ledger, self.name, self._pace, num_finished)
            self._holding = holding
            self._ask()
        limit = self._times.start_s if is_first else self._times.end_s
        self._wait(lambda: not holding.is_fresh or (self.away and not is_first), limit)
        with self._state:
            holding.is_fresh = False
            agreed = holding.ledger.terms
        holding.num_portions = num_portions(agreed)
        return agreed

    def next(self, waits: bool) -> int | None:
        """The next portion to train on.

        Args:
            waits: Whether to wait, at the end of an epoch, until nothing can come back;
                to be asked by who has but one batch in hand.

        Returns:
            None at the end of the epoch, or, of those who do not wait, for now.
        """
        holding, begin = self._current, time.monotonic()
        with self._state:
            holding.consults, self._is_alone = waits, False
            self._ask()
            try:
                self._wait(
                    lambda: self._has_answer(holding, waits, begin),
                    self._times.slowest_s,
                )
                # Under the lock still, or what is ahead might be given back.
                return self._answer(holding, waits)
            finally:
                holding.consults = False

    def remaining(self) -> Ranges:
        """Portions that are not finished, but for those that are handed out here."""
        with self._state:
            holding = self._current
            others = holding.ledger.of_others(self.name).values()
            return union(holding.ledger.left, *others, as_ranges(holding.ahead))

    @property
    def num_claimed(self) -> int:
        """Portions of the epoch that anybody has claimed, as far as is known."""
        return self._current.num_claimed

    def leave(self, seconds: float) -> None:
        """Gives back what was not trained on, and ends the thread; once or twice.

        Args:
            seconds: To wait for it.
        """
        with self._state:
            self._close(leaves=True)
            self._ending = True
            self._ask()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    @property
    def _current(self) -> Holding:
        assert self._holding is not None
        return self._holding

    def _close(self, leaves: bool) -> None:
        if self._holding is not None:
            self._holding.close(leaves)
            # One before it that is not reported yet will not be any more.
            self._closed = [self._holding]
        self._holding = None

    def _ask(self) -> None:
        self._asked = True
        self._state.notify_all()

    def _wait(self, condition: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._state:
            while not condition() and time.monotonic() < deadline:
                self._state.wait(self._times.wait_s)
                self._raise_if_failed()

    def _has_answer(self, holding: Holding, waits: bool, begin: float) -> bool:
        ledger = holding.ledger
        if holding.ahead or ledger.is_over:
            return True
        if not waits and (not ledger.left or self._last_turn > begin):
            return True  # nothing is to be had, or it was left to others
        self._is_alone = bool(self.away) or self._hears_nothing(holding, begin)
        return self._is_alone

    def _hears_nothing(self, holding: Holding, begin: float) -> bool:
        silent_s = time.monotonic() - max(begin, self._last_turn)
        near, times = holding.is_near_its_end, self._times
        return silent_s > (times.end_s if near else times.answer_s)

    def _answer(self, holding: Holding, waits: bool) -> int | None:
        number: int | None = None
        if holding.ahead:
            number = holding.hand_out()
        elif self._is_alone:
            self._say_it_is_alone()
            number = holding.take_alone(*self._place())
        elif waits and not holding.ledger.is_over:
            self._say_who_did_not_come(holding)
        holding.has_ended = waits and number is None
        self._ask()
        return number

    def _place(self) -> tuple[int, int]:
        own = self._members.member.number
        known = sorted({*self._members.roll.members, own})
        return known.index(own), len(known)

    def _say_it_is_alone(self) -> None:
        if not self._told_alone:
            _log.warning(
                "the pool of batches cannot be reached (%s): this super-learner goes "
                "on with a share of what is left",
                self.away or "no answer",
            )
        self._told_alone = True

    def _say_who_did_not_come(self, holding: Holding) -> None:
        ledger = holding.ledger
        late = [name for name in ledger.held if name not in ledger.resting]
        _log.warning(
            "epoch %d ends here without super-learners %s, which hold batches of it "
            "and have not come to its end for %g s",
            holding.number,
            late,
            self._times.slowest_s,
        )

    # --- the thread

    def _work(self) -> None:
        while True:
            with self._state:
                self._asked = False
                is_last = self._ending
            self._take_turn()
            if is_last:
                break
            with self._state:
                self._state.wait_for(lambda: self._asked or self._ending, self._pause())
        self._rendezvous.close()

    def _pause(self) -> float:
        """Until the next look, if nobody asks for one."""
        waits = self._holding is not None and self._holding.consults
        return self._times.wait_s if waits else self._times.look_s

    def _take_turn(self) -> None:
        try:
            self._rendezvous.ask(self._meet)
        except (RendezvousAway, OtherTerms) as error:
            self._note_absence(str(error))

    def _meet(self, store: Store) -> None:
        if self._store is not store:
            self._store, self._written = store, set()
        if not self._members.is_in and not self._ending:
            return
        for holding in self._closed:
            self._update(store, holding)
            with self._state:
                self._closed = [one for one in self._closed if one is not holding]
            store.delete_key(_key(holding.number - 2))
        if (holding := self._holding) is not None:
            self._update(store, holding)
            self._note_presence(holding)

    def _update(self, store: Store, holding: Holding) -> None:
        key = _key(holding.number)
        text = self._stored(store, key, holding)
        for _ in range(_TRIES):
            found = _parsed(text)
            with self._state:
                plan = holding.plan(found, self._gone(found))
            wanted = plan.ledger.to_json()
            if wanted != text:
                stored = store.compare_set(key, text, wanted).decode()
                if stored == text:
                    raise RendezvousAway("it has lost its memory")
                if stored != wanted:
                    text = stored
                    continue
            self._applied(holding, plan)
            return
        raise RendezvousAway(f"the pool changed under {_TRIES} changes of ours")

    def _stored(self, store: Store, key: str, holding: Holding) -> str:
        if holding.number in self._written:
            # This one has a time limit of its own, also where the link is cut.
            return store.multi_get([key])[0].decode()
        with self._state:
            known = holding.ledger.begun_anew(self.name, uuid.uuid4().hex)
        text = store.compare_set(key, "", known.to_json()).decode()
        self._written.add(holding.number)
        return text

    def _applied(self, holding: Holding, plan: Plan) -> None:
        with self._state:
            num_twice = holding.apply(plan)
            self.num_twice += num_twice
            self._state.notify_all()
        if num_twice:
            _log.warning(
                "%d batches of epoch %d were trained on by another super-learner too",
                num_twice,
                holding.number,
            )

    def _gone(self, ledger: Ledger) -> set[str]:
        """Who has a part in it and is on the roll no more."""
        live = {m.incarnation for m in self._members.roll.members.values()}
        self._seen |= live
        absent, now = ledger.names - live - {self.name}, time.monotonic()
        since = {name: self._absent_since.get(name, now) for name in absent}
        self._absent_since = since
        # One that was never seen may be newer than the roll that is known here.
        late = self._times.end_s
        return {n for n in absent if n in self._seen or now - since[n] > late}

    def _note_absence(self, reason: str) -> None:
        with self._state:
            self.away = reason
            self._state.notify_all()
            # Nobody is in a hurry to hear the same once more.
            self._state.wait_for(lambda: self._ending, self._times.look_s)

    def _note_presence(self, holding: Holding) -> None:
        with self._state:
            if holding.ledger.is_settled:
                self._last_turn, self.away = time.monotonic(), ""
                told, self._told_alone = self._told_alone, False
                self._state.notify_all()
            else:
                told = False
        if told:
            _log.warning("the pool of batches is back")


def _key(epoch: int) -> str:
    """Of the ledger of an epoch, in the store of the job."""
    return f"pool/{epoch}"


def _parsed(text: str) -> Ledger:
    try:
        return Ledger.from_json(text)
    except ValueError as error:
        raise RendezvousAway(str(error)) from error


def _all(num: int) -> Ranges:
    return ((0, num),) if num else ()
