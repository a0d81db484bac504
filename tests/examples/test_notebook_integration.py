"""The notebook in examples/ trains with learners that its kernel forks."""

from importlib.util import find_spec
from pathlib import Path

import pytest

if not all(map(find_spec, ("nbclient", "ipykernel", "matplotlib"))):
    pytest.skip("needs the extra `notebooks`", allow_module_level=True)

import nbformat

from notebooks import run
from tests.examples.programs import FOLDER

NOTEBOOK = FOLDER / "in_a_notebook.ipynb"
SIZES, OTHER_SIZES = "= 2, 32, 200, 64", "= 2, 7, 6, 24"


def printed(notebook: nbformat.NotebookNode) -> str:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    return "".join(one.text for one in outputs if one.get("name") == "stdout")


def test_it_trains_under_any_name_with_other_sizes(tmp_path: Path) -> None:
    notebook = run.read(NOTEBOOK)
    training = next(c.source for c in notebook.cells if "trainer.fit" in c.source)
    assert any(SIZES in cell.source for cell in notebook.cells)
    for cell in notebook.cells:
        cell.source = cell.source.replace(SIZES, OTHER_SIZES)
    for name in ("ddp_notebook", "rdpsgd_notebook"):
        again = f'STRATEGY = "{name}"\n{training}'
        notebook.cells.append(nbformat.v4.new_code_cell(again))
    nbformat.write(notebook, tmp_path / "changed.ipynb")
    lines = printed(run.execute(tmp_path / "changed.ipynb"))
    assert lines.count("6 steps") == 3
    assert lines.count("exchanges per step") == 2
    assert "loss on other vectors" in lines


def test_what_is_committed_was_run() -> None:
    notebook = run.read(NOTEBOOK)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert "exchanges per step" in printed(notebook)
    assert "loss on other vectors" in printed(notebook)
