"""What a stranger who reaches the rendezvous can write there, and what comes of it."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from torch._C._distributed_c10d import Store

from lightning_adpsgd.islands.member_list import Member, MemberList
from lightning_adpsgd.islands.membership import Membership
from lightning_adpsgd.islands.rendezvous import Rendezvous
from lightning_adpsgd.islands.signatures import Signatures
from lightning_adpsgd.transport.links.credentials import Credentials
from tests.helpers import PATIENCE_S, until
from tests.islands.archipelago import HEARTBEAT, NOBODY_LISTENS, Server, rendezvous
from tests.islands.test_membership import die

TOKEN = Credentials(b"0123456789abcdef")
OURS = Signatures(TOKEN, "job")


def member_with_token(server: Server, name: str, port: int) -> Membership:
    client = Rendezvous(server.address, PATIENCE_S, TOKEN)
    member = Member(-1, name, "host", (f"10.0.0.1:{port}",))
    one = Membership(client, member, lambda: 5, HEARTBEAT, **NOBODY_LISTENS)
    one.start()
    assert one.enter(PATIENCE_S)
    return one


def as_stranger(server: Server, action: Callable[[Store], Any]) -> Any:
    client = Rendezvous(server.address, PATIENCE_S)
    try:
        return client.ask(action)
    finally:
        client.close()


def rewrite(store: Store, change: Callable[[list[Any]], object]) -> None:
    epoch, rows = json.loads(store.get("members"))
    for row in rows:
        change(row)
    store.set("members", json.dumps([epoch + 1, rows]))
    store.set("version", "7")


def test_a_signed_text_is_of_one_token_one_job_and_one_subject() -> None:
    signed = OURS.sign("a text with spaces", "kind")
    assert OURS.read(signed, "kind") == "a text with spaces"
    others = [
        OURS.read(signed, "another kind"),
        OURS.read(signed.replace("text", "test"), "kind"),
        OURS.read("a text with spaces", "kind"),
        OURS.read("", "kind"),
        Signatures(TOKEN, "another job").read(signed, "kind"),
        Signatures(Credentials(b"another token..."), "job").read(signed, "kind"),
    ]
    assert others == [None] * 6


def test_without_a_token_texts_are_as_they_are() -> None:
    plain = Signatures(Credentials(), "job")
    assert plain.sign("a text", "kind") == "a text"
    assert plain.read("a text", "kind") == "a text"


@pytest.mark.parametrize("place", range(6))
def test_no_field_of_a_row_can_be_changed(place: int) -> None:
    row = [3, "name", "host", ["10.0.0.1:1"], "origin"]
    proof = OURS.of("member", *row, "")
    listed = [*row, proof]
    listed[place] = [4, "other", "other", ["10.6.6.6:6"], "other", "00"][place]

    def is_genuine(one: Member) -> bool:
        return OURS.holds(one.proof, "member", *one._replace(proof=""))

    texts = [json.dumps([1, [found]]) for found in ([*row, proof], listed)]
    found = [len(MemberList.from_json(text, is_genuine).by_number) for text in texts]
    assert found == [1, 0]


def test_a_stranger_moves_nobody_to_another_address() -> None:
    with rendezvous() as server:
        both = [member_with_token(server, name, 1) for name in ("one", "two")]
        until(lambda: all(len(o.members.by_number) == 2 for o in both), "both")
        whole = dict(both[0].members.by_number)
        seen = list[MemberList]()
        for one in both:
            one._on_change = lambda one=one: seen.append(one.members)

        def put_a_relay(row: list[Any]) -> None:
            row[3] = ["10.6.6.6:6"]

        as_stranger(server, lambda store: rewrite(store, put_a_relay))
        for one in both:
            assert one.refresh(PATIENCE_S)
        until(lambda: all(o.members.by_number == whole for o in both), "both again")
        ways = {m.addresses for found in seen for m in found.by_number.values()}
        assert ways <= {("10.0.0.1:1",)}
        # And what the next one reads is whole again.
        found = as_stranger(server, lambda store: json.loads(store.get("members")))
        assert {tuple(row[3]) for row in found[1]} == {("10.0.0.1:1",)}
        for one in both:
            one.stop(5)


def test_a_stranger_adds_nobody_to_the_list() -> None:
    with rendezvous() as server:
        one = member_with_token(server, "one", 1)

        def add(store: Store) -> None:
            epoch, rows = json.loads(store.get("members"))
            rows.append([9, "stranger", "host", ["10.6.6.6:6"], "", ""])
            store.set("members", json.dumps([epoch + 1, rows]))
            store.set("version", "7")

        as_stranger(server, add)
        for _ in range(12):
            assert one.refresh(PATIENCE_S)
        assert set(one.members.by_number) == {0}
        one.stop(5)


def test_a_stranger_keeps_no_dead_member_alive() -> None:
    """Neither with heartbeats of its own, nor with old ones that were once true."""
    with rendezvous() as server:
        one, dead = (member_with_token(server, name, 1) for name in ("one", "dead"))
        until(lambda: len(one.members.by_number) == 2, "both")
        key = "heartbeat/dead"
        old = as_stranger(server, lambda store: store.get(key))
        assert dead.refresh(PATIENCE_S)
        die(dead)
        made_up = ["1000000 5", old.decode().replace(" 5 ", " 6 ")]
        texts = itertools.cycle([old.decode(), *made_up])
        stranger = Rendezvous(server.address, PATIENCE_S)

        def is_evicted() -> bool:
            stranger.ask(lambda store: store.set(key, next(texts)))
            return set(one.members.by_number) == {0}

        until(is_evicted, "the eviction")
        stranger.close()
        one.stop(5)
