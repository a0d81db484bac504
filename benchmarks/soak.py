"""A long run in which six super-learners suffer whatever comes, drawn from a seed.

    python -m benchmarks.soak --minutes 30 --seed 0

What that is, `fault_injection` says. Learner 0 is spared, so that one journal tells of
the whole run. What is left, `results/soak.json`, says what it did to those who lived.
"""

import argparse
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks import killed_methods, results, step_journal, workload
from benchmarks.fault_injection import FALL_ILL, SPARED, Event, World
from benchmarks.killable import Killable
from benchmarks.step_journal import Entry, Journal, Life
from benchmarks.workload import NARROW, Batch

LEARNERS = 6
STEP_S, QUIET_END_S = 0.1, 25.0


# --- one life


class _Module(killed_methods.Module):
    def __init__(self, life: Killable) -> None:
        super().__init__(life)
        self._diary = Journal(life.folder, life.number, life.life)
        self._falls_ill = False
        signal.signal(FALL_ILL, self._fall_ill)

    @override
    def batches(self) -> Iterator[Batch]:
        return self.life.paced(STEP_S)

    def _fall_ill(self, number: int, frame: object) -> None:
        self._falls_ill = True

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self._falls_ill:
            self._falls_ill = False
            next(self.model.parameters()).data.fill_(float("nan"))
        return super().training_step(batch, batch_idx)

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        statistics: Any = self.trainer.strategy
        members = statistics.gossip_statistics().members
        loss = float(outputs["loss"])
        entry = Entry(time.monotonic(), members, loss, step_journal.memory_of())
        self._diary.write(entry)


def live(life: Killable, host: str = killed_methods.HERE) -> None:
    """One life of an island that keeps a journal."""
    killed_methods.train_island(_Module(life), host)


# --- what it did to them


def soak(seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    """Runs it; its figures."""
    port = 20_000 + 200 * (int.from_bytes(os.urandom(2)) % 50)
    begin = time.monotonic()
    world = World(Killable(0, LEARNERS, 0, port, folder, begin + seconds), seed, live)
    try:
        world.run(begin + seconds - QUIET_END_S)
        world.crowd.wait(seconds + 60.0)
        lasting = world.crowd.alive()
    finally:
        world.close()
    lives = [step_journal.read(folder, number) for number in range(LEARNERS)]
    return {
        "question": f"{LEARNERS} super-learners for {seconds / 60:.0f} minutes with "
        f"faults drawn from seed {seed}; steps are waits of {1e3 * STEP_S:.0f} ms.",
        **figures(lives, world.events),
        "loss": losses(folder, max(sum(map(len, own)) for own in lives)),
        "terminations that took too long": world.late,
        "processes that did not end": len(lasting),
        "learners that ended in an error": len(trouble(folder)),
        "series": {**series(lives), **protocol(world, begin, folder)},
    }


def protocol(world: World, begin: float, folder: Path) -> dict[str, Any]:
    """What happened, what it did to the rendezvous, and what learners said of it."""
    return {
        "memory of the rendezvous from start to end, MB": [
            [round(one[0] / 1e6, 1), round(one[-1] / 1e6, 1)]
            for one in world.memory
            if one
        ],
        "events": [
            [e.kind, *e.learners, round(e.begin - begin, 1)] for e in world.events
        ],
        "errors": trouble(folder),
    }


def figures(lives: Sequence[Sequence[Life]], events: Sequence[Event]) -> dict[str, Any]:
    """What the journals tell in single numbers."""
    faults = [
        [(e.begin, e.end + 2.0) for e in events if number in e.learners]
        for number in range(len(lives))
    ]
    gaps = [
        [gap for life in own for gap in step_journal.gaps(life, faults[number])]
        for number, own in enumerate(lives)
    ]
    all_gaps = sorted(itertools.chain(*gaps))
    return {
        "faults": dict(Counter(event.kind for event in events)),
        "seconds from kill to closed ring": detected(lives, events, "kill"),
        "seconds from two kills to closed ring": detected(lives, events, "kill_two"),
        "seconds from stop to closed ring": detected(lives, events, "stop_long"),
        "seconds between steps, median": statistics.median(all_gaps),
        "seconds between steps, 999 of 1000 below": all_gaps[-len(all_gaps) // 1000],
        "seconds between steps, largest": all_gaps[-1],
        "seconds between steps, largest of learner 0": max(gaps[SPARED]),
        "memory growth of learner 0, MB": (step_journal.growth(lives[SPARED][0]) or 0)
        / 1e6,
    }


def series(lives: Sequence[Sequence[Life]]) -> dict[str, list[float]]:
    """What the journals tell of each learner, and of learner 0 over time."""
    grown = [step_journal.growth(life) for own in lives for life in own]
    return {
        "lives of each": [len(own) for own in lives],
        "steps of each": [sum(map(len, own)) for own in lives],
        "memory growth of lives over 2 minutes, MB": [
            round(g / 1e6, 1) for g in grown if g is not None
        ],
        "members that learner 0 knew of, each 10 s": [
            *step_journal.members_over_time(lives[SPARED][0])
        ],
        "loss of learner 0 by minute": step_journal.loss_by_minute(lives[SPARED]),
    }


def detected(
    lives: Sequence[Sequence[Life]], events: Sequence[Event], kind: str
) -> dict[str, float]:
    """Over all faults of a kind; a survivor's next step shows what it knows."""
    of_kind = [event for event in events if event.kind == kind]
    each = [step_journal.detection(lives, e.learners, e.begin) for e in of_kind]
    known = [seconds for seconds in each if seconds is not None]
    if not known:
        return {"faults": len(of_kind), "seen": 0}
    return {
        "faults": len(of_kind),
        "seen": len(known),
        "median": statistics.median(known),
        "largest": max(known),
    }


def losses(folder: Path, num_steps: int) -> dict[str, float]:
    """On held-out samples, beside learners that average in each step undisturbed."""
    kept = [torch.load(path) for path in sorted(folder.glob("*.weights"))]
    mean = held_out_loss(torch.stack(kept).mean(0))
    control = held_out_loss(undisturbed(num_steps))
    return {
        "of the mean": mean,
        "largest of a learner": max(map(held_out_loss, kept)),
        "undisturbed": control,
        "of undisturbed": mean / control,
        "learners at the end": len(kept),
        "steps of undisturbed": num_steps,
    }


def undisturbed(num_steps: int) -> Tensor:
    """Weights of as many learners that take their mean in each step."""
    model = workload.make_model(widths=NARROW)
    optimizer = workload.make_optimizer(model)
    feeds = [workload.batches(1 + number) for number in range(LEARNERS)]
    for _ in range(num_steps):
        parts = [next(feed) for feed in feeds]
        optimizer.zero_grad()
        columns = (torch.cat(column) for column in zip(*parts, strict=True))
        workload.loss(model, Batch(*columns)).backward()
        optimizer.step()
    return workload.weights_of(model)


@torch.no_grad()
def held_out_loss(weights: Tensor) -> float:
    model = workload.make_model(widths=NARROW)
    nn.utils.vector_to_parameters(weights, model.parameters())
    return workload.loss(model, next(workload.batches(99, workload.HELD_OUT))).item()


def trouble(folder: Path) -> list[str]:
    """What learners said that ended by themselves in an error."""
    texts = [path.read_text() for path in sorted(folder.glob("*.trouble"))]
    return [text[-500:] for text in texts if "SIGTERMException" not in text]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for journals and outputs")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        kept = chosen.keep or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        found = soak(60 * chosen.minutes, chosen.seed, kept)
    command = f"python -m benchmarks.soak --minutes {chosen.minutes:g}"
    command += f" --seed {chosen.seed}"
    print(results.write("soak", found, command, time.monotonic() - begin))


if __name__ == "__main__":
    sys.exit(main())
