"""What TLS costs an exchange: two hosts alternate exchanges with and without it.

The two learners, on emulated hosts, are joined by links of islands twice: once plain,
as `LIGHTNING_ADPSGD_UNPROTECTED=1` lets them be, and once with token and TLS. The same
two processes exchange over one and over the other in turn. On a shaped link a chunk is
encrypted while another crosses, so the clock shows less than what processors do.
"""

import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import hosts, learners
from benchmarks.checksums import NUM_ELEMENTS, Switch, Taken, beside_bare, one_exchange
from benchmarks.learners import Place
from benchmarks.results import Report, Row
from benchmarks.timing import print_row, spread
from lightning_adpsgd.gossip.engine import Gossip, GossipOptions
from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.transport.links.credentials import FOLDER, Credentials
from lightning_adpsgd.transport.links.issuing import issue
from lightning_adpsgd.transport.links.peer_info import PeerInfo
from lightning_adpsgd.transport.links.sockets import Address
from lightning_adpsgd.transport.links.transport import LinkTransport

TURNS, TURNS_QUICK, WARMUPS = 12, 4, 2  # even, so that neither is first more often
LIMIT_S = 170.0
TIMEOUT = timedelta(minutes=1)
WITH, WITHOUT = "token and TLS", "neither"
LINKS = {"unshaped": None, "10 Gbit/s": "10gbit", "1 Gbit/s": "1gbit"}


def program(
    addresses: list[str], folder: Path, turns: int
) -> Callable[[Place], list[Taken]]:
    """Measures exchanges in pairs: one with TLS and one without."""

    def run(place: Place) -> list[Taken]:
        dist.init_process_group("gloo", timeout=TIMEOUT)
        schedule = Schedule(find_topology("ring"), num_super_learners=2)
        taken = list[Taken]()
        # The `Switch` leaves nothing out here: it only has the clocks of one exchange.
        watch = Switch()
        kinds = {
            WITH: Credentials.from_environment({FOLDER: str(folder)}),
            WITHOUT: Credentials(unprotected=True),
        }
        with ExitStack() as stack:
            engines = {
                kind: stack.enter_context(_engine(addresses, credentials, schedule))
                for kind, credentials in kinds.items()
            }
            rounds = {kind: itertools.count(1) for kind in kinds}
            for turn in range(WARMUPS + turns):
                order = (WITH, WITHOUT) if turn % 2 else (WITHOUT, WITH)
                pair = {
                    kind: one_exchange(engines[kind], schedule, rounds[kind], watch)
                    for kind in order
                }
                taken += [pair[WITH], pair[WITHOUT]]
        return taken[2 * WARMUPS :]

    return run


@contextmanager
def _engine(
    addresses: list[str], credentials: Credentials, schedule: Schedule
) -> Iterator[Gossip]:
    index = dist.get_rank()
    info = PeerInfo(index, f"process {index}", "benchmark", model="")
    transport, ready = LinkTransport(info, credentials), threading.Event()
    here = Address(addresses[index], 0)
    listener = transport.listen(here, lambda *_: ready.set())
    told: list[str] = ["", ""]
    dist.all_gather_object(told, str(listener.address))
    transport.connect(1 - index, Address.parse(told[1 - index]))
    assert ready.wait(TIMEOUT.total_seconds())
    members = Members.fixed(schedule, index)
    weights, group = torch.randn(NUM_ELEMENTS), SuperLearnerGroup()
    engine = Gossip([weights], transport, group, members, GossipOptions())
    dist.barrier()
    engine.start()
    try:
        yield engine
        engine.pause()
        dist.barrier()
        engine.settle()
        engine.stop()
        dist.barrier()
    finally:
        listener.close()
        transport.close()


def rows(link: str, asking: list[Taken], answering: list[Taken]) -> Iterator[Row]:
    """A row with and one without; each exchange is compared with that beside it."""
    for first, name in enumerate((WITH, WITHOUT)):
        wall = spread(1e3 * taken.wall for taken in asking[first::2])
        ends = answering[first::2]
        ratio = beside_bare([t.wall for t in asking], first)
        processor = spread(1e3 * t.processor for t in ends).median
        details = {
            "processor ms, of the end that answers": processor,
            "of that without": beside_bare([t.processor for t in answering], first),
        }
        print_row(f"{link}, {name}", f"{wall:.1f} ms", f"{ratio:.3f}")
        case = {"link": link, "protection": name}
        yield Row(case, wall, "ms an exchange", ratio, details=details)


def measure(quick: bool = False) -> Report:
    """Exchanges with and without, on an unshaped link and on two shaped ones."""
    report = Report(
        f"What token and TLS cost an exchange of {4e-6 * NUM_ELEMENTS:.0f} MB "
        "(float32) between two hosts.",
        limit="neither",
        notes=["Both hosts share the cores of this machine."],
    )
    if hosts.are_missing(report):
        return report
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, hosts.emulated(2) as emulated:
        folder = Path(name) / "credentials"
        issue(folder, days=1)
        for link, rate in LINKS.items():
            emulated.shape(rate)
            turns = TURNS_QUICK if quick else TURNS
            run = program(emulated.addresses, folder, turns)
            report.rows += rows(link, *learners.run(run, 2, LIMIT_S, emulated))
    return report
