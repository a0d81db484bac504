"""Who averages with whom: mixing matrices, named and custom topologies, schedules."""

from lightning_adpsgd.topology.named import TOPOLOGIES, find_topology
from lightning_adpsgd.topology.topology import Topology

__all__ = ["TOPOLOGIES", "Topology", "find_topology"]
