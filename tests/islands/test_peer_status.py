"""What an island believes of a peer after an observation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_adpsgd.islands.member_list import Member
from lightning_adpsgd.islands.peer_status import (
    Event,
    News,
    Peer,
    Status,
    transition,
)

MEMBER = Member(3, "incarnation", "host", ())
NOW = 100.0
ALIVE = Peer(MEMBER)
SUSPECT = Peer(MEMBER, Status.SUSPECT, is_reported=True, pause_s=2.0, retry_at=101.0)
UNREPORTED = SUSPECT._replace(is_reported=False)
DEAD, LEFT = Peer(MEMBER, Status.DEAD), Peer(MEMBER, Status.LEFT)


@pytest.mark.parametrize(
    ("peer", "event", "status", "news"),
    [
        (ALIVE, Event.LISTED, Status.ALIVE, News.NONE),
        (ALIVE, Event.LOST, Status.SUSPECT, News.LOST),
        (ALIVE, Event.SILENT, Status.SUSPECT, News.LOST),
        # The list may be about to say that it has left: nothing is reported yet.
        (ALIVE, Event.DIAL_FAILED, Status.SUSPECT, News.NONE),
        (ALIVE, Event.PROBE_FAILED, Status.SUSPECT, News.NONE),
        (ALIVE, Event.REACHED, Status.ALIVE, News.NONE),
        (ALIVE, Event.GOODBYE, Status.LEFT, News.LEFT),
        (ALIVE, Event.UNLISTED, Status.DEAD, News.LOST),
        (ALIVE, Event.FORGOTTEN, Status.DEAD, News.NONE),
        (UNREPORTED, Event.DIAL_FAILED, Status.SUSPECT, News.LOST),
        (UNREPORTED, Event.PROBE_FAILED, Status.SUSPECT, News.LOST),
        (UNREPORTED, Event.UNLISTED, Status.DEAD, News.LOST),
        (UNREPORTED, Event.GOODBYE, Status.LEFT, News.LEFT),
        (SUSPECT, Event.LISTED, Status.SUSPECT, News.NONE),
        (SUSPECT, Event.LOST, Status.SUSPECT, News.NONE),
        (SUSPECT, Event.DIAL_FAILED, Status.SUSPECT, News.NONE),
        (SUSPECT, Event.REACHED, Status.ALIVE, News.REACHABLE),
        (SUSPECT, Event.GOODBYE, Status.LEFT, News.NONE),
        (SUSPECT, Event.UNLISTED, Status.DEAD, News.NONE),
        (DEAD, Event.LISTED, Status.ALIVE, News.BACK),
        (DEAD, Event.LOST, Status.DEAD, News.NONE),
        (DEAD, Event.REACHED, Status.DEAD, News.NONE),
        (LEFT, Event.LISTED, Status.LEFT, News.NONE),
        (LEFT, Event.UNLISTED, Status.LEFT, News.NONE),
        (LEFT, Event.CALLED, Status.LEFT, News.NONE),
    ],
)
def test_an_event_changes_what_is_believed_and_is_news_once(
    peer: Peer, event: Event, status: Status, news: News
) -> None:
    after, told = transition(peer, event, NOW)
    assert (after.status, told) == (status, news)


@pytest.mark.parametrize(
    ("event", "longest"), [(Event.PROBE_FAILED, 8.0), (Event.DIAL_FAILED, 30.0)]
)
def test_a_suspect_is_retried_after_twice_the_time_each_time(
    event: Event, longest: float
) -> None:
    """Less often if a dial has failed, for which all others had to wait."""
    peer, pauses = ALIVE, list[float]()
    for _ in range(9):
        peer, _ = transition(peer, event, NOW)
        assert not peer.is_due(peer.retry_at - 0.01)
        assert peer.is_due(peer.retry_at)
        pauses.append(peer.retry_at - NOW)
    assert pauses == [min(2.0**n / 2, longest) for n in range(9)]
    peer, _ = transition(peer, Event.REACHED, NOW)
    peer, _ = transition(peer, Event.LOST, NOW)
    assert peer.retry_at - NOW == 0.5


def test_a_suspect_that_dials_this_island_is_retried_at_once() -> None:
    peer, _ = transition(SUSPECT, Event.CALLED, NOW)
    assert peer.is_due(NOW)


@pytest.mark.parametrize(
    ("event", "needs_probe"),
    [
        (Event.LOST, True),  # its host may say that its process has gone
        (Event.DIAL_FAILED, True),
        (Event.SILENT, False),  # nothing would answer
        (Event.PROBE_FAILED, False),
    ],
)
def test_the_host_of_a_lost_peer_is_asked_once(event: Event, needs_probe: bool) -> None:
    peer, _ = transition(ALIVE, event, NOW)
    assert peer.needs_probe is needs_probe
    assert not transition(peer, Event.PROBED, NOW)[0].needs_probe


@given(events=st.lists(st.sampled_from(Event), max_size=40))
def test_no_peer_is_lost_twice_before_it_was_reached_again(events: list[Event]) -> None:
    peer, is_lost = ALIVE, False
    for event in events:
        peer, news = transition(peer, event, NOW)
        if news in (News.REACHABLE, News.BACK):
            is_lost = False
        assert not (is_lost and news in (News.LOST, News.LEFT))
        is_lost = is_lost or news is News.LOST
        assert peer.is_due(float("inf")) == (peer.status is Status.SUSPECT)
        assert peer.member == MEMBER


def test_only_a_suspect_is_due() -> None:
    for peer in (ALIVE, DEAD, LEFT):
        assert not peer.is_due(NOW)
    assert not SUSPECT.is_due(SUSPECT.retry_at - 1)
    assert SUSPECT.is_due(SUSPECT.retry_at)


@pytest.mark.parametrize(
    ("peer", "event", "after"),
    [
        (ALIVE, Event.LOST, SUSPECT._replace(needs_probe=True)),
        (SUSPECT, Event.REACHED, ALIVE),
        (SUSPECT, Event.FORGOTTEN, DEAD),
        (DEAD, Event.LISTED, ALIVE),
        (SUSPECT._replace(needs_probe=True), Event.PROBED, SUSPECT),
    ],
)
def test_nothing_of_a_former_belief_is_left(
    peer: Peer, event: Event, after: Peer
) -> None:
    found, _ = transition(peer, event, NOW)
    times = {"pause_s": after.pause_s, "retry_at": after.retry_at}
    assert found._replace(**times) == after
