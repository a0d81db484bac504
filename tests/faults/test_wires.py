"""What damaged, slow and cut links do to islands over real connections; and clocks."""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_adpsgd.gossip.exchange import REQUEST
from lightning_adpsgd.gossip.peers import Asker
from lightning_adpsgd.transport.links.connection import make_header
from tests.faults.wires import Flips, Wires, wires
from tests.helpers import PATIENCE, PATIENCE_S, random_rows, until
from tests.islands.archipelago import (
    HEARTBEAT,
    Trained,
    archipelago,
    rendezvous,
    total,
    train_until,
)
from tests.islands.test_islands import all_reach, all_see, at_once, quiet

LENGTH, CHUNK = 40, 4
NAN = float("nan")


def more(trained: Sequence[Trained], num: int) -> list[int]:
    """Exchanges of each, once it has made so many more."""
    return [one.exchanges + num for one in trained]


def go_on(trained: Sequence[Trained], num: int = 5) -> None:
    """All exchange as before."""
    least = more(trained, num)
    train_until(trained, lambda: all_reach(trained, least), "exchanges")


def train_until_all_see(trained: Sequence[Trained], num: int) -> None:
    """Who trains meets a broken connection at its next exchange."""
    train_until(trained, lambda: all(o.members == num for o in trained), f"{num}")


@contextmanager
def wired(
    monkeypatch: pytest.MonkeyPatch, rows: Tensor, **options: Any
) -> Iterator[tuple[Wires, list[Trained]]]:
    """Islands that see one another, over links that a test may harm."""
    with (
        wires(monkeypatch) as links,
        rendezvous() as server,
        archipelago(server, rows, **options) as trained,
    ):
        all_see(trained, len(rows))
        yield links, trained


def assert_between(trained: Sequence[Trained], rows: Tensor) -> None:
    """Nobody has taken up what nobody had: means of weights stay between them."""
    vectors = torch.stack([one.vector for one in trained])
    assert (vectors <= rows.amax(0) + 1e-9).all()
    assert (vectors >= rows.amin(0) - 1e-9).all()


def settled_sum(trained: Sequence[Trained]) -> Tensor:
    """The sum of all, while nothing is under way."""
    quiet(trained)
    return total(trained)


@pytest.mark.parametrize("seed", range(2))
def test_flipped_bits_are_left_out_by_both_ends_or_end_the_connection(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(3, LENGTH, seed)
    with wired(monkeypatch, rows, chunk_elements=CHUNK) as (links, trained):
        at_once(trained, rows)
        flips = Flips(seed, one_in=20)
        links.change = flips
        train_until(trained, lambda: flips.num >= 12, "flipped bits")
        links.change = lambda piece: piece
        train_until_all_see(trained, 3)
        go_on(trained)
        found = settled_sum(trained)
        assert_between(trained, rows)
        # A connection that ends may leave a chunk at one end and not at the other.
        spread = rows.amax(0) - rows.amin(0)
        assert ((found - rows.sum(0)).abs() <= len(rows) * spread).all()


def test_a_flipped_bit_in_a_payload_is_counted_and_changes_no_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = random_rows(2, 4 * 1024)
    with wired(monkeypatch, rows) as (links, trained):
        go_on(trained)  # all handshakes are over
        quiet(trained)
        at_once(trained, rows)
        flipped = threading.Event()

        def flip_in_the_payload(piece: bytearray) -> bytearray:
            # Of 32 kB, a piece that is full is neither a word nor the end of a message.
            if len(piece) == 256 and not flipped.is_set() and b"\xadpsg" not in piece:
                piece[128] ^= 64
                flipped.set()
            return piece

        links.change = flip_in_the_payload
        train_until(trained, flipped.is_set, "a payload")
        go_on(trained)
        damaged = sum(one.island.statistics().damaged for one in trained)
        assert damaged == 2  # a part, at both ends
        assert [one.island.statistics().lost for one in trained] == [0, 0]
        torch.testing.assert_close(settled_sum(trained), rows.sum(0))


@pytest.mark.parametrize("seed", range(2))
def test_chunks_that_end_in_the_middle_end_the_connection_and_nothing_else(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(3, LENGTH, seed)
    with wired(monkeypatch, rows, chunk_elements=CHUNK) as (links, trained):
        at_once(trained, rows)
        tears = Flips(seed, one_in=100, tears=True)
        links.change = tears
        train_until(trained, lambda: tears.num >= 4, "torn messages")
        links.change = lambda piece: piece
        train_until_all_see(trained, 3)
        go_on(trained)
        assert_between(trained, rows)


def test_a_link_that_is_cut_and_healed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All connections break at once and none can be made; the rendezvous is there."""
    rows = random_rows(3)
    with wired(monkeypatch, rows) as (links, trained):
        at_once(trained, rows)
        links.cut()
        train_until_all_see(trained, 1)
        before = settled_sum(trained)
        for one in trained:  # each goes on by itself
            for _ in range(20):
                one.step(0.1)
        links.plugged = True
        train_until_all_see(trained, 3)
        go_on(trained)
        # What each has learned meanwhile is in the sum.
        torch.testing.assert_close(settled_sum(trained), before + 3 * 20 * 0.1)


def test_a_slow_link_slows_down_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(4, LENGTH)
    released = threading.Event()

    def crawl(piece: bytearray) -> bytearray:
        released.wait(0.2)
        return piece

    with wired(monkeypatch, rows) as (links, trained):
        try:
            at_once(trained, rows)
            links.touches = lambda source, target: {source, target} == {0, 1}
            links.change = crawl
            ages = [one.island.statistics().exchanges for one in trained]
            # Each of the two has another neighbour, with which it goes on at its pace.
            train_until(
                trained,
                lambda: all(
                    one.exchanges > age + 40
                    for one, age in zip(trained, ages, strict=True)
                ),
                "exchanges over the other links",
            )
            assert [one.members for one in trained] == 4 * [4]
            assert [one.island.statistics().lost for one in trained] == 4 * [0]
        finally:
            released.set()
        torch.testing.assert_close(settled_sum(trained), rows.sum(0))


@pytest.mark.parametrize("seed", [0])
def test_a_clock_that_jumps_says_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Years forward and back, between any two looks at it."""
    dice, true = random.Random(seed), time.time
    years = 3e8
    monkeypatch.setattr(time, "time", lambda: true() + dice.uniform(-years, years))
    rows = random_rows(3)
    with rendezvous() as server, archipelago(server, rows) as trained:
        all_see(trained, 3)
        at_once(trained, rows)
        begin = time.monotonic()
        train_until(
            trained,
            lambda: time.monotonic() > begin + 2 * HEARTBEAT.silence_s,
            "two silences",
        )
        go_on(trained)
        assert [one.members for one in trained] == 3 * [3]
        assert [one.island.statistics().lost for one in trained] == 3 * [0]
        torch.testing.assert_close(settled_sum(trained), rows.sum(0))


def test_an_island_that_is_no_number_takes_the_weights_of_a_neighbour() -> None:
    """Over real connections, in the middle of whose exchanges it falls ill."""
    rows = random_rows(3, LENGTH)
    with (
        rendezvous() as server,
        archipelago(server, rows, chunk_elements=CHUNK) as trained,
    ):
        all_see(trained, 3)
        at_once(trained, rows)
        sick, rest = trained[1], [trained[0], trained[2]]
        go_on(trained)
        others = settled_sum(rest)
        sick.vector[LENGTH // 2] = NAN

        def has_reloaded() -> bool:
            assert all(one.vector.isfinite().all() for one in rest)
            return sick.island.statistics().reloads == 1

        train_until(trained, has_reloaded, "other weights")
        go_on(trained)
        assert sick.vector.isfinite().all()
        assert [one.island.statistics().reloads for one in trained] == [0, 1, 0]
        assert [one.members for one in trained] == 3 * [3]
        assert others.isfinite().all()
        assert_between(trained, rows)


def test_half_of_all_die_at_once() -> None:
    rows = random_rows(6)
    with rendezvous() as server, archipelago(server, rows) as trained:
        all_see(trained, 6)
        at_once(trained, rows)
        go_on(trained)
        quiet(trained)
        dead, rest = trained[1:4], [trained[0], *trained[4:]]
        share = total(dead)
        for one in dead:
            one.cut_off()
        for one in dead:
            one.die()
        all_see(rest, 3)
        go_on(rest)
        torch.testing.assert_close(settled_sum(rest), rows.sum(0) - share)
        until(lambda: [o.island.statistics().lost for o in rest] == 3 * [3], "words")


def test_who_hears_late_that_a_lane_is_cut_says_nothing_over_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that asked waits for the processor until all are connected again."""
    late, released, goes_on = list[Asker](), threading.Event(), Asker._goes_on

    def find_out_late(asker: Asker) -> bool:
        found = goes_on(asker)
        if not (found or asker._threads.is_over or released.is_set()):
            late.append(asker)
            assert released.wait(PATIENCE_S)
        return found

    monkeypatch.setattr(Asker, "_goes_on", find_out_late)
    with wired(monkeypatch, random_rows(2)) as (links, trained):
        links_of = [one.island._connections for one in trained]
        # By then the other end knows of the lane, too.
        until(lambda: all(one._dialed for one in links_of), "both lanes")
        links.cut()
        until(lambda: len(late) == 2, "the end of both lanes")
        links.plugged = True
        train_until_all_see(trained, 2)
        go_on(trained)
        released.set()
        until(lambda: all(asker.ended.is_set() for asker in late), "their last words")
        # Over the lanes on which a word of theirs would have been heard before.
        assert links_of[0].pull(1, PATIENCE_S) is not None
        assert links_of[1].pull(0, PATIENCE_S) is not None
        assert [one.island.statistics().lost for one in trained] == [1, 1]


def test_a_damaged_word_of_one_that_is_not_reached_again_ends_its_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else who asks would wait for an answer as long as for one that is stopped."""
    options = {"timeout": 10 * PATIENCE}
    with wired(monkeypatch, random_rows(2), **options) as (links, trained):
        one, two = (each.island._connections for each in trained)
        monkeypatch.setattr(one, "_retry_suspects", lambda: False)
        links.cut()
        train_until_all_see(trained, 1)
        links.plugged = True
        # The second asks, and is answered; it is not asked.
        train_until(trained, lambda: two._dialed == {0}, "a dial")
        least = trained[1].exchanges + 1
        train_until(trained, lambda: trained[1].exchanges >= least, "exchanges")
        flipped = threading.Event()

        def flip_in_a_request(piece: bytearray) -> bytearray:
            # Behind the header stand the word, its two numbers, and their checksum.
            is_word = len(piece) == len(make_header(0)) + 4 * 8
            if is_word and piece[-4 * 8] == REQUEST and not flipped.is_set():
                piece[-8] ^= 64
                flipped.set()
            return piece

        links.change = flip_in_a_request
        train_until(trained, flipped.is_set, "a request")
        train_until(trained, lambda: two.lost == 2, "the end of the lane")
        assert one._dialed == set()
