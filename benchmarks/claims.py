"""What a claim of the next work unit costs: an atomic counter or a ledger.

Learners of one job claim from a counter: one atomic addition in the job's store.
Islands claim from a ledger, which also knows what each of them holds, so that a dead
island's work units come back. It is a JSON text that a claim replaces by
compare-and-set, in a thread that claims two units ahead. It could serve both, if it
were fast enough.

Claimants are processes that share one server of torch's store; a batch is a timed wait.
The third way, a bare number under compare-and-set, is a lower bound on the cost of any
ledger in one key, because it has no text to parse.
"""

import multiprocessing
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from benchmarks.results import Report, Row, Target
from benchmarks.timing import Spread, print_row, spread
from lightning_adpsgd.epochs.claims import ClaimCounter, LearnerIndex
from lightning_adpsgd.epochs.pool import IslandPool, PoolTimeouts
from lightning_adpsgd.epochs.work_units import Terms
from lightning_adpsgd.islands.membership import Member, MemberList
from lightning_adpsgd.islands.rendezvous import serve
from lightning_adpsgd.islands.signatures import Signatures
from lightning_adpsgd.transport.links.credentials import Credentials

COUNTER, LEDGER, NUMBER = "counter", "ledger", "bare number, compare-and-set"
CLAIMANTS = (4, 16, 64)
BATCH_S = (0.02, 0.1)
WINDOW_S = 8.0
NUM_UNITS = 10**7
"""The units of an epoch: more than are claimed in the time, so that no epoch ends."""

TERMS = Terms(0, ((0, NUM_UNITS),), "equal")
PATIENCE_S = 180.0
PATIENCE = timedelta(seconds=120)
KEPT = 0.95
"""The bound: the least share of the batches that free claims would allow."""

_PATIENT = PoolTimeouts(answer_s=600.0, end_s=600.0, start_s=600.0)


class Figures(NamedTuple):
    """The figures of one claimant.

    Attributes:
        waits: seconds that each claim took from the training thread.
        core_s: processor time of the process.
        attempts: number of compare-and-set operations.
        conflicts: number of those that failed because another claimant was faster.
    """

    waits: list[float]
    core_s: float
    attempts: int
    conflicts: int


class CountedStore:
    """A store that counts how often compare-and-set was beaten by another claimant."""

    def __init__(self, store: Store) -> None:
        self.plain, self.attempts, self.conflicts = store, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        """Does what the store's does, and counts it."""
        stored = self.plain.compare_set(key, expected, wanted)
        self.attempts += 1
        self.conflicts += stored != wanted.encode()
        return stored


class Claimant(NamedTuple):
    """A way to claim, ready to be used.

    Attributes:
        claim: function that gives the next unit, given how many units are finished.
        stop: function that ends it.
    """

    claim: Callable[[int], object]
    stop: Callable[[], None]


def from_counter(store: CountedStore, number: int, num: int) -> Claimant:
    """Claims as learners of one job do."""
    counter = ClaimCounter(store.plain, LearnerIndex(number, num), lambda name: None)
    finished = [0]
    counter.open(0, TERMS, lambda terms: NUM_UNITS, lambda: finished[0])

    def claim(num_finished: int) -> object:
        finished[0] = num_finished
        return counter.next(1, waits=True)

    return Claimant(claim, lambda: None)


def from_number(store: CountedStore, number: int, num: int) -> Claimant:
    """Claims by compare-and-set of a number alone."""

    def claim(finished: int) -> int:
        text = store.multi_get(["number"])[0].decode()
        while True:
            stored = store.compare_set("number", text, str(int(text) + 1)).decode()
            if stored == str(int(text) + 1):
                return int(text)
            text = stored

    if number == 0:
        store.set("number", "0")
    return Claimant(claim, lambda: None)


class Direct:
    """A rendezvous without time limits: the ledger's best case."""

    def __init__(self, store: CountedStore) -> None:
        self._store, self.signatures = store, Signatures(Credentials(), "job")

    def ask(self, action: Callable[[Any], Any]) -> Any:
        """Returns the result of an action on the store."""
        return action(self._store)

    def close(self) -> None:
        """Does nothing, because there is nothing to close."""


class FixedMembers:
    """A member list that never changes."""

    def __init__(self, number: int, num: int) -> None:
        live = {n: Member(n, f"{n:032x}", "", ()) for n in range(num)}
        self.member, self.members, self.is_in = live[number], MemberList(1, live), True


def from_ledger(store: CountedStore, number: int, num: int) -> Claimant:
    """Claims as islands do."""
    rendezvous: Any = Direct(store)
    members: Any = FixedMembers(number, num)
    pool = IslandPool(rendezvous, members, lambda: None, _PATIENT)
    finished = [0]
    pool.start()
    pool.open(0, TERMS, lambda terms: NUM_UNITS, lambda: finished[0])

    def claim(num_finished: int) -> object:
        finished[0] = num_finished
        return pool.next(1, waits=True)

    return Claimant(claim, lambda: pool.leave(60.0))


WAYS = {COUNTER: from_counter, NUMBER: from_number, LEDGER: from_ledger}


def work(
    way: str, number: int, num: int, batch_s: float, port: int, answer: Connection
) -> None:
    """Runs one claimant, which sends its figures."""
    torch.set_num_threads(1)
    time.sleep(1 + number * 0.05)  # a listener cannot accept all at once
    plain = TCPStore(
        "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=PATIENCE
    )
    store = CountedStore(PrefixStore("job", plain))
    claimant = WAYS[way](store, number, num)
    _meet(plain, "begin", num)
    before = store.attempts, store.conflicts
    end, core_s, waits = time.monotonic() + WINDOW_S, time.process_time(), list[float]()
    while time.monotonic() < end:
        begin = time.perf_counter()
        claimant.claim(len(waits))
        waits.append(time.perf_counter() - begin)
        time.sleep(batch_s)
    core_s = time.process_time() - core_s
    figures = store.attempts - before[0], store.conflicts - before[1]
    answer.send(Figures(waits, core_s, *figures))
    _meet(plain, "end", num)
    threading.Thread(target=claimant.stop, daemon=True).start()


def _meet(store: TCPStore, what: str, num: int) -> None:
    if store.add(what, 1) == num:
        store.set(f"all {what}", "")
    store.wait([f"all {what}"], timedelta(seconds=120))


def run(way: str, num: int, batch_s: float) -> list[Figures]:
    """Runs all claimants of one way; returns their figures."""
    fork, port = multiprocessing.get_context("fork"), _free_port()
    # The server is a process of its own: a fork beside its thread may hang.
    server = fork.Process(target=serve, args=("127.0.0.1", port, fork.Event()))
    pipes = [fork.Pipe(duplex=False) for _ in range(num)]
    claimants = [
        fork.Process(target=work, args=(way, number, num, batch_s, port, answer))
        for number, (_, answer) in enumerate(pipes)
    ]
    for process in (server, *claimants):
        process.start()
    try:
        return [_received(receive) for receive, _ in pipes]
    finally:
        for process in (*claimants, server):
            process.join(1 if process is not server else 0)
            process.kill()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _received(connection: Connection) -> Figures:
    if not connection.poll(PATIENCE_S):
        raise TimeoutError(f"a claimant gave no figures within {PATIENCE_S:g} s")
    return connection.recv()


def measure(quick: bool = False) -> Report:
    """Claims per second, waiting, processor time and conflicts of each way."""
    report = Report(
        "What a claim of the next batch costs, by an atomic counter and by a ledger.",
        limit="the batches of claimants that wait for nothing",
        notes=[
            "a batch is a timed wait; all claimants share the cores of this machine",
            "the bare number under compare-and-set is the least that a ledger pays",
        ],
    )
    for batch_s in BATCH_S[:1] if quick else BATCH_S:
        for num in CLAIMANTS[1:] if quick else CLAIMANTS:
            for way in WAYS:
                row = row_of(way, num, batch_s, run(way, num, batch_s))
                report.rows.append(row)
                if way == LEDGER and num == max(CLAIMANTS):
                    claim = f"{num} claimants by ledger, {batch_s * 1000:g} ms: share"
                    report.targets.append(Target(claim, KEPT, row.ratio or 0.0))
    return report


def row_of(way: str, num: int, batch_s: float, figures: list[Figures]) -> Row:
    """The row of one way with so many claimants."""
    waits = [wait for one in figures for wait in one.waits]
    found: Spread = spread(wait * 1000 for wait in waits)
    attempts = sum(one.attempts for one in figures)
    conflicts = sum(one.conflicts for one in figures)
    share = len(waits) * batch_s / (num * WINDOW_S)
    details = {
        "claims/s": len(waits) / WINDOW_S,
        "99th percentile, ms": sorted(waits)[len(waits) * 99 // 100] * 1000,
        "core, ms a claim": sum(one.core_s for one in figures) * 1000 / len(waits),
        "conflicts a claim": conflicts / len(waits),
        "share of conflicts": conflicts / attempts if attempts else 0.0,
    }
    case = {"way": way, "claimants": num, "batch, ms": batch_s * 1000}
    figure = ", ".join(f"{name} {value:.3g}" for name, value in details.items())
    print_row(f"{way}, {num}, {batch_s * 1000:g} ms", f"{found:.2f} ms", f"{share:.3f}")
    print(f"    {figure}", flush=True)
    return Row(case, found, "ms", share, details=details)
