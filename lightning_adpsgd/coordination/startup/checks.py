"""The checks before the learners of a job start.

All learners must have arrived, with the same versions and the same options. The
learners of a super-learner must be on one machine. Learners must reach one another at
the addresses that Gloo will use. Later, all must have the same model. All problems are
reported in one message, the same in every learner, which names hosts and remedies.
"""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from datetime import timedelta
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from lightning_adpsgd.coordination.startup.barrier import (
    StartupBarrier,
    StartUpError,
    wait_while,
)
from lightning_adpsgd.coordination.startup.learner_info import (
    LearnerInfo,
    disagreements,
    scattered,
    settings_of,
)
from lightning_adpsgd.coordination.startup.reachability import (
    LearnerLocation,
    ReachabilityServer,
    explain,
    loopback_traps,
    neighbours,
    visit_all,
)
from lightning_adpsgd.coordination.store import store_at
from lightning_adpsgd.files import boot_id
from lightning_adpsgd.transport.links.sockets import Address, probe
from lightning_adpsgd.transport.network_interfaces import (
    VARIABLE,
    NoSuchInterface,
    gloo_addresses,
    interfaces,
    is_loopback,
)
from lightning_adpsgd.weights.flat import first_difference
from lightning_adpsgd.weights.worker import BackgroundWorker

_VISIT_TIMEOUT = timedelta(seconds=5)
_MOST_LINES, _BACKLOG = 8, 2048


class LaunchPlacement(NamedTuple):
    """The placement of a learner by its launcher.

    Attributes:
        per_machine: number of learners on each machine, `devices`.
        own: number of this learner on its machine, from 0.
    """

    per_machine: int
    own: int

    def trouble(self) -> str:
        """The reason why Lightning has no device for this learner; may be empty."""
        if self.own < self.per_machine:
            return ""
        return (
            f"it is learner {self.own + 1} of its machine, and `devices` is "
            f"{self.per_machine}. Start as many learners on each host as `devices` says"
        )


def open_store(
    address: str, port: int, rank: int, world_size: int, patience: timedelta
) -> Store:
    """Connects to the job's store, as torch does for its process group.

    Learner 0 hosts the store, unless `torchrun` does. torch may connect once more.

    Raises:
        StartUpError: The store cannot be hosted, or not be reached within the patience.
    """
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    holds, host = rank == 0 and not by_launcher, socket.gethostname()
    if not holds:
        _await_listener(address, port, rank, patience)
    # In a thread: torch tries silently, without any bound where a listener is mute.
    worker = BackgroundWorker("adpsgd-store", torch.device("cpu"))
    found = worker.submit(
        lambda: store_at(
            _listener_at(address, port) if holds else None,
            *(address, port, world_size),
            is_master=holds,
            timeout=patience,
            wait_for_workers=False,
            multi_tenant=holds,
        )
    )

    def describe(_: object, waited_s: float) -> str:
        return (
            f"learner 0 on host {host} hosts the job's store, and has not reached it "
            f"at {address}:{port} for {waited_s:.0f} s: MASTER_ADDR must lead to the "
            "host of learner 0"
            if holds
            else f"learner {rank} on host {host} has reached {address}:{port}, and no "
            f"store has answered there for {waited_s:.0f} s: see whether learner 0 has "
            "ended; MASTER_PORT must be a port that nothing else uses there"
        )

    try:
        wait_while(lambda: not found.done(), patience, describe)
        return found.result()
    except StartUpError:
        raise
    except RuntimeError as error:  # in torch 2.6 a port in use is no DistError
        raise StartUpError(
            f"learner {rank} on host {host} could not "
            f"{'host' if holds else 'join'} the job's store at {address}:{port}: "
            f"{str(error).splitlines()[0]}. MASTER_ADDR must name the host of learner "
            "0, and MASTER_PORT a port that nothing else uses there"
        ) from error
    finally:
        worker.stop(0.0)


def _listener_at(address: str, port: int) -> int | None:
    """A socket that listens only at the interface that was named.

    None leaves the choice to torch, which listens at all interfaces: for a port that
    another process may have, and for the names that docs/security.md lists.
    """
    with suppress(OSError):
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        family, *_, place = found[0]
        host = str(place[0])
        is_ambiguous = is_loopback(host) or len({place[0] for *_, place in found}) > 1
        if is_ambiguous and address not in ("localhost", host):
            return None
        server = socket.create_server(place, family=family, backlog=_BACKLOG)
        return server.detach()
    return None


def check_start(
    store: Store,
    rank: int,
    world_size: int,
    dials: Mapping[str, Any],
    placement: LaunchPlacement,
    patience: timedelta,
) -> None:
    """Waits for all learners and checks them, before any process group is made.

    Args:
        dials: settings that must be equal in all learners.

    Raises:
        StartUpError: A check failed; it gives the host, the problem and the remedy.
    """
    # torchrun may keep the store of learners that it has ended and starts again.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"lightning_adpsgd/attempt/{attempt}", store)
    # Counted by the store, because every learner takes part in each start once.
    start = (store.add("starts", 1) - 1) // world_size
    own = PrefixStore(f"start/{start}", store)
    size = placement.per_machine
    names = [f"learner {r} (machine {r // size})" for r in range(world_size)]
    barrier = StartupBarrier(own, rank, world_size, patience, names)
    try:
        addresses, trouble = gloo_addresses(), placement.trouble()
    except NoSuchInterface as error:
        addresses, trouble = [], placement.trouble() or str(error)
    with closing(ReachabilityServer(rank, addresses)) as server:
        settings = settings_of(dials, {"world size": world_size})
        chosen, host = os.environ.get(VARIABLE, ""), socket.gethostname()
        where = server.endpoints, interfaces(), chosen
        own_location = LearnerLocation(rank, host, _machine(), *where)
        info = LearnerInfo(own_location, settings, trouble)
        node_size = size if dials["super_learner_size"] == "node" else 1
        locations = _meet_learners(barrier, info, node_size)
        barrier.names = [str(location) for location in locations]
        _check_reachability(barrier, locations, rank)


def check_same_layout(
    store: Store, rank: int, world_size: int, layout: str, patience: timedelta
) -> None:
    """Refuses models that differ in a weight's name, shape, memory format or dtype.

    Args:
        store: store of the job, under a prefix that nothing else uses.
        layout: `FlatParameters.layout()` of this learner.

    Raises:
        StartUpError: A model differs; it names the first weight unlike learner 0's.
    """
    digest = sha256(layout.encode()).hexdigest()
    if rank == 0:
        # The text is read only by learners that differ: with many weights it is long.
        store.set("layout", layout)
        store.set("layout/digest", digest)
    same = store.get("layout/digest").decode() == digest
    difference = "" if same else first_difference(store.get("layout").decode(), layout)
    word = json.dumps([f"learner {rank} on host {socket.gethostname()}", difference])
    StartupBarrier(store, rank, world_size, patience).ask("model", word, _judge_models)


def _meet_learners(
    barrier: StartupBarrier, info: LearnerInfo, node_size: int
) -> list[LearnerLocation]:
    def judge(words: list[str]) -> str:
        told = [LearnerInfo.from_json(word) for word in words]
        locations = [one.place for one in told]
        _refuse(
            [
                *disagreements(told),
                *(f"{one.place}: {one.trouble}" for one in told if one.trouble),
                *loopback_traps(locations),
                *scattered(locations, node_size),
            ]
        )
        return json.dumps([asdict(location) for location in locations])

    locations = json.loads(barrier.ask("introduction", json.dumps(asdict(info)), judge))
    return [LearnerLocation.from_dict(location) for location in locations]


def _check_reachability(
    barrier: StartupBarrier, locations: Sequence[LearnerLocation], rank: int
) -> None:
    machines = [location.machine for location in locations]
    targets = [locations[other] for other in neighbours(rank, machines)]
    met = visit_all(targets, _VISIT_TIMEOUT)

    def judge(words: list[str]) -> str:
        # One line for each pair of hosts, because its learners report nearly the same.
        lines = {
            (machines[source], machines[target]): explain(
                locations[source], locations[target], Address(*end), wrong
            )
            for source, word in enumerate(words)
            for target, end, wrong in json.loads(word)
        }
        _refuse(list(lines.values()))
        return ""

    barrier.ask("connections", json.dumps(met), judge)


def _judge_models(words: list[str]) -> str:
    told = [json.loads(word) for word in words]
    _refuse(
        [
            f"the model of {name} differs from that of {told[0][0]}: {difference}. All "
            "learners must build the same model: look for a choice that depends on the "
            "rank, the host or its data, and for different copies of the program"
            for name, difference in told
            if difference
        ]
    )
    return ""


def _refuse(wrong: Sequence[str]) -> None:
    if not wrong:
        return
    more = len(wrong) - _MOST_LINES
    shown = [*wrong[:_MOST_LINES], *([f"... and {more} more"] if more > 0 else [])]
    raise StartUpError("\n".join(["training cannot start:", *shown]))


def _machine() -> str:
    # It differs between machines of one name, and between containers of one machine.
    parts = [socket.gethostname(), boot_id()]
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


def _await_listener(address: str, port: int, rank: int, patience: timedelta) -> None:
    # Torch would retry silently.
    def describe(wrong: object, waited_s: float) -> str:
        return (
            f"learner {rank} on host {socket.gethostname()} cannot reach the job's "
            f"store at {address}:{port} after {waited_s:.0f} s: {wrong}. MASTER_ADDR "
            "must be an address of the host of learner 0 that all hosts reach, and a "
            "firewall must allow MASTER_PORT; check whether learner 0 runs"
        )

    store = Address(address, port)
    wait_while(lambda: probe(store), patience, describe, longest_pause_s=1.0)
