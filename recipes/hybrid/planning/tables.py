"""The tables of docs/switchboard.md: measured costs, and projections by corpus."""

import math
from collections.abc import Iterator

from recipes.hybrid.planning.costs import CORPORA, Corpus, Cost, read_costs
from recipes.hybrid.planning.hours import stage_minutes, training_hours
from recipes.hybrid.planning.memory import disk_gb, memory_gb

GPUS = (1, 8, 64)
CORES_PER_GPU, MOST_CORES = 8, 64
_BEGIN, _END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"


def page() -> Iterator[str]:
    """The tables, as lines of Markdown."""
    costs, source = read_costs()
    yield f"Measured: {source}"
    yield ""
    yield "| stage | one core does | unit |"
    yield "|---|---|---|"
    for name, cost in costs.items():
        yield f"| {name} | {_round(cost.per_second)} a second | {cost.unit} |"
    for corpus in CORPORA:
        yield from _tables(corpus, costs)


def _tables(corpus: Corpus, costs: dict[str, Cost]) -> Iterator[str]:
    frames = f"{corpus.frames / 1e6:.0f} million frames"
    yield ""
    yield f"### {corpus.name}: {corpus.hours:g} h, {frames}"
    yield ""
    machines = (f"{gpus} GPU, {cores_of(gpus)} cores" for gpus in GPUS)
    yield f"| | {' | '.join(machines)} |"
    yield "|---|---|---|---|"
    minutes = [stage_minutes(corpus, costs, cores_of(gpus)) for gpus in GPUS]
    for stage in minutes[0]:
        yield f"| {stage}, minutes | {' | '.join(_round(m[stage]) for m in minutes)} |"
    train = (training_hours(corpus, gpus) for gpus in GPUS)
    cells = (_round(a) if a == b else f"{_round(a)} to {_round(b)}" for a, b in train)
    yield f"| train, 16 epochs on V100, hours | {' | '.join(cells)} |"
    yield ""
    yield "| gigabytes | |"
    yield "|---|---|"
    for name, size in {**disk_gb(corpus), **memory_gb(corpus)}.items():
        yield f"| {name} | {_round(size)} |"


def cores_of(gpus: int) -> int:
    """Cores that the stages get: they run on one machine, whatever trains."""
    return min(CORES_PER_GPU * gpus, MOST_CORES)


def _round(value: float) -> str:
    """Two digits that count."""
    if value < 0.05:
        return "< 0.1"
    digits = 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, digits):,.{max(0, digits)}f}"


def with_tables(text: str) -> str:
    """A page with the tables between its two marks."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    tables = "\n".join(page())
    return f"{before}{_BEGIN}\n{tables}\n\n{_END}{after}"
