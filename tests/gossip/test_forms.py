"""Which form an exchange takes: its wire dtype, and the length of its messages."""

import math
from collections.abc import Sequence
from threading import Condition

import torch

from lightning_adpsgd.gossip.forms import Form, FormChoice, forms_of, joined
from lightning_adpsgd.weights.replica import Replica

BIG = 1 << 17
AUTO = (4 * BIG, BIG, BIG // 2, BIG // 2)
"""Bytes at full width, with a byte, with half a byte, and in short messages."""


def test_the_first_exchange_is_narrow_and_in_short_messages() -> None:
    assert FormChoice(AUTO).choose(math.inf) == 3


def test_an_exchange_is_as_wide_as_half_a_step_allows() -> None:
    for step_seconds, form in ((2.0, 0), (1.9, 1), (0.5, 1), (0.4, 2), (0.1, 3)):
        choice = FormChoice(AUTO)
        choice.took(2, 0.12)
        # Proportions say 0.96 and 0.24 s of the wider ones.
        assert choice.choose(step_seconds) == form


def test_an_exchange_longer_than_a_step_goes_in_short_messages() -> None:
    choice = FormChoice([4 * BIG, 4 * BIG])
    choice.took(1, 1.0)
    assert [choice.choose(seconds) for seconds in (0.9, 1.1)] == [1, 0]


def test_where_cores_are_idle_a_quarter_of_a_step_is_enough() -> None:
    choice = FormChoice([4 * BIG, 4 * BIG])
    choice.took(1, 1.0)
    chosen = [choice.choose(seconds, cores_idle=True) for seconds in (3.9, 4.1)]
    assert chosen == [1, 0]
    assert choice.choose(3.9, cores_idle=False) == 0


def test_idle_cores_do_not_shorten_messages_over_a_long_link() -> None:
    """Steps of 0.1 s and round trips of 0.2 s, of which short messages take four."""
    choice = FormChoice([4 * BIG, 4 * BIG], num_messages=(1, 8))
    for seconds, form in ((0.5, 0), (0.7, 1)):
        choice.took(0, seconds, round_trip=0.2)
        assert choice.choose(0.1, cores_idle=True) == form


def test_a_wider_form_that_is_faster_than_its_bytes_say_is_found_by_a_try() -> None:
    choice = FormChoice(AUTO)
    taken = (0.3, 0.3, 0.4, 0.4)  # latency is most of it
    chosen = []
    for _ in range(130):
        chosen.append(form := choice.choose(0.7))
        choice.took(form, taken[form])
    assert chosen == [3, 1, 1, 0] + [0] * 126


def test_one_in_many_shows_whether_the_link_has_become_faster() -> None:
    choice = FormChoice(AUTO)
    chosen = []
    for _ in range(132):
        chosen.append(form := choice.choose(1.0))
        choice.took(form, (3.0, 0.8, 0.7, 0.7)[form])
    tries = [call for call, form in enumerate(chosen, 1) if form == 1]
    assert tries == [2, 4, 8, 16, 32, 64, 128]
    assert chosen[0] == 3
    assert set(chosen[1:]) == {1, 2}


def chosen_with(link: Sequence[float], processor: Sequence[float]) -> list[int]:
    """The forms of 200 exchanges beside steps of a second, by what each takes."""
    choice, chosen = FormChoice(AUTO), list[int]()
    for _ in range(200):
        chosen.append(form := choice.choose(1.0))
        choice.took(form, link[form] + processor[form], processor[form])
    return chosen


def test_fewer_bits_that_take_longer_than_all_are_left() -> None:
    """A fast link and a large model: even half a byte takes more than a step."""
    chosen = chosen_with(link=(0.2, 0.05, 0.025, 0.025), processor=(0.2, 1.1, 1.1, 1.2))
    assert chosen == [3] + [0] * 199


def test_a_guess_that_was_wrong_is_not_made_again() -> None:
    """Arithmetic and messages overlap, so that the link seems to take no time."""
    seconds, choice, chosen = (4.0, 1.2, 1.1, 1.1), FormChoice(AUTO), list[int]()
    for _ in range(200):
        chosen.append(form := choice.choose(1.0))
        choice.took(form, seconds[form], seconds[form] - 0.01)
    assert sorted(chosen) == [0, 1, 2] + [3] * 197


def test_no_wider_form_is_tried_over_a_slow_link() -> None:
    chosen = chosen_with(link=(9.6, 2.4, 1.2, 1.2), processor=(0.1, 0.3, 0.3, 0.4))
    assert chosen == [3] * 200


def test_over_a_long_link_no_form_is_blamed_for_the_round_trip() -> None:
    """Steps of 0.05 s and round trips of 0.2 s, which bytes of 0.02 s do not make."""
    forms = FormChoice(AUTO, num_messages=(1, 1, 1, 8))
    chosen = list[int]()
    for _ in range(200):
        chosen.append(form := forms.choose(0.05))
        seconds = 0.2 + (0.16, 0.04, 0.02, 0.62)[form]
        forms.took(form, seconds, round_trip=0.2)
    assert chosen == [3] + [0] * 199


def test_over_a_long_and_slow_link_messages_are_short() -> None:
    forms = FormChoice(AUTO, num_messages=(1, 1, 1, 8))
    chosen = list[int]()
    for _ in range(200):
        chosen.append(form := forms.choose(0.05))
        forms.took(form, 0.2 + (8.0, 2.0, 1.0, 1.2)[form], round_trip=0.2)
    assert chosen[-50:] == [3] * 50


def test_short_messages_carry_the_parts_of_long_ones_in_order() -> None:
    for elements in (300 << 10, 1 << 22):  # of less than a chunk, and of four
        state, part_elements = Condition(), elements // 8
        replica = Replica(
            [[torch.zeros(elements)]], 1 << 20, state, part_elements=part_elements
        )
        long, short = forms_of(replica, replica.chunks, None)
        assert [len(parts) for parts in short.messages] == [1] * 8
        assert covered(long) == covered(short) == elements
        assert len(long.messages) == len(replica.chunks)
        assert max(map(len, long.messages)) <= 2


def covered(form: Form) -> int:
    """Elements of parts that follow one another without a gap."""
    pieces = [part for parts in form.messages for part in parts]
    places = [part.place for part in pieces]
    assert places == sorted(places)
    return sum(map(len, pieces))


def test_joined_parts_are_read_and_changed_as_each_of_them_is() -> None:
    weights = torch.arange(10.0)
    replica = Replica([[weights]], 10, Condition(), part_elements=4)
    (chunk,) = joined(replica.chunks[0].parts)
    chunk.add(torch.ones(10), 0.5)
    assert torch.equal(weights, torch.arange(10.0))
    into = torch.empty(len(chunk))
    chunk.read(into)
    replica.merge()
    assert torch.equal(into, torch.arange(10.0) + 0.5)
    assert torch.equal(weights, into)
