"""The links of a job: every learner in a thread, over TCP on loopback."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore, Store

from lightning_adpsgd.coordination.startup import linking
from lightning_adpsgd.coordination.startup.rollcall import StartUpError
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.transport.base import PeerLost
from lightning_adpsgd.transport.links import LinkTransport
from tests.helpers import PATIENCE, Swap, swap, together


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linking, "gloo_addresses", lambda: ["127.0.0.1"])


def link(
    store: Store,
    rank: int,
    num: int,
    size: int,
    peers: Sequence[int],
    timeout: timedelta = PATIENCE,
) -> LinkTransport:
    return linking.link(store, rank, num, size, peers, timeout, PATIENCE)


@contextmanager
def linked(num: int, size: int, topology: str) -> Iterator[list[LinkTransport]]:
    """All learners of a job of so many, `size` to a super-learner."""
    store, graph = HashStore(), find_topology(topology)

    def learner(rank: int) -> LinkTransport:
        return link(store, rank, num, size, graph.peers(rank // size, num // size))

    transports = together([lambda r=rank: learner(r) for rank in range(num)])
    try:
        yield transports
    finally:
        for transport in transports:
            transport.close()


def heard(transport: LinkTransport, peers: Sequence[int], value: float) -> list[float]:
    """What peers sent on both of their lanes, to each of which a value went."""
    got = []
    for peer in peers:
        for lane in (0, 1):
            mine, into = torch.full((1,), value), torch.zeros(1)
            swap(transport, lane, [Swap(peer, mine, into)], PATIENCE)
            got.append(into.item())
    return got


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_learners_are_linked_with_their_peers_on_both_lanes(topology: str) -> None:
    peers = [find_topology(topology).peers(index, 4) for index in range(4)]
    with linked(4, 1, topology) as links:
        got = together(
            [lambda t=t: heard(t, peers[t.index], float(t.index)) for t in links]
        )
    assert got == [[peer for peer in own for _ in (0, 1)] for own in peers]


def test_each_learner_of_a_node_is_linked_with_its_counterpart() -> None:
    """Ranks 0 and 1 are one super-learner, 2 and 3 the other."""
    with linked(4, 2, "ring") as links:
        actions = [
            lambda t=t, rank=rank: heard(t, [1 - t.index], float(rank))
            for rank, t in enumerate(links)
        ]
        assert together(actions) == [[2, 2], [3, 3], [0, 0], [1, 1]]


def test_a_loss_names_the_learner_of_the_peer() -> None:
    """Of super-learner 1, to learner 0: learner 2 of the job."""
    with linked(4, 2, "ring") as links:
        links[2].close()
        with pytest.raises(PeerLost, match=r"super-learner 1 .* from its learner 2: "):
            links[0].post_receive(1, 0, torch.zeros(1)).wait(PATIENCE)


def refused(action: Callable[[], LinkTransport]) -> str:
    with pytest.raises(StartUpError) as error, closing(action()):
        pass
    return str(error.value)


def test_a_peer_that_does_not_dial_is_told_to_all() -> None:
    """Learner 1 has no peers, and learner 0 waits for it in vain."""
    store, short = HashStore(), timedelta(seconds=0.2)
    told = together(
        [
            lambda: refused(lambda: link(store, 0, 2, 1, [1], short)),
            lambda: refused(lambda: link(store, 1, 2, 1, [], short)),
        ]
    )
    assert told[0] == told[1]
    assert "learner 0: super-learner" in told[0]
    assert "`transport='gloo'`" in told[0]


@pytest.mark.parametrize(
    ("addresses", "message"),
    [
        ([], "GLOO_SOCKET_IFNAME names no interface with an IPv4 address"),
        (["192.0.2.1"], "cannot listen at 192.0.2.1:0"),  # of nobody (RFC 5737)
    ],
)
def test_an_address_that_cannot_be_listened_at_is_told_to_all(
    addresses: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linking, "gloo_addresses", lambda: addresses)
    store = HashStore()
    told = together(
        [
            lambda: refused(lambda: link(store, 0, 2, 1, [1])),
            lambda: refused(lambda: link(store, 1, 2, 1, [0])),
        ]
    )
    assert told[0] == told[1]
    assert [f"learner {rank}: {message}" in told[0] for rank in (0, 1)] == [True, True]
