"""Makes a page of a notebook, with the outputs that are stored in it.

A notebook is read as the JSON that it is: to import `nbformat` takes a second, a tenth
of all that the site takes.
"""

import json
from typing import Any

# Of several forms of one output, the first that is there.
FORMS = ("text/html", "image/svg+xml", "image/png", "text/markdown", "text/plain")


def page_of_notebook(text: str) -> str:
    """The Markdown of a notebook, from its JSON; nothing is run."""
    return "\n\n".join(_cell(cell) for cell in json.loads(text)["cells"]) + "\n"


def _cell(cell: dict[str, Any]) -> str:
    source = _joined(cell["source"])
    if cell["cell_type"] != "code":
        return source
    outputs = [_output(output) for output in cell["outputs"]]
    return "\n\n".join([f"````python\n{source}\n````", *outputs])


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return _quoted(_joined(output["text"]))
    if output["output_type"] == "error":
        return _quoted(f"{output['ename']}: {output['evalue']}")
    form = next(form for form in FORMS if form in output["data"])
    data = _joined(output["data"][form])
    if form == "image/png":
        return f"![plot](data:image/png;base64,{data.replace(chr(10), '')})"
    return _quoted(data) if form == "text/plain" else data


def _joined(text: str | list[str]) -> str:
    """A text of the file, which may have one string for each line."""
    return text if isinstance(text, str) else "".join(text)


def _quoted(text: str) -> str:
    return f"````text\n{text.rstrip()}\n````"
