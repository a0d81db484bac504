"""Meetings and failure notices of the learners of a job, through its key-value store.

They do not use collectives. A collective that a learner does not join blocks in
compiled code until it times out and takes its process group down. A thread can poll a
key while the learner continues.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

from torch._C._distributed_c10d import HashStore, Store, TCPStore

from lightning_adpsgd.coordination.heartbeats import Heartbeats
from lightning_adpsgd.transport.network_interfaces import family_of
from lightning_adpsgd.weights.worker import CallTimedOut, TimedCalls

# How long a failure waits for the store of a host that may be stopped. torch's client
# waits without limit.
_ANSWER_S = 3.0
# A learner that waits for others looks again after a quarter of the time that it has
# waited, so that a short wait stays short, within these seconds.
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.001, 0.01
_SILENT_HOST = (
    "the job's store, which learner 0 or its launcher hosts, does not answer: see "
    "whether that process or its machine is stopped or cut off"
)
T = TypeVar("T")


def store_at(listener: int | None, *place: Any, **options: Any) -> TCPStore:
    """Makes a store, whose server takes over a listening socket if there is one."""
    make = partial(TCPStore, *place, master_listen_fd=listener, **options)
    try:
        return make()
    except NotImplementedError:
        # In torch 2.6 only the older of its two servers takes a socket. It ends the
        # process when it can open no more files.
        return make(use_libuv=False)


def serve_near(host: str, timeout: timedelta) -> tuple[Store, str]:
    """A store in this process, and its address for `near_store`.

    Args:
        host: address of this host that the other learners can reach.
    """
    with socket.create_server((host, 0), family=family_of(host)) as listener:
        port, place = listener.getsockname()[1], listener.detach()
    store = store_at(
        place, host, port, is_master=True, wait_for_workers=False, timeout=timeout
    )
    return store, f"{host} {port}"


def near_store(address: str, timeout: timedelta) -> Store:
    """The store that another learner serves at an address."""
    host, port = address.split()
    return TCPStore(
        host, int(port), is_master=False, wait_for_workers=False, timeout=timeout
    )


def pause_s(waited_s: float) -> float:
    """Seconds until the next look of a learner that has waited for so many."""
    return min(max(waited_s / 4, _SHORTEST_LOOK_S), _LONGEST_LOOK_S)


def own_connection(store: Store) -> Store:
    """The same store, over a connection that no other thread uses.

    Calls over one connection wait for one another, each for a round trip. Before torch
    2.8, or if the host does not answer (it may have ended), it is the store itself.
    """
    usual = store.timeout  # pyright: ignore  the stubs lack it
    store.set_timeout(timedelta(seconds=_ANSWER_S))  # else half an hour, in Lightning
    try:
        own: Store = store.clone()  # pyright: ignore  the stubs lack it
    except (AttributeError, RuntimeError):
        return store
    finally:
        store.set_timeout(usual)
    own.set_timeout(usual)
    return own


def _in_time(call: Callable[[], T]) -> T:
    """The result of a call of the store; raises `CallTimedOut` after some seconds."""
    calls = TimedCalls("adpsgd-failure")
    try:
        return calls.run(call, _ANSWER_S)
    finally:
        calls.stop()


class LearnerFailed(RuntimeError):
    """Another learner of the job has failed, so this one ends too."""


class LearnerDiverged(LearnerFailed, FloatingPointError):
    """The training of another learner has diverged, so that of the job has too."""


class LearnerFollows(SystemExit):
    """Ends a learner whose trace would only repeat that of `LearnerFailed`."""


class Meanwhile(Protocol):
    """Work of a learner while it waits in a meeting, in its training thread."""

    def while_waiting(self, meeting: str) -> None:
        """Called repeatedly until all learners have arrived."""
        ...

    def when_met(self) -> None:
        """Called once when all learners have arrived."""
        ...


class Coordinator:
    """Failure notices and meetings of the learners of one job.

    `_lock` guards `failure`. The watch thread, its look at the store, and
    `announce_failure` in any thread write it; the training thread reads it. The watch
    thread counts `_silent_turns`, and its look sets them to 0. Any of them may set
    `_no_store`, once, when the store has not answered. The training thread writes
    `has_ended`, which a look reads. Everything else belongs to the training thread.

    Calls that look for a failure, or that follow one, have a time limit: the host of
    the store may be stopped with its connections open. Meetings have none, but they end
    when a learner has given no sign of life for `timeout`.

    Args:
        store: the job's, shared by all learners under a prefix that nothing else uses.
        timeout: time that a learner may take to end after it knows of a failure, before
            its process is killed. A store or learner silent for so long is a failure.
        when_failed: function called once, by the watch thread, when it sees a failure.

    Attributes:
        failure: message of the failure; None while nothing has failed.
        num_meetings: number of meetings that this learner has returned from.
        has_ended: whether all learners have ended training, so that the store may go.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        poll: timedelta = timedelta(seconds=0.25),
        when_failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout, self._poll_s = timeout, poll.total_seconds()
        self._lock = threading.Lock()
        self._looks, self._watched = TimedCalls("adpsgd-look"), store
        self._heartbeats = Heartbeats(rank, world_size, timeout)
        self._silent_turns = 0
        self._no_store: str | None = None
        self._stopped = threading.Event()
        self._meetings = 0
        self.num_meetings = 0
        self._thread: threading.Thread | None = None
        self._when_failed = when_failed
        self.failure: str | None = None
        self.has_ended = False

    def start(self) -> None:
        """Starts the thread that watches for failures of others."""
        self._watched = own_connection(self._store)
        self._thread = threading.Thread(
            target=self._watch, name="adpsgd-watch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch thread; can be called twice."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(5 * self._poll_s + 1)
        # Closes the connections: the store ends with its process group.
        self._store = self._watched = HashStore()

    def announce_failure(self, message: str) -> None:
        """Tells all learners; the first message of the job wins."""
        with self._lock:
            if self.failure is None:
                self.failure = self._publish(message)

    def explain(self, symptom: str, patience: timedelta = timedelta(seconds=1)) -> str:
        """The failure behind a symptom, if a learner announced one; else the symptom.

        A learner may notice a broken connection before it reads the cause in the store.
        """
        deadline = time.perf_counter() + patience.total_seconds()
        while self.failure is None and time.perf_counter() < deadline:
            if self._thread is None:
                self._ask(partial(self._look, f"{symptom}; "), None)
            self._stopped.wait(0.02)
        self.announce_failure(symptom)
        self._note_seen()
        return self.failure or symptom

    def show_for_learner_0(self) -> None:
        """Shows the failure, for one that only follows, if learner 0 cannot show it.

        If it can, this waits until it does, because a launcher may end all learners
        once one of them has ended.
        """
        silent = self.silent_learners()
        others = [r for r in range(self._rank) if r not in silent]
        if 0 in silent and not others and self.failure is not None:
            self._show(self.failure)

    def raise_if_failed(self) -> None:
        """Raises `LearnerFailed` once any learner of the job has failed."""
        if self.failure is not None:
            raise LearnerFailed(self.failure)

    def meet(self, name: str, meanwhile: Meanwhile | None = None) -> None:
        """Waits until every learner has reached the meeting of this name.

        The wait has no time limit, because a waiting learner keeps answering its peers.
        Only a failure of a learner ends it early.

        Raises:
            LearnerFailed: A learner failed, shows no sign of life, or came to a
                different meeting, which means that the learners' programs differ.
        """
        key = f"meeting/{self._meetings}"
        self._meetings += 1
        self._check_same_meeting(key, name)
        num_arrived, begin = self._store.add(f"{key}/arrived", 1), time.monotonic()
        while num_arrived < self._world_size:
            if meanwhile is not None:
                meanwhile.while_waiting(name)
            self._raise_if_lost(f"at {name!r}")
            self._stopped.wait(pause_s(time.monotonic() - begin))
            num_arrived = self._store.add(f"{key}/arrived", 0)
        if meanwhile is not None:
            meanwhile.when_met()
        self.num_meetings += 1

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds.

        Raises:
            LearnerFailed: A learner failed meanwhile, or shows no sign of life.
        """
        while not condition():
            self._raise_if_lost("for an answer")
            self._stopped.wait(0.01)

    def _raise_if_lost(self, where: str) -> None:
        self.raise_if_failed()
        if lost := self._heartbeats.lost(self._store):
            message = (
                f"learner {self._rank} waits {where}; learner {lost} has shown no "
                f"sign of life for {self._heartbeats.silence_s:.0f} s: its process has "
                "died, is stopped, or is in a call that holds Python's interpreter "
                "lock. See what it printed last"
            )
            self.announce_failure(message)
            raise LearnerFailed(self.failure or message)

    def silent_learners(self, patience: timedelta = timedelta(seconds=1)) -> list[int]:
        """Waits until all others have seen the failure; returns those that have not.

        They are dead or stuck. The process that hosts the store calls this before it
        ends, because the store ends with it.
        """
        deadline = time.perf_counter() + patience.total_seconds()
        while (silent := self._unseen()) and time.perf_counter() < deadline:
            self._stopped.wait(0.05)
        return silent

    def _unseen(self) -> list[int]:
        def look() -> list[int]:
            others = (r for r in range(self._world_size) if r != self._rank)
            return [r for r in others if not self._store.check([f"failure/seen/{r}"])]

        return self._ask(look, [])

    def _check_same_meeting(self, key: str, name: str) -> None:
        mine = f"{name}\t{self._rank}"
        first = self._store.compare_set(f"{key}/name", "", mine).decode()
        first_name, _, first_rank = first.partition("\t")
        if first_name != name:
            message = (
                f"learner {self._rank} came to {name!r} while learner {first_rank} "
                f"waits at {first_name!r}: all learners must validate, save and end "
                "at the same points of their programs. Most likely a condition in a "
                "callback or hook depends on local values, or on the number of batches "
                "or steps, which differs between learners that share an epoch. Log a "
                "metric in every batch, stop at the end of an epoch, or set "
                "`work_sharing=False`"
            )
            self.announce_failure(message)
            raise LearnerFailed(message)

    def _publish(self, message: str) -> str:
        publish = partial(self._store.compare_set, "failure", "", message)
        first = self._ask(publish, None)
        return first.decode() if first else self._show(f"{message}{self._no_store}")

    def _watch(self) -> None:
        try:
            self._look_until_failure()
        finally:
            self._looks.stop(1.0)
        if self.failure is not None and not self._stopped.is_set():
            self._follow_failure()

    def _look_until_failure(self) -> None:
        while self.failure is None and not self._stopped.wait(self._poll_s):
            try:
                self._looks.run(self._look, self._poll_s)
            except CallTimedOut:
                self._judge_silence()
            if self.has_ended and self._no_store is not None:
                return

    def _judge_silence(self) -> None:
        # Counted in turns: while this process is stopped, the store is not silent.
        self._silent_turns += 1
        silence_s = self._silent_turns * 2 * self._poll_s
        with self._lock:
            if self.failure is None and silence_s > self._timeout.total_seconds():
                self.failure = self._show(f"{_SILENT_HOST} ({silence_s:.0f} s)")

    def _follow_failure(self) -> None:
        if self._rank == 0:
            # At once: a launcher may kill this process before its exception is shown.
            print(f"Training ends: {self.failure}", file=sys.stderr, flush=True)
        self._when_failed()
        self._note_seen()
        if not self._stopped.wait(self._timeout.total_seconds()):
            self._end_process()

    def _note_seen(self) -> None:
        self._ask(partial(self._store.set, f"failure/seen/{self._rank}", ""), None)

    def _ask(self, call: Callable[[], T], otherwise: T) -> T:
        """What the store answers, after a failure; it may be gone, or its host stopped.

        Without an answer it is not asked again: torch shows a trace each time, a host
        that goes on takes what it was told, and one that is dead is not waited for.
        """
        if self._no_store is not None:
            return otherwise
        try:
            return _in_time(call)
        except RuntimeError:
            self._no_store = ""
        except CallTimedOut:
            self._no_store = f"; {_SILENT_HOST}"
        return otherwise

    def _look(self, symptom: str = "") -> None:
        if self._no_store is not None:  # known since this look was queued
            return
        try:
            failure = self._announced()
            self._heartbeats.beat(self._watched)
        except RuntimeError as error:
            self._note_that_the_store_is_gone(error, symptom)
            return
        finally:
            self._silent_turns = 0
        with self._lock:
            self.failure = self.failure or failure

    def _announced(self) -> str | None:
        has_failed = self._watched.check(["failure"])
        return self._watched.get("failure").decode() if has_failed else None

    def _note_that_the_store_is_gone(self, error: RuntimeError, symptom: str) -> None:
        reason, self._no_store = str(error).partition("\n")[0], ""
        with self._lock:
            if self.failure is None and not self.has_ended:
                self.failure = self._show(
                    f"{symptom}the learner that hosts the job's store is gone "
                    f"({reason}); see what learner 0 printed last"
                )

    def _show(self, failure: str) -> str:
        # Learner 0 shows what others have announced. It cannot show this.
        print(f"learner {self._rank} ends: {failure}", file=sys.stderr, flush=True)
        return failure

    def _end_process(self) -> None:
        # The training thread has been inside one call for the whole timeout, most
        # likely a collective with a learner that is gone; an exception cannot reach it.
        late = f"its training thread did not come back within {self._timeout}"
        self._show(f"{self.failure} ({late})")
        os._exit(1)
