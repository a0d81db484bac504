"""The transports of one job: messages over process groups of Gloo or NCCL."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.transport.base import PeerLost, Pending, Transport


class DistributedTransport(Transport):
    """Point-to-point messages over a dedicated process group.

    Gloo matches point-to-point operations on the network threads of the group. They
    occupy none of these while they wait, so an idle receive costs nothing. The number
    of a lane is the tag of its operations.

    Args:
        group: process group with one learner of each super-learner, in the order of
            their indices. Nothing else may use it.
        hosts: host of each learner of the job, by rank, for messages.
    """

    def __init__(self, group: dist.ProcessGroup, hosts: Sequence[str] = ()) -> None:
        self._group = group
        self._ranks = ranks = dist.get_process_group_ranks(group)
        names = ((n, f" on host {hosts[n]}" if hosts else "") for n in ranks)
        self._names = [f"learner {rank}{where}" for rank, where in names]
        self.index = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    @override
    def post_receive(self, peer: int, lane: int, into: Tensor) -> Pending:
        return self._post(self._group.recv, "receiving from", peer, lane, into)

    @override
    def post_send(self, peer: int, lane: int, tensor: Tensor) -> Pending:
        return self._post(self._group.send, "sending to", peer, lane, tensor)

    @override
    def post_mean(self, vector: Tensor) -> Pending:
        work = dist.all_reduce(vector, group=self._group, async_op=True)
        operation = "averaging over all super-learners"
        return _Mean(_Work(work, None, operation), vector, self.size)

    def _post(
        self, kind: Callable[..., Any], doing: str, peer: int, lane: int, tensor: Tensor
    ) -> Pending:
        operation = f"{doing} {self._names[peer]}"
        try:
            # Not by `dist.isend`, whose checks cost as much as a short message.
            work = kind([tensor], peer, lane)
        except RuntimeError as error:
            raise PeerLost(peer, operation, str(error)) from error
        return _Work(work, peer, operation)


class DeviceTransport(DistributedTransport):
    """Rounds between GPUs over a dedicated NCCL process group.

    A wait blocks the calling thread's stream, not the thread. NCCL's watchdog notices a
    peer that does not come, and ends the process after the group's timeout. NCCL has no
    lanes, so it can carry only rounds.
    """

    on_device = True

    @override
    def post_all(
        self, lane: int, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor]
    ) -> list[Pending]:
        # As one batch: NCCL runs the operations of a pair one by one, so two ends that
        # both begin with a receive would wait for each other.
        operations = [
            *(self._operation(dist.irecv, *receive) for receive in receives.items()),
            *(self._operation(dist.isend, *send) for send in sends.items()),
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return [_Work(work, None, "mixing with its peers") for work in works]

    def _operation(self, kind: Callable[..., Any], peer: int, tensor: Tensor) -> Any:
        return dist.P2POp(kind, tensor, self._ranks[peer], self._group)


class _Work:
    def __init__(self, work: Any, peer: int | None, operation: str) -> None:
        self._work, self._peer, self._operation = work, peer, operation

    def wait(self, timeout: timedelta) -> None:
        try:
            self._work.wait(timeout)
        except RuntimeError as error:
            reason = str(error).rpartition("] ")[2]
            raise PeerLost(self._peer, self._operation, reason) from error


class _Mean:
    def __init__(self, sum: _Work, vector: Tensor, size: int) -> None:
        self._sum, self._vector, self._size = sum, vector, size

    def wait(self, timeout: timedelta) -> None:
        self._sum.wait(timeout)
        self._vector.div_(self._size)
