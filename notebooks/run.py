"""Executes notebooks and writes what they show into them: `python -m notebooks.run`.

Each runs in a process of its own and in an empty folder, so that it finds nothing that
another has left. Of what Jupyter writes beside the outputs only what is the same
everywhere is kept: two executions that show the same give the same file.
"""

import argparse
import base64
import io
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from PIL import Image

FOLDER = Path(__file__).parent
SECONDS = 180
"""In which a notebook must be through, on two cores."""
_METADATA = {
    "kernelspec": {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    },
    "language_info": {"name": "python"},
}


def notebooks() -> list[Path]:
    """All of them, in the order of their numbers."""
    return sorted(FOLDER.glob("[0-9][0-9]-*.ipynb"))


def read(path: Path) -> NotebookNode:
    """A notebook as it is committed."""
    return nbformat.read(path, as_version=4)


def execute(path: Path, seconds: float = SECONDS) -> NotebookNode:
    """Runs all cells anew, with this Python and this tree, and returns what they show.

    Raises:
        CellExecutionError: A cell failed; the message has its source.
        CellTimeoutError: A cell alone took longer than all of them may.
    """
    # Only here: it takes longer to import than all that reads notebooks.
    from nbclient import NotebookClient

    notebook = read(path)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=round(seconds),
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
        )
        client.execute(env=_environment())
    return _tidied(notebook)


def _environment() -> dict[str, str]:
    # Beside its own folder a notebook finds what is installed, as in Jupyter.
    paths = [str(FOLDER), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        # Learners share the cores of one machine: a thread each.
        "OMP_NUM_THREADS": "1",
        # Who is logged in sees the same notebook as who is not.
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }


def _tidied(notebook: NotebookNode) -> NotebookNode:
    notebook.metadata = nbformat.from_dict(_METADATA)
    for cell in notebook.cells:
        cell.metadata = NotebookNode()  # when it ran, and for how long
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                data["image/png"] = _smaller(data["image/png"])
    return notebook


def _smaller(picture: str) -> str:
    """The picture in 128 colours, which takes a third of the bytes."""
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    buffer = io.BytesIO()
    image.quantize(128).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def main(arguments: Sequence[str]) -> None:
    """Executes those that are named, or all, and replaces their files."""
    parser = argparse.ArgumentParser(prog="python -m notebooks.run")
    parser.add_argument("numbers", nargs="*", help="such as 00 05; none: all")
    numbers = parser.parse_args(arguments).numbers
    for path in notebooks():
        if not numbers or path.name[:2] in numbers:
            begin = time.perf_counter()
            nbformat.write(execute(path), path)
            seconds = time.perf_counter() - begin
            size = path.stat().st_size / 1000
            print(f"{path.name}: {seconds:.0f} s, {size:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
