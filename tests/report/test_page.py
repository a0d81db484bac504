"""The page in a real browser: what a reader sees, reaches and hears."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import lightning_adpsgd
from lightning_adpsgd.__main__ import main
from lightning_adpsgd.report import collect, write_page
from tests.report.browser import CHROMIUM, Browser, browser
from tests.report.runs import (
    write_lane,
    write_lanes,
    write_rows,
    write_run,
    write_score,
)

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")

EVIL = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment: `ddp` once, and a gossiping run with three seeds."""
    folder = tmp_path_factory.mktemp("experiment")
    write_run(folder / "train" / "ddp", "ddp", gossips=False)
    for seed in (1, 2, 3):
        name = f"adpsgd-seed{seed}"
        write_run(folder / "train" / name, name, seed=seed, shift=seed / 100)
    write_lanes(folder / "train" / "adpsgd-seed1" / "timeline")
    write_score(folder / "score" / "ddp", "ddp", 0.05)
    write_score(folder / "score" / "adpsgd", "adpsgd-seed1", 0.04, other="ddp")
    notes = {
        "title": f"Made up {EVIL}",
        "facts": {"machine": "2 cores", "command": EVIL},
        "notes": ["Read this first."],
        "tables": [{"title": "Race", "head": ["run", "loss"], "rows": [["a", 0.5]]}],
    }
    (folder / "made-up.page.json").write_text(json.dumps(notes))
    return folder


@pytest.fixture(scope="module")
def page(experiment: Path) -> Path:
    assert main(["report", str(experiment), "--out", str(experiment / "r.html")]) == 0
    return experiment / "r.html"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def seen(shown: Browser, page: Path) -> Browser:
    shown.open(page)
    return shown


def text_of(seen: Browser, selector: str) -> str:
    return seen.value(f"document.querySelector({json.dumps(selector)}).innerText")


def chart(title: str) -> str:
    """The figure of that title, in JavaScript."""
    return (
        "[...document.querySelectorAll('figure')]"
        f".find((one) => one.querySelector('h3').textContent === {json.dumps(title)})"
    )


def press(seen: Browser, label: str) -> None:
    seen.value(
        "[...document.querySelectorAll('button')].find((one) => one.textContent === "
        f"{json.dumps(label)} || one.ariaLabel === {json.dumps(label)}).click()"
    )


# --- the file


class Outside(HTMLParser):
    """Collects what a page refers to outside of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = ("src", "href")
        found = (value for name, value in attrs if name in names and value)
        self.found += [v for v in found if not v.startswith(("data:", "#"))]


def test_the_page_refers_to_nothing_outside(page):
    reader = Outside()
    reader.feed(page.read_text())
    assert reader.found == []
    assert "default-src 'none'" in page.read_text()


def test_a_run_whose_loss_is_no_number_makes_a_page_all_the_same(tmp_path):
    write_run(tmp_path, "first", shift=float("nan"))
    write_page(collect([tmp_path]), tmp_path / "page.html")
    [data] = re.findall(
        r'id="data">(.*?)</script>', (tmp_path / "page.html").read_text()
    )
    series = json.loads(data)["runs"][0]["series"]
    assert series["val_loss"][0] == [99, None]


def test_a_broken_file_leaves_the_old_page_as_it_was(tmp_path, capsys):
    write_run(tmp_path, "first")
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "--out", str(out), "--title", "Mine"]) == 0
    before = out.read_bytes()
    assert b"<title>Mine</title>" in before
    (tmp_path / "score.json").write_text('{"parts":')
    assert main(["report", str(tmp_path), "--out", str(out)]) == 2
    assert (
        "score.json, line 1: the file is not complete JSON" in capsys.readouterr().err
    )
    assert out.read_bytes() == before


def test_the_report_needs_neither_torch_nor_lightning():
    code = (
        "import sys, lightning_adpsgd.report; "
        "print({'torch', 'lightning', 'numpy', 'matplotlib'} & set(sys.modules))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "set()\n"


def test_the_program_and_the_style_are_part_of_the_wheel():
    package = Path(lightning_adpsgd.__file__).parent
    settings = tomllib.loads(package.with_name("pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["lightning_adpsgd"]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    others = {
        path for path in (package / "report").rglob("*.*") if path.suffix != ".py"
    }
    assert {path for path in others if "__pycache__" not in path.parts} <= packed


# --- the page in a browser


@needs_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_its_window_and_its_console_is_silent(shown, page, width, theme):
    shown.open(page, width, theme)
    assert shown.errors == []
    assert [one for one in shown.requests if not one.startswith("data:")] == [
        page.as_uri()
    ]
    assert shown.value("document.documentElement.scrollWidth") <= width
    wide = shown.value(
        "[...document.querySelectorAll('svg.chart')]"
        ".filter((one) => one.getBoundingClientRect().right > innerWidth).length"
    )
    assert wide == 0
    assert shown.value("document.documentElement.dataset.theme") == theme


def contrast(seen: Browser, first: str, second: str) -> float:
    """Ratio of the luminances of two colours of the style, as WCAG has it."""
    luminances = sorted(luminance(seen, name) for name in (first, second))
    return (luminances[1] + 0.05) / (luminances[0] + 0.05)


def luminance(seen: Browser, name: str) -> float:
    style = "getComputedStyle(document.documentElement)"
    code = seen.value(f"{style}.getPropertyValue({json.dumps(name)}).trim()")
    parts = [int(code[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@needs_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_curves_stand_out_in_both_themes(shown, page, theme):
    shown.open(page, theme=theme)
    for ground in ("--paper", "--card"):
        for name in ("--ink", "--faint", "--wrong", "--missed", "--extra", "--focus"):
            assert contrast(shown, name, ground) >= 4.5, name
        for name in (*(f"--c{k}" for k in range(7)), "--wait", "--exchange"):
            assert contrast(shown, name, ground) >= (3 if name != "--wait" else 2), name


@needs_browser
def test_the_theme_can_be_switched(seen):
    press(seen, "dark page")
    assert seen.value("document.documentElement.dataset.theme") == "dark"
    press(seen, "light page")
    assert seen.value("document.documentElement.dataset.theme") == "light"


@needs_browser
def test_what_files_say_is_text_and_never_part_of_the_page(seen):
    assert EVIL in text_of(seen, "h1")
    assert EVIL in text_of(seen, "dl")
    assert seen.value("document.querySelectorAll('main img').length") == 0
    assert "<b>gone</b>" in text_of(seen, "#timeline")


@needs_browser
def test_every_table_has_a_heading_over_each_cell(seen):
    widths = seen.value(
        "[...document.querySelectorAll('table')].map((one) =>"
        " [...one.rows].map((row) => row.cells.length))"
    )
    assert len(widths) >= 5
    assert all(len(set(rows)) == 1 for rows in widths)


@needs_browser
def test_the_curves_are_where_the_figures_say(seen):
    """The held-out loss of `ddp` is 4 / epoch, at 6400 samples times the epoch."""
    points = seen.value(
        "pointsOf(DATA.runs.find((run) => run.name === 'ddp'), 'heldOut', 'samples')"
    )
    assert [x for x, _ in points] == [6400 * k for k in range(1, 11)]
    assert [y for _, y in points] == pytest.approx([4 / k for k in range(1, 11)])
    circles = seen.value(f"{chart('Loss')}.querySelectorAll('circle').length")
    assert circles == 20  # ten validations of each entry


@needs_browser
@pytest.mark.parametrize(
    ("axis", "last"), [("seconds", 50), ("bytes", 1e7), ("steps", 1000)]
)
def test_a_loss_is_shown_against_each_axis(seen, axis, last):
    press(seen, axis)
    label = seen.value(f"{chart('Loss')}.querySelector('svg.chart').ariaLabel")
    names = {"seconds": "seconds of", "bytes": "bytes sent", "steps": "optimizer steps"}
    assert names[axis] in label
    run = "DATA.runs.find((run) => run.name === 'adpsgd-seed1')"
    assert seen.value(f"pointsOf({run}, 'heldOut', '{axis}')")[-1] == [last, 0.41]


@needs_browser
def test_a_loss_between_two_validations_has_the_samples_of_its_own_step(seen):
    """At step 49 a training loss lies between no samples and those of step 99."""
    run = "DATA.runs.find((run) => run.name === 'ddp')"
    [first, *_] = seen.value(f"pointsOf({run}, 'train', 'samples')")
    assert first == pytest.approx([3200, 3.9])


@needs_browser
def test_seeds_are_a_band_around_their_median(seen):
    legend = text_of(seen, ".legend")
    assert "adpsgd, 3 seeds" in legend
    assert "seed1" not in legend
    assert seen.value(f"{chart('Loss')}.querySelectorAll('.band').length") == 1
    page = "entriesOf(DATA.runs).find((one) => one.runs.length === 3).runs"
    band = seen.value(f"bandOf({page}.map((run) => pointsOf(run, 'heldOut', 'steps')))")
    assert band[0] == pytest.approx([100, 4.02, 4.01, 4.03])


@needs_browser
def test_a_curve_can_be_switched_off(seen):
    curves = f"{chart('Loss')}.querySelectorAll('path[data-run=\"ddp\"]').length"
    assert seen.value(curves) == 2
    press(seen, "ddp")
    assert seen.value(curves) == 0
    press(seen, "ddp")
    assert seen.value(curves) == 2


def heights(seen: Browser) -> list[float]:
    """The numbers beside the axis of the loss."""
    found = seen.value(
        f"[...{chart('Loss')}.querySelectorAll('text[text-anchor=end]')]"
        ".map((one) => one.textContent)"
    )
    return [float(one) for one in found]


@needs_browser
def test_the_axis_of_the_loss_shows_differences_and_all_if_it_is_asked_to(seen):
    assert max(heights(seen)) < 1.6  # the losses begin at 4
    press(seen, "zoomed")
    assert max(heights(seen)) >= 3.5


@needs_browser
def test_a_short_run_beside_a_long_one_is_in_the_zoomed_chart(shown, tmp_path):
    write_run(tmp_path / "long", "long")
    short = [{"step": k, "val_loss": 6 - k} for k in range(5)]
    write_rows(tmp_path / "short" / "metrics.csv", short)
    write_page(collect([tmp_path]), tmp_path / "page.html")
    shown.open(tmp_path / "page.html")
    press(shown, "steps")
    # The first number below the axis: the chart does not begin at 250 of 1000 steps.
    assert float(domain(shown).split()[0]) < 250
    # Without the first quarter of either: 2 is the loss of the last step of the short.
    assert 4.5 < max(heights(shown)) < 6


@needs_browser
def test_a_difference_to_another_run_is_exact(seen):
    seen.value(
        "(() => { const one = document.getElementById('reference'); one.value = 'ddp';"
        " one.dispatchEvent(new Event('change')); })()"
    )
    label = seen.value(f"{chart('Loss')}.querySelector('svg.chart').ariaLabel")
    assert "ddp ends at 0" in label
    assert "adpsgd, 3 seeds ends at 0.02" in label


def domain(seen: Browser) -> str:
    found = f"[...{chart('Loss')}.querySelectorAll('text[text-anchor=middle]')]"
    return seen.value(f"{found}.map((one) => one.textContent).join(' ')")


@needs_browser
def test_dragging_zooms_and_a_double_click_shows_all(seen):
    press(seen, "Loss: all of it")
    before = domain(seen)
    seen.value(f"{chart('Loss')}.scrollIntoView()")
    box = seen.value(
        f"(({{left, top}}) => [left, top])({chart('Loss')}"
        ".querySelector('svg.chart').getBoundingClientRect())"
    )
    x, y = box[0] + 300, box[1] + 100
    seen.mouse("mouseMoved", x, y)
    tip = f"{chart('Loss')}.querySelector('.tip')"
    assert "held out" in seen.value(f"{tip}.innerText")
    seen.mouse("mousePressed", x, y, held=True)
    seen.mouse("mouseMoved", x + 200, y, held=True)
    seen.mouse("mouseReleased", x + 200, y)
    assert domain(seen) != before
    seen.value(
        f"{chart('Loss')}.querySelector('svg.chart')"
        ".dispatchEvent(new MouseEvent('dblclick'))"
    )
    assert domain(seen) == before


@needs_browser
def test_the_keyboard_reaches_charts_and_lanes(seen):
    press(seen, "Loss: all of it")
    before = domain(seen)
    seen.value(f"{chart('Loss')}.querySelector('svg.chart').focus()")
    seen.press("ArrowRight")
    assert "samples, ddp, " in text_of(seen, "#spoken")
    seen.press("+")
    assert domain(seen) != before
    seen.press("0")
    assert domain(seen) == before
    stops = seen.value("[...document.querySelectorAll('svg.chart[tabindex]')].length")
    assert stops == 6  # five charts and the lanes
    seen.value("document.querySelector('svg.lanes').focus()")
    seen.press("0")
    assert "second 0 to 10" in text_of(seen, "#spoken")


@needs_browser
def test_lanes_show_steps_waits_exchanges_and_who_was_lost(seen):
    lanes = "document.querySelector('svg.lanes')"
    count = f"{lanes}.querySelectorAll"
    # Six steps of the slow learner, of half a second, and thirty of the other.
    assert 29 <= seen.value(f"{count}('rect.wait').length") <= 32
    assert 6 <= seen.value(f"{count}('.link').length") <= 7
    press(seen, "adpsgd-seed1: all of it")
    assert seen.value(f"{count}('.lost').length") == 2
    rows = text_of(seen, "#timeline tbody").splitlines()
    assert [row.split("\t")[:5] for row in rows] == [
        ["0", "100", "10", "20.0%", "0.2"],
        ["1", "16", "2", "0.0%", "1"],
    ]


@needs_browser
def test_figures_by_number_are_means_over_seeds(seen):
    runs = "entriesOf(DATA.runs).find((one) => one.runs.length === 3).runs"
    found = seen.value(f"numberedOf({runs}, 'gossip/staleness_')")
    assert [steps for steps, _ in found] == [1, 3]
    assert [count for _, count in found] == pytest.approx([90, 10])


@needs_browser
def test_many_steps_are_drawn_as_shares_and_not_one_by_one(shown, tmp_path):
    steps = [{"begin": k, "end": k + 1, "waited": 0.25} for k in range(3000)]
    for learner in range(40):  # more figures than a call takes arguments
        write_lane(tmp_path / f"{learner}.timeline.csv", steps)
    write_page(collect([tmp_path]), tmp_path / "page.html")
    shown.open(tmp_path / "page.html")
    press(shown, f"{tmp_path.parent.name}: all of it")
    assert shown.errors == []
    waits = shown.value("document.querySelectorAll('rect.wait').length")
    assert 40 * 100 < waits < 40 * 400


@needs_browser
def test_words_have_their_intervals_tests_confidences_and_sound(seen):
    assert seen.value("document.querySelectorAll('.interval').length") == 4
    assert "5.00%" in text_of(seen, "#word-errors tbody")
    tests = text_of(seen, "#word-errors div > div tbody").split("\t")
    assert tests[0] == "adpsgd-seed1 less ddp"
    assert tests[1] == "-1.00%"
    assert tests[2:] == ["-2.5", "0.012", "20"]
    assert text_of(seen, ".pair.S").split() == ["mean", "meme", "40%"]
    assert text_of(seen, ".pair.D").split() == ["it", "∅"]
    seen.value(
        "(() => { window.one = document.querySelector('audio'); one.load(); })()"
    )
    seen.wait_for("one.readyState >= 1")
    assert seen.value("one.duration") == pytest.approx(0.1, abs=0.01)
    assert seen.errors == []


@needs_browser
def test_a_run_of_nothing_but_a_row_has_a_page(shown, tmp_path):
    write_run(tmp_path, "only")
    (tmp_path / "metrics.csv").unlink()
    write_page(collect([tmp_path]), tmp_path / "page.html")
    shown.open(tmp_path / "page.html", width=390)
    assert shown.errors == []
    assert "only" in text_of(shown, "#runs tbody")


@needs_browser
def test_a_row_in_another_folder_belongs_to_the_figures_of_its_name(shown, tmp_path):
    logged, rows = tmp_path / "logs", tmp_path / "runs"
    write_run(logged, "mine")
    rows.mkdir()
    (logged / "mine.run.csv").rename(rows / "mine.run.csv")
    (logged / "hparams.yaml").write_text("run/name: mine\n")
    write_page(collect([logged, rows]), tmp_path / "page.html")
    shown.open(tmp_path / "page.html")
    [row] = text_of(shown, "#runs tbody").splitlines()
    assert row.startswith("logs: mine\tadpsgd\t")


@needs_browser
def test_the_word_errors_of_a_training_are_told_from_those_of_the_test_sets(
    shown, tmp_path
):
    write_run(tmp_path / "bare", "bare")
    write_page(collect([tmp_path]), tmp_path / "page.html")
    shown.open(tmp_path / "page.html")
    assert "WER" not in text_of(shown, "#runs")
    write_run(tmp_path / "speech", "speech")
    row = {"name": "speech", "algorithm": "adpsgd", "wer": 0.0123}
    write_rows(tmp_path / "speech" / "speech.run.csv", [row])
    write_score(tmp_path / "score", "speech", 0.05)
    write_page(collect([tmp_path]), tmp_path / "page.html")
    shown.open(tmp_path / "page.html")
    assert "held-out WER" in text_of(shown, "#runs .scroll:nth-of-type(2) thead")
    assert "The rates of the test sets are under Word errors" in text_of(shown, "#runs")
    assert "1.23%" in text_of(shown, "#runs .scroll:nth-of-type(2) tbody")


# --- comparisons, single figures, folds


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a control and of two runs that a table compares."""
    folder = tmp_path_factory.mktemp("race")
    for name in ("control", "race-ddp", "race-adpsgd"):
        rows = write_run(folder / name, name)
        if name != "control":  # gossip's figures at the end alone
            few = [{k: v for k, v in r.items() if "gossip" not in k} for r in rows[:-1]]
            write_rows(folder / name / "metrics.csv", [*few, rows[-1]])
    write_lanes(folder / "control" / "timeline")
    chart = {"runs": ["race-ddp", "race-adpsgd"], "against": "seconds"}
    table = {"title": "Race", "head": ["run"], "rows": [["a"]], "chart": chart}
    (folder / "race.page.json").write_text(json.dumps({"tables": [table]}))
    write_score(folder / "score", "race-ddp", 0.05)
    path = folder / "score" / "utterances.json"
    [one] = json.loads(path.read_text())
    silent = {k: v for k, v in one.items() if k != "audio"}
    path.write_text(json.dumps([one, *[silent] * 8]))
    write_page(collect([folder]), folder / "page.html")
    return folder / "page.html"


RACE = "Loss against seconds of training"


def curves(seen: Browser, title: str) -> set[str]:
    found = seen.value(
        f"[...{chart(title)}.querySelectorAll('path[data-run]')]"
        ".map((one) => one.dataset.run)"
    )
    return set(found)


@needs_browser
def test_runs_that_a_table_compares_are_drawn_below_it_against_seconds(shown, race):
    shown.open(race)
    assert curves(shown, RACE) == {"race-ddp", "race-adpsgd"}
    label = shown.value(f"{chart(RACE)}.querySelector('svg.chart').ariaLabel")
    assert label.startswith(f"{RACE} against seconds of training: race-adpsgd ends at")
    assert shown.value(f"{chart(RACE)}.closest('section').id") == "race"
    assert curves(shown, "Loss") == {"control"}
    press(shown, "race-ddp")
    assert curves(shown, "Loss") == {"control", "race-ddp"}
    press(shown, "samples")
    assert curves(shown, RACE) == {"race-ddp", "race-adpsgd"}
    assert shown.errors == []


@needs_browser
def test_a_figure_recorded_once_is_told_and_not_drawn(shown, race):
    shown.open(race)
    press(shown, "race-ddp")
    assert curves(shown, "Consensus distance") == {"control"}
    caption = shown.value(f"{chart('Consensus distance')}.innerText")
    assert "Recorded once: race-ddp 0.1%." in caption


@needs_browser
def test_each_chart_names_its_curves(shown, race):
    shown.open(race, width=390)
    keys = shown.value(
        "[...document.querySelectorAll('.key')].map((one) => one.innerText.trim())"
    )
    assert len(keys) >= 5
    assert keys[0].split("\n") == ["race-adpsgd", "race-ddp"]
    assert set(keys[1:]) == {"control"}


@needs_browser
def test_lanes_say_which_seconds_are_shown(shown, race):
    shown.open(race)
    caption = "document.querySelector('#timeline figcaption').innerText"
    first = shown.value(caption)
    assert first == "Shown: second 2.5 to 5.5. Recorded: 0 to 10."
    press(shown, "control: all of it")
    assert shown.value(caption) == "Shown: second 0 to 10. Recorded: 0 to 10."


@needs_browser
def test_utterances_after_the_third_are_folded_and_silence_is_explained(shown, race):
    shown.open(race)
    text = text_of(shown, "#worst-utterances")
    assert "Only 1 of these 9 utterances were kept with their sound." in text
    assert "6 more" in text
    cards = "[...document.querySelectorAll('.utterance')]"
    assert shown.value(f"{cards}.filter((one) => one.checkVisibility()).length") == 3


@needs_browser
def test_tables_of_many_columns_need_no_scrolling_on_a_wide_screen(shown, race):
    shown.open(race)
    wide = shown.value(
        "[...document.querySelectorAll('.scroll')]"
        ".filter((one) => one.scrollWidth > one.clientWidth + 1).length"
    )
    assert wide == 0
