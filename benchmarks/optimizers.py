"""The effect of local gradients on adaptive optimizers, with a small transformer.

Momentum and AdamW's moments stay in each super-learner and are never averaged. A local
second moment has seen a learner's own gradients, which are noisier than their mean over
all. So it is larger, and the steps that are divided by its root are shorter than under
`ddp` at the same learning rate. Each method is therefore measured at its own best rate,
which is searched by factors of two until both neighbours are worse.

A causal transformer reads the bytes of Python's reference manual, as it comes with the
interpreter. Eight learners train on a simulated clock, with the engine's own arithmetic
(docs/virtual-cluster.md); an exchange takes half a step. `sync, complete` averages all
weights after each step: with SGD that is `ddp`, to rounding, so the difference with
AdamW is the effect of local moments. Rates are chosen by one seed, on the held-out text
that is reported, and all seeds are trained at the best.
"""

import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import vector_to_parameters
from typing_extensions import override

from benchmarks.results import Report, Row
from benchmarks.timing import print_row, spread
from lightning_adpsgd.virtual.clock import Compute, Link
from lightning_adpsgd.virtual.cluster import VirtualCluster

LEARNERS, STEPS, WARM_UP = 8, 80, 0.1
CONTEXT, WIDTH, HEADS, LAYERS, SYMBOLS = 32, 48, 4, 2, 128
BATCH, HELD_OUT, SEEDS = 8, 128, 3
EMA_DECAY = 0.98
METHODS: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"num_super_learners": 1, "super_learner_size": LEARNERS},
    "sync, complete": {"topology": "complete", "communication": "sync"},
    "adpsgd": {"topology": "ring"},
}
FIRST_RATE = {"AdamW": 8e-3, "SGD": 0.2}
WITH_SGD = ("ddp", "adpsgd")
DECAY = 0.01


class Transformer(nn.Module):
    """Logits of the next byte: [batch, time] -> [batch, time, 128]."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.layers = nn.ModuleList(self._layer() for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, SYMBOLS)

    @staticmethod
    def _layer() -> nn.Module:
        return nn.TransformerEncoderLayer(
            *(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu"), batch_first=True, norm_first=True
        )

    @override
    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        hidden = self.symbols(text) + self.places
        for layer in self.layers:
            hidden = layer(hidden, mask, is_causal=True)
        return self.out(hidden)


def loss(module: nn.Module, batch: Tensor) -> Tensor:
    """Cross-entropy of the next byte in nats; a batch is [sequences, CONTEXT + 1]."""
    return cross_entropy(module(batch[:, :-1]).transpose(1, 2), batch[:, 1:])


def text(held_out: bool) -> Tensor:
    """Bytes of the manual's sections, every tenth of which is held out."""
    chosen = [n for i, n in enumerate(sorted(topics)) if (i % 10 == 9) == held_out]
    written = "\n".join(topics[name] for name in chosen)
    return torch.tensor(list(written.encode("ascii", "replace")))


def sequences(source: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Pieces of a text, drawn with replacement: [count, CONTEXT + 1]."""
    begins = torch.randint(len(source) - CONTEXT, (count,), generator=generator)
    return source[begins[:, None] + torch.arange(CONTEXT + 1)]


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        method: name in `METHODS`.
        rate: peak of the learning rate.
        seed: seed of the initial weights, the samples and the simulated times.
        optimizer: "AdamW" or "SGD" with momentum.
        decay: weight decay.
        warm_up: share of the steps in which the rate rises.
        options: further arguments of the cluster.
    """

    method: str
    rate: float
    seed: int
    optimizer: str = "AdamW"
    decay: float = DECAY
    warm_up: float = WARM_UP
    options: Mapping[str, Any] = field(default_factory=dict)


class Outcome(NamedTuple):
    """The outcome of a training.

    Attributes:
        loss: of the consensus model on held-out text, nats a byte; infinite if the
            training diverged.
        ema: the same of the exponential average of the learners' mean.
        second: mean root of AdamW's second moments; NaN with SGD.
        distance: relative consensus distance at the end.
    """

    loss: float
    ema: float
    second: float
    distance: float


def train(run: Run) -> Outcome:
    """Trains once; the same run gives the same outcome."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    made: list[torch.optim.Optimizer] = []
    cluster = make_cluster(run, made)
    average: list[Tensor] = []
    report = cluster.fit(
        learner_batches(run.seed),
        LEARNERS * BATCH * STEPS,
        lr_schedule=schedule(run.warm_up),
        every_samples=LEARNERS * BATCH,
        on_point=lambda _: keep_average(average, cluster),
    )
    if report.diverged:
        return Outcome(*[math.inf] * 4)
    held_out = held_out_loss(cluster.module)
    vector_to_parameters(average[0], cluster.module.parameters())
    distance = report.points[-1].relative_distance
    return Outcome(held_out, held_out_loss(cluster.module), second(made), distance)


def make_cluster(run: Run, made: list[torch.optim.Optimizer]) -> VirtualCluster:
    """The learners of a run; their optimizers are entered into `made`."""
    module = Transformer()
    num_bytes = 4 * sum(p.numel() for p in module.parameters())

    def optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        kind: Any = torch.optim.AdamW if run.optimizer == "AdamW" else torch.optim.SGD
        momentum = {} if run.optimizer == "AdamW" else {"momentum": 0.9}
        made.append(kind(parameters, run.rate, weight_decay=run.decay, **momentum))
        return made[-1]

    options: dict[str, Any] = {"num_super_learners": LEARNERS}
    return VirtualCluster(
        module,
        loss=loss,
        optimizer=optimizer,
        compute=Compute(1.0, spread=0.2),
        link=Link(bandwidth=2.0 * num_bytes, latency=1e-3),
        samples_in=len,
        seed=run.seed,
        **{**options, **METHODS[run.method], **run.options},
    )


def learner_batches(seed: int) -> Callable[[int], Iterator[Tensor]]:
    """A function from the number of a learner to its endless batches."""
    source = text(held_out=False)

    def batches(learner: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + learner)
        while True:
            yield sequences(source, BATCH, generator)

    return batches


def schedule(warm_up: float) -> Callable[[int], float]:
    """A linear rise, then half a cosine to a tenth; equal for all of a round."""

    def factor(samples: int) -> float:
        done = samples // (LEARNERS * BATCH) / STEPS
        if done < warm_up:
            return max(done / warm_up, 1 / (warm_up * STEPS))
        fallen = (1 + math.cos(math.pi * (done - warm_up) / (1 - warm_up))) / 2
        return 0.1 + 0.9 * fallen

    return factor


def keep_average(average: list[Tensor], cluster: VirtualCluster) -> None:
    """Updates the exponential average of the learners' mean at a point."""
    (rows,) = cluster.weights()
    mean = rows.mean(0)
    if average:
        average[0].lerp_(mean, 1 - EMA_DECAY)
    else:
        average.append(mean.clone())


@torch.no_grad()
def held_out_loss(module: nn.Module) -> float:
    """The loss on text that no learner trains on."""
    source = text(held_out=True)
    return loss(module, sequences(source, HELD_OUT, torch.Generator())).item()


def second(made: Sequence[torch.optim.Optimizer]) -> float:
    """The mean root of the second moments, over all weights of all super-learners."""
    states = [state for optimizer in made for state in optimizer.state.values()]
    found = [s["exp_avg_sq"].flatten() for s in states if "exp_avg_sq" in s]
    return torch.cat(found).sqrt().mean().item() if found else math.nan


# --- the search, and what is reported


class Trials:
    """A pool of processes for trainings, each of which is done once."""

    def __init__(self, processes: int) -> None:
        self._known: dict[str, Outcome] = {}
        self._pool = multiprocessing.get_context("fork").Pool(processes)

    def close(self) -> None:
        """Ends the processes."""
        self._pool.terminate()

    def of(self, runs: Iterable[Run]) -> list[Outcome]:
        """The outcome of each training."""
        runs = list(runs)
        wanted = {repr(run): run for run in runs if repr(run) not in self._known}
        found = self._pool.imap(train, wanted.values(), chunksize=1)
        for key, outcome in zip(wanted, found, strict=True):
            self._known[key] = outcome
        return [self._known[repr(run)] for run in runs]


def best_rates(trials: Trials, runs: Sequence[Run]) -> list[Run]:
    """Each run at the rate at which both neighbours are worse."""
    best = list(runs)
    while True:
        around = [at_rates(run, 1, 0.5, 2) for run in best]
        found = iter(trials.of(run for three in around for run in three))
        losses = [[next(found).loss for _ in three] for three in around]
        pairs = zip(around, losses, strict=True)
        better = [three[lost.index(min(lost))] for three, lost in pairs]
        if better == best:
            return best
        best = better


def at_rates(run: Run, *factors: float) -> list[Run]:
    """The run at several multiples of its rate."""
    return [replace(run, rate=run.rate * factor) for factor in factors]


def over_seeds(trials: Trials, run: Run, seeds: int) -> list[Outcome]:
    """The outcomes of a run, by seed."""
    return trials.of(replace(run, seed=seed) for seed in range(seeds))


def mean_loss(outcomes: Sequence[Outcome]) -> float:
    """Over seeds; infinite if one diverged."""
    return sum(outcome.loss for outcome in outcomes) / len(outcomes)


def measure(quick: bool = False) -> Report:
    """Measures each method, and variants of the asynchronous one, at the best rates."""
    report = Report(
        f"A causal transformer on {LEARNERS} simulated learners, {STEPS} steps each, "
        "with AdamW and with SGD.",
        limit="the loss of ddp with AdamW at its best rate",
        notes=[
            "second moment: mean root of AdamW's second moments at the end, at a "
            f"learning rate of {FIRST_RATE['AdamW']:g}, of that under ddp; one seed.",
            f"EMA: of the learners' mean, decay {EMA_DECAY} a step.",
            "SGD is with momentum 0.9 and without weight decay. The best rate of each "
            "method is searched by factors of two with one seed, on the text that is "
            "reported, until both neighbours are worse.",
        ],
    )
    trials, seeds = Trials(os.cpu_count() or 1), 1 if quick else SEEDS
    try:
        best = best_rates(trials, starts())
        report.rows += method_rows(trials, best, seeds)
        report.rows += rate_rows(trials, best)
        report.rows += variant_rows(trials, best, seeds)
    finally:
        trials.close()
    return report


def starts() -> list[Run]:
    """Each method with each of its optimizers, at the first rate."""
    runs = [Run(method, FIRST_RATE["AdamW"], 0) for method in METHODS]
    sgd = (Run(m, FIRST_RATE["SGD"], 0, "SGD", decay=0.0) for m in WITH_SGD)
    return [*runs, *sgd]


def method_rows(trials: Trials, best: Sequence[Run], seeds: int) -> Iterator[Row]:
    """Each method at its best rate."""
    trials.of(replace(run, seed=seed) for run in best for seed in range(seeds))
    control = mean_loss(over_seeds(trials, best[0], seeds))
    for run in best:
        found = over_seeds(trials, run, seeds)
        details = {
            "rate": run.rate,
            "loss with EMA": spread(o.ema for o in found).median,
            "relative consensus distance": spread(o.distance for o in found).median,
        }
        if run.optimizer == "AdamW":
            details["second moment"] = second_of_ddp(trials, run.method)
        case = {"method": run.method, "optimizer": run.optimizer}
        yield row(case, found, control, "best rates", details)


def second_of_ddp(trials: Trials, method: str) -> float:
    """Second moments of a method, of those under `ddp` at the same rate."""
    rate = FIRST_RATE["AdamW"]
    mine, theirs = trials.of([Run(method, rate, 0), Run("ddp", rate, 0)])
    return mine.second / theirs.second


def rate_rows(trials: Trials, best: Sequence[Run]) -> Iterator[Row]:
    """The loss of one seed at half, once and twice the best rate."""
    for run in best:
        chosen = at_rates(run, 0.5, 1, 2)
        losses = [outcome.loss for outcome in trials.of(chosen)]
        for neighbour, outcome in zip(chosen, trials.of(chosen), strict=True):
            case = {"method": run.method, "optimizer": run.optimizer}
            yield row(
                {**case, "rate": neighbour.rate},
                [outcome],
                losses[1],
                "beside the best rates, one seed",
                {},
                ratio_to="at the best rate",
            )


def variant_rows(trials: Trials, best: Sequence[Run], seeds: int) -> Iterator[Row]:
    """`adpsgd` with AdamW at its best rate, with one thing changed at a time."""
    plain = next(r for r in best if (r.method, r.optimizer) == ("adpsgd", "AdamW"))
    variants = {
        "as it is": plain,
        "gossip_every=16": replace(plain, options={"gossip_every": 16}),
        "wire_dtype=int8": replace(plain, options={"wire_dtype": torch.int8}),
        "no warm-up": replace(plain, warm_up=0.0),
        "clipped at norm 1": replace(plain, options={"gradient_clip": 1.0}),
    }
    trials.of(replace(r, seed=s) for r in variants.values() for s in range(seeds))
    control = mean_loss(over_seeds(trials, plain, seeds))
    for name, run in variants.items():
        found = over_seeds(trials, run, seeds)
        distance = spread(outcome.distance for outcome in found).median
        details = {"relative consensus distance": distance}
        case = {"adpsgd with AdamW": name}
        yield row(case, found, control, "one thing changed", details, "as it is")


def row(
    case: Mapping[str, str | float],
    found: Sequence[Outcome],
    control: float,
    table: str,
    details: Mapping[str, float],
    ratio_to: str = "",
) -> Row:
    """One row of a table: losses over seeds, and their ratio to a control."""
    losses = [outcome.loss for outcome in found if math.isfinite(outcome.loss)]
    diverged = len(found) - len(losses)
    value = spread(losses or [math.log(SYMBOLS)])  # chance, where all have diverged
    ratio = None if diverged else mean_loss(found) / control
    print_row(", ".join(map(str, case.values())), f"{value:.3f}", f"{ratio}")
    if diverged:
        details = {**details, "diverged": diverged}
    return Row(case, value, "nats a byte", ratio, ratio_to, table, details)
