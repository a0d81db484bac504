"""Topologies, which say who averages with whom, and schedules of mixing matrices."""

from lightning_adpsgd.topology.named import TOPOLOGIES, find_topology
from lightning_adpsgd.topology.topology import Topology

__all__ = ["TOPOLOGIES", "Topology", "find_topology"]
