"""Both transports keep the same promises: between threads, and over Gloo."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_adpsgd.transport.base import (
    SYNCHRONOUS_LANE,
    PeerLost,
    Transport,
    lane_of,
    one_behind,
)
from lightning_adpsgd.transport.process_group import DistributedTransport
from tests.helpers import PATIENCE, Swap, forked, swap, together
from tests.threads import ThreadTransport

Program = Callable[[Transport], Any]
Run = Callable[[int, Program], list[Any]]
SHORT = timedelta(seconds=0.3)


def over_threads(size: int, program: Program) -> list[Any]:
    return together([lambda t=t: program(t) for t in ThreadTransport.connect(size)])


@pytest.fixture
def over_gloo(tmp_path: Path) -> Run:
    def run(size: int, program: Program) -> list[Any]:
        def learner(rank: int) -> Any:
            dist.init_process_group(
                "gloo", f"file://{tmp_path}/store", rank=rank, world_size=size
            )
            group = dist.new_group(list(range(size)), backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            hosts = [f"node{n}" for n in range(size)]
            return program(DistributedTransport(group, hosts))

        outcomes = forked(size, learner)
        assert [outcome.error for outcome in outcomes] == [""] * size
        return [outcome.value for outcome in outcomes]

    return run


@pytest.fixture(params=["threads", "gloo"])
def run(request: pytest.FixtureRequest, over_gloo: Run) -> Run:
    return over_threads if request.param == "threads" else over_gloo


def cross(transport: Transport, lane: int, peers: list[int], value: float) -> list[Any]:
    incoming = {peer: torch.zeros(2) for peer in peers}
    outgoing = torch.full((2,), value)
    swap(
        transport,
        lane,
        [Swap(peer, outgoing, incoming[peer]) for peer in peers],
        PATIENCE,
    )
    return [incoming[peer].tolist() for peer in peers]


def test_each_swaps_with_each_other(run: Run) -> None:
    def program(transport: Transport) -> Any:
        peers = [j for j in range(transport.size) if j != transport.index]
        return cross(transport, SYNCHRONOUS_LANE, peers, float(transport.index))

    assert run(3, program) == [
        [[1, 1], [2, 2]],
        [[0, 0], [2, 2]],
        [[0, 0], [1, 1]],
    ]


def test_lanes_do_not_take_each_others_messages(run: Run) -> None:
    def program(transport: Transport) -> Any:
        peer = 1 - transport.index
        sent = [torch.tensor([float(lane)]) for lane in range(3)]
        order = range(3) if transport.index == 0 else reversed(range(3))
        received = {lane: torch.zeros(1) for lane in order}
        pending = [
            transport.post_receive(peer, lane, into) for lane, into in received.items()
        ]
        pending += [transport.post_send(peer, lane, sent[lane]) for lane in received]
        for operation in pending:
            operation.wait(PATIENCE)
        return sorted((lane, into.item()) for lane, into in received.items())

    assert run(2, program) == [[(0, 0.0), (1, 1.0), (2, 2.0)]] * 2


def test_messages_of_one_lane_keep_their_order(run: Run) -> None:
    def program(transport: Transport) -> Any:
        peer, into = 1 - transport.index, torch.zeros(1)
        received = []
        for number in range(5):
            value = torch.tensor([float(number)])
            swap(transport, 0, [Swap(peer, value, into)], PATIENCE)
            received.append(into.item())
        return received

    assert run(2, program) == [[0, 1, 2, 3, 4]] * 2


def test_one_way_messages_need_no_answer(run: Run) -> None:
    def program(transport: Transport) -> Any:
        into = torch.zeros(1)
        message = (
            Swap(1, torch.ones(1), None)
            if transport.index == 0
            else Swap(0, None, into)
        )
        swap(transport, 0, [message], PATIENCE)
        return into.item()

    assert run(2, program) == [0, 1]


def test_an_average_is_over_all(run: Run) -> None:
    def program(transport: Transport) -> Any:
        vector = torch.tensor([float(transport.index), 6.0], dtype=torch.float64)
        for _ in range(2):
            transport.post_mean(vector).wait(PATIENCE)
        return vector.tolist()

    assert run(3, program) == [[1.0, 6.0]] * 3


def test_a_peer_that_says_nothing_is_lost_by_name(run: Run) -> None:
    def program(transport: Transport) -> Any:
        if transport.index == 1:
            return None
        message = Swap(1, None, torch.zeros(1))
        with pytest.raises(PeerLost, match=r"lost super-learner 1 .*`timeout`") as lost:
            swap(transport, 0, [message], SHORT)
        assert "batches" not in str(lost.value)  # learners may have different numbers
        return lost.value.peer

    # The other end is there for as long as its process; a dead one is lost as well.
    assert run(2, program) == [1, None]


def test_a_lost_learner_is_named_with_its_host(over_gloo: Run) -> None:
    def program(transport: Transport) -> Any:
        if transport.index == 0:
            with pytest.raises(PeerLost) as lost:
                swap(transport, 0, [Swap(1, None, torch.zeros(1))], SHORT)
            return str(lost.value).partition(":")[0]
        return None

    message = "lost super-learner 1 while receiving from learner 1 on host node1"
    assert over_gloo(2, program)[0] == message


def test_a_wait_that_timed_out_closes_the_pair(over_gloo: Run) -> None:
    """A lost peer stays lost at both ends, and no thread waits for it again."""

    def program(transport: Transport) -> Any:
        peer, lost = 1 - transport.index, []
        # Learner 0 waits on a lane of its own for what never comes.
        for lane in (transport.index, SYNCHRONOUS_LANE):
            try:
                patience = SHORT if transport.index == 0 else PATIENCE
                swap(transport, lane, [Swap(peer, None, torch.zeros(1))], patience)
            except PeerLost as error:
                lost.append(error.peer)
        return lost

    assert over_gloo(2, program) == [[1, 1], [0, 0]]


def test_the_two_ends_of_a_pair_ask_on_lanes_of_their_own() -> None:
    assert len({lane_of(0, 1), lane_of(1, 0), SYNCHRONOUS_LANE}) == 3


def test_each_is_yielded_once_the_next_is_posted() -> None:
    events: list[tuple[str, int]] = []

    def post(number: int) -> int:
        events.append(("post", number))
        return number

    for number in one_behind(post(n) for n in range(3)):
        events.append(("land", number))
    posts_and_lands = [("post", 0), ("post", 1), ("land", 0), ("post", 2), ("land", 1)]
    assert events == [*posts_and_lands, ("land", 2)]
    assert list(one_behind([])) == []
