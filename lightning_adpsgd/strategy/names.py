"""The names of the algorithms, as in the papers, and the settings that each stands for.

It is read in the middle of torch's own import, and imports neither that nor Lightning.
"""

from typing import Any

# Settings of the strategy classes; the names are those of the papers' algorithms.
NAMES: dict[str, dict[str, Any]] = {
    "sdpsgd": {
        "topology": "ring",
        "communication": "sync",
        "super_learner_size": 1,
    },
    "adpsgd": {
        "topology": "ring",
        "communication": "async",
        "super_learner_size": 1,
    },
    "adpsgd_random": {
        "topology": "random_ring",
        "communication": "async",
        "super_learner_size": 1,
    },
    "d1psgd": {
        "topology": "complete",
        "communication": "delay_by_one",
        "super_learner_size": 1,
    },
    "rdpsgd": {
        "topology": "complete",
        "communication": "ready_pairs",
        "super_learner_size": 1,
    },
    "hadpsgd": {
        "topology": "ring",
        "communication": "async",
        "super_learner_size": "node",
    },
}
