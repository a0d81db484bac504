"""What all learners did: speed, exchanges, staleness, waiting, consensus distance."""

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_adpsgd.callbacks.clock import Monitor
from lightning_adpsgd.callbacks.learners import (
    LearnerRecord,
    membership,
    record_of,
    summarize,
)
from lightning_adpsgd.callbacks.reporting import consensus_distances, gather, log


class GossipMonitor(Monitor):
    """Logs what all learners did, at each validation in `fit`.

    Logged under `gossip/`: `consensus_distance`, `relative_consensus_distance`,
    `exchanges_per_second` and `exchanges_per_step` (a learner's, per step of its own),
    `merges`, `bytes_sent`, `bytes_per_second`, `refused`, `staleness_mean`,
    `staleness_max` and `staleness_{steps}` (the histogram, bins in use);
    `peer_age_{s}`, the most steps that a peer has made since its last completed
    exchange with super-learner s, and the mean and maximum of these ages over all
    pairs; of islands `members`, `joined` and `lost`. Under `learners/`:
    `global_samples`, `train_seconds`, `samples_per_second`, `exposed_fraction` (waiting
    for communication per training time, mean over learners), and the steps per second
    of each learner and their least and most.

    Ages are those of the asynchronous engine at the start of the validation; staleness
    counts from the start of the training. What a strategy does not have is left out.

    Attributes:
        records: One record per learner, as of the last validation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[LearnerRecord] = []

    @override
    def measure(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rows = gather(trainer, record_of(trainer, self.clock).row())
        self.records = [LearnerRecord.from_row(row) for row in rows]
        if trainer.is_global_zero:
            figures = summarize(self.records) | membership(trainer)
            log(trainer, figures | consensus_distances(trainer))
