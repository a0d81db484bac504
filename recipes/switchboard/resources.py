"""What the real corpora would need: hours, disk and memory per stage, as projections.

`--measure RUN` reads from the stamps of a run how long the stages named took, of how
many frames, and keeps the costs of one core in `resources.json`; `--rates RUN` measures
there the parts of stages that depend on models (`rates`). Without either the tables of
docs/switchboard.md are computed from that file and from what the papers report of their
GPUs:

    minutes of a stage = units / (units per second of a core * cores * 60)
    hours of training = hours of one GPU / (GPUs * efficiency)

A projection supposes that cores and GPUs do not wait for disks.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lightning_adpsgd.asr.frames.store import is_stored, stored_frames
from lightning_adpsgd.files import write_json, written_whole
from recipes.switchboard.settings import Settings, override

INPUTS = Path(__file__).with_name("resources.json")
FRAMES_PER_HOUR = 360_000
CHUNK = 21
EPOCHS = 16
ALIGNED = 100_000  # utterances that mixtures are trained on
LEAVES = 32_000
ARCS = 10e6  # of a graph with a pruned 4-gram: supposed
HUB5_FRAMES = 3.7 * FRAMES_PER_HOUR  # both parts of the test
DEV_FRAMES = 400 * 500  # utterances of 5 s, for the choice of scales
SCALES = 6
UBM_FRAMES = 2e6 * 12  # as many passes at full size as 6 at each doubling come to
IVECTOR_ITERATIONS = 10
FMLLR_ROUNDS = 2 + 1  # of the mixtures' training, and the maps that are kept
NUM_PARAMETERS = 43_154_944
# One V100 trains SWB-2000 for 16 epochs in 192 hours, 64 of them in 5.2 (the papers).
V100_HOURS, V100_64_HOURS = 192.0, 5.2
CORES_PER_GPU, MOST_CORES = 8, 64
_MEL_BYTES = 40 * 2
_FMLLR_BYTES = 40 * 2
_LABEL_BYTES = 4
_UTTERANCE_BYTES = 1330  # growth of a process that read 100,000 of Fisher's shape
_BEGIN, _END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"


class Corpus(NamedTuple):
    """Sizes of a corpus.

    Attributes:
        name: Of its recipe.
        hours: Of speech that is trained on.
        recordings: Files.
        utterances: Of the training.
        disc_hours: Of recordings on the discs, both sides of a call being one.
    """

    name: str
    hours: float
    recordings: int
    utterances: int
    disc_hours: float

    @property
    def sides(self) -> int:
        """Conversation sides."""
        return 2 * self.recordings

    @property
    def frames(self) -> float:
        """Frames of 10 ms."""
        return self.hours * FRAMES_PER_HOUR


# Hours and utterances after capping repeats, from Kaldi's s5c; 1,975 h of the papers.
CORPORA = (
    Corpus("swb300", 286, 2438, 256_000, 260),
    Corpus("swb2000", 1975, 2438 + 11_699 + 120, 2_100_000, 260 + 1960 + 60),
)
GPUS = (1, 8, 64)
UNITS = {
    "check": "recordings",
    "prepare": "utterances",
    "features": "frames",
    "align": "frames",
}


# Of parts of stages: the first two and `graph` by `python -m benchmarks tree`.
STATISTICS, LEAVES_GROWN = "triphone: statistics", "triphone: tree"
ALIGNING = "triphone: a realignment"
FMLLR, IVECTORS = "adapt: a round of fMLLR", "adapt: an iteration of i-vectors"
OCCUPANCY = "adapt: 2,048 Gaussians"
NETWORK, SEARCH = "decode: the papers' network", "decode: search"


class Cost(NamedTuple):
    """What one core does of a stage, or of a part of one.

    Attributes:
        unit: "recordings", "utterances", "frames" and so on.
        per_second: So many of them.
    """

    unit: str
    per_second: float


def measured(exp: Path, stage: str, cores: int, iterations: int) -> Cost:
    """Cost of a stage of a run.

    Args:
        exp: Folder of the stages.
        stage: One of `UNITS`.
        cores: Processes that it used; `prepare` uses one.
        iterations: Realignments of its flat start (`align.num_iterations`).
    """
    passes = iterations + 2  # and the equal parts, and the labels
    count = {
        "check": lambda: _num_recordings(exp / "check/report.json"),
        "prepare": lambda: _num_lines(exp / "prepare/train.jsonl"),
        "features": lambda: _frames(exp / "features"),
        "align": lambda: _frames(exp / "features") * passes,
    }[stage]
    used = 1 if stage == "prepare" else cores
    return Cost(UNITS[stage], count() / (_seconds(exp / stage) * used))


def _num_recordings(report: Path) -> int:
    found = json.loads(report.read_text())
    return len(found.get("recordings") or found["seconds"])


def _num_lines(path: Path) -> int:
    with path.open() as file:
        return sum(1 for _ in file)


def _seconds(stage: Path) -> float:
    return json.loads((stage / ".done").read_text())["seconds"]


def _frames(features: Path) -> int:
    return sum(stored_frames(split) for split in features.iterdir() if is_stored(split))


def read_costs(path: Path = INPUTS) -> tuple[dict[str, Cost], str]:
    """The kept costs, and where they were measured."""
    values = json.loads(path.read_text())
    return {name: Cost(*cost) for name, cost in values["costs"].items()}, values["from"]


def stage_minutes(
    corpus: Corpus, costs: dict[str, Cost], cores: int
) -> dict[str, float]:
    """Minutes of the stages that run on cores; some parts of them use one."""
    trained = min(1.0, ALIGNED / corpus.utterances)
    alone = {
        "prepare": [("prepare", corpus.utterances)],
        "triphone": [(LEAVES_GROWN, LEAVES)],
        "graph": [("graph", ARCS)],
    }
    shared = {
        "check": [("check", corpus.recordings)],
        "prepare": [],
        "features": [("features", corpus.frames)],
        # 14 realignments of some, then labels for all
        "align": [("align", corpus.frames * (1 + 14 * trained))],
        "triphone": [
            (STATISTICS, corpus.frames),
            (ALIGNING, corpus.frames * (1 + 8 * trained)),
        ],
        "graph": [],
        "adapt": [
            (FMLLR, corpus.frames * FMLLR_ROUNDS),
            (OCCUPANCY, corpus.frames + UBM_FRAMES),
            (IVECTORS, corpus.sides * IVECTOR_ITERATIONS),
        ],
        "decode": [
            (NETWORK, HUB5_FRAMES + DEV_FRAMES),
            (SEARCH, HUB5_FRAMES + DEV_FRAMES * SCALES),
        ],
    }

    def seconds(parts: list[tuple[str, float]]) -> float:
        return sum(number / costs[name].per_second for name, number in parts)

    return {
        stage: (seconds(parts) / cores + seconds(alone.get(stage, []))) / 60
        for stage, parts in shared.items()
    }


def training_hours(corpus: Corpus, gpus: int) -> tuple[float, float]:
    """Hours of 16 epochs on V100s: if nothing is lost, and at the papers' efficiency.

    64 of them did 37 times the work of one; what 8 lose lies between 0 and that.
    """
    one = V100_HOURS * corpus.hours / CORPORA[1].hours
    efficiency = V100_HOURS / (V100_64_HOURS * 64)
    return one / gpus, one / gpus if gpus == 1 else one / (gpus * efficiency)


def disk_gb(corpus: Corpus) -> dict[str, float]:
    """Gigabytes that stages leave, and that the discs hold as mu-law."""
    return {
        "discs, not compressed": corpus.disc_hours * 3600 * 8000 * 2 / 1e9,
        "features, float16": corpus.frames * _MEL_BYTES / 1e9,
        "fMLLR, float16": corpus.frames * _FMLLR_BYTES / 1e9,
        "labels": corpus.frames * _LABEL_BYTES / 1e9,
        "weights in a checkpoint": NUM_PARAMETERS * 4 / 1e9,
    }


def memory_gb(corpus: Corpus) -> dict[str, float]:
    """Gigabytes of memory, of which frames are mapped and need not be in it."""
    return {
        "prepare: utterances": corpus.utterances * _UTTERANCE_BYTES / 1e9,
        "training, each GPU: weights, gradients, gossip": NUM_PARAMETERS * 4 * 4 / 1e9,
    }


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


def main(arguments: list[str] | None = None) -> int:
    """Measure, or print the tables."""
    parser = argparse.ArgumentParser(prog="python -m recipes.switchboard.resources")
    parser.add_argument("--measure", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--rates", type=Path, metavar="RUN", help="with `adapt` done")
    parser.add_argument("--stages", nargs="+", choices=UNITS, default=[*UNITS])
    parser.add_argument("--cores", type=int, default=1, help="that it used")
    parser.add_argument("--iterations", type=int, default=14, help="of its flat start")
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    parser.add_argument("--machine", default="", help="where and when, in words")
    given = parser.parse_args(arguments)
    if given.measure:
        costs = {
            stage: measured(given.measure / "exp", stage, given.cores, given.iterations)
            for stage in given.stages
        }
        _keep(costs, given.machine)
    if given.rates:
        from recipes.switchboard.rates import rates  # needs torch and a decoder

        of_run = Settings(corpus=given.rates, out=given.rates, states="triphone")
        costs = {name: Cost(*rate) for name, rate in rates(_as_the_papers(of_run))}
        _keep(costs, given.machine)
    if given.page:
        text = with_tables(given.page.read_text(encoding="utf-8"))
        with written_whole(given.page) as file:
            file.write(text)
    else:
        print("\n".join(page()))
    return 0


def _keep(costs: dict[str, Cost], machine: str) -> None:
    kept, source = read_costs() if INPUTS.exists() else ({}, "")
    told = "; ".join(part for part in (source, machine) if part)
    write_json(INPUTS, {"from": told, "costs": kept | costs})


def _as_the_papers(settings: Settings) -> Settings:
    """With the papers' streams and width of the search; one core."""
    return override(settings, "adapt.streams=both", "decode.max_active=7000", "cores=1")


if __name__ == "__main__":
    sys.exit(main())
