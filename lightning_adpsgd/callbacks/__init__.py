"""Callbacks that write figures of a training to any Lightning logger.

docs/monitoring.md has what each of them writes. They work under every strategy, and
leave out figures that it lacks. Only `SaveWithinEpoch`, which writes checkpoints, needs
learners that share their epochs.
"""

from lightning_adpsgd.callbacks.allreduce import AllreduceWait
from lightning_adpsgd.callbacks.clock import Monitor
from lightning_adpsgd.callbacks.consensus import ConsensusMonitor
from lightning_adpsgd.callbacks.convergence import ConvergenceMonitor
from lightning_adpsgd.callbacks.curve import TrainingCurve
from lightning_adpsgd.callbacks.gossip import GossipMonitor
from lightning_adpsgd.callbacks.progress_line import ProgressLine
from lightning_adpsgd.callbacks.reporting import summary
from lightning_adpsgd.callbacks.timeline import Timeline
from lightning_adpsgd.callbacks.within_epoch import SaveWithinEpoch

__all__ = [
    "AllreduceWait",
    "ConsensusMonitor",
    "ConvergenceMonitor",
    "GossipMonitor",
    "Monitor",
    "ProgressLine",
    "SaveWithinEpoch",
    "Timeline",
    "TrainingCurve",
    "summary",
]
