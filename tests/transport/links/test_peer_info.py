"""What two members tell each other, and in what they must agree."""

import json
import re
from dataclasses import asdict
from typing import Any

import pytest

from lightning_adpsgd.transport.links.peer_info import PeerInfo, differences
from tests.transport.links.ends import info


def test_peer_info_goes_through_json() -> None:
    told = info(3, settings={"wire_dtype": "int8"})
    assert PeerInfo.from_dict(json.loads(json.dumps(asdict(told)))) == told


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"member": "3"}, "`member` of peer info must be a int"),
        ({"member": True}, "`member` of peer info must be a int"),
        ({"member": -1}, "numbers from 0 to"),
        ({"member": 1 << 70}, "numbers from 0 to"),
        ({"super_learner_size": 0}, "numbers from 0 to"),
        ({"member": 1 << 31}, "numbers from 0 to"),
        ({"shard": 1 << 31}, "numbers from 0 to"),
        ({"super_learner_size": (1 << 31) + 1}, "numbers from 0 to"),
        ({"model": 4}, "`model` of peer info must be a str"),
        ({"settings": {"gain": 1}}, "must hold strings"),
        ({"settings": []}, "`settings` of peer info must be a dict"),
        ({"other": 1}, "must have the fields"),
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
