"""One pool of work units for all islands: a ledger for each epoch, in the rendezvous.

Each training has ledgers of its own, named by its origin. A rendezvous that lives on
also has those of earlier trainings: other weights were trained on their units.

A separate thread maintains this island's part of the ledger (`ledger`) and claims units
ahead of need; the training thread takes them. docs/islands.md says how an epoch ends,
and what an island does while the rendezvous is away.
"""

import logging
import random
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from torch._C._distributed_c10d import Store
from typing_extensions import override

from lightning_adpsgd.epochs.claims import Claim, ClaimRate
from lightning_adpsgd.epochs.lease import Lead, Lease, Plan
from lightning_adpsgd.epochs.ledger import Ledger, OtherTerms
from lightning_adpsgd.epochs.ranges import Ranges, as_ranges, union
from lightning_adpsgd.epochs.work_units import Terms
from lightning_adpsgd.islands.member_store import text_at
from lightning_adpsgd.islands.membership_reader import MembershipView
from lightning_adpsgd.islands.rendezvous import Rendezvous, RendezvousUnreachable
from lightning_adpsgd.islands.service import ServiceThread

_log = logging.getLogger(__name__)

_TRIES = 200
# For each island, after another one was faster: many that retry at once collide again.
_ASIDE_S = 0.003
# Training continues without an answer after the time of this number of turns. An epoch
# ends without live islands that have not reached its end after so many seconds.
_PATIENCE_TURNS, _SLOWEST_S = 3, 300.0
# An island may validate while others run several epochs, and must find those done.
_KEPT_EPOCHS = 100


@dataclass(frozen=True)
class PoolTimeouts:
    """The time limits of the pool.

    Args:
        look_s: seconds between two reads of the ledger when no unit is needed.
        wait_s: seconds between two reads while the training thread waits.
        answer_s: seconds without an answer from the rendezvous, after which training
            continues without it; more where a turn takes long.
        end_s: as `answer_s`, but near the end of an epoch, where others may soon take
            the same units. Also the time for which an island that was never seen among
            the members is waited for.
        start_s: seconds to wait in the first epoch for the ledger of other islands.
    """

    look_s: float = 0.5
    wait_s: float = 0.05
    answer_s: float = 0.25
    end_s: float = 3.0
    start_s: float = 20.0


class IslandPool(ServiceThread):
    """This island's part in the pool, which only its first learner uses.

    The training thread and the pool's thread share all fields below `_state`. Only the
    pool's thread uses the rendezvous. `raise_if_failed` is called while the training
    thread waits. `away` says why the pool cannot be reached; it is empty if it can.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        members: MembershipView,
        raise_if_failed: Callable[[], None],
        times: PoolTimeouts | None = None,
    ) -> None:
        super().__init__("the thread of the pool of batches", "adpsgd-pool", self._end)
        self._rendezvous, self._members = rendezvous, members
        self._times = times or PoolTimeouts()
        self._raise_if_failed, self._rate = raise_if_failed, ClaimRate()
        self._lead = Lead()
        self._lease: Lease | None = None
        self._closed: list[Lease] = []
        self._asked, self._is_alone, self._told_alone = False, False, False
        self._is_apart = False  # from the pool of the others, since the last answer
        self._heard_at = 0.0
        self.away = ""
        self._seen, self._absent_since = set[str](), dict[str, float]()
        self._error: BaseException | None = None

    @property
    def own(self) -> str:
        """The name of this island in the ledger, its incarnation."""
        return self._members.member.incarnation

    # --- used by the training thread

    def open(
        self,
        number: int,
        terms: Terms,
        num_units: Callable[[Terms], int],
        num_finished: Callable[[], int],
    ) -> Terms:
        """Begins an epoch; see `claims.ClaimCounter`."""
        num = num_units(terms)
        ledger = Ledger(uuid.uuid4().hex, terms, ((0, num),) if num else ())
        is_first = self._lease is None
        # Otherwise it would train alone, on terms of its own, in each epoch.
        expects = is_first or self._is_apart
        with self._state:
            self._close(leaves=False)
            lease = Lease(
                number, ledger, self.own, self._rate, self._lead, num_finished
            )
            self._lease = lease
            self._ask()
        limit = self._times.start_s if is_first else self._times.end_s
        self._wait(lambda: not lease.is_fresh or (self.away and not expects), limit)
        with self._state:
            lease.is_fresh = False
            agreed = lease.ledger.terms
        lease.num_units = num_units(agreed)
        return agreed

    def next(self, num_held: int, waits: bool) -> Claim:
        """Claims the next unit; see `claims.ClaimCounter`."""
        lease, begin = self._lease, time.monotonic()
        assert lease is not None
        with self._state:
            lease.is_awaited, self._is_alone = waits, False
            if lease.is_short:
                self._ask()
            try:
                self._wait(lambda: self._has_answer(lease, waits, begin), _SLOWEST_S)
                lease.note_rate()
                # Still under the lock, or the units claimed ahead might be given back.
                number = self._answer(lease, waits)
            finally:
                lease.is_awaited = False
        return Claim(number, lease.num_claimed, lease.has_ended)

    def remaining(self, held: Ranges) -> Ranges | None:
        """The units that are not finished; see `claims.ClaimCounter`."""
        with self._state:
            if (lease := self._lease) is None:
                return None
            others = lease.ledger.of_others(self.own).values()
            return union(lease.ledger.left, *others, as_ranges(lease.ahead), held)

    def leave(self, seconds: float) -> None:
        """Returns unused units, and ends the thread; can be called twice."""
        with self._state:
            self._close(leaves=True)
        self.stop(seconds)

    def _close(self, leaves: bool) -> None:
        if self._lease is not None:
            self._lease.close(leaves)
            # An earlier epoch that is not reported yet never will be.
            self._closed = [self._lease]
        self._lease = None

    def _ask(self) -> None:
        self._asked = True
        self._state.notify_all()

    def _wait(self, condition: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._state:
            while not condition() and time.monotonic() < deadline:
                self._state.wait(self._times.wait_s)
                self._raise_if_failed()
                if self._error is not None:
                    raise self._error

    def _has_answer(self, lease: Lease, waits: bool, begin: float) -> bool:
        ledger = lease.ledger
        if lease.ahead or ledger.is_over:
            return True
        if not waits and (not ledger.left or self._heard_at > begin):
            return True  # nothing is left, or only units left to others
        self._is_alone = bool(self.away) or self._hears_nothing(lease, begin)
        return self._is_alone

    def _hears_nothing(self, lease: Lease, begin: float) -> bool:
        silent_s = time.monotonic() - max(begin, self._heard_at)
        near, times = lease.is_near_its_end, self._times
        patience_s = times.end_s if near else times.answer_s
        return silent_s > max(patience_s, _PATIENCE_TURNS * self._lead.turn_s)

    def _answer(self, lease: Lease, waits: bool) -> int | None:
        number: int | None = None
        if lease.ahead:
            number = lease.hand_out()
        elif self._is_alone:
            self._say_it_is_alone()
            number = lease.take_alone(*self._place())
        elif waits and not lease.ledger.is_over:
            self._say_who_did_not_come(lease)
        lease.has_ended = waits and number is None
        if lease.is_short or lease.has_ended:
            self._ask()
        return number

    def _place(self) -> tuple[int, int]:
        own = self._members.member.number
        known = sorted({*self._members.members.by_number, own})
        return known.index(own), len(known)

    def _say_it_is_alone(self) -> None:
        if not self._told_alone:
            _log.warning(
                "the pool of batches cannot be reached (%s): this super-learner "
                "continues with its share of the remaining batches",
                self.away or "no answer",
            )
        self._told_alone = True

    def _say_who_did_not_come(self, lease: Lease) -> None:
        ledger, members = lease.ledger, self._members.members.by_number.values()
        known = {one.incarnation: str(one) for one in members}
        late = [known.get(n, n) for n in ledger.held if n not in ledger.resting]
        _log.warning(
            "epoch %d ends here without %s: each holds batches of it, and has not come "
            "to its end for %g s",
            lease.number,
            ", ".join(late),
            _SLOWEST_S,
        )

    # --- used by the thread

    @override
    def _work(self) -> bool:
        if goes_on := super()._work():
            self.take(self._take_turn)
        self._rendezvous.close()
        return goes_on

    @override
    def _rest(self) -> None:
        waits = self._lease is not None and self._lease.is_awaited
        hurries = waits and not self.has_just_failed
        pause_s = self._times.wait_s if hurries else self._times.look_s
        self._state.wait_for(lambda: self._asked or self._ending, pause_s)
        self._asked = False

    def _end(self, error: BaseException) -> None:
        with self._state:
            self._error = error
            self._state.notify_all()

    @override
    def _take_turn(self) -> None:
        try:
            self._rendezvous.ask(self._meet)
        except (RendezvousUnreachable, OtherTerms) as error:
            self._is_apart |= isinstance(error, OtherTerms)
            with self._state:
                self.away = str(error)
                self._state.notify_all()
                # There is no hurry to read the same ledger again.
                self._state.wait_for(lambda: self._ending, self._times.look_s)

    def _meet(self, store: Store) -> None:
        if not self._members.is_in and not self._ending:
            return
        for lease in self._closed:
            with suppress(OtherTerms):  # nothing of it is known there
                self._update(store, lease)
            with self._state:
                self._closed = [one for one in self._closed if one is not lease]
            store.delete_key(_key(lease, before=_KEPT_EPOCHS))
        if (lease := self._lease) is not None:
            begin = time.monotonic()
            self._update(store, lease)
            self._lead.took(time.monotonic() - begin)
            self._note_presence(lease)

    def _update(self, store: Store, lease: Lease) -> None:
        if lease.origin is None:
            # By the list: while it takes the weights of others, a member has none.
            own = self._members.member
            of_own = self._members.members.by_number.get(own.number, own)
            lease.origin = of_own.origin
        key, signatures = _key(lease), self._rendezvous.signatures
        for _ in range(_TRIES):
            text = text_at(store, key) or self._begun_anew(store, lease, instead_of="")
            found = _parsed(signatures.read(text, key), lease)
            if found is None:
                self._begun_anew(store, lease, instead_of=text)
                continue
            with self._state:
                plan = lease.plan(found, self._gone(found))
            wanted = signatures.sign(plan.ledger.to_json(), key)
            if wanted != text:
                stored = store.compare_set(key, text, wanted).decode()
                if stored == text:
                    raise RendezvousUnreachable("it has lost its data")
                if stored != wanted:
                    time.sleep(random.uniform(0.0, _ASIDE_S * len(found.names)))
                    continue
            self._applied(lease, plan)
            return
        raise RendezvousUnreachable(
            f"the pool changed during each of {_TRIES} attempts to change it"
        )

    def _begun_anew(self, store: Store, lease: Lease, instead_of: str) -> str:
        key = _key(lease)
        with self._state:
            known = lease.ledger.begun_anew(self.own, uuid.uuid4().hex)
        wanted = self._rendezvous.signatures.sign(known.to_json(), key)
        return store.compare_set(key, instead_of, wanted).decode("utf-8", "replace")

    def _applied(self, lease: Lease, plan: Plan) -> None:
        with self._state:
            num_twice = lease.apply(plan)
            self._state.notify_all()
        if num_twice:
            _log.warning(
                "%d batches of epoch %d were trained on by another super-learner too",
                num_twice,
                lease.number,
            )

    def _gone(self, ledger: Ledger) -> set[str]:
        live = {m.incarnation for m in self._members.members.by_number.values()}
        self._seen |= live
        absent, now = ledger.names - live - {self.own}, time.monotonic()
        since = {name: self._absent_since.get(name, now) for name in absent}
        self._absent_since = since
        # An island never seen may be newer than the member list known here.
        late = self._times.end_s
        return {n for n in absent if n in self._seen or now - since[n] > late}

    def _note_presence(self, lease: Lease) -> None:
        if not lease.ledger.is_settled:
            return
        with self._state:
            self._heard_at, self.away, self._is_apart = time.monotonic(), "", False
            told, self._told_alone = self._told_alone, False
            self._state.notify_all()
        if told:
            _log.warning("the pool of batches is back")


def _key(lease: Lease, before: int = 0) -> str:
    """The key of the ledger of a lease, or of one some epochs before it."""
    return f"pool/{lease.origin}/{lease.number - before}"


def _parsed(text: str | None, lease: Lease) -> Ledger | None:
    """The ledger in a text; None if it is malformed or not signed."""
    try:
        found = Ledger.from_json(text or "")
        if found.terms == lease.ledger.terms and found.end > lease.num_units:
            raise ValueError(f"it has units beyond {lease.num_units}")
        if lease.is_old(found):
            raise ValueError("it is an old version that was replaced")
        return found
    except ValueError as error:
        _log.warning("the pool of batches starts over (%s): some may come twice", error)
        return None
