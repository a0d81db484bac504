"""The report of a sweep: RESULTS.md and its figures."""

from collections.abc import Mapping
from pathlib import Path

from recipes.batch_size import plots
from recipes.batch_size.doubts import doubts
from recipes.batch_size.limits import Limit, limits, ratio
from recipes.batch_size.outcomes import write_whole
from recipes.batch_size.search import Best
from recipes.batch_size.settings import CLIPPED, Cell, Setting, Settings
from recipes.batch_size.sweep import Sweep
from recipes.batch_size.workloads import Workload
from recipes.hybrid.pipeline.provenance import provenance


def write_report(out: Path, sweep: Sweep, workload: Workload) -> Path:
    """Writes RESULTS.md, its figures as PNG and SVG, and prints warnings and tables.

    Args:
        out: folder of the report.
        sweep: sweep with all its runs.
        workload: what was trained, before or after its samples were cut.
    """
    batches = sweep.settings.batches
    figures = {
        "loss": plots.loss_against_batch(sweep, sweep.bests),
        "rule": plots.loss_against_batch(sweep, sweep.at_rule),
    }
    figures |= {f"curves-{b}": plots.curves(sweep, b) for b in batches}
    for name, figure in figures.items():
        for kind in ("png", "svg"):
            figure.savefig(out / f"{name}.{kind}", dpi=150)
    tables = "\n\n".join(
        [
            "Each at its own best learning rate:",
            loss_table(sweep, sweep.bests),
            limit_table(sweep, sweep.bests),
            "At the papers' rule, rates in proportion to batches from the baseline's:",
            loss_table(sweep, sweep.at_rule),
            limit_table(sweep, sweep.at_rule),
        ]
    )
    warnings = doubts(sweep.bests, sweep.settings)
    parts = [
        f"# Results: {workload.name}",
        _facts(sweep, workload),
        *warnings,
        "![loss against batch, each at its best rate](loss.png)",
        tables,
        "![loss against batch, rates in proportion to it](rule.png)",
        _READING,
        *(f"![learning curves](curves-{batch}.png)" for batch in batches),
    ]
    write_whole(out / "RESULTS.md", "\n\n".join(parts) + "\n")
    told = "\n\n".join([*warnings, tables, f"report: {out / 'RESULTS.md'}"])
    print(f"\n{told}")
    return out / "RESULTS.md"


_READING = """\
Losses are held-out cross-entropies of the consensus model, mean [least, greatest] over
the seeds, at the learning rate and norm after the @, which were best for that algorithm
and batch on other held-out samples; `!` marks a best setting at an edge of the grid,
"diverged" a cell in which some seed did at every rate. A limit is the batch at which
the mean loss over the seeds leaves the margin above the baseline's, linear in the
logarithm of the batch between two that were trained. `>=` is a limit that may be
larger: the loss never leaves the margin, or a seed diverged at the next batch, so that
there is no loss to draw a line to. `<` is one below the smallest batch. The baseline of
clipped algorithms (`+clip`) is clipped SSGD. The ratio is that to SSGD's limit, clipped
as the algorithm is, with the central 95 % of a bootstrap over seeds. It is a bound if
one of both limits may be larger, and left out if both may."""


def loss_table(sweep: Sweep, cells: Mapping[Cell, Best]) -> str:
    """Losses by algorithm and batch, as Markdown.

    Args:
        sweep: sweep that names the algorithms and batches.
        cells: cells, each at a learning rate.
    """
    batches = sweep.settings.all_batches
    rows = [
        [name, *(_loss(cells.get(Cell(name, batch))) for batch in batches)]
        for name in sweep.settings.algorithms
    ]
    return _table(["loss", *(f"batch {batch}" for batch in batches)], rows)


def limit_table(sweep: Sweep, cells: Mapping[Cell, Best]) -> str:
    """Limits and their ratios to SSGD's, as Markdown.

    Args:
        sweep: sweep that names the algorithms and margins.
        cells: cells, each at a learning rate, with the baseline's.
    """
    margins = sweep.settings.margins
    heads = [f"{what}, {m:.0%}" for m in margins for what in ("limit", "ratio")]
    rows = [
        [name, *(text for m in margins for text in _limit(sweep, cells, name, m))]
        for name in sweep.settings.algorithms
    ]
    return _table(["largest batch within", *heads], rows)


def _limit(
    sweep: Sweep, cells: Mapping[Cell, Best], algorithm: str, margin: float
) -> tuple[str, str]:
    batch, control = sweep.settings.baseline_batch, Cell(algorithm, 0).control
    found = limits(cells, batch, margin, range(sweep.settings.seeds))
    if algorithm not in found:
        return "", ""
    if algorithm == control:
        return _bound(found[algorithm]), "1"
    if not found[algorithm].batch or not found[control].batch:
        smallest = min(cell.batch for cell in cells if cell.algorithm == algorithm)
        return f"< {smallest}", ""
    bound = _bound(found[algorithm])
    if found[algorithm].open and found[control].open:
        return bound, ""
    interval = ratio(cells, batch, margin, algorithm)
    sign = ">= " * found[algorithm].open + "<= " * found[control].open
    return (
        bound,
        f"{sign}{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]",
    )


def _bound(found: Limit) -> str:
    return f"{'>= ' if found.open else ''}{found.batch:.0f}"


def _loss(best: Best | None) -> str:
    if best is None:
        return ""
    losses = best.losses.values()
    if max(losses) == float("inf"):
        return f"diverged @ {_setting(best.setting)}"
    spread = f"[{min(losses):.3f}, {max(losses):.3f}]"
    edge = "!" if best.at_edge else ""
    return f"{best.mean:.3f} {spread} @ {_setting(best.setting)}{edge}"


def _setting(setting: Setting) -> str:
    clipped = "" if setting.norm is None else f", clip {setting.norm:.3g}"
    return f"{setting.rate:.3g}{clipped}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _facts(sweep: Sweep, workload: Workload) -> str:
    facts = {
        **provenance(),
        "workload": f"{workload.name}: {_samples(sweep.settings, workload)}, "
        f"{workload.num_classes} classes",
        "learners": _learners(sweep.settings),
        "schedule": _schedule(sweep.settings),
        "runs": _effort(sweep),
    }
    return "\n".join(f"- {name}: {fact}" for name, fact in facts.items())


def _samples(settings: Settings, workload: Workload) -> str:
    """How many were trained on, and of how many."""
    trained, given = (
        len(several.train[0])
        for several in (workload.cut(settings.largest_batch), workload)
    )
    return f"{trained} samples" + (f" of {given}" if trained < given else "")


def _learners(settings: Settings) -> str:
    return (
        f"{settings.num_learners} virtual ones; times of steps lognormal with spread "
        f"{settings.spread:g}, weights cross a link in {settings.exchange:g} steps; "
        f"hadpsgd in super-learners of {settings.super_learner_size}; mixing gain "
        f"{settings.mixing_gain:g} where asynchronous"
    )


def _schedule(settings: Settings) -> str:
    return (
        f"{settings.epochs} epochs; from 1/{settings.rise} of the peak rate to all of "
        f"it in {settings.warmup_epochs:g}, then x {settings.decay:.3g} per epoch; "
        f"momentum 0; clipped at norms from {settings.min_clip:g} to "
        f"{settings.max_clip:g} where a name ends in {CLIPPED}"
    )


def _effort(sweep: Sweep) -> str:
    seconds = sum(outcome.wall_seconds for outcome in sweep.outcomes)
    diverged = sum(bool(outcome.diverged) for outcome in sweep.outcomes)
    return (
        f"{len(sweep.outcomes)}, {diverged} of them diverged, {sweep.settings.seeds} "
        f"seeds, {seconds / 60:.0f} minutes of one core that others used too"
    )
