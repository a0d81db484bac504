"""What a training did, told to any Lightning logger.

`TrainingCurve` writes the loss against global samples and time while training runs;
it makes no collective and never waits for another learner. The monitors look at each
validation, where all learners come anyway: `ConvergenceMonitor` at training and
held-out loss, divergence and the run's summary row, `GossipMonitor` at what every
learner did and how old what it heard was, `ConsensusMonitor` at how the super-learners
differ and what that does to the learning rate. `AllreduceWait` measures the waiting
inside DDP's gradient allreduce. All of them work under every strategy; what does not
exist there is left out.
"""

from lightning_adpsgd.callbacks.allreduce import AllreduceWait
from lightning_adpsgd.callbacks.clock import Monitor, TrainingClock
from lightning_adpsgd.callbacks.consensus import ConsensusMonitor
from lightning_adpsgd.callbacks.convergence import ConvergenceMonitor
from lightning_adpsgd.callbacks.curve import TrainingCurve
from lightning_adpsgd.callbacks.gossip import GossipMonitor
from lightning_adpsgd.callbacks.learners import (
    STALENESS_BINS,
    LearnerRecord,
    summarize,
    total_staleness,
)
from lightning_adpsgd.callbacks.reporting import log
from lightning_adpsgd.callbacks.within_epoch import SaveWithinEpoch

__all__ = [
    "STALENESS_BINS",
    "AllreduceWait",
    "ConsensusMonitor",
    "ConvergenceMonitor",
    "GossipMonitor",
    "LearnerRecord",
    "Monitor",
    "SaveWithinEpoch",
    "TrainingClock",
    "TrainingCurve",
    "log",
    "summarize",
    "total_staleness",
]
