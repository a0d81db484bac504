"""The mean of all learners' weights, in the precision of averages."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_adpsgd.weights.replica import averaging_dtype

# The most elements in a message, but for a longer chunk: each waits for far hosts.
MESSAGE = 1 << 22


def exact_means(
    chunks: Iterable[Tensor],
    number: int,
    speaks: bool,
    group: dist.ProcessGroup | None,
    longest: int = MESSAGE,
) -> Iterator[Tensor]:
    """The means of chunks, one by one: the same bits in all learners.

    Args:
        chunks: weights of this learner, as long as those of the others. They are read a
            message at a time, and each may change once its mean is known.
        number: number of learners that speak.
        speaks: whether this learner adds its weights.
        group: process group of all; None: that of all learners of the job.
        longest: the most elements in a message, but for a longer chunk; equal in all.
    """
    for several in _in_messages(chunks, longest):
        joined = torch.cat([one.to(averaging_dtype(one.dtype)) for one in several])
        if len(joined):
            dist.all_reduce(joined if speaks else joined.zero_(), group=group)
        means = joined.div_(number).split([len(chunk) for chunk in several])
        del joined, several
        yield from means
        del means


def _in_messages(chunks: Iterable[Tensor], longest: int) -> Iterator[list[Tensor]]:
    """Chunks of one dtype that travel together, because each message has a latency."""
    several, length = list[Tensor](), 0
    for chunk in chunks:
        fits = length + chunk.numel() <= longest
        if several and not (fits and chunk.dtype == several[0].dtype):
            yield several
            several, length = [], 0
        several.append(chunk)
        length += chunk.numel()
    if several:
        yield several
