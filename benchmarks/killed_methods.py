"""The methods of the benchmark `kills`, each as a program of one life of a learner."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from benchmarks import workload
from benchmarks.killable import STEP_S, Killable
from benchmarks.plain_loops import PEERS, PERIOD, plain_step, use_peers
from benchmarks.quiet import quiet_trainer, quieten
from benchmarks.workload import Batch
from lightning_adpsgd import HADPSGDStrategy

SAVE_EVERY = 20  # steps of `ddp`
HERE = "127.0.0.1"
TOKEN = "only for a benchmark on one machine"
ISLANDS, DDP = "adpsgd as islands", "ddp, torchrun"
TORCHFT, LOCAL_SGD = "torchft DDP", "torchft LocalSGD"


@contextmanager
def nothing(port: int) -> Iterator[None]:
    """The surroundings of a method that needs only its learners."""
    yield


def _started(*words: str, stderr: int | None = None) -> "subprocess.Popen[bytes]":
    """Starts a Python process; returns once it has printed its first line."""
    command = [sys.executable, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def start_rendezvous(port: int) -> "subprocess.Popen[bytes]":
    """Starts a rendezvous; returns once it listens."""
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
    """The rendezvous of islands."""
    return _ended(start_rendezvous(port))


def lighthouse(port: int) -> AbstractContextManager[None]:
    """The lighthouse of torchft, in a process of its own."""
    code = (
        "import site, sys, time; [site.addsitedir(p) for p in sys.argv[2:]]\n"
        "from torchft.coordination import LighthouseServer\n"
        "server = LighthouseServer(bind='127.0.0.1:' + sys.argv[1], min_replicas=1, "
        "quorum_tick_ms=10, join_timeout_ms=1000, heartbeat_timeout_ms=2000)\n"
        "print('up', flush=True); time.sleep(1e6)"
    )
    folders = [str(p) for p in PEERS.glob("lib/python*/site-packages")]
    quiet = subprocess.DEVNULL  # it logs every step
    return _ended(_started("-c", code, str(port), *folders, stderr=quiet))


class _Feed(IterableDataset[Batch]):
    def __init__(self, batches: Callable[[], Iterator[Batch]]) -> None:
        super().__init__()
        self._batches = batches

    @override
    def __iter__(self) -> Iterator[Batch]:
        return self._batches()


class Module(L.LightningModule):
    """The module that an island trains."""

    def __init__(self, life: Killable) -> None:
        super().__init__()
        self.model, self.life = life.make_model(), life

    def batches(self) -> Iterator[Batch]:
        """The batches of this life; each is recorded as it begins."""
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
    """Trains through Lightning's Trainer, as a user of islands would."""
    quieten()
    os.environ["LIGHTNING_ADPSGD_TOKEN"] = TOKEN
    # Hosts are network namespaces of this machine.
    os.environ["LIGHTNING_ADPSGD_UNPROTECTED"] = "1"
    url = f"tcp://{host}:{module.life.port}"
    trainer = quiet_trainer(
        HADPSGDStrategy("ring", "async", 1, islands=url),
        devices=1,
        default_root_dir=module.life.folder,
    )
    trainer.fit(module)


def island(life: Killable) -> None:
    """One life of an island."""
    train_island(Module(life))


def agent(life: Killable) -> None:
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


def _ddp_worker(life: Killable) -> None:
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


def _together(life: Killable) -> Iterator[Batch]:
    """Batches until one of the learners reports that the time is over."""
    for batch in life.batches():
        over = torch.tensor(float(time.monotonic() >= life.until - 2 * STEP_S))
        dist.all_reduce(over)
        if over:
            return
        yield batch


def torchft(
    make: Callable[[Any, nn.Module], Callable[[Batch], object]],
) -> Callable[[Killable], None]:
    """A program of torchft whose step is what `make` returns of manager and model."""

    def program(life: Killable) -> None:
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
    """The way to run a method.

    Args:
        program: Program of one life of a learner.
        around: Processes besides the learners, which are not killed.
        is_peer: Whether it needs what `make peers` installs.
        supervised: Whether the program starts the learners, and starts them again.
    """

    program: Callable[[Killable], None]
    around: Callable[[int], Any] = nothing
    is_peer: bool = False
    supervised: bool = False


METHODS = {
    ISLANDS: Kind(island, rendezvous),
    DDP: Kind(agent, supervised=True),
    TORCHFT: Kind(torchft(_ft_ddp), lighthouse, True),
    LOCAL_SGD: Kind(torchft(_ft_local_sgd), lighthouse, True),
}
