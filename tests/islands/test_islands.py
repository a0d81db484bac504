"""Islands over real connections: they come, meet, die, and nobody waits."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_adpsgd import __version__
from lightning_adpsgd.gossip import exchange
from lightning_adpsgd.gossip.exchange import Channel, Lane, _Exchange
from lightning_adpsgd.gossip.pacing import CoreShare
from lightning_adpsgd.gossip.protocol import Position
from lightning_adpsgd.islands.connections import MOST_UNLISTED, Connections
from lightning_adpsgd.islands.joining import Joining
from lightning_adpsgd.islands.mean import consensus_over_shards
from lightning_adpsgd.islands.member_list import Heartbeat, MemberList
from lightning_adpsgd.islands.peer_status import Status
from lightning_adpsgd.islands.rendezvous import Rendezvous
from lightning_adpsgd.transport.base import PeerLost
from lightning_adpsgd.transport.links.credentials import Credentials
from lightning_adpsgd.transport.links.handshake import Refused
from lightning_adpsgd.transport.links.sockets import Address
from lightning_adpsgd.transport.links.transport import LinkTransport
from tests.helpers import PATIENCE_S, engine_threads, random_rows, together, until
from tests.islands.archipelago import (
    HEARTBEAT,
    PATIENCE,
    Server,
    Trained,
    archipelago,
    are_idle,
    rendezvous,
    total,
    train_until,
)


def all_see(trained: Sequence[Trained], num: int) -> None:
    whole = lambda: all(one.members == num for one in trained)  # noqa: E731
    until(whole, f"a ring of {num}", every_s=0.01)


def quiet(trained: Sequence[Trained]) -> None:
    """Nobody asks any more, and what was under way has ended at both ends."""
    until(lambda: are_idle(trained), "the end of exchanges")


def at_once(trained: Sequence[Trained], rows: Tensor) -> None:
    """Weights of their own for islands that have begun with equal ones."""
    for one, row in zip(trained, rows, strict=True):
        one.vector.copy_(row)


def test_a_joiner_begins_with_the_weights_of_those_who_are_there() -> None:
    rows = random_rows(4)
    with rendezvous() as server, archipelago(server, rows) as trained:
        all_see(trained, 4)
        for one in trained:
            assert torch.equal(one.vector, rows[0])
        assert [one.island.started_from for one in trained] == [None] + 3 * [Position()]


def test_islands_come_to_their_mean_and_end_without_a_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a machine that stalls, a goodbye may take longer than who says it would wait.
    monkeypatch.setattr("lightning_adpsgd.islands.island._GOODBYE_S", PATIENCE_S)
    rows = random_rows(4)
    with rendezvous() as server, archipelago(server, rows) as trained:
        all_see(trained, 4)
        at_once(trained, rows)
        mean = rows.mean(0)
        train_until(
            trained,
            lambda: all((one.vector - mean).abs().max() < 0.01 for one in trained),
            "the mean",
        )
        for one in trained:
            one.island.stop()
        assert [one.island.statistics().lost for one in trained] == [0, 0, 0, 0]
    assert engine_threads() == []


@pytest.mark.parametrize("topology", ["ring", "random_pairs", "complete"])
def test_the_sum_is_kept_but_for_the_share_of_the_dead(topology: str) -> None:
    rows = random_rows(4)
    with rendezvous() as server, archipelago(server, rows, topology) as trained:
        all_see(trained, 4)
        at_once(trained, rows)
        least = [one.exchanges + 5 for one in trained]
        train_until(trained, lambda: all_reach(trained, least), "exchanges")
        quiet(trained)
        torch.testing.assert_close(total(trained), rows.sum(0), atol=1e-10, rtol=0)
        dead, rest = trained[1], [trained[0], *trained[2:]]
        share = total([dead])
        dead.die()
        all_see(rest, 3)
        least = [one.exchanges + 5 for one in rest]
        train_until(rest, lambda: all_reach(rest, least), "exchanges without the dead")
        quiet(rest)
        expected = rows.sum(0) - share
        torch.testing.assert_close(total(rest), expected, atol=1e-10, rtol=0)


def all_reach(trained: Sequence[Trained], least: Sequence[int]) -> bool:
    return all(one.exchanges >= num for one, num in zip(trained, least, strict=True))


def test_a_death_in_the_middle_of_an_exchange_costs_that_exchange_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every thread of the others goes on, and their sum is off by chunks at most."""
    rows = random_rows(3, length=40)
    with (
        rendezvous() as server,
        archipelago(server, rows, chunk_elements=4) as trained,
    ):
        all_see(trained, 3)
        at_once(trained, rows)
        dead, rest = trained[1], [trained[0], trained[2]]
        killed = threading.Event()
        land = _Exchange.land

        def land_or_die(exchange: _Exchange, *arguments: Any) -> Any:
            is_its = exchange._channel.transport is dead.island._transports[0]
            if is_its and not killed.is_set():
                killed.set()
                dead.cut_off()
            return land(exchange, *arguments)

        monkeypatch.setattr(_Exchange, "land", land_or_die)
        train_until(trained, killed.is_set, "an exchange of the one who dies")
        dead.die()
        all_see(rest, 2)
        least = [one.exchanges + 5 for one in rest]
        train_until(rest, lambda: all_reach(rest, least), "exchanges without the dead")
        quiet(rest)
        spread = float((rows.amax(0) - rows.amin(0)).max())
        drift = (total([*rest, dead]) - rows.sum(0)).abs().max()
        assert drift <= spread
        until(lambda: [o.island.statistics().lost for o in rest] == [1, 1], "warnings")


def test_a_join_changes_no_sum_and_the_joiner_pushes_nothing_old() -> None:
    rows = random_rows(3)
    with rendezvous() as server, archipelago(server, rows[:2]) as trained:
        all_see(trained, 2)
        at_once(trained, rows[:2])
        before = total(trained)
        joiner = Trained(server, 1000 + rows[2])
        joiner.island.start()
        try:
            all_see([*trained, joiner], 3)
            assert torch.equal(total(trained), before)
            # It sits between the two, and takes their mean.
            torch.testing.assert_close(joiner.vector, before / 2)
            least = [one.exchanges + 3 for one in [*trained, joiner]]
            together = [*trained, joiner]
            train_until(together, lambda: all_reach(together, least), "exchanges")
            assert all(one.vector.abs().max() < 100 for one in together)
        finally:
            joiner.island.stop()


def test_a_joiner_comes_to_the_position_of_the_others() -> None:
    rows = random_rows(2)
    with rendezvous() as server, archipelago(server, rows[:1]) as (first,):
        for _ in range(7):
            first.island.note(samples=10, epochs=2)
            first.step()
        joiner = Trained(server, rows[1])
        joiner.island.start()
        assert joiner.island.started_from == Position(7, 70, 2)
        joiner.step()
        assert joiner.island.position.steps == 8
        joiner.island.stop()


def test_an_island_that_is_further_than_the_others_keeps_its_weights() -> None:
    """As one that resumes from a checkpoint where others have begun anew."""
    rows = random_rows(2)
    with rendezvous() as server, archipelago(server, rows[:1]):
        resumed = Trained(server, rows[1])
        resumed.island.start(Position(1000, 0, 3))
        assert resumed.island.started_from is None
        assert torch.equal(resumed.vector, rows[1])
        resumed.island.stop()


def test_the_last_one_goes_on_alone_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with rendezvous() as server, archipelago(server, random_rows(2)) as trained:
        all_see(trained, 2)
        trained[1].die()
        all_see(trained[:1], 1)
        for _ in range(5):
            trained[0].step(1.0)
        until(lambda: trained[0].island.statistics().lost == 1, "the warning")
    told = [r.message for r in caplog.records if "lost island 1" in r.message]
    assert len(told) == 1
    assert "training continues with this island alone" in told[0]


def test_an_island_comes_back_under_another_number() -> None:
    rows = random_rows(3)
    with rendezvous() as server, archipelago(server, rows[:2]) as trained:
        all_see(trained, 2)
        trained[1].die()
        again = Trained(server, rows[2])
        again.island.start()
        all_see([trained[0], again], 2)
        assert again.island.membership.member.number == 2
        seen = again.exchanges
        train_until([trained[0], again], lambda: again.exchanges > seen + 2, "it")
        again.island.stop()


def test_all_know_of_a_death_that_its_neighbours_alone_can_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its machine says that nobody listens there; no silence is long enough."""
    deaf = replace(PATIENCE, heartbeat=Heartbeat(0.05, silence_s=600.0, empty_s=0.1))
    monkeypatch.setattr("tests.islands.archipelago.PATIENCE", deaf)
    with rendezvous() as server, archipelago(server, random_rows(5)) as trained:
        all_see(trained, 5)
        trained[2].die()
        rest = [*trained[:2], *trained[3:]]
        all_see(rest, 4)
        left = {0, 1, 3, 4}
        until(
            lambda: all(set(o.membership.members.by_number) == left for o in rest), "it"
        )
        assert [one.island.statistics().lost for one in rest] == 4 * [1]


def test_all_know_of_a_death_where_no_list_can_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in the half of a network that is cut off from the rendezvous."""
    monkeypatch.setattr("lightning_adpsgd.islands.connections._PROBE_AROUND_S", 0.1)
    with rendezvous() as server, archipelago(server, random_rows(6)) as trained:
        all_see(trained, 6)
        server.stop()
        until(lambda: all(one.membership.outage for one in trained), "the silence")
        dead, rest = trained[1], [trained[0], *trained[2:]]
        dead.die()
        all_see(rest, 5)


def test_two_who_know_different_members_still_exchange() -> None:
    """One does not know the other, which asks it: it is answered all the same."""
    rows = random_rows(2)
    with rendezvous() as server, archipelago(server, rows) as (one, other):
        all_see([one, other], 2)
        membership = one.island.membership
        membership._rendezvous.ask = lambda action: None  # pyright: ignore
        own = membership.member
        membership.members = MemberList(99, {own.number: own})
        links = one.island._connections
        with links._dialing:
            for name, peer in links._peers.items():
                links._peers[name] = peer._replace(status=Status.DEAD)
        links.wake()
        until(lambda: one.members == 1, "a view of its own")
        seen = other.exchanges
        train_until([one, other], lambda: other.exchanges > seen + 3, "exchanges")


def test_exchanges_go_on_without_the_rendezvous() -> None:
    rows = random_rows(3)
    with rendezvous() as server, archipelago(server, rows) as trained:
        all_see(trained, 3)
        server.stop()
        until(lambda: all(o.island.membership.outage for o in trained), "the loss")
        least = [one.exchanges + 5 for one in trained]
        train_until(trained, lambda: all_reach(trained, least), "exchanges")
        trained[2].die()
        # Nothing evicts it: the ring closes around the broken connection.
        all_see(trained[:2], 2)
        server.start()
        until(lambda: not any(o.island.membership.outage for o in trained[:2]), "it")
        late = Trained(server, rows[0])
        late.island.start()
        all_see([*trained[:2], late], 3)
        late.island.stop()


def test_the_mean_is_that_of_all_who_answer() -> None:
    rows = random_rows(3)
    with rendezvous() as server, archipelago(server, rows) as trained:
        all_see(trained, 3)
        at_once(trained, rows)
        before = [one.vector.clone() for one in trained]
        mean = trained[1].island.mean()
        assert mean.members == 3
        torch.testing.assert_close(torch.cat(mean.values), rows.mean(0))
        distance = (rows - rows.mean(0)).square().sum(1).mean().sqrt()
        found = consensus_over_shards([mean[1:]])
        assert found.distance == pytest.approx(float(distance))
        norm = float(rows.mean(0).norm())
        expected = pytest.approx(float(distance) / norm)
        assert found.relative_distance == expected
        for one, vector in zip(trained, before, strict=True):
            assert torch.equal(one.vector, vector)


def test_a_mean_waits_for_nobody_who_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = random_rows(3)
    with rendezvous() as server, archipelago(server, rows) as trained:
        all_see(trained, 3)
        at_once(trained, rows)
        stuck, release = trained[2], threading.Event()
        give = Lane.give

        def give_or_hang(lane: Lane, position: Position) -> None:
            if lane.channel.transport is stuck.island._transports[0]:
                assert release.wait(PATIENCE_S)
            give(lane, position)

        monkeypatch.setattr(Lane, "give", give_or_hang)
        # As long as it may take to get the weights of who is not stuck.
        trained[0].shorten_timeouts(3.0)
        mean = trained[0].island.mean()
        assert mean.members == 2
        torch.testing.assert_close(torch.cat(mean.values), rows[:2].mean(0))
        release.set()


@pytest.fixture
def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights take 3 s over it, of which each piece takes less than one."""
    receive = Channel.receive

    def slowly(channel: Channel, into: Tensor) -> None:
        time.sleep(0.4)
        receive(channel, into)

    monkeypatch.setattr(exchange, "_PIECE_ELEMENTS", 1)
    monkeypatch.setattr(Channel, "receive", slowly)


def is_impatient(one: Trained) -> None:
    timeouts = replace(PATIENCE, pull=timedelta(seconds=1))
    one.island._timeouts = one.island._joining._timeouts = timeouts


@pytest.mark.usefixtures("slow_link")
def test_an_island_joins_and_comes_back_over_a_link_that_is_slow_for_its_weights() -> (
    None
):
    rows = random_rows(2)
    with rendezvous() as server, archipelago(server, rows[:1]) as (first,):
        joiner = Trained(server, rows[1])
        is_impatient(joiner)
        joiner.island.start()
        assert torch.equal(joiner.vector, first.vector)
        all_see([first, joiner], 2)
        with joiner.stopped():
            all_see([first], 1)
            joiner.vector.fill_(1000.0)
        assert joiner.until_it_has_rejoined() == first.island.position
        joiner.island.stop()


def test_a_diverged_island_is_in_no_mean_and_gives_no_joiner_its_weights() -> None:
    rows = random_rows(3)
    with rendezvous() as server, archipelago(server, rows[:2]) as trained:
        all_see(trained, 2)
        trained[0].vector.fill_(float("nan"))
        mean = trained[1].island.mean()
        assert mean.members == 1
        joiner = Trained(server, rows[2])
        joiner.island.start()
        assert torch.equal(joiner.vector, trained[1].vector)
        joiner.island.stop()


def change_model(one: Trained) -> None:
    transport = one.island._transports[0]
    transport._info = replace(transport._info, model="bias:(2,):torch.float64")


def change_token(one: Trained) -> None:
    one.island._transports[0]._credentials = Credentials(b"x" * 16)


def change_version(one: Trained) -> None:
    transport = one.island._transports[0]
    transport._info = replace(transport._info, version="0.0.1")


REFUSALS: list[tuple[str, Callable[[Trained], None]]] = [
    ("models differ", change_model),
    ("token", change_token),
    (f"`version` is '0.0.1' here and '{__version__}' there", change_version),
]


@pytest.mark.parametrize(("reason", "change"), REFUSALS)
def test_who_does_not_fit_is_told_why_and_stays_out(
    reason: str, change: Callable[[Trained], None]
) -> None:
    with rendezvous() as server, archipelago(server, random_rows(1)) as (first,):
        other = Trained(server, random_rows(1)[0])
        change(other)
        with pytest.raises(Refused, match=reason):
            other.island.start()
        other.island.abort()
        assert set(first.island.membership.members.by_number) == {0}
        first.step(1.0)


def test_without_a_rendezvous_a_start_says_how_to_get_one() -> None:
    with rendezvous() as server:
        server.stop()
        one = Trained(server, random_rows(1)[0])
        one.shorten_timeouts(0.3)
        with pytest.raises(RuntimeError, match="python -m lightning_adpsgd rendezvous"):
            one.island.start()
        one.island.abort()


def test_a_departure_keeps_what_exchanges_have_brought() -> None:
    rows = random_rows(2)
    with rendezvous() as server, archipelago(server, rows) as (one, other):
        all_see([one, other], 2)
        at_once([one, other], rows)
        train_until([one, other], lambda: one.exchanges > 3, "exchanges")
        quiet([one, other])
        left = total([other])
        one.island.depart()
        torch.testing.assert_close(one.vector, rows.sum(0) - left)
        all_see([other], 1)
        assert other.island.statistics().lost == 0


def test_after_a_stop_an_island_takes_the_weights_of_the_others_first() -> None:
    """What a process that was stopped does: see tests/faults for a real one."""
    rows = random_rows(3)
    with rendezvous() as server, archipelago(server, rows) as trained:
        all_see(trained, 3)
        stopped, rest = trained[2], trained[:2]
        for one in rest:
            one.vector.copy_(rows[1])
        with stopped.stopped():
            all_see(rest, 2)
            stopped.vector.fill_(1000.0)
        steps = [one.island.position.steps for one in rest]
        # On a busy machine others may have stood still, and take weights in a step.
        found = stopped.until_it_has_rejoined(rest)
        now = rest[0].island.position
        assert found == now._replace(steps=found.steps)
        assert min(steps) <= found.steps <= max(x.island.position.steps for x in rest)
        whole = lambda: all(one.members == 3 for one in trained)  # noqa: E731
        train_until(trained, whole, "a ring of 3")
        least = [one.exchanges + 3 for one in trained]
        train_until(trained, lambda: all_reach(trained, least), "exchanges")
        assert all(one.vector.abs().max() < 100 for one in trained)
        torch.testing.assert_close(trained[0].vector, rows[1])


def test_a_slow_join_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(3)
    with rendezvous() as server, archipelago(server, rows[:2]) as trained:
        all_see(trained, 2)
        joiner, gate, arrived = Trained(server, rows[2]), *_events(2)
        pull = Lane.pull

        def pull_slowly(lane: Lane, *how: Any) -> Any:
            arrived.set()
            assert gate.wait(PATIENCE_S)
            return pull(lane, *how)

        monkeypatch.setattr(Lane, "pull", pull_slowly)
        thread = threading.Thread(target=joiner.island.start)
        thread.start()
        assert arrived.wait(PATIENCE_S)
        least = [one.exchanges + 5 for one in trained]
        train_until(trained, lambda: all_reach(trained, least), "exchanges")
        assert all(one.members == 2 for one in trained)
        gate.set()
        thread.join(PATIENCE_S)
        all_see([*trained, joiner], 3)
        joiner.island.stop()


def _events(num: int) -> list[threading.Event]:
    return [threading.Event() for _ in range(num)]


def test_who_spares_the_cores_still_says_goodbye_to_whom_it_asks_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A join changes who asks whom in the ring, while askers rest for long."""
    left = set[tuple[int, int]]()
    on_left = Connections.on_left

    def note(connections: Connections, number: int, *how: Any) -> None:
        left.add((connections._links.own, number))
        on_left(connections, number, *how)

    monkeypatch.setattr(Connections, "on_left", note)
    monkeypatch.setattr(CoreShare, "pause_s", lambda share: 10.0)
    rows = random_rows(4)
    with rendezvous() as server, archipelago(server, rows[:3]) as trained:
        all_see(trained, 3)
        for one in trained:
            for _ in range(3):
                one.step()
        joiner = Trained(server, rows[3])
        joiner.island.start()
        all_see([*trained, joiner], 4)
        until(lambda: {(0, 2), (2, 0)} <= left, "words of goodbye")
        assert [one.island.statistics().lost for one in trained] == [0, 0, 0]
        joiner.island.stop()


def test_who_spares_the_cores_lets_nobody_wait_for_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rests = threading.Event()

    def rest_for_long(share: CoreShare) -> float:
        rests.set()
        return 1000.0

    monkeypatch.setattr(CoreShare, "pause_s", rest_for_long)
    with rendezvous() as server, archipelago(server, random_rows(2)) as (one, other):
        all_see([one, other], 2)
        until(lambda: bool(one.step() or rests.is_set()), "a rest")
        assert one.island._connections.pull(1, PATIENCE_S) is not None


def _join_when_nobody_is_listed(
    server: Server, trained: Sequence[Trained], row: Tensor, stopped_s: float
) -> Trained:
    """A joiner that starts from its own weights, though two others are far ahead."""
    all_see(trained, 2)
    for one in trained:
        one.island.engine.members.position = Position(100_000)
    # Its own wait is over before they look: as on a machine that stalls.
    with trained[0].stopped(), trained[1].stopped():
        with _emptied(server):
            joiner = Trained(server, row)
            joiner.island.start()
        assert joiner.island.started_from is None
        time.sleep(stopped_s)
    return joiner


@pytest.mark.parametrize("stopped_s", [0.0, 2 * HEARTBEAT.silence_s])
def test_untrained_weights_replace_no_trained_ones(stopped_s: float) -> None:
    """A joiner that comes to an empty rendezvous before any member has come back.

    Even members that were stopped, and would take the others' weights first.
    """
    rows = torch.tensor([[5.0] * 6, [5.0] * 6, [-3.0] * 6])
    with rendezvous() as server, archipelago(server, rows[:2]) as trained:
        joiner = _join_when_nobody_is_listed(server, trained, rows[2], stopped_s)
        everybody = [*trained, joiner]
        positions: list[Position | None] = []

        def come_back() -> bool:
            for one in everybody:
                one.step()
                positions.append(one.island.note(0, 0))
            return all(one.members == 3 for one in everybody)

        until(come_back, "a ring of 3")
        assert all(one is None or one.steps >= 100_000 for one in positions)
        assert any(positions)
        least = [one.exchanges + 3 for one in everybody]
        train_until(everybody, lambda: all_reach(everybody, least), "exchanges")
        for one in everybody:
            assert torch.equal(one.vector, rows[0])
        joiner.island.stop()


@pytest.mark.parametrize("stopped_s", [0.0, 2 * HEARTBEAT.silence_s])
def test_a_mean_has_no_weights_of_a_training_for_which_an_island_gives_way(
    stopped_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It validates while it still waits for theirs, and names no training meanwhile."""
    asks, gate, take = *_events(2), Joining.weights_of_neighbours
    rows = random_rows(3)
    with rendezvous() as server, archipelago(server, rows[:2]) as trained:
        # On a slow machine they were stopped for long, and take weights themselves.
        theirs = [one.island._joining for one in trained]

        def take_late(joining: Joining) -> Any:
            if joining not in theirs:
                asks.set()
                assert gate.wait(PATIENCE_S)
            return take(joining)

        monkeypatch.setattr(Joining, "weights_of_neighbours", take_late)
        behind = _join_when_nobody_is_listed(server, trained, rows[2], stopped_s)
        train_until(
            trained,
            lambda: asks.is_set() and len(behind.listed) == 2,
            "the list of the others",
        )
        mean = behind.island.mean()
        assert (mean.members, mean.spread) == (1, 0.0)
        assert torch.equal(torch.cat(mean.values), rows[2])
        gate.set()
        behind.until_it_has_rejoined(trained)
        # A step ends the wait of those who take weights.
        everybody = [*trained, behind]
        train_until(everybody, lambda: all(o.members == 3 for o in everybody), "all")
        assert behind.island.mean().members == 3
        behind.island.stop()


@contextmanager
def _emptied(server: Server) -> Iterator[None]:
    """All keys are gone, as after a restart."""
    client = Rendezvous(server.address, answer_s=PATIENCE_S)
    client.ask(lambda store: [store.set(key, "") for key in ("members", "next")])
    try:
        yield
    finally:
        client.close()


def test_a_rendezvous_that_goes_before_an_island_is_on_the_list_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with rendezvous() as server, archipelago(server, random_rows(1)):
        joiner = Trained(server, random_rows(1)[0])
        joiner.island._timeouts = replace(PATIENCE, pull=timedelta(seconds=0.5))
        monkeypatch.setattr(Joining, "take_up_weights", lambda _: server.stop())
        joiner.island.start()
        assert "is not on the member list yet (" in caplog.text
        joiner.island.abort()


def test_of_several_that_start_together_one_is_the_first() -> None:
    rows = random_rows(6)
    with rendezvous() as server:
        islands = [Trained(server, row) for row in rows]
        together([one.island.start for one in islands])
        firsts = [one for one in islands if one.island.started_from is None]
        assert len(firsts) == 1
        for one in islands:
            assert torch.equal(one.vector, firsts[0].vector)
            assert (
                one.membership.member.origin == firsts[0].membership.member.incarnation
            )
        for one in islands:
            one.island.abort()


def test_the_first_island_begins_however_far_the_rendezvous_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To begin the list takes longer than the list must have been empty for."""
    in_time = Rendezvous._in_time

    def late(client: Rendezvous, action: Callable[[], Any]) -> Any:
        time.sleep(0.15)
        return in_time(client, action)

    monkeypatch.setattr(Rendezvous, "_in_time", late)
    with rendezvous() as server, archipelago(server, random_rows(1)) as (one,):
        assert one.island.started_from is None
        assert one.membership.is_in


def test_a_joiner_waits_on_an_empty_list_for_those_that_come_back() -> None:
    rows = random_rows(2)
    with rendezvous() as server, archipelago(server, rows[:1]) as (one,):
        one.step()
        joiner = Trained(server, rows[1])
        joiner.membership._heartbeat = replace(HEARTBEAT, empty_s=PATIENCE_S)
        with one.stopped(), _emptied(server):
            thread = threading.Thread(target=joiner.island.start)
            thread.start()
            until(lambda: joiner.membership._num_turns > 3, "its looks")
            assert not joiner.membership.is_in
        thread.join(PATIENCE_S)
        assert torch.equal(joiner.vector, one.vector)
        joiner.island.abort()


def test_a_joiner_dials_again_after_its_first_connection_has_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken, pull = list[int](), Lane.pull

    def break_once(lane: Lane, *how: Any) -> Any:
        if not broken:
            broken.append(lane.channel.peer)
            assert isinstance(lane.channel.transport, LinkTransport)
            lane.channel.transport.disconnect(lane.channel.peer)
        return pull(lane, *how)

    rows = random_rows(2)
    with rendezvous() as server, archipelago(server, rows[:1]) as (one,):
        monkeypatch.setattr(Lane, "pull", break_once)
        joiner = Trained(server, rows[1])
        joiner.island.start()
        assert broken == [0]
        assert torch.equal(joiner.vector, one.vector)
        joiner.island.stop()


def test_another_incarnation_does_not_take_over_the_lane_of_a_member() -> None:
    with rendezvous() as server, archipelago(server, random_rows(2)) as (one, other):
        all_see([one, other], 2)
        theirs = other.membership.member
        twin = LinkTransport(
            replace(one.island._transports[0]._info, member=1, incarnation="twin"),
            Credentials(),
        )
        door = Address.parse(one.membership.member.addresses[0])
        with pytest.raises(Refused, match="number 1 belongs to another process"):
            twin.connect(0, door)
        # Nor does one that is dialed as somebody else, or over a relay.
        twin.rename(2, "third")
        with pytest.raises(Refused, match="its incarnation 'old' was expected"):
            twin.connect(0, door, incarnation="old")
        twin.close()
        assert one.membership.members.by_number[1] == theirs
        seen = one.exchanges
        train_until([one, other], lambda: one.exchanges > seen + 2, "exchanges")


def test_who_is_not_on_the_list_takes_a_bounded_number_of_threads() -> None:
    with rendezvous() as server, archipelago(server, random_rows(1)) as (one,):
        door = Address.parse(one.membership.member.addresses[0])
        info = one.island._transports[0]._info
        strangers = [
            LinkTransport(replace(info, member=n, incarnation=str(n)), Credentials())
            for n in range(1000, 1000 + MOST_UNLISTED + 20)
        ]
        (listener,) = one.island._listeners
        for stranger in strangers:
            until(lambda: not listener._pending, "the end of those before")
            # One that is turned away may notice it before it is greeted.
            with suppress(PeerLost):
                stranger.connect(0, door)
        refused = "ConnectionRefusedError"
        until(lambda: listener.turned_away[refused] == 20, "refusals")
        names = [thread.name for thread in threading.enumerate()]
        assert (
            sum(name.startswith("adpsgd-answer-1") for name in names) == MOST_UNLISTED
        )
        for stranger in strangers:
            stranger.close()


def test_one_malformed_row_concerns_that_member_alone() -> None:
    with rendezvous() as server, archipelago(server, random_rows(3)) as trained:
        all_see(trained, 3)
        spoil(server, lambda rows: [*rows, [7, 5, None], [8, "x", "y", ["nowhere"]]])
        spoil(server, lambda rows: [rows[0], [1, "x" * 999, "h", []], *rows[2:]])
        list_is_whole = [set(range(3)) == set(one.listed) for one in trained]
        least = [one.exchanges + 3 for one in trained]
        train_until(trained, lambda: all_reach(trained, least), "exchanges")
        until(lambda: len(spoil(server, lambda rows: rows)) == 3, "a list without it")
        assert all(list_is_whole)
        assert [one.service_errors for one in trained] == [0] * 3


def spoil(server: Server, change: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Changes the rows of the list as anyone can who reaches it; returns them."""
    client = Rendezvous(server.address, answer_s=PATIENCE_S)

    def edit(store: Any) -> list[Any]:
        epoch, rows = json.loads(store.get("members"))
        store.set("members", json.dumps([epoch + 1, changed := change(rows)]))
        store.set("version", str(time.monotonic_ns()))
        return changed

    try:
        return client.ask(edit)
    finally:
        client.close()
