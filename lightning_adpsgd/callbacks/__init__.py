"""Monitors that write figures of a training to any Lightning logger.

`TrainingCurve` logs the loss against global samples and time while training runs,
without a collective and without waiting for another learner. The other monitors log at
each validation, which all learners reach anyway:

- `ConvergenceMonitor`: training and held-out loss, divergence, and a summary row.
- `GossipMonitor`: what every learner did, and how old the weights it received were.
- `ConsensusMonitor`: how the super-learners differ, and what that does to the learning
  rate.

`summary(trainer)` says in one line what this learner has done.

`ProgressLine` shows the speed and the gossip of all learners in the progress bar.
`AllreduceWait` measures the wait for DDP's gradient allreduce, `Timeline` writes what
each learner did in its last steps, and `SaveWithinEpoch` writes checkpoints within a
shared epoch. All but `SaveWithinEpoch` work under every strategy, and leave out figures
that the strategy lacks; it writes nothing where learners get equal shares.
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
