"""The links between the super-learners of one job, all made before it begins.

Learner n of a super-learner is linked with learner n of each of its peers, by the two
lanes that Gloo would give the pair, at the address at which Gloo would listen. Where
each listens is told through the job's store, and so is a token, drawn for this job, by
which nobody else gets in. These peers neither come nor go: the loss of one ends the
job, and a cut that heals within `timeout` costs time and nothing else, as over Gloo.
"""

import json
import secrets
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from lightning_adpsgd.coordination.startup.rollcall import RollCall, StartUpError
from lightning_adpsgd.transport.base import PeerLost
from lightning_adpsgd.transport.links import (
    Address,
    Bounds,
    Credentials,
    Facts,
    LinkTransport,
    Listener,
    Refused,
)
from lightning_adpsgd.transport.network_interfaces import (
    VARIABLE,
    gloo_addresses,
    port_range,
)

_PAUSE_S = 0.1
# What is let in at once beside the peers: visitors of no concern, and second tries.
_SPARE = 64
_MOST_LINES = 8


def link(
    store: Store,
    rank: int,
    num_learners: int,
    super_learner_size: int,
    peers: Sequence[int],
    timeout: timedelta,
    patience: timedelta,
) -> LinkTransport:
    """Links this learner with its counterparts; all learners of the job call it.

    Args:
        store: The job's, under a prefix that nothing else uses.
        rank: This learner.
        num_learners: Of the job.
        super_learner_size: N.
        peers: The super-learners that this one ever asks; they ask it as well.
        timeout: For how long to try to reach one.
        patience: For how long to wait for a learner that has not come so far.

    Returns:
        The transport, every lane of it connected.

    Raises:
        StartUpError: Some could not be linked; the same message in all learners.
    """
    roll = RollCall(store, rank, num_learners, patience)
    index, shard = divmod(rank, super_learner_size)
    facts = Facts(
        member=index,
        incarnation=f"learner {rank}",
        job="",
        model="",  # compared before
        super_learner_size=super_learner_size,
        shard=shard,
    )
    transport = LinkTransport(
        facts,
        Credentials(_token_of_learner_0(store, rank)),
        num_learners // super_learner_size,
        notices_cuts=False,
        whom=lambda peer: f"its learner {peer * super_learner_size + shard}",
    )
    try:
        _Linking(transport, roll, peers, timeout).hold()
    except BaseException:
        transport.close()
        raise
    return transport


class _Linking:
    """Everybody dials the peers that it asks, and waits for those that ask it.

    `_come`, the peers whose lanes are here, is guarded by `_state`: threads of the
    listener add to it.
    """

    def __init__(
        self,
        transport: LinkTransport,
        roll: RollCall,
        peers: Sequence[int],
        timeout: timedelta,
    ) -> None:
        self._transport, self._roll, self._peers = transport, roll, peers
        self._timeout_s = timeout.total_seconds()
        self._come, self._state = set[int](), threading.Condition()

    def hold(self) -> None:
        """Returns when all lanes of all learners are connected."""
        listener, trouble = self._listen()
        try:
            own = "" if listener is None else str(listener.address)
            word = json.dumps([own, trouble])
            addresses = json.loads(self._roll.ask("addresses", word, _judge_addresses))
            trouble = self._connect(addresses)
            self._roll.ask("lanes", trouble, _judge)
        finally:
            if listener is not None:
                listener.close()

    def _listen(self) -> tuple[Listener | None, str]:
        """Listens for peers; what is wrong, if it cannot."""
        addresses = gloo_addresses()
        if not addresses:
            return None, f"{VARIABLE} names no interface with an IPv4 address"
        number = len(self._peers) + _SPARE
        bounds = Bounds(self._timeout_s, number, number)
        here = Address(addresses[0], 0)
        try:
            return self._transport.listen(here, self._welcome, bounds=bounds), ""
        except OSError as error:
            return None, f"cannot listen at {here}: {error}"

    def _welcome(self, number: int, lane: int, facts: Facts) -> None:
        with self._state:
            self._come.add(number)
            self._state.notify_all()

    def _connect(self, addresses: Sequence[str]) -> str:
        """Dials and is dialled; returns what went wrong, empty if nothing did."""
        deadline = time.monotonic() + self._timeout_s
        facts = self._transport.facts
        for peer in self._peers:
            place = addresses[peer * facts.super_learner_size + facts.shard]
            if trouble := self._dial(peer, Address.parse(place), deadline):
                return trouble
        return self._await_peers(deadline)

    def _dial(self, peer: int, address: Address, deadline: float) -> str:
        while True:
            left_s = deadline - time.monotonic()
            try:
                self._transport.connect(
                    peer, address, timedelta(seconds=max(left_s, 0.0))
                )
            except PeerLost as error:
                # A packet that was lost is sent again after a second, too late for
                # this try, and a crowd at the door has gone by the next one.
                if left_s < _PAUSE_S:
                    return f"super-learner {peer} was lost {error.detail}"
                time.sleep(_PAUSE_S)
            except Refused as error:
                return str(error)
            else:
                return ""

    def _await_peers(self, deadline: float) -> str:
        with self._state:
            self._state.wait_for(
                lambda: self._come >= {*self._peers}, deadline - time.monotonic()
            )
            missing = sorted({*self._peers} - self._come)
        if not missing:
            return ""
        return f"super-learners {missing} have not connected in {self._timeout_s:g} s"


def _token_of_learner_0(store: Store, rank: int) -> bytes:
    if rank == 0:
        store.set("token", secrets.token_hex(32))
    return store.get("token")


def _judge_addresses(words: list[str]) -> str:
    told = [json.loads(word) for word in words]
    _judge([trouble for _, trouble in told])
    return json.dumps([address for address, _ in told])


def _judge(troubles: list[str]) -> str:
    wrong = [f"learner {rank}: {what}" for rank, what in enumerate(troubles) if what]
    if wrong:
        raise StartUpError(
            "training cannot start: not all learners could be linked with one another. "
            f"See whether a firewall drops TCP on ports {port_range()} between the "
            "hosts of the job; with `transport='gloo'` no links are made.\n"
            + "\n".join(wrong[:_MOST_LINES])
        )
    return ""
