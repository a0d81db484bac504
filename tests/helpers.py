"""What several test files of the engine share: sizes, threads, small worlds."""

import gc
import itertools
import json
import multiprocessing
import os
import pickle
import queue
import random
import select
import signal
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.gossip.engine import Gossip, GossipOptions
from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.mixing.rounds import RoundMixer
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup
from lightning_adpsgd.reference import Mixing
from lightning_adpsgd.topology.matrices import identity, with_gain
from lightning_adpsgd.topology.named import TOPOLOGIES, TopologyLike, find_topology
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.transport.base import Pending, Transport
from lightning_adpsgd.weights.streams import Mark, has_streams
from tests import warm
from tests.threads import ThreadTransport

ALL_TOPOLOGIES = list(TOPOLOGIES)
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17)
# Of waits for what must come, on a machine on which any process may stall for 10 s.
PATIENCE_S = 60.0
PATIENCE = timedelta(seconds=PATIENCE_S)
PROGRAM_S = 150.0  # of a whole program, with its imports
OPEN_FILES = Path("/proc/self/fd")
# Those that were alive when the test began; `fixtures` keeps them.
EARLIER_THREADS = set[threading.Thread]()
# Threads that ask a rendezvous.
_ASKING = ("adpsgd-members", "adpsgd-pool")

T = TypeVar("T")


def num_gpus() -> int:
    """NVIDIA GPUs of this machine.

    To ask CUDA where there is none would make it useless in learners that are forked.
    """
    return torch.cuda.device_count() if Path("/dev/nvidiactl").exists() else 0


def free_port() -> int:
    """One below those that the system gives to outgoing connections.

    Nobody holds it before its user does. So that no two tests which run at a time get
    the same, each process of pytest-xdist has its own ports.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        port = random.SystemRandom().randrange(20_000 + number, 32_000, count)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


@contextmanager
def default_timeout(seconds: float) -> Iterator[None]:
    """A program that has set a timeout for all sockets, as downloaders do."""
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(None)


def together(actions: Sequence[Callable[[], T]]) -> list[T]:
    """Runs every action in a thread of its own; raises the first exception at once."""
    results: queue.SimpleQueue[tuple[int, T | BaseException]] = queue.SimpleQueue()

    def run(place: int, action: Callable[[], T]) -> None:
        try:
            results.put((place, action()))
        except BaseException as error:
            results.put((place, error))

    for place, action in enumerate(actions):
        threading.Thread(target=run, args=(place, action), daemon=True).start()
    done: dict[int, T] = {}
    while len(done) < len(actions):
        place, result = results.get(timeout=3 * PATIENCE_S)
        if isinstance(result, BaseException):
            raise result
        done[place] = result
    return [done[place] for place in range(len(actions))]


def exists(name: str, size: int) -> bool:
    """Whether there is such a topology of so many super-learners."""
    try:
        find_topology(name).check_size(size)
    except ValueError:
        return False
    return True


def topologies_of(*sizes: int) -> list[tuple[str, int]]:
    """Every topology with each of these sizes of which it exists."""
    pairs = ((name, size) for name in ALL_TOPOLOGIES for size in sizes)
    return [(name, size) for name, size in pairs if exists(name, size)]


def mixing_rounds(
    topology: TopologyLike, size: int, num_rounds: int = 6
) -> list[Tensor]:
    """The first matrices of a topology."""
    return [find_topology(topology).matrix(size, r, 0) for r in range(num_rounds)]


def mixing_of(
    topology: TopologyLike, size: int, gain: float = 1.0, every: int = 1
) -> Mixing:
    """T of each step as the oracle takes it, with a round every so many steps."""
    found = find_topology(topology)

    def mixing(step: int) -> Tensor:
        round, rest = divmod(step + 1, every)
        matrix = identity(size)
        if not rest:
            matrix = with_gain(found.matrix(size, round - 1, 0), gain)
        return matrix.to(torch.get_default_device())

    return mixing


def take_first(states: Iterator[T], num: int) -> list[T]:
    """The first states of the oracle, which has no end."""
    return list(itertools.islice(states, num))


def random_rows(size: int, length: int = 7, seed: int = 0) -> Tensor:
    """One random float64 weight vector per super-learner: [size, length]."""
    generator = torch.Generator("cpu").manual_seed(seed)
    rows = torch.randn(
        size, length, dtype=torch.float64, generator=generator, device="cpu"
    )
    return rows.to(torch.get_default_device())


def asks(mixing: Tensor, round: int, index: int) -> list[int]:
    """`Topology.asks` read off a matrix, with each edge in all its rounds."""
    takes = (mixing[:, index] > 0).tolist()
    gives = (mixing[index] > 0).tolist()
    turn = round.bit_count() % 2 == 0
    return [
        j
        for j in range(len(mixing))
        if j != index and takes[j] and (not gives[j] or (index < j) == turn)
    ]


def round_mixers(
    rows: Tensor,
    topology: TopologyLike,
    gain: float = 1.0,
    carrier: type[ThreadTransport] = ThreadTransport,
) -> tuple[list[Tensor], list[RoundMixer]]:
    """One vector and one mixer over it for each row."""
    vectors = [row.clone() for row in rows]
    schedule = Schedule(find_topology(topology), len(rows), gain)
    mixers = [
        RoundMixer([vector], transport, SuperLearnerGroup(), schedule, PATIENCE)
        for vector, transport in zip(vectors, carrier.connect(len(rows)), strict=True)
    ]
    return vectors, mixers


def engines(
    rows: Tensor, topology: TopologyLike, gain: float = 1.0, **options: Any
) -> tuple[list[Tensor], list[Gossip]]:
    """One vector and one asynchronous engine (not started) for each row."""
    vectors = [row.clone() for row in rows]
    across = ThreadTransport.connect(len(rows))
    return vectors, engines_over(across, vectors, topology, gain, **options)


def engines_over(
    transports: Sequence[Transport],
    vectors: Sequence[Tensor],
    topology: TopologyLike,
    gain: float = 1.0,
    groups: Sequence[SuperLearnerGroup] | None = None,
    **options: Any,
) -> list[Gossip]:
    """One engine (not started) for each connection and its vector."""
    schedule = Schedule(find_topology(topology), len(vectors), gain)
    dials = GossipOptions(**{"timeout": PATIENCE, **options})
    groups = groups or [SuperLearnerGroup() for _ in vectors]
    return [
        Gossip([vector], across, group, Members.fixed(schedule, across.index), dials)
        for across, vector, group in zip(transports, vectors, groups, strict=True)
    ]


def engines_of_super_learners(
    rows: Tensor, size: int, topology: TopologyLike, gain: float = 1.0, **options: Any
) -> tuple[list[list[Tensor]], list[list[Gossip]]]:
    """For each row the vectors and engines (not started) of that many learners."""
    vectors = [[row.clone() for _ in range(size)] for row in rows]
    groups = [_groups_of_one(size) for _ in rows]
    counterparts = [
        engines_over(
            ThreadTransport.connect(len(rows)),
            [of_row[n] for of_row in vectors],
            topology,
            gain,
            [group[n] for group in groups],
            **options,
        )
        for n in range(size)
    ]
    return vectors, [list(gossips) for gossips in zip(*counterparts, strict=True)]


def _groups_of_one(size: int) -> Sequence[SuperLearnerGroup]:
    """How each learner of a super-learner reaches the others of it."""
    return [SuperLearnerGroup()] if size == 1 else ThreadSuperLearner.connect(size)


def until_any(steps: Sequence[Callable[[], int]]) -> list[int]:
    """Takes steps together until one of them returns more than 0, 2000 at most."""
    found = [0] * len(steps)
    for _ in range(2000):
        if any(found):
            break
        found = together(steps)
    return found


@contextmanager
def running(gossips: Sequence[Gossip]) -> Iterator[None]:
    """Starts engines, settles and stops them together; aborts them on an error."""
    for gossip in gossips:
        gossip.start()
    try:
        yield
        settle(gossips)
        together([gossip.stop for gossip in gossips])
    finally:
        for gossip in gossips:
            gossip.abort()


def settle(gossips: Sequence[Gossip]) -> None:
    """What the learners of a job do before they take their mean."""
    together([gossip.pause for gossip in gossips])
    together([gossip.settle for gossip in gossips])


def engine_threads() -> list[str]:
    """Names of the engine's threads that this test has started and that are alive.

    An earlier one may have left a thread that waits a minute for a lost connection.
    Or it has left one that goes on to ask a rendezvous, each time by a new thread.
    """
    mine = {*threading.enumerate()} - EARLIER_THREADS
    asks = any(each.is_alive() and each.name in _ASKING for each in EARLIER_THREADS)
    names = [each.name for each in mine if each.name.startswith("adpsgd")]
    return [name for name in names if not (asks and name == "adpsgd-rendezvous")]


class ThreadSuperLearner(SuperLearnerGroup):
    """The learners of one super-learner as threads of this process."""

    def __init__(
        self, index: int, boxes: "Boxes", holds_all: bool = True, sections: Any = None
    ) -> None:
        super().__init__(None, holds_all, sections)
        self.index, self.size = index, len(boxes)
        self._boxes = boxes

    @classmethod
    def connect(
        cls, size: int, holds_all: bool = True, sections: Any = None
    ) -> list[Self]:
        """The super-learner's learners, from the first to the last shard."""
        boxes: Boxes = [[queue.SimpleQueue() for _ in range(size)] for _ in range(size)]
        return [cls(index, boxes, holds_all, sections) for index in range(size)]

    @override
    def agree(self, numbers: Sequence[int], timeout: timedelta) -> list[int]:
        found = torch.tensor(numbers, device="cpu")
        return torch.stack(self._cross(found, timeout)).amax(0).tolist()

    @override
    def gather(self, part: Tensor, into: list[Tensor], timeout: timedelta) -> None:
        for place, given in zip(into, self._cross(part, timeout), strict=True):
            place.copy_(given)

    @override
    def share(self, part: Tensor, owner: int, timeout: timedelta) -> None:
        part.copy_(self._cross(part, timeout)[owner])

    def _cross(self, mine: Tensor, timeout: timedelta) -> list[Tensor]:
        for box in self._boxes[self.index]:
            box.put(mine.clone())
        sources = [self._boxes[source][self.index] for source in range(self.size)]
        return [box.get(timeout=timeout.total_seconds()) for box in sources]


Boxes = list[list["queue.SimpleQueue[Tensor]"]]


class Swap(NamedTuple):
    """One pair of messages that cross: what goes to a peer, what comes from it."""

    peer: int
    outgoing: Tensor | None
    incoming: Tensor | None


def swap(
    transport: Transport, lane: int, swaps: Sequence[Swap], timeout: timedelta
) -> None:
    """Sends and receives at the same time, with any number of peers."""
    pending = [
        transport.post_receive(s.peer, lane, s.incoming)
        for s in swaps
        if s.incoming is not None
    ]
    pending += [
        transport.post_send(s.peer, lane, s.outgoing)
        for s in swaps
        if s.outgoing is not None
    ]
    for operation in pending:
        operation.wait(timeout)


class DeviceThreadTransport(ThreadTransport):
    """Takes tensors of a GPU, and like NCCL lets streams wait instead of threads."""

    on_device = True

    @override
    def post_receive(self, peer: int, lane: int, into: Tensor) -> Pending:
        return _MarkedReceipt(self._mailboxes.box(peer, self.index, lane), into)

    @override
    def post_send(self, peer: int, lane: int, tensor: Tensor) -> Pending:
        sent, mark = tensor.clone(), Mark(tensor.device)
        mark.set()
        box: Any = self._mailboxes.box(self.index, peer, lane)
        box.put((sent, mark))
        return _Done()

    @override
    def post_mean(self, vector: Tensor) -> Pending:
        return _MeanByWayOfTheHost(vector, super().post_mean(vector.cpu()))


class _MeanByWayOfTheHost:
    def __init__(self, vector: Tensor, inner: Any) -> None:
        self._vector, self._inner = vector, inner

    def wait(self, timeout: timedelta) -> None:
        self._inner.wait(timeout)
        self._vector.copy_(self._inner._vector)


class _MarkedReceipt:
    def __init__(self, box: Any, into: Tensor) -> None:
        self._box, self._into = box, into

    def wait(self, timeout: timedelta) -> None:
        sent, mark = self._box.get(timeout=timeout.total_seconds())
        mark.follow()
        self._into.copy_(sent)
        if has_streams(sent.device):
            sent.record_stream(torch.accelerator.current_stream(sent.device))


class _Done:
    def wait(self, timeout: timedelta) -> None:
        """A mailbox takes a message at once."""


class HeldTransport(Transport):
    """Payloads wait at a gate, words pass: an exchange can be held under way."""

    def __init__(self, inner: Transport) -> None:
        self.index, self.size = inner.index, inner.size
        self.gate, self.arrived = threading.Event(), threading.Event()
        self._inner = inner

    @override
    def post_receive(self, peer: int, lane: int, into: Tensor) -> Pending:
        pending = self._inner.post_receive(peer, lane, into)
        return _Held(pending, self) if into.dtype == torch.uint8 else pending

    @override
    def post_send(self, peer: int, lane: int, tensor: Tensor) -> Pending:
        return self._inner.post_send(peer, lane, tensor)

    @override
    def post_mean(self, vector: Tensor) -> Pending:
        return self._inner.post_mean(vector)


class _Held:
    def __init__(self, inner: Pending, transport: HeldTransport) -> None:
        self._inner, self._transport = inner, transport

    def wait(self, timeout: timedelta) -> None:
        self._transport.arrived.set()
        assert self._transport.gate.wait(timeout.total_seconds())
        self._inner.wait(timeout)


def num_open_files() -> int:
    """The least number within half a second: a server closes its ends later."""
    counts = list[int]()
    for _ in range(10):
        counts.append(len(os.listdir(OPEN_FILES)))
        time.sleep(0.05)
    return min(counts)


def until(condition: Callable[[], bool], what: str, every_s: float = 0.001) -> None:
    """Waits for what other threads bring about; fails after the tests' patience.

    A long wait is looked at less often, up to 5 ms: others need the processor.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(every_s)
        every_s = max(every_s, min(1.05 * every_s, 0.005))


class Outcome(NamedTuple):
    """How a forked process ended."""

    value: Any
    error: str
    exit_code: int


def forked(
    num: int, action: Callable[[int], Any], seconds: float = 100
) -> list[Outcome]:
    """Runs `action(rank)` in forked processes, which skip the imports.

    Processes that still run after the time are killed: exit code -9.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(num)]
    processes = [
        context.Process(target=_report, args=(action, rank, pipes[rank][1]))
        for rank in range(num)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    deadline = time.monotonic() + seconds
    try:
        outcomes = [_collect(receiver, deadline) for receiver, _ in pipes]
        return [
            Outcome(value, error, _end(process, deadline))
            for process, (value, error) in zip(processes, outcomes, strict=True)
        ]
    finally:
        # A test that is ended by its time limit leaves nobody behind.
        for process in processes:
            process.kill()


def in_fresh_process(
    action: Callable[[str], Any], argument: str, finalizes: bool = True
) -> Any:
    """What a function of a module returns, as JSON, in a process of its own.

    Whoever has made a Trainer has asked for GPUs, and its children may not fork again.
    To take all modules apart at its end, as an interpreter does, takes half a second.
    """
    program = (
        "import json, sys\n"
        f"from {action.__module__} import {action.__name__} as action\n"
        "print(json.dumps(action(sys.argv[1])))"
    )
    done = subprocess.run(
        [warm.python(), *["-Xfinalize"] * finalizes, "-c", program, argument],
        cwd=Path(__file__).parents[1],
        # What Lightning chooses itself may be another test's by the time it is used.
        env={**os.environ, "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def without(*packages: str) -> str:
    """The first lines of a warm program in which packages cannot be imported."""
    return f"""
import sys
is_one = lambda name: name.partition(".")[0] in {packages}
sys.meta_path[:] = [finder for finder in sys.meta_path if not is_one(finder.__module__)]
for name in filter(is_one, [*sys.modules, *{packages}]):
    sys.modules[name] = None
"""


def _report(action: Callable[[int], Any], rank: int, sender: Connection) -> None:
    torch.set_num_threads(1)
    try:
        # Plain: multiprocessing's own pickles share tensors with a process that ends.
        sender.send_bytes(pickle.dumps((action(rank), "")))
    except BaseException:
        sender.send_bytes(pickle.dumps((None, traceback.format_exc())))
        raise


def _collect(receiver: Connection, deadline: float) -> tuple[Any, str]:
    try:
        if receiver.poll(max(0.0, deadline - time.monotonic())):
            return pickle.loads(receiver.recv_bytes())
    except EOFError:
        return None, "ended without a word"
    return None, "still ran at the end of the test's patience"


def _end(process: Any, deadline: float) -> int:
    process.join(max(0.1, deadline - time.monotonic()))
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode


def memory_of_tensors() -> int:
    """Bytes of all tensors of this process, those that share memory once."""
    gc.collect()  # garbage of other tests would be freed between two calls
    tensors = [one for one in gc.get_objects() if type(one) is Tensor]
    storages = [tensor.untyped_storage() for tensor in tensors if not tensor.is_meta]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def expect_all_to_end(program: Callable[[], None]) -> None:
    """Runs a program in a process of its own, and waits for all that it forks to end.

    The program becomes the leader of a session, and is to be killed.
    """
    open_while_one_is_alive, copy = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=_lead, args=[program])
    process.start()
    assert process.pid is not None
    os.close(copy)
    process.join()
    try:
        assert process.exitcode == -signal.SIGKILL
        ended, _, _ = select.select([open_while_one_is_alive], [], [], PATIENCE_S)
        assert ended
    finally:
        os.close(open_while_one_is_alive)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _lead(program: Callable[[], None]) -> None:
    os.setsid()
    program()
