"""What a member list says: pure functions."""

from itertools import product
from typing import Any

import pytest

from lightning_adpsgd.islands.member_list import (
    Beat,
    Member,
    MemberList,
    ahead_of,
    furthest_origin,
)

MEMBER = Member(3, "incarnation", "host", ())


@pytest.mark.parametrize(
    "row", [None, "row", {}, [], [1, "a", "b"], [1, "a", "b", [], "", "", "more"]]
)
def test_what_is_no_row_of_a_member_is_refused(row: object) -> None:
    with pytest.raises(ValueError, match="a row must have 4 to 6 fields, got "):
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
        ({"number": -1}, "`number` .* from 0 to 2147483647, got "),
        ({"number": MOST + 1}, "`number` .* from 0 to 2147483647, got "),
        ({"number": True}, "`number` .* from 0 to 2147483647, got "),
        ({"number": 1.0}, "`number` .* from 0 to 2147483647, got "),
        (
            {"addresses": ["here:1"] * 4097},
            "`addresses` .* a list of at most 4096, got ",
        ),
        ({"addresses": "here:1"}, "`addresses` .* a list of at most 4096, got "),
        ({"addresses": [1]}, "at most 256 characters, got "),
        ({"addresses": ["nowhere"]}, "nowhere"),
        ({"incarnation": "x" * 257}, "at most 256 characters, got "),
        ({"host": None}, "at most 256 characters, got "),
        ({"origin": 3}, "at most 256 characters, got "),
        ({"origin": "", "proof": "x" * 257}, "at most 256 characters, got "),
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


def by_incarnation(steps_of: dict[int, int]) -> dict[str, int]:
    return {f"start {number}": steps for number, steps in steps_of.items()}


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
        ({1: 8, 2: 4, 3: 4}, "a"),  # as far
        ({1: 9, 2: 4, 3: 4}, "b"),
        ({1: 4, 2: 4, 3: 9}, "c"),
        ({1: 5, 2: 4, 3: 9}, "b"),
        ({1: 1}, "b"),  # who has shown no steps has made none
        ({2: 1, 9: 99}, "a"),
        ({4: 99}, "a"),  # whose training nobody knows is not asked
    ],
)
def test_the_furthest_training_has_half_of_the_most_steps_and_the_least_name(
    steps_of: dict[int, int], origin: str
) -> None:
    trainings = enumerate(("b", "a", "c", ""), start=1)
    listed = {number: of_training(number, name) for number, name in trainings}
    assert furthest_origin(MemberList(0, listed), by_incarnation(steps_of)) == origin


def test_of_no_member_there_is_no_furthest_training() -> None:
    assert furthest_origin(MemberList(), {}) == ""
    assert furthest_origin(MemberList(0, {1: of_training(1, "")}), {"start 1": 7}) == ""


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
        known = by_incarnation(steps_of)
        found = ahead_of(of_training(1, origin), steps, listed, known)
        assert found == (other if gives_way else None)
    # Who was not heard of is ahead of nobody.
    assert ahead_of(of_training(1, origin), steps, listed, {}) is None


def test_of_two_trainings_one_gives_way() -> None:
    """Whichever is asked, as long as each knows how far the other is."""
    for mine in range(1, 30):
        for theirs in range(1, 30):
            pair = (of_training(1, "a"), mine), (of_training(2, "b"), theirs)
            listed = MemberList(0, {one.number: one for one, _ in pair})
            steps_of = {one.incarnation: steps for one, steps in pair}
            behind = [ahead_of(*one, listed, steps_of) for one in pair]
            assert behind.count(None) == 1


def test_who_gives_way_takes_the_weights_that_it_gives_way_to() -> None:
    """Not those of its own training from another member that is as far."""
    for mine, theirs in product(range(1, 30), range(1, 30)):
        for own, other in (("a", "b"), ("b", "a")):
            rest = {1: of_training(1, own), 2: of_training(2, other)}
            listed, known = MemberList(0, rest), by_incarnation({1: mine, 2: theirs})
            if ahead_of(of_training(3, own), mine, listed, known):
                assert furthest_origin(listed, known) == other


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
    told = "number 1 belongs to another process, on host host"
    assert listed.objection(1, "another") == told


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
