"""Every notebook shows what it should, and fits into its time and size.

The two quickest run here, all of them by `make notebooks`.
"""

import ast
import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

if not all(map(find_spec, ("nbclient", "ipykernel", "matplotlib"))):
    pytest.skip("needs the extra `notebooks`", allow_module_level=True)

from nbformat import NotebookNode

from benchmarks.results import RESULTS
from notebooks import run
from tests import warm
from tests.helpers import forked

# What `pip install -e .[asr,notebooks]` does not install.
OF_OTHER_EXTRAS = ("jiwer", "jsonargparse", "kaldi_native_fbank", "onnx", "wandb")
MOST_BYTES = 300_000
MACHINE = re.compile(r"/(root|home|tmp|work|Users|mnt|opt|usr|var)/\w|ipykernel_\d")
WIDGET = "application/vnd.jupyter.widget"

NOTEBOOKS = run.notebooks()
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook: NotebookNode) -> Iterator[NotebookNode]:
    for cell in code_cells(notebook):
        yield from cell.outputs


def texts(output: NotebookNode) -> Iterator[str]:
    """All that an output holds but its pictures."""
    yield output.get("text", "")
    for kind, content in output.get("data", {}).items():
        if not kind.startswith("image/"):
            yield str(content)


def kinds(cell: NotebookNode) -> set[str]:
    """Streams by name and displays by type: what a reader sees below a cell."""
    shown: set[str] = set()
    for output in cell.outputs:
        shown |= {output.name} if "name" in output else set(output.get("data", {}))
    return shown


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


def test_what_a_notebook_calls_measured_is_of_the_committed_file() -> None:
    """A benchmark that is run again leaves the notebooks behind."""
    files = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    known = {(file["date"], file["commit"]) for file in files}
    stored = "".join(
        t for p in NOTEBOOKS for o in outputs(run.read(p)) for t in texts(o)
    )
    told = set(re.findall(r"measured (.+?), commit (\S+?),", stored))
    assert told
    assert told <= known


QUICKEST = [path for path in NOTEBOOKS if path.name[:2] in ("00", "04")]

# Matplotlib is imported already in a warm program, and is told its backend before the
# kernel could say so by the environment.
KERNEL = """#!/bin/sh
exec "{python}" -c "
import runpy, sys
import matplotlib
matplotlib.rcParams['backend'] = 'module://matplotlib_inline.backend_inline'
sys.argv = sys.argv[sys.argv.index('-m') + 1 :]
runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)
" "$@"
"""


@pytest.fixture
def warm_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that have torch and Lightning imported."""
    command = tmp_path / "python"
    command.write_text(KERNEL.format(python=warm.python()))
    command.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(command))


def said(cell: NotebookNode) -> list[str]:
    """What a cell prints, but for figures that are rounding errors."""
    printed = (output.get("text", "") for output in cell.outputs)
    return [re.sub(r"\d\.\de-0[6-9]", "nothing", text) for text in printed]


@pytest.mark.usefixtures("warm_kernels")
@pytest.mark.timeout(run.SECONDS + 60)
@pytest.mark.parametrize("path", QUICKEST, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_committed(path: Path) -> None:
    executed = code_cells(run.execute(path))
    committed = code_cells(run.read(path))
    for cell, expected in zip(executed, committed, strict=True):
        assert kinds(cell) == kinds(expected), cell.source
        assert said(cell) == said(expected), cell.source


def import_as_jupyter_does(path: Path) -> None:
    """Executes a notebook's imports where the package alone is installed."""
    clone = run.FOLDER.parent
    for name in {name.partition(".")[0] for name in sys.modules}:
        if (clone / name).is_dir() and name != "lightning_adpsgd":
            for module in [m for m in sys.modules if m.partition(".")[0] == name]:
                del sys.modules[module]
    sys.modules |= dict.fromkeys(OF_OTHER_EXTRAS)
    elsewhere = [place for place in sys.path if Path(place).resolve() != clone]
    sys.path[:] = [str(run.FOLDER), *elsewhere]
    for cell in code_cells(run.read(path)):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(ast.unparse(node), {})


def test_notebooks_import_what_is_there_as_jupyter_opens_them() -> None:
    import_module("IPython.display")  # once, and not in each of them
    outcomes = forked(
        len(NOTEBOOKS), lambda number: import_as_jupyter_does(NOTEBOOKS[number])
    )
    failed = {p.name: o.error for p, o in zip(NOTEBOOKS, outcomes, strict=True)}
    assert {name: error for name, error in failed.items() if error} == {}


@each
def test_every_cell_was_run_once_and_in_order(path: Path) -> None:
    counts = [cell.execution_count for cell in code_cells(run.read(path))]
    assert counts == list(range(1, len(counts) + 1))


@each
def test_no_output_is_an_error_a_warning_or_a_widget(path: Path) -> None:
    for output in outputs(run.read(path)):
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text
        assert not any(kind.startswith(WIDGET) for kind in output.get("data", {}))


@each
def test_no_output_names_the_machine(path: Path) -> None:
    names = {socket.gethostname(), os.path.expanduser("~"), str(run.FOLDER.parent)}
    for output in outputs(run.read(path)):
        for text in texts(output):
            assert not MACHINE.search(text), text
            assert not [name for name in names if len(name) > 3 and name in text]


@each
def test_a_notebook_is_small(path: Path) -> None:
    assert path.stat().st_size < MOST_BYTES
    assert "widgets" not in run.read(path).metadata


@each
def test_a_notebook_begins_with_a_question_and_its_answer(path: Path) -> None:
    first = run.read(path).cells[0]
    title, *answer = first.source.splitlines()
    assert first.cell_type == "markdown"
    assert title.startswith("# ")
    assert title.endswith("?")
    assert len(" ".join(answer)) > 200


@each
def test_the_list_of_notebooks_names_it(path: Path) -> None:
    listed = (run.FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"]({path.name})" in listed
