"""Writes the history of a life of a learner: each change of its weights, at once.

`history` says what the lines mean, reads them and checks that they add up.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.history import Average, Name, Put, Record, Step
from lightning_adpsgd.gossip.exchange import Lane
from lightning_adpsgd.weights.replica import Part, Replica


class Recorder:
    """Writes the history of this process, which trains one life of one learner."""

    def __init__(self, folder: Path, name: Name) -> None:
        path = folder / f"{name.learner}.{name.life}.history"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._here, self._before, self._update = threading.local(), 0.0, 0.0

    def write(self, record: Record) -> None:
        """Adds a line; it is in the file at once, so that a kill loses none."""
        line = json.dumps([type(record).__name__, *record]) + "\n"
        os.write(self._file, line.encode())

    def follow_exchanges(self) -> None:
        """Records all later changes by exchanges or by the weights of others."""
        for name, asks in (("ask", True), ("answer", False)):
            setattr(Lane, name, self._known_to(getattr(Lane, name), asks))
        add, put = Part.add, Part.put
        room: dict[int, Tensor] = {}

        def add_and_tell(part: Part, change: Tensor, weight: float) -> None:
            add(part, change, weight)
            peer, asks = self._here.lane
            value = change.sum(dtype=torch.float64).item() * weight
            now = time.monotonic()
            self.write(Average(now, peer, asks, part.place, value))

        def put_and_tell(part: Part, weights: Tensor) -> None:
            old = room.setdefault(part.place, torch.empty_like(weights))
            part.read(old)
            put(part, weights)
            value = (weights.double() - old.double()).sum().item()
            self.write(Put(time.monotonic(), value))

        Part.add, Part.put = add_and_tell, put_and_tell  # pyright: ignore

    def _known_to(self, method: Callable[..., Any], asks: bool) -> Callable[..., Any]:
        def exchange(lane: Lane, *arguments: Any) -> Any:
            self._here.lane = lane.channel.peer, asks
            return method(lane, *arguments)

        return exchange

    def begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Marks the moment after the merges of a step and before its optimizer."""
        self._before = _sum_of(optimizer)

    def end_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Marks the end of an update, as a hook after the optimizer's step."""
        self._update += _sum_of(optimizer) - self._before

    def step(self, replica: Replica, batch: tuple[int, int], island: Any) -> None:
        """Records that a batch has ended, with its epoch and its number."""
        position, lost = island.position.steps, island.statistics().lost
        with replica.guard:
            total = 0.0
            for chunk in replica.chunks:
                chunk.read(values := torch.empty(len(chunk), dtype=chunk.dtype))
                total += values.sum(dtype=torch.float64).item()
            update, self._update = self._update, 0.0
            member, now = island.membership.member, time.monotonic()
            who = member.number, member.origin
            step = Step(now, *batch, *who, position, update, total, lost)
            self.write(step)


def _sum_of(optimizer: torch.optim.Optimizer) -> float:
    weights = (w for group in optimizer.param_groups for w in group["params"])
    return sum(w.detach().sum(dtype=torch.float64).item() for w in weights)
