"""What two members tell each other, and in what they must agree."""

import json
import re
from dataclasses import asdict
from typing import Any

import pytest

from lightning_adpsgd.transport.links.peer_info import (
    _KINDS,
    PROTOCOL,
    PeerInfo,
    Wanted,
    differences,
)
from tests.transport.links.ends import info


def test_peer_info_goes_through_json() -> None:
    told = info(3, settings={"wire_dtype": "int8"})
    assert PeerInfo.from_dict(json.loads(json.dumps(asdict(told)))) == told


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"member": "3"}, "`member` of peer info must be of type int, got '3'"),
        ({"member": True}, "`member` of peer info must be of type int, got True"),
        ({"member": -1}, "`member` of peer info must be from 0 to 2147483647, got -1"),
        ({"member": 1 << 70}, "`member` .* from 0 to 2147483647, got 1180591620"),
        ({"super_learner_size": 0}, "`super_learner_size` .* from 1 to .*, got 0"),
        ({"member": 1 << 31}, "`member` .* from 0 to 2147483647, got 2147483648"),
        ({"shard": 1 << 31}, "`shard` .* from 0 to 2147483647, got 2147483648"),
        (
            {"super_learner_size": (1 << 31) + 1},
            "`super_learner_size` .* from 1 to 2147483648, got 2147483649",
        ),
        ({"model": 4}, "`model` of peer info must be of type str, got 4"),
        ({"settings": {"gain": 1}}, "must be strings, got {'gain': 1}"),
        ({"settings": []}, "`settings` of peer info must be of type dict, got "),
        ({"other": 1}, "must have the fields .*, got "),
    ],
)
def test_malformed_peer_info_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PeerInfo.from_dict({**asdict(info()), **change})


def test_the_largest_numbers_are_read() -> None:
    most = 1 << 31
    largest = info(most - 1, shard=most - 1, super_learner_size=most)
    assert PeerInfo.from_dict(asdict(largest)) == largest


@pytest.mark.parametrize("content", [None, [], "info", 3, {}])
def test_what_is_no_peer_info_at_all_is_refused(content: object) -> None:
    with pytest.raises(ValueError, match="must have the fields"):
        PeerInfo.from_dict(content)


def test_members_of_one_job_agree() -> None:
    assert differences(info(0), info(1)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"job": "another"}, "`job` is 'a job' here and 'another' there"),
        ({"version": "0.0.1"}, "`version` is .* here and '0.0.1' there"),
        ({"super_learner_size": 4}, "`super_learner_size` is 1 here and 4 there"),
        ({"shard": 2}, "`shard` is 0 here and 2 there"),
        ({"settings": {"gain": "0.5"}}, "`gain` is 'absent' here and '0.5' there"),
        (
            {"model": "weight:(2, 4):torch.float32"},
            r"first weight to differ is `weight` of shape \(2, 3\) in torch.float32, "
            r"and there `weight` of shape \(2, 4\)",
        ),
        (
            {"model": "bias:(2, 3):torch.float32"},
            "first weight to differ is `weight` .* there `bias`",
        ),
        ({"member": 0}, "both are super-learner 0"),
    ],
)
def test_a_difference_names_what_both_have(
    change: dict[str, Any], message: str
) -> None:
    (found,) = differences(info(0), info(**{"member": 1, **change}))
    assert re.search(message, found), found


ONE, OTHER = "0123456789abcdef", "fedcba9876543210"


@pytest.mark.parametrize(
    ("ours", "theirs", "agree"),
    [
        (ONE, ONE, True),
        (ONE, OTHER, False),
        (OTHER, ONE, False),
        # Weights that are yet to be taken are of no training.
        (ONE, "", True),
        ("", ONE, True),
        ("", "", True),
    ],
)
def test_weights_of_two_trainings_are_not_averaged(
    ours: str, theirs: str, agree: bool
) -> None:
    found = differences(info(0, origin=ours), info(1, origin=theirs))
    assert (found == []) == agree
    begun = f"begun by super-learners '{ours[:8]}' and '{theirs[:8]}', and are not"
    assert [begun in one for one in found] == [True] * (not agree)


def test_all_differences_are_told_the_settings_in_their_order() -> None:
    mine = info(0, settings={"b": "1", "a": "1", "same": "1"})
    theirs = info(0, job="another", settings={"b": "2", "a": "2", "same": "1"})
    told = [one.partition(" ")[0] for one in differences(mine, theirs)]
    assert told == ["`job`", "`a`", "`b`", "both"]


@pytest.mark.parametrize(("num", "end"), [(98, "'"), (99, "...")])
def test_what_a_peer_says_of_itself_fills_no_log(num: int, end: str) -> None:
    """A text is told with its quotation marks, of which 100 characters are kept."""
    (found,) = differences(info(0), info(1, job="x" * num))
    assert found == f"`job` is 'a job' here and '{'x' * min(num, 99)}{end} there"
    name = "n" * (num + 2)
    (found,) = differences(info(0), info(1, settings={name: "1"}))
    assert found.startswith(f"`{'n' * 100}` is ")


@pytest.mark.parametrize(
    ("wanted", "address", "message"),
    [
        (Wanted(1), "here:1", ""),
        (Wanted(1, "start 1", "here:1"), "here:1", ""),
        (Wanted(1, "", "relay:1"), "", ""),  # it does not know where it listens
        (Wanted(0), "", "listens where super-learner 0 was expected"),
        (Wanted(2), "", "listens where super-learner 2 was expected"),
        (Wanted(1, "start 0"), "", "where its incarnation 'start 0' was expected"),
        (Wanted(1, "start 2"), "", "where its incarnation 'start 2' was expected"),
        (Wanted(1, "", "relay:1"), "here:1", "dialed at 'relay:1' and listens at"),
    ],
)
def test_a_listener_objects_to_being_taken_for_another(
    wanted: Wanted, address: str, message: str
) -> None:
    said = wanted.objection(info(1), address)
    assert message in said
    assert bool(said) == bool(message)


@pytest.mark.parametrize(
    ("row", "read"),
    [
        ([1, "a", "b"], Wanted(1, "a", "b")),
        ([True, "a", "b"], Wanted(-1)),
        ([1, "a"], Wanted(-1)),
        ([1, "a", "b", "c"], Wanted(-1)),
        ([1, "a", None], Wanted(-1)),
        ("1ab", Wanted(-1)),
        (None, Wanted(-1)),
    ],
)
def test_whom_a_dialer_expects_is_somebody_or_nobody(row: Any, read: Wanted) -> None:
    assert Wanted.from_row(row) == read


def test_other_fields_are_another_protocol() -> None:
    """Only the protocol's number tells an older version that it cannot read them."""
    fields = "incarnation job member model origin settings shard super_learner_size "
    assert (PROTOCOL, sorted(_KINDS)) == (5, [*fields.split(), "version"])
