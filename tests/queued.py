"""A device whose work is queued, as that of a GPU is, on the CPU of the tests.

It computes at once, and keeps the books of who may know what: each thread has a stream,
and work in one stream knows of work in another only through events, or because a thread
of the host has waited for it. Work that touches an element without knowing of what was
done to it before is a race, whether or not it would show on a GPU of this day.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_adpsgd.weights import replica, streams

# For each stream: how much of its work is known to be done before.
Clock = dict[int, int]
_HOST = -1  # in the place of a stream


class _Touch(NamedTuple):
    stream: int
    number: int
    writes: bool
    by: str


class Books:
    """What the streams of all threads have done, and in which order that is certain.

    Attributes:
        races: a text for each piece of work that did not know of what came before.
    """

    def __init__(self) -> None:
        self.races = list[str]()
        self._lock = threading.RLock()
        self._streams: dict[int, Stream] = {}
        self._host: Clock = {}
        self._touched: dict[int, list[_Touch]] = defaultdict(list)
        self._held = list[Tensor]()

    def stream(self) -> "Stream":
        """The stream of the calling thread."""
        key = threading.get_ident()
        with self._lock:
            return self._streams.setdefault(key, Stream(self, len(self._streams)))

    def wait_for(self, clock: Clock) -> None:
        """The host has waited: all that it queues from now on comes later."""
        with self._lock:
            _join(self._host, clock)

    def note(self, what: str, read: list[Tensor], written: list[Tensor]) -> None:
        """Books a piece of work of the calling thread."""
        with self._lock:
            stream = self.stream()
            _join(stream.clock, self._host)
            number = stream.clock.get(stream.number, 0) + 1
            for tensors, writes in ((read, False), (written, True)):
                for tensor in tensors:
                    touch = _Touch(stream.number, number, writes, what)
                    self._touch(tensor, touch, stream.clock)
            stream.clock[stream.number] = number

    def note_network(self, memory: Tensor, writes: bool) -> None:
        """Books that the network reads or writes memory of the host, at once."""
        with self._lock:
            number = self._host[_HOST] = self._host.get(_HOST, 0) + 1
            touch = _Touch(_HOST, number, writes, "the network")
            self._touch(memory, touch, self._host)

    def _touch(self, tensor: Tensor, touch: _Touch, clock: Clock) -> None:
        self._held.append(tensor)  # so that nothing else gets its memory
        for place in _addresses(tensor):
            for one in self._touched[place]:
                is_known = one.number <= clock.get(one.stream, 0)
                is_own = one.stream == touch.stream
                if (one.writes or touch.writes) and not is_known and not is_own:
                    self.races.append(f"{touch.by} after {one.by}")
            if touch.writes:
                self._touched[place].clear()
            if touch not in self._touched[place]:
                self._touched[place].append(touch)


class Stream:
    """The order of the work that one thread queues."""

    def __init__(self, books: Books, number: int) -> None:
        self.books, self.number, self.clock = books, number, Clock()

    def wait_event(self, event: "Event") -> None:
        _join(self.clock, event.clock)

    def synchronize(self) -> None:
        self.books.wait_for(self.clock)


class Event:
    """A point in the work of a stream."""

    def __init__(self, device: torch.device) -> None:
        self.clock = Clock()

    def record(self, stream: Stream) -> None:
        self.clock = dict(stream.clock)


class Watch(TorchDispatchMode):
    """Books what the calling thread computes."""

    def __init__(self, books: Books) -> None:
        super().__init__()
        self._books = books

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, for seconds

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [*zip(func._schema.arguments, args, strict=False)]
        read, written = list[Tensor](), list[Tensor]()
        for argument, value in given:
            alias = argument.alias_info
            is_view = alias is not None and not alias.is_write
            found = value if isinstance(value, list | tuple) else [value]
            if not is_view:
                tensors = [one for one in found if isinstance(one, Tensor)]
                (read if alias is None else written).extend(tensors)
        name = func._schema.name
        made = result if isinstance(result, list | tuple) else [result]
        for returned, value in zip(func._schema.returns, made, strict=False):
            is_new = returned.alias_info is None and isinstance(value, Tensor)
            if is_new and not name.startswith("aten::empty"):
                written.append(value)
        out = (kwargs or {}).get("out")
        written += [out] if isinstance(out, Tensor) else []
        self._books.note(name, read, written)
        if name == "aten::_local_scalar_dense":
            self._books.stream().synchronize()
        return result


@contextmanager
def queued(monkeypatch: pytest.MonkeyPatch) -> Iterator[Books]:
    """Makes the CPU a device whose work is queued; asserts that nothing raced."""
    books = Books()

    def side_stream(device: torch.device) -> Watch:
        return Watch(books)

    with monkeypatch.context() as patch:
        for module in (streams, replica):
            patch.setattr(module, "has_streams", lambda device: True)
        patch.setattr("lightning_adpsgd.weights.worker.side_stream", side_stream)
        patch.setattr(streams, "host_memory", _host_memory)
        patch.setattr(torch, "Event", Event)
        patch.setattr(
            torch.accelerator, "current_stream", lambda device: books.stream()
        )
        with Watch(books):
            yield books
    assert not books.races, books.races


def _host_memory(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(length, dtype=dtype)


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def _addresses(tensor: Tensor) -> list[int]:
    """The addresses of a strided tensor's elements."""
    places = [tensor.data_ptr()]
    for length, step in zip(tensor.shape, tensor.stride(), strict=True):
        steps = range(0, length * step, step) if step else range(1)
        places = [p + s * tensor.element_size() for p in places for s in steps]
    return places
