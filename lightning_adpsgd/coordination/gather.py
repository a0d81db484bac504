"""Gathers plain data from all learners in learner 0, without pickle.

Only tensors, numbers, strings and containers of them are accepted, because the data is
read as by `torch.load(weights_only=True)`.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_adpsgd.files import printable

_MOST_BYTES = 1000


@contextmanager
def ending_together(
    what: str, group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """A context that raises in all learners of a group if it raises in one.

    Its end is a collective over the group; its body must contain none.

    Args:
        what: clause that says what an error prevents, for the message in the others.

    Raises:
        OSError: Another learner has failed; the message has its error.
    """
    try:
        yield
    except Exception as error:  # whatever it is, the others wait for this learner
        texts_of_all(f"{type(error).__name__}: {error}", group)
        raise
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    for rank, text in zip(ranks, texts_of_all("", group), strict=True):
        if text:
            raise OSError(f"{what}: learner {rank} raised {text}")


def gather_weights_only(
    value: Any, group: dist.ProcessGroup | None = None
) -> list[Any] | None:
    """Gathers one value from each learner of a group; None: from all learners.

    Returns:
        In the first learner, the values by rank, tensors on the host; None elsewhere.
    """
    where, buffer = _device_of(group), io.BytesIO()
    torch.save(value, buffer)
    mine = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8).to(where)
    length = torch.tensor([len(mine)], device=where)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    longest = max(int(number) for number in lengths)
    mine = torch.nn.functional.pad(mine, (0, longest - len(mine)))
    is_first = dist.get_rank(group) == 0
    rows = [torch.empty_like(mine) for _ in lengths] if is_first else None
    dist.gather(mine, rows, group=group, group_dst=0)
    if rows is None:
        return None
    pairs = zip(rows, lengths, strict=True)
    contents = (row[: int(number)].cpu().numpy().tobytes() for row, number in pairs)
    read = partial(torch.load, map_location="cpu", weights_only=True)
    return [*map(read, map(io.BytesIO, contents))]


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """The device of the tensors that a group carries."""
    return torch.device("cpu" if dist.get_backend(group) == "gloo" else "cuda")


def texts_of_all(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """The texts of all learners of a group, by rank, each cut to 1000 bytes."""
    # A file name may not be valid text, and the others wait for this message.
    encoded = printable(text).encode()
    content = encoded[:_MOST_BYTES].ljust(_MOST_BYTES, b"\0")
    mine = torch.tensor([*content], dtype=torch.uint8, device=_device_of(group))
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in rows]
