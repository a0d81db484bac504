"""The methods that are compared, each as a program of one learner.

Lightning's own strategies and those of this package train through Lightning's Trainer,
as their users do; the other libraries train in a plain loop. Both loops take the same
batches of the same `Feed`, which also keeps the clock, so the comparison is of the time
from one step to the next. `solo` exists in both loops.
"""

from collections.abc import Callable

from benchmarks.feed import Task, Trace
from benchmarks.learners import Place
from benchmarks.lightning_programs import alone, through_trainer, within_host
from benchmarks.plain_loops import (
    PERIOD,
    decent_dp,
    in_plain_loop,
    post_local,
    solo,
    torchft,
)

SOLO, SOLO_LOOP = "solo", "solo, plain loop"
WITHIN_HOST = "ddp within each host"
PROGRAMS: dict[str, Callable[[Place, Task], Trace]] = {
    SOLO: alone,
    "ddp": through_trainer("ddp"),
    WITHIN_HOST: within_host,
    "sdpsgd": through_trainer("sdpsgd"),
    "d1psgd": through_trainer("d1psgd"),
    "adpsgd": through_trainer("adpsgd"),
    "adpsgd_random": through_trainer("adpsgd_random"),
    "rdpsgd": through_trainer("rdpsgd"),
    "hadpsgd": through_trainer("hadpsgd"),
    SOLO_LOOP: in_plain_loop(solo, gloo=False),
    "torch post-local": in_plain_loop(post_local(hierarchical=False)),
    "torch hierarchical": in_plain_loop(post_local(hierarchical=True)),
    "Decent-DP ring": in_plain_loop(decent_dp("ring")),
    "Decent-DP one-peer-exp": in_plain_loop(decent_dp("one-peer-exp")),
    "torchft LocalSGD": in_plain_loop(torchft(diloco=False), gloo=False),
    "torchft DiLoCo": in_plain_loop(torchft(diloco=True), gloo=False),
}
# These average after so many steps of their own.
PERIODS = {name: PERIOD for name in PROGRAMS if name.startswith(("torch ", "torchft"))}
NEED_PEERS = {name for name in PROGRAMS if name.startswith(("Decent-DP", "torchft"))}
