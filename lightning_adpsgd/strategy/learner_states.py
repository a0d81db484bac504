"""What a checkpoint holds of each super-learner and of each of its learners."""

from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info


def by_super_learner(learners: list[Any], size: int) -> list[dict[str, Any]]:
    """The states of all learners, grouped for a checkpoint.

    Args:
        learners: states by rank; `own` of each is kept, all else of the first alone.
        size: N.
    """
    return [
        {
            **{name: value for name, value in first.items() if name != "own"},
            "learners": [one["own"] for one in learners[n * size : (n + 1) * size]],
        }
        for n, first in enumerate(learners[::size])
    ]


def learner_of(
    saved: list[Any], rank: int, num_learners: int, super_learner_size: int
) -> dict[str, Any] | None:
    """What `by_super_learner` kept of one learner.

    Returns:
        None where the job that saved had another S or N, which is said once.
    """
    size, num_super_learners = super_learner_size, num_learners // super_learner_size
    # Before version 0.2 a checkpoint kept nothing of each learner.
    sizes = [len(group.get("learners") or [None] * size) for group in saved]
    if sizes != [size] * num_super_learners:
        rank_zero_info(
            f"The checkpoint holds {len(saved)} super-learners of {max(sizes)} and "
            f"this job has {num_super_learners} of {size}: all start from their mean."
        )
        return None
    group, place = divmod(rank, size)
    own = (saved[group].get("learners") or [{}] * size)[place]
    return {**saved[group], "own": own}
