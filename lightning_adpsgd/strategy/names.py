"""The names of the algorithms, as in the papers, and the settings behind each name.

It is imported in the middle of torch's own import, so it imports neither torch nor
Lightning.
"""

from typing import Any

NAMES: dict[str, dict[str, Any]] = {
    name: {"topology": topology, "communication": mode, "super_learner_size": size}
    for name, topology, mode, size in (
        ("sdpsgd", "ring", "sync", 1),
        ("adpsgd", "ring", "async", 1),
        ("adpsgd_random", "random_ring", "async", 1),
        ("d1psgd", "complete", "delay_by_one", 1),
        ("rdpsgd", "complete", "ready_pairs", 1),
        ("hadpsgd", "ring", "async", "node"),
    )
}
