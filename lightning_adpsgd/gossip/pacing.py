"""The pacing of exchanges: whose turn it is, and how much of the cores they may use."""

import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal

from lightning_adpsgd.gossip.account import Account
from lightning_adpsgd.gossip.protocol import Outcome, UnderWay
from lightning_adpsgd.gossip.slowdown import Slowdown

_log = logging.getLogger(__name__)

# A learner that exchanges less often than once a minute trains alone.
_LONGEST_PAUSE_S = 60.0
# Fewer exchanges per step than this are reported after this time.
_REPORT_AFTER_S, _RARE = 60.0, 0.2
# Cores are idle where threads wait for one during less of an exchange than this.
_CROWDED = 0.25
# The number of step boundaries from which the duration of a step is computed.
_STEPS = 6
# Where Linux reports for how long threads have waited for a core.
_PRESSURE = Path("/proc/pressure/cpu")


class CoreShare:
    """Bounds the share of the training's time that exchanges take.

    docs/concepts.md, "How often", defines the charge of an exchange.

    The asking end pays the cost of the last exchange in advance, so that only one of
    several waiting exchanges starts. The asked end pays afterwards. `_lock` guards all.

    A `share` of 1 is no bound. `bound_s` has the seconds for which the bound has made
    exchanges wait, each second once.

    Args:
        share: bound, in (0, 1].
        in_full: whether an exchange's processor time counts in full even if cores are
            idle.
        slowdown: durations of steps, which say if less than that is to be charged.
    """

    def __init__(
        self, share: float, in_full: bool = False, slowdown: Slowdown | None = None
    ) -> None:
        self._share, self._in_full, self._slowdown = share, in_full, slowdown
        self.bound_s = 0.0
        self._lock = threading.Lock()
        # When all charges are paid off; cost of the last exchange; how much of running
        # exchanges is prepaid; until when `bound_s` covers waits; crowding in the last.
        self._even_at, self._cost, self._ahead = 0.0, 0.0, 0.0
        self._counted_to, self._crowding = 0.0, 1.0

    @property
    def are_idle(self) -> bool:
        """Whether the last exchange took from nobody, or there is no bound."""
        return self._share == 1 or self._crowding < _CROWDED

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Charges the exchange made inside the context, in the same thread."""
        begin, worked, waited = time.monotonic(), time.thread_time(), waiting_s()
        try:
            with self._slowdown.exchange() if self._slowdown else nullcontext():
                yield
        finally:
            work, seconds = time.thread_time() - worked, time.monotonic() - begin
            if self._slowdown is not None:
                work = min(work, self._slowdown.taken_s(seconds, self._share))
            crowded = 1.0 if self._in_full else crowding(waited, waiting_s(), seconds)
            self._crowding = crowded
            self.spent(work * crowded)

    def stepped(self, now: float) -> None:
        """Notes the end of an optimizer step; for the training thread."""
        if self._slowdown is not None:
            self._slowdown.stepped(now)

    def merged(self, seconds: float) -> None:
        """Charges the time of a merge in the training thread."""
        with self._lock:
            self._charge(seconds)

    def spent(self, seconds: float) -> None:
        """Charges the processor time of an exchange; for any thread."""
        with self._lock:
            self._cost = seconds
            paid = min(self._ahead, seconds)
            self._ahead -= paid
            self._charge(seconds - paid)

    def pause_s(self) -> float:
        """The seconds to wait; 0: an exchange may begin, and is charged in advance."""
        if self._share == 1:
            return 0.0
        with self._lock:
            now = time.monotonic()
            left = self._even_at - now
            if left > 0:
                self.bound_s += self._even_at - max(now, self._counted_to)
                self._counted_to = self._even_at
                return left
            self._charge(self._cost)
            self._ahead += self._cost
            return 0.0

    def _charge(self, seconds: float) -> None:
        now = time.monotonic()
        paid_at = max(now, self._even_at) + seconds / self._share
        self._even_at = min(paid_at, now + _LONGEST_PAUSE_S)


def waiting_s() -> float | None:
    """The total seconds in which some thread of this machine has waited for a core.

    They are Linux's pressure stall information; None on systems without it.
    """
    try:
        line, *_ = _PRESSURE.read_text(encoding="ascii").splitlines()
        return int(line.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError):  # missing, or masked by a container
        return None


def crowding(before: float | None, after: float | None, seconds: float) -> float:
    """The share of a time span in which some thread waited for a core, in [0, 1].

    It follows from `waiting_s` before and after; without that it is 1, to be cautious.
    """
    if before is None or after is None or seconds <= 0:
        return 1.0
    return min(1.0, max(0.0, after - before) / seconds)


Turn = Literal["come", "met", "not yet"]
"""The result of a wait for the turn of a peer: it may be requested; it has asked
meanwhile, so that no request is needed; or neither, because the time is over or
something else is to be done first."""


class Traffic:
    """All exchanges of one learner: which may begin, and when to pause.

    `_state` guards `_under_way` and `is_paused`. It is notified when an exchange or a
    rest ends. So that a peer that was first holds up no other for long, it is notified
    too when that one is admitted, is requested or begins. The training thread appends
    to `_steps`, which ask threads copy.

    Attributes:
        hurry: set while the training thread waits, so that no exchange rests.
        is_paused: whether this learner asks for no exchanges.
    """

    def __init__(
        self,
        account: Account,
        state: threading.Condition,
        cpu_share: float,
        own: Callable[[], int] = lambda: 0,
        on_gpu: bool = False,
        steps_alone: bool = True,
    ) -> None:
        self._account, self._state, self._share = account, state, cpu_share
        # A step that waits for other learners is also longer beside their exchanges.
        slowdown = Slowdown() if on_gpu and steps_alone else None
        self.cores = CoreShare(cpu_share, in_full=on_gpu, slowdown=slowdown)
        # By section: exchanges of different ones do not overlap in any weight.
        self._under_way = defaultdict[int, UnderWay](lambda: UnderWay(own))
        self.is_paused = False
        self.hurry = threading.Event()
        self._steps = deque[float](maxlen=_STEPS)
        self._reports_at: float | None = None

    def pause(self, hurries: bool = True) -> None:
        """Stops asking for exchanges until `resume`; still answers.

        It is a `hurry` meanwhile if `hurries`; if not, peers are admitted one by one.
        """
        with self._state:
            self.is_paused = True
            if hurries:
                self.hurry_on()
            else:
                self.hurry.clear()

    def resume(self) -> None:
        """Starts asking again."""
        self.hurry.clear()
        with self._state:
            self.is_paused = False

    def hurry_on(self) -> None:
        """Ends all rests, until `hurry` is cleared."""
        with self._state:
            self.hurry.set()
            self._state.notify_all()

    def await_turn(
        self,
        peer: int,
        unless: Callable[[], bool],
        section: int = 0,
        seconds: float = math.inf,
    ) -> Turn:
        """Waits until a peer may be requested, or `hurry` or `unless` ends the wait.

        The wait ends when it is the peer's turn and `cpu_share` allows an exchange, and
        after so many seconds in any case.
        """
        with self._state:
            under_way = self._under_way[section]
            under_way.line_up(peer)
            turn = self._wait_in_line(peer, under_way, unless, seconds)
            under_way.step_out(peer)
            self._state.notify_all()
            return turn

    def _wait_in_line(
        self, peer: int, under_way: UnderWay, unless: Callable[[], bool], seconds: float
    ) -> Turn:
        latest = time.monotonic() + seconds
        while pause_s := (
            under_way.wait_s(peer, time.monotonic()) or self.cores.pause_s()
        ):
            if self.hurry.is_set() or unless() or under_way.has_been_met(peer):
                break
            left_s = latest - time.monotonic()
            # An earlier thread for the same peer may have taken it from the line late.
            if left_s <= 0 or peer not in under_way.in_line:
                return "not yet"
            self._state.wait(min(pause_s, left_s, _LONGEST_PAUSE_S))
        if under_way.has_been_met(peer):
            return "met"
        return "not yet" if unless() else "come"

    @contextmanager
    def requesting(self, peer: int, section: int = 0) -> Iterator[None]:
        """A context for a request to a peer; if it succeeds, `make` must follow."""
        with self._state:
            self._under_way[section].request(peer, time.monotonic())
            self._state.notify_all()
        try:
            yield
        except BaseException:
            with self._state:
                self._under_way[section].answered_by(peer)
                self._state.notify_all()
            raise

    def has_been_met(self, peer: int, section: int = 0) -> bool:
        """Whether an exchange with a peer has begun since its last turn came."""
        with self._state:
            return self._under_way[section].has_been_met(peer)

    def admit(self, peer: int, seconds: float, section: int = 0) -> None:
        """Waits until a peer that requests an exchange is admitted (`UnderWay`).

        It is admitted after so many seconds, or in a `hurry`, in any case.
        """
        with self._state:
            under_way = self._under_way[section]
            under_way.requested_by(peer)
            latest = time.monotonic() + seconds
            while not self.hurry.is_set():
                now = time.monotonic()
                wait_s = min(latest - now, under_way.admission_wait_s(peer, now))
                if wait_s <= 0:
                    break
                self._state.wait(wait_s)
            under_way.admit(peer, time.monotonic())
            self._state.notify_all()

    def declined_by(self, peer: int, section: int = 0) -> None:
        """Notes that a peer that was admitted does not begin, or is lost."""
        with self._state:
            self._under_way[section].declined_by(peer)
            self._state.notify_all()

    def stepped(self) -> None:
        """Notes the end of an optimizer step; for the training thread."""
        self._steps.append(now := time.monotonic())
        self.cores.stepped(now)

    @property
    def step_seconds(self) -> float:
        """The mean duration of the last steps, infinite before the second."""
        steps = list(self._steps)
        if len(steps) < 2:
            return math.inf
        return (steps[-1] - steps[0]) / (len(steps) - 1)

    def is_idle(self) -> bool:
        """Whether no exchange is under way; the caller holds the engine's lock."""
        return not any(one.total() for one in self._under_way.values())

    def make(
        self,
        peer: int,
        exchange: Callable[[int], Outcome],
        asked: bool = False,
        section: int = 0,
        admitted: bool = False,
    ) -> bool:
        """Makes an exchange with a peer if it may begin, and records its outcome.

        Args:
            exchange: function that makes it, from the number of exchanges under way.
            asked: whether the peer has asked; if so it may always begin (`UnderWay`).
            admitted: whether the peer has admitted this learner, which may have begun
                another exchange meanwhile.

        Returns:
            Whether it was made.
        """
        with self._state:
            number = self._begin(peer, self._under_way[section], asked, admitted)
        if not number:
            return False
        outcome = None
        try:
            with self.cores.exchange():
                outcome = exchange(number)
        finally:
            with self._state:
                self._under_way[section].leave(peer, time.monotonic())
                if outcome is not None:
                    self._account.exchanged(peer, outcome, section)
                self._state.notify_all()
        if outcome is not None:
            self._account.warn_of(peer, outcome)
        return True

    def _begin(
        self, peer: int, under_way: UnderWay, asked: bool, admitted: bool
    ) -> int:
        now, may_begin = time.monotonic(), asked or not self.is_paused
        if admitted:
            may_begin &= under_way.may_begin(peer, now)
            under_way.answered_by(peer)
        if admitted or asked:
            self._state.notify_all()
        return under_way.enter(peer, asked, now) if may_begin else 0

    def report_rate(self) -> None:
        """Warns once, after the first minute, if `cpu_share` makes exchanges rare.

        They may be rare because a cable was out: the bound is the reason only if they
        have waited for it most of the time.

        Only the training thread of one learner calls it, at each step.
        """
        now = time.monotonic()
        if self._reports_at is None:
            self._reports_at = now + _REPORT_AFTER_S
        if now < self._reports_at:
            return
        self._reports_at = math.inf
        rate = self._account.exchanges_per_step
        if self.cores.bound_s > _REPORT_AFTER_S / 2 and rate < _RARE:
            _log.warning(
                "A learner exchanges weights %.2g times per step, so that exchanges "
                "take at most `cpu_share=%g` of the training's time. Raise `cpu_share` "
                "to exchange more often; 1 means no bound.",
                *(rate, self._share),
            )
