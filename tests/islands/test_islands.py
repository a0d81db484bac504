"""Islands over real connections: they come, meet, die, and nobody waits."""

import torch

from tests.helpers import engine_threads, random_rows, until
from tests.islands.archipelago import Trained, archipelago, rendezvous, steps_of


def test_islands_find_one_another_and_come_to_one_mean() -> None:
    rows = random_rows(4)
    with rendezvous() as server, archipelago(server, rows) as trained:
        until(lambda: all(one.members == 4 for one in trained), "the ring")
        # A joiner begins with the weights of the others: all with those of the first.
        for one in trained:
            torch.testing.assert_close(one.vector, rows[0])
        for one, row in zip(trained, rows, strict=True):
            one.vector.copy_(row)
        until(lambda: (steps_of(trained), min(o.exchanges for o in trained) > 9)[1], "")
        mean = rows.mean(0)
        for one in trained:
            until(
                lambda o=one: (
                    steps_of(trained),
                    bool((o.vector - mean).abs().max() < 0.05),
                )[1],
                "the mean",
            )
        for one in trained:
            one.island.stop()
    assert engine_threads() == []


def test_the_death_of_one_is_survived() -> None:
    rows = random_rows(3)
    with rendezvous() as server, archipelago(server, rows) as trained:
        until(lambda: all(one.members == 3 for one in trained), "the ring")
        trained[1].die()
        rest = [trained[0], trained[2]]
        until(lambda: all(one.members == 2 for one in rest), "closed")
        n = [o.exchanges for o in rest]
        until(lambda: (steps_of(rest), rest[0].exchanges > n[0] + 3)[1], "exchanges")
        again = Trained(server, rows[1])
        again.island.start()
        until(lambda: all(one.members == 3 for one in [*rest, again]), "the ring again")
        again.island.stop()
        until(lambda: all(one.members == 2 for one in rest), "closed")
        print(rest[0].island.statistics())
