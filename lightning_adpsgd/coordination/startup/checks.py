"""What is checked before the learners of a job begin.

That all have come; that they run the same versions with the same dials; that the
learners of a super-learner are on one machine; that learners reach one another where
Gloo will listen; later, that all have the same model. What is wrong is one message,
the same in every learner, which names hosts and remedies.
"""

import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from lightning_adpsgd.coordination.startup.introductions import (
    Introduction,
    disagreements,
    scattered,
    settings_of,
)
from lightning_adpsgd.coordination.startup.reachability import (
    Doorbell,
    Endpoint,
    Place,
    explain,
    loopback_traps,
    neighbours,
    ring_all,
)
from lightning_adpsgd.coordination.startup.rollcall import (
    NOTICE_S,
    RollCall,
    StartUpError,
)
from lightning_adpsgd.dials import Dials
from lightning_adpsgd.transport.network_interfaces import (
    VARIABLE,
    NoSuchInterface,
    gloo_addresses,
    interfaces,
)
from lightning_adpsgd.weights.flat import first_difference

_log = logging.getLogger(__name__)
_PROBE_TIMEOUT = timedelta(seconds=5)
_MOST_LINES = 8


class Seats(NamedTuple):
    """Where a launcher put a learner.

    Attributes:
        per_machine: Learners that the Trainer has on each machine, its `devices`.
        own: The number of this learner on its machine, from 0.
    """

    per_machine: int
    own: int

    def trouble(self) -> str:
        """Why the Trainer has no device for this learner; empty if it has."""
        if self.own < self.per_machine:
            return ""
        return (
            f"it is learner {self.own + 1} of its machine, and `Trainer(devices=)` is "
            f"{self.per_machine}. Start as many learners on each host as `devices` says"
        )


def open_store(
    address: str, port: int, rank: int, world_size: int, patience: timedelta
) -> Store:
    """Connects to the job's store, as torch does when it makes its process group.

    Learner 0 holds the store, unless `torchrun` does. Torch may connect once more.

    Raises:
        StartUpError: It cannot be held, or not be reached within the patience.
    """
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    holds = rank == 0 and not by_launcher
    if not holds:
        _await_listener(address, port, rank, patience)
    try:
        return TCPStore(
            address,
            port,
            world_size,
            is_master=holds,
            timeout=patience,
            wait_for_workers=False,
            multi_tenant=holds,
        )
    except DistError as error:
        raise StartUpError(
            f"learner {rank} on host {socket.gethostname()} could not "
            f"{'hold' if holds else 'join'} the job's store at {address}:{port}: "
            f"{str(error).splitlines()[0]}. MASTER_ADDR must name the host of learner "
            "0, and MASTER_PORT a port that nothing else uses there"
        ) from error


def check_start(
    store: Store,
    rank: int,
    world_size: int,
    dials: Dials,
    seats: Seats,
    patience: timedelta,
) -> list[str]:
    """Brings all learners together, before any process group is made.

    Args:
        store: The job's.
        rank: This learner.
        world_size: Number of learners.
        dials: Must agree.
        seats: Where the launcher put this learner.
        patience: For how long to wait for a learner that has not come.

    Returns:
        What messages call the learners: "learner 3 on host node17".

    Raises:
        StartUpError: Says what is wrong on which host, and what to do.
    """
    # torchrun may keep the store of learners that it has ended and starts again.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"lightning_adpsgd/attempt/{attempt}", store)
    # Counted by the store, because every learner comes to each start once.
    start = (store.add("starts", 1) - 1) // world_size
    own = PrefixStore(f"start/{start}", store)
    size = seats.per_machine
    names = [f"learner {r} (machine {r // size})" for r in range(world_size)]
    roll = RollCall(own, rank, world_size, patience, names)
    addresses, trouble = _find_addresses()
    with closing(Doorbell(rank, addresses)) as bell:
        settings = settings_of(dials, {"world size": world_size})
        introduction = Introduction(
            _place(rank, bell), settings, seats.trouble() or trouble
        )
        node_size = size if dials.super_learner_size == "node" else 1
        places = _introduce(roll, introduction, node_size)
        roll.names = [str(place) for place in places]
        _check_ways(roll, places, rank)
    return roll.names


def check_same_layout(
    store: Store, rank: int, world_size: int, layout: str, patience: timedelta
) -> None:
    """Refuses learners whose models differ in the name, shape or dtype of a weight.

    Args:
        store: The job's, under a prefix that nothing else uses.
        rank: This learner.
        world_size: Number of learners.
        layout: `FlatParameters.layout()` of this learner.
        patience: For how long to wait for a learner that has not come.

    Raises:
        StartUpError: Names the first weight in which learners differ from learner 0.
    """
    digest = sha256(layout.encode()).hexdigest()
    if rank == 0:
        # The text is read only by learners that differ: with many weights it is long.
        store.set("layout", layout)
        store.set("layout/digest", digest)
    same = store.get("layout/digest").decode() == digest
    difference = "" if same else first_difference(store.get("layout").decode(), layout)
    word = json.dumps([f"learner {rank} on host {socket.gethostname()}", difference])
    RollCall(store, rank, world_size, patience).ask("model", word, _judge_models)


def _introduce(
    roll: RollCall, introduction: Introduction, node_size: int
) -> list[Place]:
    def judge(words: list[str]) -> str:
        told = [Introduction.from_json(word) for word in words]
        places = [one.place for one in told]
        _refuse(
            [
                *disagreements(told),
                *(f"{one.place}: {one.trouble}" for one in told if one.trouble),
                *loopback_traps(places),
                *scattered(places, node_size),
            ]
        )
        return json.dumps([asdict(place) for place in places])

    places = json.loads(roll.ask("introduction", introduction.to_json(), judge))
    return [Place.from_dict(place) for place in places]


def _check_ways(roll: RollCall, places: Sequence[Place], rank: int) -> None:
    machines = [place.machine for place in places]
    targets = [places[other] for other in neighbours(rank, machines)]
    met = ring_all(targets, _PROBE_TIMEOUT)

    def judge(words: list[str]) -> str:
        # One line for each pair of hosts: what its learners say hardly differs.
        lines = {
            (machines[source], machines[target]): explain(
                places[source], places[target], Endpoint(*end), wrong
            )
            for source, word in enumerate(words)
            for target, end, wrong in json.loads(word)
        }
        _refuse(list(lines.values()))
        return ""

    roll.ask("connections", json.dumps(met), judge)


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


def _place(rank: int, bell: Doorbell) -> Place:
    chosen = os.environ.get(VARIABLE, "")
    host = socket.gethostname()
    return Place(rank, host, _machine(), bell.endpoints, interfaces(), chosen)


def _machine() -> str:
    """Differs between machines of one name, and between containers of one machine."""
    parts = [socket.gethostname()]
    for read in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        lambda: os.readlink("/proc/self/ns/net"),
    ):
        try:
            parts.append(read())
        except OSError:
            continue
    return " ".join(parts)


def _find_addresses() -> tuple[list[str], str]:
    """Where Gloo will listen, or why it cannot."""
    try:
        return gloo_addresses(), ""
    except NoSuchInterface as error:
        return [], str(error)


def _await_listener(address: str, port: int, rank: int, patience: timedelta) -> None:
    """Waits until something listens: torch would retry without a word."""
    begin, noticed, pause_s = time.monotonic(), False, 0.01
    while wrong := _visit(address, port):
        waited_s = time.monotonic() - begin
        message = (
            f"learner {rank} on host {socket.gethostname()} cannot reach the job's "
            f"store at {address}:{port} after {waited_s:.0f} s: {wrong}. MASTER_ADDR "
            "must be an address of the host of learner 0 that all hosts reach, and a "
            "firewall must let MASTER_PORT through; see whether learner 0 runs"
        )
        if waited_s > patience.total_seconds():
            raise StartUpError(message)
        if waited_s > NOTICE_S and not noticed:
            noticed = True
            _log.warning("%s; still trying", message)
        time.sleep(pause_s)
        pause_s = min(1.0, 1.5 * pause_s)


def _visit(address: str, port: int) -> str:
    """Why nothing can be heard there; empty if something listens."""
    try:
        socket.create_connection((address, port), 5).close()
    except OSError as error:
        return str(error)
    return ""
