"""Makes a page of a notebook, with the outputs that are stored in it."""

import nbformat
from nbformat import NotebookNode

# Of several forms of one output, the first that is there.
FORMS = ("text/html", "image/svg+xml", "image/png", "text/markdown", "text/plain")


def page_of_notebook(text: str) -> str:
    """The Markdown of a notebook, from its JSON; nothing is run."""
    notebook = nbformat.reads(text, as_version=4)
    return "\n\n".join(_cell(cell) for cell in notebook.cells) + "\n"


def _cell(cell: NotebookNode) -> str:
    if cell.cell_type != "code":
        return cell.source
    outputs = [_output(output) for output in cell.outputs]
    return "\n\n".join([f"````python\n{cell.source}\n````", *outputs])


def _output(output: NotebookNode) -> str:
    if output.output_type == "stream":
        return _quoted(output.text)
    if output.output_type == "error":
        return _quoted(f"{output.ename}: {output.evalue}")
    form = next(form for form in FORMS if form in output.data)
    data = output.data[form]
    if form == "image/png":
        return f"![plot](data:image/png;base64,{data.replace(chr(10), '')})"
    return _quoted(data) if form == "text/plain" else data


def _quoted(text: str) -> str:
    return f"````text\n{text.rstrip()}\n````"
