"""Data-parallel training that keeps going when a network or a machine is slow.

Importing this package makes the strategy names (`"hadpsgd"`, `"adpsgd"`, ...) known to
Lightning. Everything else is imported when it is first used. So an import costs almost
nothing, and may happen while torch itself is being imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_adpsgd.registration import install

if TYPE_CHECKING:
    from lightning_adpsgd.dials import Async as Async
    from lightning_adpsgd.dials import ModelParallel as ModelParallel
    from lightning_adpsgd.dials import ReadyPairs as ReadyPairs
    from lightning_adpsgd.strategy.fabric import (
        HADPSGDFabricStrategy as HADPSGDFabricStrategy,
    )
    from lightning_adpsgd.strategy.trainer import HADPSGDStrategy as HADPSGDStrategy
    from lightning_adpsgd.topology.named import Topology as Topology
    from lightning_adpsgd.virtual.cluster import VirtualCluster as VirtualCluster

__version__ = "0.2.0"

_HOME = {
    "Async": "dials",
    "HADPSGDFabricStrategy": "strategy.fabric",
    "HADPSGDStrategy": "strategy.trainer",
    "ModelParallel": "dials",
    "ReadyPairs": "dials",
    "Topology": "topology.named",
    "VirtualCluster": "virtual.cluster",
}

__all__ = [
    "Async",
    "HADPSGDFabricStrategy",
    "HADPSGDStrategy",
    "ModelParallel",
    "ReadyPairs",
    "Topology",
    "VirtualCluster",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


install()
