import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.helpers import PROGRAM_S, free_port

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_adpsgd"
# The log and the change log name files as they were called at the time.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES += [ROOT / "notebooks" / "README.md", *sorted(ROOT.glob("benchmarks/**/*.md"))]
PAGES += [ROOT / "examples" / "README.md", *sorted(ROOT.glob("recipes/**/*.md"))]
PAGES.remove(ROOT / "docs" / "log.md")
PATH = re.compile(r"(?<![\w./-])(?:[\w-]+/)+[\w-]+\.py\b")
FOLDER = re.compile(r"`((?:lightning_adpsgd|recipes|tests|benchmarks)/[\w/]*/)`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def _page(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _first_block(page: str) -> str:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)[0]


def _run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(program)
    done = subprocess.run(
        [warm.python(), "train.py"],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MASTER_PORT": str(free_port()),
        },
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_the_readmes_program_trains_in_an_empty_folder(tmp_path: Path) -> None:
    done = _run(_first_block("README.md"), tmp_path)
    assert "`max_epochs=5` reached" in done.stderr
    said = re.findall(r"learner (\d): (\d+) steps, (\d+) exchanges", done.stdout)
    assert sorted(index for index, *_ in said) == ["0", "1", "2", "3"]
    assert all(int(exchanges) > 0 for *_, exchanges in said)
    # 64 batches in each of 5 epochs, of which each learner takes as many as it can.
    assert sum(int(steps) for _, steps, _ in said) == 320


@pytest.mark.slow
def test_the_program_for_fabric_trains_in_an_empty_folder(tmp_path: Path) -> None:
    done = _run(_first_block("docs/fabric.md"), tmp_path)
    assert done.stdout.count("validation loss") == 5
    saved = torch.load(tmp_path / "model.ckpt", weights_only=True)
    # It learns the sum of its features.
    expected = torch.ones(1, 8)
    torch.testing.assert_close(saved["model"]["weight"], expected, atol=0.05, rtol=0)


@pytest.mark.slow
def test_the_page_on_monitoring_shows_what_a_run_came_to(tmp_path: Path) -> None:
    done = _run(_first_block("docs/monitoring.md"), tmp_path)
    # Both learners write to one output, and one of them draws progress bars there.
    losses = re.findall(r"adpsgd at batch 64: loss ([\d.]+)", done.stdout)
    assert losses, done.stdout
    assert float(losses[-1]) < 1
    pytest.importorskip("matplotlib")
    page = (ROOT / "docs/monitoring.md").read_text()
    drawing = re.findall(r"```python\n(.*?)```", page, re.S)[1]
    _run(drawing, tmp_path)
    assert (tmp_path / "loss_against_batch.png").stat().st_size > 0


# --- what the pages name is there


def test_every_path_that_a_page_names_is_there() -> None:
    lost = []
    for page in PAGES:
        text, places = page.read_text(encoding="utf-8"), (ROOT, PACKAGE, page.parent)
        names = (*PATH.findall(text), *FOLDER.findall(text))
        missing = (n for n in names if not any((at / n).exists() for at in places))
        lost += [(_page(page), name) for name in missing]
    assert lost == []


def test_every_link_of_a_page_leads_somewhere() -> None:
    lost = []
    for page in PAGES:
        targets = LINK.findall(page.read_text(encoding="utf-8"))
        missing = (each for each in targets if not (page.parent / each).exists())
        lost += [(_page(page), target) for target in missing]
    assert lost == []


def _folders_of_the_readme() -> Iterator[str]:
    """Rooms of the package aside, which must be there."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text.partition("\n    lightning_adpsgd/ ")[2].partition("\n\n")[0]
    for name in re.findall(r"\b(\w+)/", tree):
        if not (PACKAGE / name).is_dir():
            yield name
    yield PACKAGE.name


def test_the_tree_of_the_contributors_is_the_tree_on_disk() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = text.partition("## The tree\n")[2].partition("\n## ")[0]
    top = set(re.findall(r"^    ([\w.]+)/", tree, re.M))
    assert top
    assert {name for name in top if not (ROOT / name).is_dir()} == set()
    assert {*_folders_of_the_readme()} == top - {"installation"}
    rooms = set(re.findall(r"^\| \d+ \| `(\w+)`", text, re.M))
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= rooms
    assert {name for name in rooms if not list(PACKAGE.glob(f"{name}*"))} == set()


def test_the_readme_fits_on_three_screens() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 150


def test_every_entry_of_the_log_is_in_its_index() -> None:
    text = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    index, _, entries = text.partition("\n## Index\n")[2].partition("\n## ")
    titles = re.findall(r"^(?:## )?[\d-]{10}: (.*)$", entries, re.M)
    listed = [title.lower() for title in re.findall(r"^- \[(.*)\]\(#", index, re.M)]
    assert sorted(listed) == sorted(title.lower() for title in titles)
