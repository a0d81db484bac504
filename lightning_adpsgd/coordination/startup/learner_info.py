"""The information that learners exchange at start-up, and where they must agree.

It is pure: it turns information about learners into sentences about problems.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from lightning_adpsgd import __version__
from lightning_adpsgd.coordination.startup.reachability import LearnerLocation
from lightning_adpsgd.import_names import lightning_version
from lightning_adpsgd.topology.named import Topology
from lightning_adpsgd.transport.links.peer_info import PROTOCOL

_MOST_HOSTS = 8
_REMEDIES = {
    "version": "Install the same versions on all hosts, or use one container image",
    "dial": "Start the same program with the same arguments on all hosts",
    "job": "Give the launcher of every host the same job, and the Trainer or Fabric "
    "its size",
}


@dataclass(frozen=True)
class LearnerInfo:
    """The information of a learner about itself.

    Learners of another version read it too, by the names of its fields.

    Attributes:
        place: host of the learner, and the addresses at which it listens.
        settings: values that must be equal in all learners, by kind and name.
        trouble: reason why it has no address to listen at; empty if it has one.
    """

    place: LearnerLocation
    settings: Mapping[str, Mapping[str, str]]
    trouble: str = ""

    @classmethod
    def from_json(cls, text: str) -> "LearnerInfo":
        """Reads what `asdict` and JSON wrote; ignores fields of another version."""
        content = json.loads(text)
        place = LearnerLocation.from_dict(content["place"])
        return cls(place, content["settings"], content["trouble"])


def settings_of(
    dials: Mapping[str, Any], job: Mapping[str, int]
) -> dict[str, dict[str, str]]:
    """The values that must be equal in all learners, by kind and name.

    Builds of one torch version for different devices ("2.6.0+cpu") count as equal, as
    do patch versions of Python.
    """
    return {
        "version": {
            "python": ".".join(platform.python_version_tuple()[:2]),
            "torch": torch.__version__.partition("+")[0],
            "lightning": lightning_version(),
            "lightning_adpsgd": __version__,
            "protocol": str(PROTOCOL),
        },
        "dial": {name: _text(value) for name, value in dials.items()},
        "job": {name: str(value) for name, value in job.items()},
    }


def disagreements(infos: Sequence[LearnerInfo]) -> list[str]:
    """One line for each setting that differs, with the learners of each value."""
    settings = {
        (kind, name): None
        for info in infos
        for kind, of_kind in info.settings.items()
        for name in of_kind
    }
    lines = []
    for kind, name in settings:
        holders: dict[str, list[LearnerLocation]] = {}
        for info in infos:
            value = info.settings.get(kind, {}).get(name, "absent")
            holders.setdefault(value, []).append(info.place)
        if len(holders) > 1:
            told = " and ".join(f"{v} in {describe(p)}" for v, p in holders.items())
            lines.append(f"`{name}` differs: {told}. {_REMEDIES.get(kind, '')}".strip())
    return lines


def scattered(locations: Sequence[LearnerLocation], size: int) -> list[str]:
    """One line for each super-learner whose learners are on several hosts."""
    firsts = range(0, len(locations), size)
    parts = [locations[first : first + size] for first in firsts]
    broken = [part for part in parts if len({one.machine for one in part}) > 1]
    if not broken:
        return []
    hosts: dict[str, list[LearnerLocation]] = {}
    for location in locations:
        hosts.setdefault(location.machine, []).append(location)
    counts = ", ".join(f"{len(on)} on {on[0].host}" for on in hosts.values())
    return [
        '`super_learner_size="node"` makes a super-learner of the learners of one '
        f"machine, but {describe(broken[0])} would form one across machines. Start as "
        f"many learners on each host as `devices` says (there are {counts}), "
        "numbered host by host: with SLURM use `srun --distribution=block`, with Open "
        "MPI `mpirun --map-by slot`. Or set `super_learner_size` to a number"
    ]


def describe(locations: Sequence[LearnerLocation]) -> str:
    """A phrase for some learners: "learners 0-3, 6 (hosts a, b)"."""
    hosts = list(dict.fromkeys(location.host for location in locations))
    named = ", ".join(hosts[:_MOST_HOSTS])
    named += f" and {len(hosts) - _MOST_HOSTS} more" if hosts[_MOST_HOSTS:] else ""
    ranks = _ranges([location.rank for location in locations])
    learners = "learner" if len(locations) == 1 else "learners"
    return f"{learners} {ranks} ({'host' if len(hosts) == 1 else 'hosts'} {named})"


def _ranges(ranks: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{r[0]}-{r[-1]}" if r[1:] else str(r[0]) for r in runs)


def _text(value: object) -> str:
    if isinstance(value, Topology):
        return value.name
    return str(value) if isinstance(value, timedelta) else repr(value)
