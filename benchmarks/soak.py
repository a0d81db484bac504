"""A long run of eight super-learners under random faults, drawn from a seed.

    python -m benchmarks.soak --minutes 30 --seed 0

`fault_injection` describes the faults. They share the batches of each epoch, with a
token and TLS, each on an emulated host of its own where this machine can. Learner 0 is
spared, so that one journal tells of the whole run. The result, `results/soak.json`, has
the effect on the survivors, and whether their weights and batches add up.
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
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import history, hosts, results, soaked, step_journal
from benchmarks.fault_injection import SPARED, World
from benchmarks.history import Fault
from benchmarks.hosts import Hosts
from benchmarks.killable import Killable
from benchmarks.soaked import CREDENTIALS, STEP_S, UNITS
from benchmarks.step_journal import Life
from lightning_adpsgd.transport.links.issuing import issue

LEARNERS = 8
QUIET_END_S = 25.0
ENDING_S = 120.0  # after the last step, for all to end


# --- where it happens


@contextmanager
def own_hosts(num: int) -> Iterator[Hosts | None]:
    """Makes a host for each learner, or none if this machine cannot emulate them."""
    if reason := hosts.reason_against():
        print(f"all on one host, without faults of links: {reason}", file=sys.stderr)
        yield None
    else:
        with hosts.emulated(num) as made:
            yield made


def live(where: Hosts | None, life: Killable) -> None:
    """Runs one life, on the host of its learner."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent has one of its own
    address = "127.0.0.1"
    if where is not None:
        where.enter(life.number)
        address = where.addresses[-1]
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    soaked.live(life, address)


@contextmanager
def world(
    folder: Path, seed: int, seconds: float, learners: int, where: Hosts | None = None
) -> Iterator[World]:
    """Learners that train for a given time, and end by themselves."""
    issue(folder / CREDENTIALS, days=1)
    port = 20_000 + 200 * (int.from_bytes(os.urandom(2)) % 50)
    first = Killable(0, learners, 0, port, folder, time.monotonic() + seconds)
    made = World(first, seed, partial(live, where), where)
    try:
        yield made
    finally:
        made.close()


# --- the effect on the learners


def soak(seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    """Makes the run; returns its figures."""
    begin = time.monotonic()
    with (
        own_hosts(LEARNERS + 1) as where,
        world(folder, seed, seconds, LEARNERS, where) as suffering,
    ):
        suffering.run(begin + seconds - QUIET_END_S)
        suffering.crowd.wait(seconds + ENDING_S - (time.monotonic() - begin))
        lasting = suffering.crowd.alive()
    lives = [step_journal.read(folder, number) for number in range(LEARNERS)]
    place = "an emulated host each" if suffering.hosts else "one host"
    return {
        "question": f"{LEARNERS} super-learners on {place} for {seconds / 60:.0f} "
        f"minutes, with shared epochs of {UNITS} batches, a token and TLS, and faults "
        f"drawn from seed {seed}; steps are waits of {1e3 * STEP_S:.0f} ms.",
        **figures(lives, suffering.events),
        "accounts": accounts(folder, suffering.events),
        "loss": losses(folder, max(sum(map(len, own)) for own in lives)),
        "terminations that took too long": suffering.late,
        "processes that did not end": len(lasting),
        "learners that ended in an error": len(soaked.trouble(folder)),
        "series": {**series(lives), **protocol(suffering, begin, folder)},
    }


def accounts(folder: Path, events: Sequence[Fault]) -> dict[str, Any]:
    """Whether weights and batches add up; see `history`."""
    verdict = history.check(history.read(folder), events, UNITS)
    for sentence in verdict.unexplained:
        print(sentence, file=sys.stderr)
    return {
        "lives": verdict.lives,
        "steps": verdict.steps,
        "averages at both ends": (verdict.averages - verdict.one_sided) // 2,
        "averages at one end, explained": verdict.one_sided,
        "of these by a connection that broke without a fault of ours": verdict.of_lost,
        "what those moved the sum of 68,362 weights by": verdict.moved,
        "weights taken from others": verdict.puts,
        "largest imbalance of a sum of weights": verdict.worst_balance,
        "averages of weights of two trainings": verdict.of_two_origins,
        "averages before any weights were taken": verdict.untrained,
        "whole epochs": verdict.epochs,
        "batches lost": verdict.lost,
        "batches done twice": verdict.twice,
        "findings that no fault explains": len(verdict.unexplained),
    }


def protocol(world: World, begin: float, folder: Path) -> dict[str, Any]:
    """The faults, their effect on the rendezvous, and the learners' messages."""
    return {
        "memory of the rendezvous from start to end, MB": [
            [round(one[0] / 1e6, 1), round(one[-1] / 1e6, 1)]
            for one in world.memory
            if one
        ],
        "events": [
            [e.kind, *e.learners, round(e.begin - begin, 1)] for e in world.events
        ],
        "errors": soaked.trouble(folder),
    }


def figures(lives: Sequence[Sequence[Life]], events: Sequence[Fault]) -> dict[str, Any]:
    """The single numbers from the journals."""
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
    """The series from the journals: of each learner, and of learner 0 over time."""
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
    lives: Sequence[Sequence[Life]], events: Sequence[Fault], kind: str
) -> dict[str, float]:
    """The times until survivors' next steps show faults of one kind."""
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
    """The held-out losses, beside those of undisturbed synchronous learners."""
    kept = [torch.load(path) for path in sorted(folder.glob("*.weights"))]
    mean = soaked.held_out_loss(torch.stack(kept).mean(0))
    control = soaked.held_out_loss(soaked.undisturbed(LEARNERS, num_steps))
    return {
        "of the mean": mean,
        "largest of a learner": max(map(soaked.held_out_loss, kept)),
        "undisturbed": control,
        "of undisturbed": mean / control,
        "learners at the end": len(kept),
        "steps of undisturbed": num_steps,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak")
    length = "length of the soak (%(default)s)"
    parser.add_argument("--minutes", type=float, default=30.0, help=length)
    drawn = "seed of the faults (%(default)s)"
    parser.add_argument("--seed", type=int, default=0, help=drawn)
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
