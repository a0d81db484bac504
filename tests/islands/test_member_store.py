"""What members write into the rendezvous and read there, on a store of this process."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, Store

from lightning_adpsgd.islands import member_store
from lightning_adpsgd.islands.member_list import Beat, Member, MemberList
from lightning_adpsgd.islands.member_store import MemberStore, text_at
from lightning_adpsgd.islands.rendezvous import RendezvousUnreachable
from lightning_adpsgd.islands.signatures import Signatures
from lightning_adpsgd.transport.links.credentials import Credentials

PLAIN = Signatures(Credentials(), "job")
SIGNED = Signatures(Credentials(b"0123456789abcdef"), "job")
ONE, TWO = (Member(number, f"start {number}", "host", ()) for number in (1, 2))


def list_of(*members: Member, epoch: int = 1) -> MemberList:
    return MemberList(epoch, {member.number: member for member in members})


@pytest.fixture
def plain() -> HashStore:
    return HashStore()


@pytest.fixture
def store(plain: HashStore) -> MemberStore:
    return MemberStore(plain, PLAIN)


@pytest.mark.parametrize("other", [list_of(ONE), list_of(TWO, epoch=9)])
def test_a_list_is_replaced_only_where_nobody_was_faster(
    plain: HashStore, store: MemberStore, other: MemberList
) -> None:
    """Whichever text is greater."""
    wanted = list_of(ONE, TWO, epoch=5)
    version = plain.get("version")
    plain.set("members", other.to_json())
    assert not store.replace("", wanted)
    assert store.members()[1] == other
    assert plain.get("version") == version
    assert store.replace(other.to_json(), wanted)
    assert store.members()[1] == wanted
    assert plain.get("version") != version


def test_a_change_raises_the_epoch_and_nothing_changed_raises_none(
    store: MemberStore,
) -> None:
    assert store.change(7, lambda old: {**old, 1: ONE}) == list_of(ONE, epoch=8)
    assert store.change(3, lambda old: {**old, 2: TWO}) == list_of(ONE, TWO, epoch=9)
    assert store.change(99, lambda old: old) == list_of(ONE, TWO, epoch=9)


@pytest.mark.parametrize("text", ["nonsense", '[1, [["no row"]]]'])
def test_nonsense_is_counted_told_once_and_replaced_by_the_next_change(
    plain: HashStore,
    store: MemberStore,
    text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        for _ in range(3):
            plain.set("members", text)
            assert store.members()[1] == MemberList(int(text != "nonsense"))
            assert store.members()[1].num_invalid == 1
        store.change(5, lambda old: {1: ONE})
        assert store.members()[1].num_invalid == 0
    told = [one.message for one in caplog.records]
    begin = "ignored 1 rows of the member list"
    assert [one.startswith(begin) for one in told] == [True] * 2


@pytest.mark.parametrize("epoch", [1 << 62, int("9" * 4300)])
def test_a_list_of_any_epoch_can_be_replaced(
    plain: HashStore, store: MemberStore, epoch: int
) -> None:
    """JSON reads a number of 4300 digits, and does not write the one after it."""
    plain.set("members", f"[{epoch}, []]")
    for number in range(3):
        member = ONE._replace(number=number)
        store.change(0, lambda old, one=member: {**old, one.number: one})
    found = store.members()[1]
    assert (set(found.by_number), found.num_invalid) == ({0, 1, 2}, 0)


def test_a_list_that_others_change_all_the_time_is_given_up(
    plain: HashStore, store: MemberStore
) -> None:
    def edit(old: dict[int, Member]) -> dict[int, Member]:
        plain.set("members", list_of(epoch=plain.add("edits", 1)).to_json())
        return {1: ONE}

    with pytest.raises(RendezvousUnreachable, match="during each of 100 attempts"):
        store.change(0, edit)


@pytest.mark.parametrize("signatures", [PLAIN, SIGNED])
def test_a_goodbye_is_the_last_heartbeat_of_one_incarnation(
    plain: HashStore, signatures: Signatures
) -> None:
    store = MemberStore(plain, signatures)
    assert not store.has_said_goodbye(ONE)
    for beat, leaves in ((Beat(3, 40), False), (Beat(None, 41), True)):
        store.show(ONE, beat)
        assert store.has_said_goodbye(ONE) == leaves
        version, beats = store.beats([ONE, TWO])
        assert version == plain.get("version")
        assert beats == {"start 1": beat, "start 2": None}
    if signatures is SIGNED:
        assert not store.has_said_goodbye(ONE._replace(incarnation="another"))


def test_a_number_is_greater_than_those_drawn_and_those_on_the_list(
    plain: HashStore, store: MemberStore
) -> None:
    assert [store.draw_number() for _ in range(3)] == [0, 1, 2]
    store.change(0, lambda old: {7: ONE._replace(number=7)})
    assert [store.draw_number() for _ in range(2)] == [8, 9]
    for nonsense in ("x", "-5", "9" * 10):
        plain.set("next", nonsense)
        assert store.draw_number() == 8
    plain.set("next", "999999999")
    assert store.draw_number() == 999999999


def test_a_member_is_genuine_only_with_the_proof_of_its_signatures(
    plain: HashStore,
) -> None:
    store = MemberStore(plain, SIGNED)
    signed = store.signed(ONE)
    store.change(0, lambda old: {1: signed, 2: TWO})
    found = store.members()[1]
    assert (found.by_number, found.num_invalid) == ({1: signed}, 1)


def test_numbers_that_others_draw_all_the_time_are_given_up(
    plain: HashStore, store: MemberStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(store: Store, key: str) -> str:
        found = text_at(store, key)
        if key == "next":
            plain.set("next", str(int(found or 0) + 5))
        return found

    monkeypatch.setattr(member_store, "text_at", overtaken)
    with pytest.raises(RendezvousUnreachable, match=r"no number .* in 100 attempts"):
        store.draw_number()


@pytest.mark.parametrize("key", ["members", "next"])
def test_a_text_that_is_none_is_replaced(
    plain: HashStore, store: MemberStore, key: str
) -> None:
    """No comparison with what was read could ever find it."""
    plain.set(key, b"\xff\xfe")  # pyright: ignore[reportArgumentType]
    assert store.draw_number() == 0
    store.change(0, lambda old: {**old, 1: ONE})
    assert store.members()[1] == list_of(ONE)


def test_a_heartbeat_is_looked_for_until_it_is_there(
    plain: HashStore, store: MemberStore
) -> None:
    assert store.beats([ONE])[1] == {"start 1": None}
    store.show(ONE, Beat(1, 7))
    assert store.beats([TWO, ONE])[1] == {"start 1": Beat(1, 7), "start 2": None}
    plain.set("heartbeat/start 1", "nonsense")
    assert store.beats([ONE])[1] == {"start 1": None}
    assert store.beats([]) == (plain.get("version"), {})


def test_two_of_one_number_have_heartbeats_of_their_own(store: MemberStore) -> None:
    """A rendezvous that has come back empty gives away numbers that are in use."""
    other = TWO._replace(number=ONE.number)
    store.show(ONE, Beat(9, 100))
    store.show(other, Beat(None, 0))
    assert store.beats([ONE])[1] == {"start 1": Beat(9, 100)}
    assert store.beats([other])[1] == {"start 2": Beat(None, 0)}
    assert not store.has_said_goodbye(ONE)


def test_a_new_connection_leaves_the_version_as_it_is(plain: HashStore) -> None:
    store = MemberStore(plain, PLAIN)
    assert plain.get("version") == b"0"
    store.change(0, lambda old: {1: ONE})
    version = plain.get("version")
    assert version != b"0"
    MemberStore(plain, PLAIN)
    assert plain.get("version") == version


def test_rows_without_sense_are_replaced_though_nothing_else_changes(
    plain: HashStore, store: MemberStore
) -> None:
    for text in ('[1, [["no row"]]]', "nonsense"):
        plain.set("members", text)
        store.change(0, lambda old: old)
        assert store.members()[1].num_invalid == 0


class Counting:
    """A store that counts what it is asked, each of which is a round trip."""

    def __init__(self, store: HashStore) -> None:
        self._store, self.asked = store, list[str]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.asked.append(name)
        return getattr(self._store, name)


def test_each_text_is_read_in_one_round_trip(plain: HashStore) -> None:
    counting: Any = Counting(plain)
    store = MemberStore(counting, PLAIN)
    for one in (ONE, TWO):
        store.show(one, Beat(1, 1))
    store.change(0, lambda old: {1: ONE, 2: TWO})
    counting.asked.clear()
    store.members()
    assert counting.asked == ["compare_set"]
    counting.asked.clear()
    store.beats([ONE, TWO])
    assert counting.asked == ["check", "multi_get"]


def test_two_that_draw_at_once_get_different_numbers(plain: HashStore) -> None:
    """Both have read the same text when the first one replaces it."""
    others = list[int]()

    class Late(Counting):
        def compare_set(self, key: str, text: str, wanted: str) -> bytes:
            if key == "next" and wanted and not others:
                others.append(MemberStore(plain, PLAIN).draw_number())
            return plain.compare_set(key, text, wanted)

    late: Any = Late(plain)
    assert MemberStore(late, PLAIN).draw_number() not in others
    assert len(others) == 1
