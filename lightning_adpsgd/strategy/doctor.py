"""`python -m lightning_adpsgd doctor`: checks what a first run needs.

A separate process with the same environment tests whether Lightning knows the
strategies' names without an import. All other checks inspect this machine.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.cuda import nccl

import lightning_adpsgd
from lightning_adpsgd.import_names import LIGHTNING, OTHER, import_names
from lightning_adpsgd.strategy.checkpoints.io import flawed_loader
from lightning_adpsgd.strategy.names import NAMES
from lightning_adpsgd.transport.network_interfaces import (
    NoSuchInterface,
    gloo_addresses,
    interfaces,
    is_loopback,
)

SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_PATIENCE_S = 120.0
_PROBE = """
from {}.strategies import StrategyRegistry
from {}.strategies import STRATEGY_REGISTRY
print(*{{*StrategyRegistry}} & {{*STRATEGY_REGISTRY}})
"""
_REGISTRIES = {
    LIGHTNING: ("lightning.pytorch", "lightning.fabric"),
    OTHER: (OTHER, "lightning_fabric"),
}


class Finding(NamedTuple):
    """The subject of a check, its result, and the remedy if one is needed."""

    what: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{'!' if self.remedy else ' '} {self.what:<12} {self.found}"
        return f"{line}\n{'':15}{self.remedy}" if self.remedy else line


def examine() -> Iterator[Finding]:
    """Checks the installation, then the machine."""
    place = Path(lightning_adpsgd.__file__).parent
    yield Finding("package", f"{lightning_adpsgd.__version__} at {place}")
    yield _names(list(entry_points(group="torch.backends", name="lightning_adpsgd")))
    yield Finding("Python", f"{sys.version.split()[0]} at {sys.executable}")
    yield Finding("torch", torch.__version__, flawed_loader() or "")
    found = [name for name in (LIGHTNING, OTHER) if find_spec(name) is not None]
    versions = (f"{version(name.replace('_', '-'))} as {name}" for name in found)
    yield Finding("Lightning", ", ".join(versions))
    yield _gloo()
    yield _nccl()
    found = ", ".join(str(interface) for interface in interfaces())
    yield Finding("interfaces", found or "none with an IPv4 address")


def _names(installed: list[EntryPoint]) -> Finding:
    try:
        known, complaint = _known_without_import()
    except subprocess.TimeoutExpired:
        known, complaint = set(), f"`import lightning` took over {_PATIENCE_S:.0f} s"
    missing = [name for name in NAMES if name not in known]
    if not missing:
        return Finding("names", f"known without an import: {', '.join(NAMES)}")
    found = f"not known without an import: {', '.join(missing)}"
    return Finding("names", found, _why_unknown(installed, complaint))


def _why_unknown(installed: list[EntryPoint], complaint: str) -> str:
    if not installed:
        why = "the package is not installed here: `pip install` it"
    elif os.environ.get(SWITCH, "1") != "1":
        why = f"{SWITCH}={os.environ[SWITCH]} switches it off: unset it"
    else:
        why = complaint or "torch did not call the entry point: install again"
    return f"{why}; or write `import lightning_adpsgd` first"


def _known_without_import() -> tuple[set[str], str]:
    """The names that both Trainer and Fabric know in a new process; its last output."""
    probe = _PROBE.format(*_REGISTRIES[import_names().choose()])
    ran = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
    )
    said = [line.strip() for line in ran.stderr.splitlines() if "Error" in line]
    return set(ran.stdout.split()), said[-1] if said else ""


def _gloo() -> Finding:
    if not dist.is_available() or not dist.is_gloo_available():
        remedy = "learners communicate over Gloo: install a torch built with it"
        return Finding("Gloo", "missing", remedy)
    try:
        addresses = gloo_addresses()
    except NoSuchInterface as error:
        return Finding("Gloo", str(error), "name one of the interfaces below")
    found = f"listens at {', '.join(addresses) or 'an address that is not known'}"
    if all(is_loopback(address) for address in addresses):
        found += "; for learners on several hosts, set GLOO_SOCKET_IFNAME"
    return Finding("Gloo", found)


def _nccl() -> Finding:
    if not torch.cuda.is_available():
        return Finding("NCCL", "not in use: no GPU")
    names = {torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())}
    gpus = f"{torch.cuda.device_count()} of {', '.join(sorted(names))}"
    if not dist.is_nccl_available():
        remedy = 'rounds of "sync" and "delay_by_one" on GPUs need it'
        return Finding("NCCL", f"missing; {gpus}", remedy)
    release = ".".join(str(part) for part in nccl.version())
    return Finding("NCCL", f"{release}; {gpus}")
