"""The floor: the loss of the same steps if communication cost nothing."""

import time

from benchmarks.racing.columns import NUM_HOSTS
from benchmarks.racing.course import (
    SHARES_OF_TIME,
    Finish,
    Heat,
    weights_of,
)
from benchmarks.racing.problems import PROBLEMS
from benchmarks.workload import anneal, loss


def train_floor(heat: Heat) -> Finish:
    """`ddp` of all learners in one process, one batch after another.

    Its curve is over the time in which the learners would have made these steps.
    """
    (num_steps,), problem = heat.steps, PROBLEMS[heat.problem]
    model = problem.make_model(heat.seed)
    optimizer = problem.make_optimizer(model.parameters(), heat.rate)
    anneal(optimizer, heat.rate, num_steps)
    feeds = [problem.batches_of(heat.seed, rank) for rank in range(NUM_HOSTS)]
    kept, curve, begin = list(SHARES_OF_TIME), [], time.monotonic()
    for step in range(num_steps):
        share = step / num_steps
        if heat.with_curve and kept and share >= kept[0]:
            curve.append((kept.pop(0) * heat.seconds, weights_of(model)))
        optimizer.zero_grad()
        for feed in feeds:
            # Apart, because each learner's batch norm sees its own batch.
            (loss(model, next(feed)) / NUM_HOSTS).backward()
        optimizer.step()
    took = time.monotonic() - begin
    return Finish(
        num_steps, heat.seconds, num_steps / took, 0, 0.0, weights_of(model), curve
    )
