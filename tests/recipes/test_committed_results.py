"""The tables of the recipes' RESULTS.md are those of the committed results."""

import functools
import json
import math
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import recipes.batch_size
import recipes.demo
from recipes.batch_size.__main__ import parser, settings_of
from recipes.batch_size.outcomes import Outcome, read_table
from recipes.batch_size.report import limit_table, loss_table
from recipes.batch_size.search import Best
from recipes.batch_size.settings import CLASSIFIER, Cell, Settings
from recipes.batch_size.sweep import Sweep
from tests.figures import is_rounded, marked
from tests.pages.blocks import section
from tests.pages.tables import Table, anchor, sections, tables, without_tables

FOLDER = Path(recipes.batch_size.__file__).parent
PAGE = FOLDER / "RESULTS.md"
DEMO = Path(recipes.demo.__file__).parent
CONTROL, SECOND_CONTROL = "ssgd+clip", "sdpsgd_complete+clip"
SPREAD = re.compile(r"-?\d+\.\d+\s\[-?\d+\.\d+,\s-?\d+\.\d+\]")


class Part:
    """A sweep on the page: its section, and the name of its headings and file."""

    def __init__(self, title: str, name: str, file: str) -> None:
        self.text = section(PAGE, title)
        self.name = name
        self.outcomes = _outcomes(file)

    def tables(self, heading: str) -> list[Table]:
        """Those below one of the headings."""
        return list(tables(sections(self.text)[anchor(f"{self.name}, {heading}")]))

    def sweep(self, of: Table, limits: Table) -> Sweep:
        """Settings of the command on the page, batches and margins of the tables."""
        block = re.search(
            r"^    python -m recipes.batch_size .*?\n\n", self.text, re.M | re.S
        )
        assert block
        words = shlex.split(textwrap.dedent(block[0]).replace("\\\n", ""))[3:]
        batches = tuple(int(head.removeprefix("batch ")) for head in of.head[1:])
        margins = tuple(
            int(head.removeprefix("ratio, ").removesuffix("%")) / 100
            for head in limits.head[2::2]
        )
        settings = settings_of(parser().parse_args(words))
        return Sweep(replace(settings, batches=batches, margins=margins), self.outcomes)


@functools.cache
def _outcomes(file: str) -> list[Outcome]:
    return read_table(FOLDER / "results" / file)


PARTS = {
    "classifier": ("Classifier", "Classifier", "classifier.csv"),
    "classifier, clipped": (
        "Without warm-up, clipped and not",
        "Classifier without warm-up",
        "classifier-clipped.csv",
    ),
    "speech": ("Speech", "Speech", "speech.csv"),
    "speech, clipped": (
        "Speech without warm-up, clipped and not",
        "Speech without warm-up",
        "speech-clipped.csv",
    ),
}
CLIPPED = [name for name in PARTS if "clipped" in name]


def _table(text: str) -> Table:
    (found,) = tables(text)
    return found


@pytest.mark.parametrize("name", PARTS)
def test_tables_of_best_settings_are_those_of_the_committed_runs(name: str) -> None:
    part = Part(*PARTS[name])
    kind = "setting" if name in CLIPPED else "rate"
    losses, limits = part.tables(f"each at its own best {kind}")
    sweep = part.sweep(losses, limits)
    assert losses == _table(loss_table(sweep, sweep.bests))
    assert limits == _table(limit_table(sweep, sweep.bests))


@pytest.mark.parametrize("name", [name for name in PARTS if name != "speech"])
def test_tables_at_the_papers_rule_are_those_of_the_committed_runs(name: str) -> None:
    part = Part(*PARTS[name])
    losses, limits = part.tables("at the papers' rule")
    sweep = part.sweep(losses, limits)
    assert losses == _table(loss_table(sweep, sweep.at_rule))
    assert limits == _table(limit_table(sweep, sweep.at_rule))


def test_speech_with_warm_up_diverges_at_the_papers_rule() -> None:
    part = Part(*PARTS["speech"])
    sweep = part.sweep(*part.tables("each at its own best rate"))
    above = [best for cell, best in sweep.at_rule.items() if cell.batch > 128]
    assert len(above) == 7 * 3
    assert all(math.isinf(best.mean) for best in above)


@pytest.mark.parametrize("name", CLIPPED)
def test_ratios_to_the_second_control_are_those_of_the_committed_runs(
    name: str,
) -> None:
    part = Part(*PARTS[name])
    (limits,) = part.tables("against the second control")
    sweep = part.sweep(part.tables("at the papers' rule")[0], limits)
    cells = with_second_control(sweep.at_rule, sweep.settings)
    computed = _table(limit_table(sweep, cells))
    first = {SECOND_CONTROL: CONTROL}
    expected = {row[0]: row[1:] for row in computed.rows}
    assert limits.head == computed.head
    for row in limits.rows:
        assert row[1:] == expected[first.get(row[0], row[0])], row[0]


def with_second_control(
    cells: Mapping[Cell, Best], settings: Settings
) -> dict[Cell, Best]:
    """The cells, with the second control in the place of the first.

    At the smallest batch the first remains: margins are counted from its loss.
    """
    smallest = Cell(CONTROL, settings.baseline_batch)
    others = {c: b for c, b in cells.items() if c.algorithm != CONTROL}
    moved = {
        Cell(CONTROL, cell.batch): best
        for cell, best in cells.items()
        if cell.algorithm == SECOND_CONTROL
    }
    return {**others, **moved, smallest: cells[smallest]}


@pytest.mark.parametrize("name", PARTS)
def test_the_page_says_how_many_runs_there_are_and_how_many_diverged(name: str) -> None:
    part = Part(*PARTS[name])
    said = re.search(
        r"([\d,]+)\sruns\s\(\[csv\]\([^)]*\)\),\s(\w+)\s*diverged", part.text
    )
    assert said
    words = {"none": 0, "five": 5}
    assert int(said[1].replace(",", "")) == len(part.outcomes)
    diverged = sum(bool(outcome.diverged) for outcome in part.outcomes)
    assert words.get(said[2], said[2]) in (diverged, str(diverged))


def test_what_the_page_says_of_no_best_setting_at_an_edge_holds() -> None:
    for name in PARTS:
        part = Part(*PARTS[name])
        kind = "setting" if name in CLIPPED else "rate"
        sweep = part.sweep(*part.tables(f"each at its own best {kind}"))
        assert not any(best.at_edge for best in sweep.bests.values()), name


def test_the_table_of_64_learners_is_that_of_the_committed_runs() -> None:
    (found,) = tables(section(PAGE, "64 learners instead of 16"))
    few = _at_rate(2, "classifier.csv")
    many = _at_rate(2, "classifier-64-learners.csv")
    for algorithm, with_16, with_64 in found.rows:
        assert with_16 == few[algorithm]
        if algorithm != "ssgd":  # one learner with the whole batch, however many
            assert with_64 == many[algorithm]


def test_other_rates_of_64_learners_are_as_the_page_says() -> None:
    text = section(PAGE, "64 learners instead of 16")
    said = re.search(
        r"has (\S+) there, and 2.83 was worse for `adpsgd`, (\S+)\. ", text
    )
    lost = re.search(r"The fixed ring loses (\S+) with 64 learners", text)
    assert said
    assert lost
    file = "classifier-64-learners.csv"
    rates = {rate: _at_rate(rate, file) for rate in (1.4142136, 2, 2.8284271)}
    assert rates[1.4142136]["ssgd"].startswith(f"{said[1]} ")
    assert rates[2.8284271]["adpsgd"].startswith(f"{said[2]} ")
    ring, few = rates[2]["adpsgd"], _at_rate(2, "classifier.csv")["adpsgd"]
    assert is_rounded(lost[1], float(ring[:5]) - float(few[:5]))


def _at_rate(rate: float, file: str) -> dict[str, str]:
    """Mean and range over three seeds at batch 2048, by algorithm."""
    losses: dict[str, list[float]] = {}
    for outcome in _outcomes(file):
        if (outcome.batch, outcome.rate) == (2048, rate):
            losses.setdefault(outcome.algorithm, []).append(outcome.loss)
    # Where the page is silent, as about `sdpsgd`, there may be fewer seeds.
    return {name: _spread(seeds) for name, seeds in losses.items() if len(seeds) == 3}


def _spread(losses: list[float]) -> str:
    mean = sum(losses) / len(losses)
    return f"{mean:.3f} [{min(losses):.3f}, {max(losses):.3f}]"


def test_losses_beside_effective_rates_are_those_of_the_sweep() -> None:
    """The shares themselves come from gradients, which no file keeps."""
    (found,) = tables(section(PAGE, "Effective learning rate"))
    part = Part(*PARTS["classifier"])
    sweep = Sweep(CLASSIFIER, part.outcomes)
    for batch, algorithm, *_, loss in found.rows:
        best = sweep.at_rule[Cell(algorithm, int(batch))]
        assert loss == _spread(list(best.losses.values()))


def test_intervals_in_the_prose_of_the_page_are_in_its_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    known = {cell for table in tables(text) for row in table.rows for cell in row}
    spreads = {found[0] for cell in known for found in SPREAD.finditer(cell)}
    said = {re.sub(r"\s", " ", s[0]) for s in SPREAD.finditer(without_tables(text))}
    assert len(said) > 20
    assert said <= spreads


def test_a_paragraph_with_marks_has_one_behind_each_of_its_figures() -> None:
    paragraphs = PAGE.read_text(encoding="utf-8").split("\n\n")
    readings = [list(marked(text)) for text in paragraphs if "<!--" in text]
    assert len(readings) == 9
    missing = [s.figures for text in readings for s in text if s.source is None]
    assert missing == []


def test_what_the_prose_says_of_clipped_ssgd_follows_from_the_limits() -> None:
    part = Part(*PARTS["classifier, clipped"])
    _, limits = part.tables("each at its own best setting")
    rows = {row[0]: [int(limit) for limit in row[1:5:2]] for row in limits.rows[:2]}
    said = re.search(
        r"to (\S+) times the batch of SSGD within 10 % and (\S+) times within 15 %",
        part.text,
    )
    assert said
    for figure, limit, of in zip(
        said.groups(), rows[CONTROL], rows["ssgd"], strict=True
    ):
        assert is_rounded(figure, limit / of)


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ("ssgd", r"The other four of SSGD have (\S+) to (\S+),"),
        ("adpsgd_random", r"those of `adpsgd_random` (\S+) to (\S+)\."),
    ],
)
def test_losses_of_seeds_that_do_not_diverge_are_those_of_the_committed_runs(
    algorithm: str, words: str
) -> None:
    """At 32 times the batch and the papers' rule."""
    part = Part(*PARTS["classifier, clipped"])
    said = re.search(words, part.text)
    losses = [
        outcome.loss
        for outcome in part.outcomes
        if outcome.run.cell == Cell(algorithm, 8192)
        and (outcome.rate, outcome.diverged) == (8, "")
    ]
    assert said
    assert len(losses) == 4
    assert all(map(is_rounded, said.groups(), (min(losses), max(losses))))


# --- the demo


def test_the_demos_table_of_five_seeds_is_that_of_the_committed_file() -> None:
    rows = json.loads((DEMO / "seeds.json").read_text())["rows"]
    (found,) = tables(section(DEMO / "RESULTS.md", "Five seeds of one engine"))
    assert len(found.rows) == len(rows) == 5
    for cells, row in zip(found.rows, rows, strict=True):
        said = re.findall(r"-?\d+(?:[.,]\d+)?", " ".join(cells[1:]))
        said = [figure.replace("1,", "1") for figure in said]
        values = _values_of_seed(row)
        assert len(said) == len(values)
        for figure, value in zip(said, values, strict=True):
            assert is_rounded(figure, value), (cells[0], figure, value)


def _values_of_seed(row: dict) -> list[float]:
    ddp, ours = row["ddp"], row["hadpsgd"]
    losses = [ddp["frame_loss"], ours["frame_loss"], row["loss_ratio"]]
    words = [ddp["words_wrong"], ours["words_wrong"], ours["words"]]
    cores = [ddp["other_cores"], ours["other_cores"]]
    return [*losses, *words, row["points"], row["z"], *cores]


def test_the_demos_earlier_pairs_have_the_mean_and_the_range_of_their_rows() -> None:
    (found,) = tables(
        section(DEMO / "RESULTS.md", "`hadpsgd` beside `ddp`: earlier pairs")
    )
    *pairs, mean, _ = found.rows
    assert len(pairs) == 8
    for column in (1, 2):
        values = [float(row[column].removesuffix(" points")) for row in pairs]
        said = re.findall(r"-?\d+\.\d+", mean[column])
        expected = [sum(values) / len(values), min(values), max(values)]
        assert all(map(is_rounded, said, expected)), (said, expected)


# Where the page has the tables of each pair.
PAIRS = (
    "2026-11-23-the-whole-demo-in-a-fresh-clone-nothing-beside",
    "2026-11-23-ten-epochs-of-training-and-five-races",
    "2026-11-23-the-whole-demo-in-a-fresh-clone-16-epochs",
    "commit-241e3e9",
    "commit-bedcae1",
    "commit-601dd4e",
    "2026-11-21-on-the-engine-that-reads-weights-where-they-lie",
    "generated-corpus",
    "recorded-speech",
)


def test_the_demos_earlier_pairs_are_those_of_the_tables_below() -> None:
    text = (DEMO / "RESULTS.md").read_text(encoding="utf-8")
    parts = sections(text)
    (found,) = tables(parts["hadpsgd-beside-ddp-earlier-pairs"])
    pairs = [row for row in found.rows if not row[0].startswith("mean")]
    for (name, ratio, points), place in zip(pairs, PAIRS, strict=True):
        ddp, ours = _loss_and_errors(next(tables(parts[place])))
        # The losses are rounded, and so is their ratio.
        low, high = (
            (ours[0] - sign * 0.0005) / (ddp[0] + sign * 0.0005) for sign in (1, -1)
        )
        assert low - 0.0005 <= float(ratio) <= high + 0.0005, name
        assert is_rounded(points.removesuffix(" points"), ours[1] - ddp[1]), name


def _loss_and_errors(table: Table) -> Iterator[tuple[float, float]]:
    """Frame loss and percentage of words wrong of both trainings, `ddp` first."""
    for row in table.rows:
        if not row[0].startswith("gmm"):
            cells = dict(zip(table.head, row, strict=True))
            errors = next(cells[head] for head in table.head if "WER total" in head)
            yield float(cells["frame loss"]), float(errors.partition(" ")[0])
