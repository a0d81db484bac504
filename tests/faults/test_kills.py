"""kill -9 at every phase of an exchange: what is left is all but the share of the dead.

Two islands live in threads of this process, the third in one of its own. Nothing is
learned before it dies, so that the sum of all weights is known to the last bit. In each
exchange ten chunks of four numbers cross; a death may leave those averaged at one end
alone that were under way.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.faults.test_wires import go_on, settled_sum
from tests.faults.victim import Victim, victim
from tests.helpers import random_rows, until
from tests.islands.archipelago import Server, Trained, archipelago, rendezvous
from tests.islands.test_islands import all_see, at_once

LENGTH, CHUNK = 40, 4
# Of random pairs each has one exchange at a time.
OPTIONS: dict[str, Any] = {"topology": "random_pairs", "chunk_elements": CHUNK}
RATE, STEPS, MARGIN = 0.1, 60, 1.02

# How many chunks may be averaged at one end alone: of those that were on their way.
ASKING = {
    "before it asks": 0,
    "asks, and is not granted yet": 2,
    "between two chunks": 2,
    "a chunk has come and is not averaged": 2,
    "a chunk is averaged at this end": 2,
    "the last verdicts are not sent": 1,
    "the exchange is over": 0,
    "before a part is merged": 0,
    "a part is merged": 0,
}
ASKED = {
    "is asked, and has not granted yet": 0,
    "between two chunks": 2,
    "a chunk is averaged at this end": 2,
    "the last verdicts are not sent": 1,
    "the exchange is over": 0,
}


class Three(NamedTuple):
    """Two who live, and one who is to die; each with weights of its own."""

    server: Server
    rest: list[Trained]
    victim: Victim
    rows: Tensor


@contextmanager
def three() -> Iterator[Three]:
    rows = random_rows(3, LENGTH)
    with (
        victim(LENGTH, **OPTIONS) as third,
        rendezvous() as server,
        archipelago(server, rows[:2], **OPTIONS) as rest,
    ):
        third.join(server.address)
        all_see(rest, 3)
        at_once(rest, rows[:2])
        third.vector.copy_(rows[2])
        yield Three(server, rest, third, rows)


def chunks_at_one_end(world: Three) -> list[int]:
    """Which chunks are missing in the sum of those who live and of the dead."""
    known = settled_sum(world.rest) + world.victim.at_death
    drift = (known - world.rows.sum(0)).abs().view(-1, CHUNK)
    # No more than what the two ends disagreed about in the chunk.
    spread = (world.rows.amax(0) - world.rows.amin(0)).view(-1, CHUNK)
    assert (drift <= spread + 1e-12).all()
    return (drift.amax(1) > 1e-12).nonzero().view(-1).tolist()


def train(rest: Sequence[Trained], target: Tensor) -> None:
    """Steps against the gradient of half the square of the distance to a target."""
    for _ in range(STEPS):
        for one in rest:
            one.island.engine.before_update()
            one.vector.add_(target - one.vector, alpha=RATE)
            one.island.engine.after_update()


def loss(weights: Tensor, target: Tensor) -> float:
    return 1.0 + float((weights - target).square().mean()) / 2


def they_live_on(world: Three) -> None:
    """Steps, exchanges and the loss are those of who lost nobody."""
    rest, rows = world.rest, world.rows
    all_see(rest, 2)
    go_on(rest)
    until(lambda: [o.island.statistics().lost for o in rest] == [1, 1], "a word")
    target = rows.sum(0)
    train(rest, target)
    go_on(rest)
    found = settled_sum(rest) / len(rest)
    undisturbed = target + (1 - RATE) ** STEPS * (rows.mean(0) - target)
    assert loss(found, target) <= MARGIN * loss(undisturbed, target)


@pytest.mark.parametrize("moment", ASKING)
def test_a_kill_of_one_that_asks(moment: str) -> None:
    with three() as world:
        world.victim.arm(moment)

        def has_died() -> bool:
            world.victim.step()
            return world.victim.has_died()

        until(has_died, moment)
        assert len(chunks_at_one_end(world)) <= ASKING[moment]
        they_live_on(world)


@pytest.mark.parametrize("moment", ASKED)
def test_a_kill_of_one_that_is_asked(moment: str) -> None:
    with three() as world:
        world.victim.arm(moment)

        def has_died() -> bool:
            world.rest[0].step()
            return world.victim.has_died()

        until(has_died, moment)
        assert len(chunks_at_one_end(world)) <= ASKED[moment]
        they_live_on(world)


def test_a_kill_of_one_that_gives_its_weights_to_a_joiner() -> None:
    with three() as world:
        world.victim.arm("gives its weights")
        nothing = torch.zeros_like(world.rows[0])
        joiner = Trained(world.server, nothing, **OPTIONS)
        joiner.island.start()
        until(world.victim.has_died, "the death")
        # It has begun with those of its other neighbours.
        torch.testing.assert_close(joiner.vector, world.rows[:2].mean(0))
        assert chunks_at_one_end(world) == []
        all_see([*world.rest, joiner], 3)
        go_on([*world.rest, joiner])
        joiner.island.stop()


def test_a_kill_of_a_joiner_that_takes_weights_is_not_even_noticed() -> None:
    rows = random_rows(2, LENGTH)
    with (
        victim(LENGTH, chunk_elements=CHUNK) as third,
        rendezvous() as server,
        archipelago(server, rows, chunk_elements=CHUNK) as rest,
    ):
        all_see(rest, 2)
        at_once(rest, rows)
        third.arm("takes the weights of another")
        third.try_to_join(server.address)
        until(third.has_died, "the death")
        go_on(rest)
        assert [one.members for one in rest] == [2, 2]
        assert [one.island.statistics().lost for one in rest] == [0, 0]
        torch.testing.assert_close(settled_sum(rest), rows.sum(0))
        assert set(rest[0].island.membership.members.by_number) == {0, 1}


def test_the_last_but_one_is_killed_and_one_trains_alone() -> None:
    """And when another one comes, they are two again."""
    rows = random_rows(2, LENGTH)
    with (
        victim(LENGTH) as other,
        rendezvous() as server,
        archipelago(server, rows[:1]) as (one,),
    ):
        other.join(server.address)
        all_see([one], 2)
        other.arm("a part is merged")

        def has_died() -> bool:
            other.step()
            return other.has_died()

        until(has_died, "the death")
        all_see([one], 1)
        for _ in range(20):
            one.step(1.0)
        joiner = Trained(server, rows[1])
        joiner.island.start()
        torch.testing.assert_close(joiner.vector, one.vector)
        all_see([one, joiner], 2)
        go_on([one, joiner])
        joiner.island.stop()
