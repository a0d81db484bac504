"""Plain data of all learners in learner 0, and errors that end all of them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_adpsgd.coordination.gather import (
    ending_together,
    gather_weights_only,
    texts_of_all,
)
from tests.helpers import forked

PAIR = [1, 2]


def value_of(rank: int) -> dict[str, Any]:
    """Of another length in each learner: torch reads on past some bytes too many."""
    return {
        "rank": rank,
        "names": ["x" * 100] * rank,
        "weights": torch.ones(rank << 15),
    }


def ending(rank: int, error: Exception, group: Any = None) -> str:
    """What a learner hears if learner 1 meets an error."""
    try:
        with ending_together("nothing was saved", group):
            if rank == 1:
                raise error
    except Exception as heard:
        return f"{type(heard).__name__}: {heard}"
    return "no error"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three learners gets."""
    address = f"file://{tmp_path_factory.mktemp('gather')}/store"

    def learner(rank: int) -> dict[str, Any]:
        dist.init_process_group("gloo", address, rank=rank, world_size=3)
        pair = dist.new_group(PAIR)
        is_in = isinstance(pair, dist.ProcessGroup)  # a number to the others
        return {
            "values": gather_weights_only(value_of(rank)),
            "texts": texts_of_all(f"{10 + rank}"),
            "fine": ending(rank + 3, KeyError()),
            "long": ending(rank, ValueError("x" + "é" * 800)),
            "no text": ending(rank, OSError("caf\udce9.ckpt"))
            .encode(errors="backslashreplace")
            .decode(),
            "pair": gather_weights_only(rank, pair) if is_in else None,
            "short": ending(rank, KeyError(), pair) if is_in else "",
        }

    outcomes = forked(3, learner)
    assert [outcome.error for outcome in outcomes] == [""] * 3
    return [outcome.value for outcome in outcomes]


def test_learner_0_has_the_values_of_all_by_rank(told: list[dict[str, Any]]) -> None:
    first, *others = (one["values"] for one in told)
    assert others == [None, None]
    assert [one["rank"] for one in first] == [0, 1, 2]
    assert [len(one["names"]) for one in first] == [0, 1, 2]
    assert [float(one["weights"].sum()) for one in first] == [0, 1 << 15, 2 << 15]


def test_all_have_the_texts_of_all_by_rank(told: list[dict[str, Any]]) -> None:
    assert [one["texts"] for one in told] == [["10", "11", "12"]] * 3


def test_an_error_in_one_learner_ends_all_with_its_words(
    told: list[dict[str, Any]],
) -> None:
    """As many as fit into what is sent, and of any language."""
    assert [one["fine"] for one in told] == ["no error"] * 3
    own = "OSError: caf\\udce9.ckpt"
    heard = f"OSError: nothing was saved: learner 1 raised {own}"
    assert [one["no text"] for one in told] == [heard, own, heard]
    heard = "OSError: nothing was saved: learner 1 raised ValueError: x" + "é" * 493
    assert [one["long"] for one in told] == [heard, "ValueError: x" + "é" * 800, heard]


def test_those_outside_of_a_group_are_left_alone(told: list[dict[str, Any]]) -> None:
    assert [one["pair"] for one in told] == [None, PAIR, None]
    heard = "OSError: nothing was saved: learner 1 raised KeyError: "
    assert [one["short"] for one in told] == ["", "KeyError: ", heard]
