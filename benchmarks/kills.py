"""What it costs the others that one of six learners is killed every twenty seconds.

It is started again ten seconds later. `adpsgd` as islands, `ddp` under torchrun's
agent, which starts all learners again from the last checkpoint, and torchft, which
averages over who is there. The control of each is itself with nobody killed. What
counts is that the others keep their pace, and that the loss is that without faults.
"""

import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from benchmarks import mortal, workload
from benchmarks.methods import (
    PEERS,
    PERIOD,
    peers_missing,
    plain_step,
    quieten,
    use_peers,
)
from benchmarks.mortal import STEP_S, Mortal, Outcome
from benchmarks.results import Report, Row, Target
from benchmarks.timing import print_row, spread
from benchmarks.workload import NARROW, Batch
from lightning_adpsgd import HADPSGDStrategy

LEARNERS, KILL_EVERY_S, ABSENT_S = 6, 20.0, 10.0
SECONDS, QUICK_S = 300.0, 60.0
WINDOW_S, START = 5.0, 3
SLOWEST_WINDOW, WORSE_LOSS = 1.1, 1.02
SAVE_EVERY = 20  # steps of `ddp`
HERE = "127.0.0.1"
TOKEN = "only for a benchmark on one machine"
ISLANDS, DDP = "adpsgd as islands", "ddp, torchrun"
TORCHFT, LOCAL_SGD = "torchft DDP", "torchft LocalSGD"


def measure(quick: bool = False) -> Report:
    """Each method undisturbed and with kills, one run after the other."""
    torch.set_num_threads(1)
    seconds = QUICK_S if quick else SECONDS
    report = Report(
        f"{LEARNERS} learners for {seconds:.0f} s, one killed every "
        f"{KILL_EVERY_S:.0f} s and started again {ABSENT_S:.0f} s later; steps are "
        f"waits of {1e3 * STEP_S:.0f} ms around a small gradient.",
        limit="the same method, nobody killed",
        notes=[
            "The value is the steps/s of a learner while it lives, its start left out. "
            f"The slowest window is the mean step in any {WINDOW_S:.0f} s of a life "
            "after its first step, of the median step. The loss is that of the mean of "
            "all weights at the end, on held-out samples.",
            f"`ddp` saves every {SAVE_EVERY} steps. Its agent starts a killed learner "
            "again at once and not after ten seconds: with an agent for each learner, "
            "and agents killed too, torchrun did not come back within a minute.",
        ],
    )
    missing = peers_missing()
    if missing:
        report.skipped["torchft"] = missing
    for method, kind in METHODS.items():
        if not (missing and kind.is_peer):
            report.rows += measure_method(method, seconds, report)
    report.targets += targets(report.rows)
    return report


def measure_method(method: str, seconds: float, report: Report) -> list[Row]:
    """Undisturbed, and with kills."""
    rows: list[Row] = []
    for faults, every in (("none", None), ("kills", KILL_EVERY_S)):
        outcome = run(METHODS[method], seconds, every)
        if len(outcome.weights) == 0 or not steps_per_second(outcome):
            said = (outcome.trouble or ["nobody said why"])[0]
            report.skipped[f"{method}, {faults}"] = f"nobody ended: {said}"
            break
        rows.append(row(method, faults, outcome, rows[0] if rows else None))
        print_row(f"{method}, {faults}", f"{rows[-1].value:.2f} steps/s", *_said(rows))
    return rows


def run(kind: "Kind", seconds: float, kill_every_s: float | None) -> Outcome:
    """One run in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        port = 20_000 + 200 * (int.from_bytes(os.urandom(2)) % 50)
        first = Mortal(0, LEARNERS, 0, port, Path(folder), 0.0)
        with kind.around(port):
            return mortal.run(
                kind.program,
                first,
                seconds,
                kill_every_s,
                ABSENT_S,
                supervised=kind.supervised,
            )


def row(method: str, faults: str, outcome: Outcome, control: Row | None) -> Row:
    value, loss = spread(steps_per_second(outcome)), held_out_loss(outcome)
    details = {
        "slowest window, of the median step": slowest_window(outcome),
        "steps of all learners": float(num_steps(outcome)),
        "held-out loss": loss,
    }
    ratio = None
    if control is not None:
        ratio = value.median / control.value.median
        details["loss, of undisturbed"] = loss / control.details["held-out loss"]
        undisturbed = control.details["steps of all learners"]
        details["steps, of undisturbed"] = num_steps(outcome) / undisturbed
        details["kills"] = float(len(outcome.kills))
    return Row(
        {"method": method, "faults": faults}, value, "steps/s", ratio, "", "", details
    )


def _said(rows: Sequence[Row]) -> Iterator[str]:
    details = rows[-1].details
    yield f"window {details['slowest window, of the median step']:.2f}"
    yield f"loss {details['held-out loss']:.3f}"


def steps_per_second(outcome: Outcome) -> list[float]:
    """Of each life that lasted a window."""
    return [
        (len(life) - 1) / (life[-1] - life[0])
        for life in settled(outcome)
        if len(life) > 1 and life[-1] - life[0] >= WINDOW_S
    ]


def settled(outcome: Outcome) -> list[list[float]]:
    """When steps began between a learner's starts and deaths, the first ones left out.

    A learner that was started again without having been killed has lived on: that it
    had to begin anew is what it has suffered from another's death.
    """
    return [
        stretch[START:]
        for number, lives in outcome.lives.items()
        for stretch in _joined(lives, [t for t, n in outcome.kills if n == number])
    ]


def _joined(lives: Sequence[list[float]], deaths: Sequence[float]) -> list[list[float]]:
    stretches: list[list[float]] = []
    for life in filter(None, lives):
        last = stretches[-1][-1] if stretches else None
        if last is None or any(last <= death <= life[0] for death in deaths):
            stretches.append([])
        stretches[-1].extend(life)
    return stretches


def num_steps(outcome: Outcome) -> int:
    return sum(len(life) for lives in outcome.lives.values() for life in lives)


def slowest_window(outcome: Outcome) -> float:
    """The largest over all lives, each against the median step of all."""
    lives = settled(outcome)
    steps = [b - a for life in lives for a, b in itertools.pairwise(life)]
    worst = max((mean for life in lives for mean in windows(life)), default=0.0)
    return worst / statistics.median(steps)


def windows(life: Sequence[float]) -> Iterator[float]:
    """Mean steps of all stretches of the window's length, in seconds."""
    end = 0
    for begin, stamp in enumerate(life):
        while end < len(life) and life[end] < stamp + WINDOW_S:
            end += 1
        if end < len(life):
            yield (life[end] - stamp) / (end - begin)


@torch.no_grad()
def held_out_loss(outcome: Outcome) -> float:
    """Of the mean of the weights."""
    model = workload.make_model(widths=NARROW)
    mean = torch.stack(outcome.weights).mean(0)
    nn.utils.vector_to_parameters(mean, model.parameters())
    batch = next(workload.batches(seed=99, size=workload.HELD_OUT))
    return workload.loss(model, batch).item()


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    for found in rows:
        if found.case == {"method": ISLANDS, "faults": "kills"}:
            window = found.details["slowest window, of the median step"]
            loss = found.details["loss, of undisturbed"]
            yield Target("islands: slowest 5 s", SLOWEST_WINDOW, window, False)
            yield Target("islands: loss, of undisturbed", WORSE_LOSS, loss, False)


# --- the methods


@contextmanager
def nothing(port: int) -> Iterator[None]:
    """A method that needs nobody beside its learners."""
    yield


def _started(*words: str, stderr: int | None = None) -> "subprocess.Popen[bytes]":
    """A process of Python, once it has said its first line."""
    command = [sys.executable, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def start_rendezvous(port: int) -> "subprocess.Popen[bytes]":
    """Returns once it listens."""
    words = ("-m", "lightning_adpsgd", "rendezvous", "--port", str(port))
    return _started(*words, "--host", HERE)


@contextmanager
def _ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()


def rendezvous(port: int) -> AbstractContextManager[None]:
    """That of islands."""
    return _ended(start_rendezvous(port))


def lighthouse(port: int) -> AbstractContextManager[None]:
    """torchft's, in a process of its own."""
    code = (
        "import site, sys, time; [site.addsitedir(p) for p in sys.argv[2:]]\n"
        "from torchft.coordination import LighthouseServer\n"
        "server = LighthouseServer(bind='127.0.0.1:' + sys.argv[1], min_replicas=1, "
        "quorum_tick_ms=10, join_timeout_ms=1000, heartbeat_timeout_ms=2000)\n"
        "print('up', flush=True); time.sleep(1e6)"
    )
    folders = [str(p) for p in PEERS.glob("lib/python*/site-packages")]
    quiet = subprocess.DEVNULL  # it tells of every step
    return _ended(_started("-c", code, str(port), *folders, stderr=quiet))


class _Feed(IterableDataset[Batch]):
    def __init__(self, batches: Callable[[], Iterator[Batch]]) -> None:
        super().__init__()
        self._batches = batches

    @override
    def __iter__(self) -> Iterator[Batch]:
        return self._batches()


class Module(L.LightningModule):
    """What an island trains."""

    def __init__(self, life: Mortal) -> None:
        super().__init__()
        self.model, self.life = life.make_model(), life

    def batches(self) -> Iterator[Batch]:
        """Of this life, each of which is written down as it begins."""
        return self.life.batches()

    @override
    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(_Feed(self.batches), batch_size=None)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return workload.loss(self.model, batch)

    @override
    def on_train_epoch_end(self) -> None:
        self.life.leave(workload.weights_of(self.model))

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return workload.make_optimizer(self.model)


def train_island(module: Module, host: str = HERE) -> None:
    """Through Lightning's Trainer, as a user of islands would."""
    quieten()
    os.environ["LIGHTNING_ADPSGD_TOKEN"] = TOKEN
    # Hosts are network namespaces of this machine.
    os.environ["LIGHTNING_ADPSGD_UNPROTECTED"] = "1"
    url = f"tcp://{host}:{module.life.port}"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=HADPSGDStrategy("ring", "async", 1, islands=url),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=module.life.folder,
    )
    trainer.fit(module)


def island(life: Mortal) -> None:
    """One life of an island."""
    train_island(Module(life))


def agent(life: Mortal) -> None:
    """torchrun's agent: if one worker dies, it ends all and starts them again."""
    quieten()
    # A store for each round: what an earlier one has left in a common store keeps the
    # workers of torch 2.11 from meeting.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=life.num_learners,
        run_id="kills",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{HERE}:{life.port}",
        max_restarts=10_000,
        monitor_interval=0.1,
        start_method="fork",
        local_addr=HERE,
    )
    elastic_launch(config, _ddp_worker)(life)


def _ddp_worker(life: Mortal) -> None:
    """A plain loop of DDP that begins at the last checkpoint."""
    # Not the agent's handler, which a fork inherits and which waits for Python.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    number, starts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    life = replace(life, number=int(number), life=int(starts))
    life.announce()
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    model, path = life.make_model(), life.folder / "ddp.ckpt"
    if path.exists():
        model.load_state_dict(torch.load(path))
    step = plain_step(
        nn.parallel.DistributedDataParallel(model), workload.make_optimizer(model)
    )
    for number, batch in enumerate(_together(life)):
        step(batch)
        if number % SAVE_EVERY == 0 and dist.get_rank() == 0:
            torch.save(model.state_dict(), partial := path.with_suffix(".partial"))
            partial.replace(path)
    life.leave(workload.weights_of(model))


def _together(life: Mortal) -> Iterator[Batch]:
    """Batches until one of the learners says that the time is over."""
    for batch in life.batches():
        over = torch.tensor(float(time.monotonic() >= life.until - 2 * STEP_S))
        dist.all_reduce(over)
        if over:
            return
        yield batch


def torchft(
    make: Callable[[Any, nn.Module], Callable[[Batch], object]],
) -> Callable[[Mortal], None]:
    """A program of torchft whose step is what `make` returns of manager and model."""

    def program(life: Mortal) -> None:
        quieten()
        use_peers()
        from torchft.manager import Manager  # pyright: ignore
        from torchft.process_group import ProcessGroupGloo  # pyright: ignore

        port = life.port + 10 + life.number
        kept = TCPStore(HERE, port, is_master=True, wait_for_workers=False)
        model = life.make_model()

        def load(state: dict[str, Any]) -> None:
            model.load_state_dict(state["model"])

        manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
            min_replica_size=1,
            load_state_dict=load,
            state_dict=lambda: {"model": model.state_dict()},
            replica_id=f"learner{life.number}_",
            store_addr=HERE,
            store_port=port,
            rank=0,
            world_size=1,
            lighthouse_addr=f"http://{HERE}:{life.port}",
            hostname=HERE,
            timeout=timedelta(seconds=5),
            quorum_timeout=timedelta(seconds=10),
            connect_timeout=timedelta(seconds=5),
        )
        step = make(manager, model)
        for batch in life.batches():
            step(batch)
        life.leave(workload.weights_of(model))
        del kept

    return program


def _ft_ddp(manager: Any, model: nn.Module) -> Callable[[Batch], object]:
    from torchft.ddp import DistributedDataParallel  # pyright: ignore
    from torchft.optim import OptimizerWrapper  # pyright: ignore

    wrapped = DistributedDataParallel(manager, model)
    optimizer = OptimizerWrapper(manager, workload.make_optimizer(model))
    return plain_step(wrapped, optimizer)


def _ft_local_sgd(manager: Any, model: nn.Module) -> Callable[[Batch], object]:
    from torchft.local_sgd import LocalSGD  # pyright: ignore

    optimizer = workload.make_optimizer(model)
    LocalSGD(manager, model, optimizer, sync_every=PERIOD).__enter__()
    return plain_step(model, optimizer)


@dataclass(frozen=True)
class Kind:
    """How a method is run.

    Args:
        program: Of one life of a learner.
        around: What stands beside all learners and is not killed.
        is_peer: Whether it needs what `make peers` installs.
        supervised: Whether the program starts the learners, and starts them again.
    """

    program: Callable[[Mortal], None]
    around: Callable[[int], Any] = nothing
    is_peer: bool = False
    supervised: bool = False


METHODS = {
    ISLANDS: Kind(island, rendezvous),
    DDP: Kind(agent, supervised=True),
    TORCHFT: Kind(torchft(_ft_ddp), lighthouse, True),
    LOCAL_SGD: Kind(torchft(_ft_local_sgd), lighthouse, True),
}
