"""`torchrun` on emulated hosts: training works, and each wrong set-up is reported.

    python -m benchmarks.launch_hosts             every scenario, a line for each
    python -m benchmarks.launch_hosts firewall    this one, with what was printed

Two hosts with two learners each; the two of a host are a super-learner. `Slope` has
the same gradients whatever its weights, so that the weights at the end are known.
Needs what `hosts` needs; a firewall also needs `nft`. It measures nothing.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from typing_extensions import override

from benchmarks.hosts import MASTER_PORT, Finished, Hosts, emulated, reason_against
from benchmarks.quiet import quiet_trainer
from lightning_adpsgd import HADPSGDStrategy

ROOT = Path(__file__).parents[1]
NUM_HOSTS, PER_HOST, STEPS, LR = 2, 2, 20, 0.1
NUM_LEARNERS = NUM_HOSTS * PER_HOST
ODD = 1
"""The host on which something is wrong."""


# --- the learner


class Slope(pl.LightningModule):
    """Its loss is linear in the weights: the gradient is the mean row of the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, dtype=torch.float64))

    @override
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        (rows,) = batch
        return (rows @ self.weight[: rows.shape[1]]).mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), LR)

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        world_size, rank = self.trainer.world_size, self.global_rank
        own = range(rank, world_size * STEPS, world_size)
        return DataLoader(Subset(TensorDataset(rows(world_size)), own))


def rows(num_learners: int) -> Tensor:
    """All rows of the training, [steps * learners, 3], in double precision."""
    generator = torch.Generator().manual_seed(1)
    size = (STEPS * num_learners, 3)
    return torch.randn(size, dtype=torch.float64, generator=generator)


def weights_at_the_end(num_learners: int) -> Tensor:
    """The weights of all learners after the last average, in closed form."""
    return -LR * STEPS * rows(num_learners).mean(0)


def learn(
    devices: int = PER_HOST,
    num_nodes: int = NUM_HOSTS,
    super_learner_size: int | Literal["node"] = "node",
    seed: int = 0,
    width: int = 3,
) -> None:
    """Trains as one learner, and prints the result."""
    torch.set_num_threads(1)
    strategy = HADPSGDStrategy("random_ring", "async", super_learner_size, seed=seed)
    trainer = quiet_trainer(strategy, devices=devices, num_nodes=num_nodes)
    module = Slope(width)
    trainer.fit(module)
    result = {
        "rank": trainer.global_rank,
        "host": os.uname().nodename,
        "weights": module.weight.tolist(),
        "super-learners": strategy.num_super_learners,
    }
    # In one write: the learners of a host share an output.
    os.write(1, f"RESULT {json.dumps(result)}\n".encode())


def results(output: str) -> list[dict]:
    """What the learners printed at their end."""
    lines = re.findall(r"RESULT (\{.*?\})", output)
    return sorted(map(json.loads, lines), key=lambda result: result["rank"])


# --- the faults of the odd host


@dataclass(frozen=True)
class Scenario:
    """One way to start the job.

    Attributes:
        rendezvous: Arguments of `torchrun` on a host.
        expected: Patterns that every host's output must match; none if the job trains.
        change: Function that changes the hosts beforehand.
        arguments: Arguments of the learners on the odd host.
        of_all: Arguments of all learners.
        environment: Variables on the odd host.
        without: Variables that are absent on all hosts.
    """

    rendezvous: Callable[[Hosts, int], list[str]]
    expected: Sequence[str] = ()
    change: Callable[[Hosts], None] = lambda hosts: None
    arguments: Sequence[str] = ()
    of_all: Sequence[str] = ()
    environment: Sequence[str] = ()
    without: Sequence[str] = ()


def _static(hosts: Hosts, host: int) -> list[str]:
    address = hosts.addresses[0]
    return [
        f"--node-rank={host}",
        f"--master-addr={address}",
        f"--master-port={MASTER_PORT}",
    ]


def _c10d(hosts: Hosts, host: int) -> list[str]:
    endpoint = f"{hosts.addresses[0]}:{MASTER_PORT}"
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        "--rdzv-id=job",
        f"--local-addr={hosts.addresses[host]}",
    ]


def _name_means_loopback(hosts: Hosts) -> None:
    """Writes /etc/hosts as Debian's installer does."""
    names = Path("/etc/netns") / hosts.namespace(ODD) / "hosts"
    lines = names.read_text().splitlines()
    others = [line for line in lines if not line.endswith(f"host{ODD}")]
    names.write_text("\n".join([f"127.0.1.1 host{ODD}", *others]) + "\n")


def _second_interface(hosts: Hosts) -> None:
    inside = ["ip", "-n", hosts.namespace(ODD)]
    _do(*inside, "link", "add", "eth1", "type", "veth", "peer", "name", "far1")
    _do(*inside, "address", "add", "10.79.0.3/24", "dev", "eth1")
    for name in ("eth1", "far1"):
        _do(*inside, "link", "set", name, "up")


def _firewall(verdict: str) -> Callable[[Hosts], None]:
    """Blocks the ports that the system assigns, as a firewall would."""

    def close(hosts: Hosts) -> None:
        inside = ["ip", "netns", "exec", hosts.namespace(ODD), "nft"]
        chain = "{ type filter hook input priority 0 ; }"
        _do(*inside, "add table inet wall")
        _do(*inside, f"add chain inet wall input {chain}")
        rule = f"iif eth0 tcp dport 32768-60999 ct state new {verdict}"
        _do(*inside, f"add rule inet wall input {rule}")

    return close


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


_FIREWALL = [rf"host{ODD}", r"cannot be reached from learner \d+ on host host\d"]
_PORTS = "allow TCP between the hosts of the job on ports 32768-60999"
SCENARIOS = {
    "static": Scenario(_static),
    "c10d": Scenario(_c10d),
    "loopback": Scenario(
        _static,
        [
            rf"learner 2 on host host{ODD} would listen at 127\.0\.1\.1, a loopback",
            rf"Set GLOO_SOCKET_IFNAME on host host{ODD}.*eth0 10\.77\.0\.2/24",
        ],
        change=_name_means_loopback,
        without=["GLOO_SOCKET_IFNAME"],
    ),
    "interface": Scenario(
        _static,
        [rf"learner 2 on host host{ODD}: GLOO_SOCKET_IFNAME=eth7 names 'eth7'"],
        environment=["GLOO_SOCKET_IFNAME=eth7"],
    ),
    "network": Scenario(
        _static,
        [
            rf"host{ODD} cannot be reached .*at 10\.79\.0\.3:\d+ \(interface eth1\)",
            rf"wrong interface. Set GLOO_SOCKET_IFNAME=eth0 on host host{ODD}",
        ],
        change=_second_interface,
        environment=["GLOO_SOCKET_IFNAME=eth1"],
    ),
    "firewall": Scenario(
        _static,
        [*_FIREWALL, "nothing answers. Most likely a firewall drops", _PORTS],
        change=_firewall("drop"),
    ),
    "rejecting_firewall": Scenario(
        _static,
        [*_FIREWALL, "is refused. Most likely a firewall rejects", _PORTS],
        change=_firewall("reject with tcp reset"),
    ),
    "dial": Scenario(
        _static,
        [
            r"`seed` differs: 0 in learners 0-1 \(host host0\)",
            rf"and 5 in learners 2-3 \(host host{ODD}\)",
        ],
        arguments=["--seed=5"],
    ),
    "version": Scenario(
        _static,
        [
            r"`lightning_adpsgd` differs: .* and 0\.0\.1 in learners 2-3 \(host ",
            "Install the same versions on all hosts",
        ],
        environment=["PYTHONPATH={other_version}"],
    ),
    "model": Scenario(
        _static,
        [
            r"the model of learner 2 on host host1 differs from that of learner 0",
            r"`weight` of shape \(4,\) in torch.float64, and there `weight` of shape",
        ],
        arguments=["--width=4"],
    ),
}


def missing(name: str) -> str | None:
    """The reason why this machine cannot run a scenario; None if it can."""
    if reason := reason_against():
        return reason
    walled = "firewall" in name
    return "no nft on this machine" if walled and not shutil.which("nft") else None


# --- running a scenario


def play(
    name: str, timeout_s: float = 200, python: str = sys.executable
) -> list[Finished]:
    """Starts the job of a scenario on fresh hosts; `torchrun` runs by `python`."""
    scenario = SCENARIOS[name]
    with emulated(NUM_HOSTS) as hosts, _other_version() as other:
        scenario.change(hosts)

        def command(host: int) -> list[str]:
            unset = [word for name in scenario.without for word in ("-u", name)]
            odd = host == ODD
            own = [f"PYTHONPATH={ROOT}", *(scenario.environment if odd else ())]
            own = [word.format(other_version=other) for word in own]
            arguments = [*scenario.of_all, *(scenario.arguments if odd else ())]
            return [
                *["env", *unset, *own, python, "-m", "torch.distributed.run"],
                *[f"--nnodes={NUM_HOSTS}", f"--nproc-per-node={PER_HOST}"],
                *scenario.rendezvous(hosts, host),
                *[str(Path(__file__)), "--learn", *arguments],
            ]

        return hosts.run(command, timeout_s)


@contextmanager
def _other_version() -> Iterator[str]:
    """A folder to import from, with this package in another version."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "lightning_adpsgd"
        shutil.copytree(ROOT / "lightning_adpsgd", package)
        init = package / "__init__.py"
        text = re.sub('__version__ = ".*"', '__version__ = "0.0.1"', init.read_text())
        init.write_text(text)
        shutil.copytree(ROOT / "benchmarks", Path(folder) / "benchmarks")
        yield folder


def wrong(name: str, finished: Sequence[Finished]) -> list[str]:
    """The differences from the expected outcome; empty if there are none."""
    expected = SCENARIOS[name].expected
    if not expected:
        return _wrong_in_training(finished)
    found = [f"host {f.host} ended with 0" for f in finished if f.code == 0]
    for one in finished:
        found += [
            f"host {one.host} is not told {pattern!r}"
            for pattern in expected
            if not re.search(pattern, one.output)
        ]
    return found


def _wrong_in_training(finished: Sequence[Finished]) -> list[str]:
    found = [f"host {f.host} ended with {f.code}" for f in finished if f.code]
    told = results("\n".join(f.output for f in finished))
    if [result["rank"] for result in told] != list(range(NUM_LEARNERS)):
        return [*found, f"results of {[result['rank'] for result in told]}"]
    end = weights_at_the_end(NUM_LEARNERS)
    weights = [torch.tensor(r["weights"], dtype=torch.float64) for r in told]
    found += [
        f"learner {r} has other weights"
        for r, w in enumerate(weights)
        if not torch.equal(w, weights[0])
    ]
    if not torch.allclose(weights[0], end, rtol=0, atol=1e-12):
        found.append(f"the weights are {weights[0]} and not {end}")
    if {result["super-learners"] for result in told} != {NUM_HOSTS}:
        found.append("not one super-learner to a host")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launch_hosts", description=__doc__
    )
    parser.add_argument("scenarios", nargs="*", metavar="scenario")
    parser.add_argument("--learn", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=3, help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--nodes", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.learn:
        shape = arguments.devices, arguments.nodes, arguments.size or "node"
        learn(*shape, arguments.seed, arguments.width)
        return 0
    failed = 0
    for name in arguments.scenarios or SCENARIOS:
        if reason := missing(name):
            print(f"{name}: skipped, {reason}")
            continue
        begin = time.perf_counter()
        finished = play(name)
        found = wrong(name, finished)
        failed += bool(found)
        print(f"{name}: {found or 'as expected'}, {time.perf_counter() - begin:.1f} s")
        if found or arguments.scenarios:
            print(*(f"--- host {f.host}\n{f.output}" for f in finished), sep="\n")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
