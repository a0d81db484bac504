"""What a member list says, and what is believed of a peer: pure functions."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_adpsgd.islands.members import (
    Beat,
    Event,
    Heartbeat,
    Member,
    MemberList,
    News,
    Peer,
    SilenceWatch,
    Status,
    ahead_of,
    furthest_origin,
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


def test_a_suspect_is_retried_after_twice_the_time_each_time() -> None:
    peer, pauses = ALIVE, list[float]()
    for _ in range(9):
        peer, _ = transition(peer, Event.PROBE_FAILED, NOW)
        assert not peer.is_due(peer.retry_at - 0.01)
        assert peer.is_due(peer.retry_at)
        pauses.append(peer.retry_at - NOW)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
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
    "row", [None, "row", {}, [], [1, "a", "b"], [1, "a", "b", [], "", "", "more"]]
)
def test_what_is_no_row_of_a_member_is_refused(row: object) -> None:
    with pytest.raises(ValueError, match="a row must have 4 to 6 fields"):
        Member.from_row(row)


ROW: dict[str, Any] = {"number": 1, "incarnation": "a", "host": "b", "addresses": []}
MOST = (1 << 31) - 1


@pytest.mark.parametrize(
    "change",
    [
        {"number": 0},
        {"number": MOST},
        {"addresses": ["here:1"] * 4096},
        {"incarnation": "x" * 256},
        {"origin": "x" * 256},
        {"origin": "", "proof": "x" * 256},
    ],
)
def test_a_row_of_a_member_is_read_up_to_its_bounds(change: dict[str, Any]) -> None:
    row = {**ROW, **change}
    member = Member(**{**row, "addresses": tuple(row["addresses"])})
    assert Member.from_row([*row.values()]) == member


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"number": -1}, "from 0 to 2.31"),
        ({"number": MOST + 1}, "from 0 to 2.31"),
        ({"number": True}, "from 0 to 2.31"),
        ({"number": 1.0}, "from 0 to 2.31"),
        ({"addresses": ["here:1"] * 4097}, "at most 4096 addresses"),
        ({"addresses": "here:1"}, "at most 4096 addresses"),
        ({"addresses": [1]}, "256 characters"),
        ({"addresses": ["nowhere"]}, "nowhere"),
        ({"incarnation": "x" * 257}, "256 characters"),
        ({"host": None}, "256 characters"),
        ({"origin": 3}, "256 characters"),
        ({"origin": "", "proof": "x" * 257}, "256 characters"),
    ],
)
def test_a_row_of_a_member_beyond_its_bounds_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Member.from_row([*{**ROW, **change}.values()])


@pytest.mark.parametrize(
    ("text", "beat"),
    [
        ("0 0", Beat(0, 0)),
        ("3 40", Beat(3, 40)),
        ("goodbye 41", Beat(None, 41)),
        ("9" * 18 + " " + "9" * 18, Beat(10**18 - 1, 10**18 - 1)),
        ("9" * 19 + " 1", None),
        ("1 " + "9" * 19, None),
        ("goodbye", None),
        ("goodbye x", None),
        ("farewell 3", None),
        ("3", None),
        ("-3 4", None),
        ("3 -4", None),
        ("3 4 5", None),
        ("", None),
    ],
)
def test_a_heartbeat_is_two_numbers_or_a_goodbye(text: str, beat: Beat | None) -> None:
    assert Beat.parse(text) == beat
    assert beat is None or str(beat) == text


def of_training(number: int, origin: str) -> Member:
    return Member(number, f"start {number}", "host", (), origin)


@pytest.mark.parametrize(
    ("one", "other", "foreign"),
    [("a", "a", False), ("a", "b", True), ("", "b", False), ("a", "", False)],
)
def test_members_are_foreign_whose_trainings_are_known_to_differ(
    one: str, other: str, foreign: bool
) -> None:
    assert of_training(1, one).is_foreign_to(of_training(2, other)) is foreign


@pytest.mark.parametrize(
    ("steps_of", "origin"),
    [
        ({}, "a"),  # the least of several that are as far
        ({1: 5, 2: 5, 3: 5}, "a"),
        ({1: 4, 2: 5, 3: 4}, "a"),
        ({1: 5, 2: 4, 3: 4}, "b"),
        ({1: 4, 2: 4, 3: 5}, "c"),
        ({1: 1}, "b"),  # who has shown no steps has made none
        ({2: 1, 9: 99}, "a"),
        ({4: 99}, "a"),  # whose training nobody knows is not asked
    ],
)
def test_the_furthest_training_is_that_of_most_steps(
    steps_of: dict[int, int], origin: str
) -> None:
    trainings = enumerate(("b", "a", "c", ""), start=1)
    listed = {number: of_training(number, name) for number, name in trainings}
    assert furthest_origin(MemberList(0, listed), steps_of) == origin


def test_of_no_member_there_is_no_furthest_training() -> None:
    assert furthest_origin(MemberList(), {}) == ""
    assert furthest_origin(MemberList(0, {1: of_training(1, "")}), {1: 7}) == ""


@pytest.mark.parametrize(
    ("origin", "steps", "gives_way"),
    [
        # The other one has made 100 steps, of the training "m".
        ("a", 49, True),
        ("a", 50, False),
        ("a", 200, False),
        ("z", 49, True),
        ("z", 200, True),
        ("z", 201, False),
        ("m", 1, False),
        ("", 1, False),
    ],
)
def test_a_training_gives_way_to_one_further_or_as_far_and_of_lesser_name(
    origin: str, steps: int, gives_way: bool
) -> None:
    other = of_training(2, "m")
    listed = MemberList(0, {2: other, 3: of_training(3, origin)})
    for steps_of in ({2: 100}, {9: 1000, 3: 1000, 2: 100}):
        found = ahead_of(of_training(1, origin), steps, listed, steps_of)
        assert found == (other if gives_way else None)
    # Who was not heard of is ahead of nobody.
    assert ahead_of(of_training(1, origin), steps, listed, {}) is None


def test_of_two_trainings_one_gives_way() -> None:
    """Whichever is asked, as long as each knows how far the other is."""
    for mine in range(1, 30):
        for theirs in range(1, 30):
            pair = (of_training(1, "a"), mine), (of_training(2, "b"), theirs)
            listed = MemberList(0, {one.number: one for one, _ in pair})
            steps_of = {one.number: steps for one, steps in pair}
            behind = [ahead_of(*one, listed, steps_of) for one in pair]
            assert behind.count(None) == 1


def test_a_list_holds_an_incarnation_and_objects_to_another() -> None:
    listed = MemberList(3, {1: MEMBER._replace(number=1)})
    for number, incarnation, holds, objects in (
        (1, "incarnation", True, False),
        (1, "another", False, True),
        (2, "incarnation", False, False),
    ):
        member = Member(number, incarnation, "host", ())
        assert listed.holds(member) is holds
        assert bool(listed.objection(number, incarnation)) is objects
    assert "another incarnation as super-learner 1 on host host" in listed.objection(
        1, "another"
    )


def test_the_epoch_after_is_that_of_no_list_before() -> None:
    assert MemberList(3).epoch_after(0) == 4
    assert MemberList(3).epoch_after(7) == 8
    assert MemberList((1 << 62) - 1).epoch_after(0) == 1 << 62
    assert MemberList(1 << 62).epoch_after(0) == 1 << 62


def test_rows_that_are_not_genuine_are_counted() -> None:
    listed = MemberList(5, {n: MEMBER._replace(number=n) for n in (1, 2, 3)})
    found = MemberList.from_json(listed.to_json(), lambda one: one.number == 2)
    assert (found.epoch, set(found.by_number), found.num_invalid) == (5, {2}, 2)
    assert MemberList.from_json("") == MemberList()
    assert MemberList.from_json(listed.to_json()).num_invalid == 0


@pytest.mark.parametrize(
    ("heartbeat", "wait_s"),
    [
        (Heartbeat(), 6.0),
        (Heartbeat(silence_s=5.0), 10.0),
        (Heartbeat(silence_s=60.0), 10.0),
        (Heartbeat(silence_s=60.0, empty_s=0.0), 0.0),
        (Heartbeat(silence_s=1.0, empty_s=30.0), 30.0),
    ],
)
def test_an_empty_list_is_not_believed_for_twice_a_silence(
    heartbeat: Heartbeat, wait_s: float
) -> None:
    assert heartbeat.wait_s == wait_s


def test_only_a_heartbeat_that_rises_shows_life() -> None:
    """An old one that somebody writes once more does not, nor one that is gone."""
    watch, told = SilenceWatch(silence_s=3.0), list[str]()
    later: list[Beat | None] = [Beat(7, 0), None, Beat(None, 0), Beat(8, 0)]
    for half_seconds in range(10):
        beats: dict[str, Beat | None] = {"rises": Beat(half_seconds, 0)}
        beats["old"] = Beat(8, 0) if half_seconds == 0 else later[half_seconds % 4]
        told = watch.look(beats, now=100 + half_seconds / 2)
    assert told == ["old"]


def test_who_comes_back_under_watch_is_measured_by_its_new_heartbeats() -> None:
    """Its counter began at 1 again, below what was seen of it before."""
    watch = SilenceWatch(silence_s=3.0)
    watch.look({"a": Beat(50, 0)}, now=100.0)
    watch.look({}, now=100.5)
    for half_seconds in range(20):
        beat = Beat(1 + half_seconds, 0)
        assert watch.look({"a": beat}, now=101 + half_seconds / 2) == []


def test_a_silence_of_just_the_bound_is_none() -> None:
    watch = SilenceWatch(silence_s=4.0)
    for second in range(5):
        assert watch.look({"a": Beat(1, 0)}, now=100.0 + second) == []
    assert watch.look({"a": Beat(1, 0)}, now=104.5) == ["a"]


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
