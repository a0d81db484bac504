"""The report of a demo: one HTML file that needs nothing beside it."""

import base64
import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from lightning_adpsgd.asr.scoring import Errors
from lightning_adpsgd.files import written_whole
from recipes.demo import plots
from recipes.demo.race import (
    RACE_CAPTION,
    Entrant,
    comparison,
    race_figure,
    race_in_words,
    race_table,
)
from recipes.demo.results import Result, table

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
       padding: 0 1rem; color: #222; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid #ccc; text-align: right; }
th:first-child, td:first-child { text-align: left; }
figure { display: inline-block; margin: 0 0 1rem; width: 29rem; max-width: 100%;
         vertical-align: top; }
dt { font-weight: bold; } dd { margin: 0 0 .4rem 1.5rem; overflow-wrap: anywhere; }
img { width: 100%; } figcaption { font-size: .85rem; color: #444; }
"""

_PLOTS: tuple[tuple[str, Callable[[Sequence[Result]], Figure], str], ...] = (
    (
        "Loss against samples",
        plots.loss_against_samples,
        "What a sample is worth. Thin: loss of learner 0 on its training batches. "
        "Marked: loss of the consensus model on held-out speakers.",
    ),
    (
        "Loss against time",
        plots.loss_against_time,
        "The same against seconds of training; validation is not counted.",
    ),
    (
        "Consensus distance",
        plots.consensus_distance,
        "sqrt(mean |w_i - w|²) / |w|: how far the super-learners are from their mean w "
        "when it is taken for validation. DDP's learners are always equal.",
    ),
    (
        "Staleness",
        plots.staleness,
        "Optimizer steps between the snapshot that an exchange used and the step at "
        "which its result was merged.",
    ),
)

_MEANING = """
<p><b>WER</b>: word errors (substitutions, deletions, insertions) per word of the
reference. <b>Frame loss</b> and <b>frame accuracy</b>: of the consensus model, the
mean of all super-learners, on held-out training speakers, the first on chunks as in
training, the second on whole utterances as in decoding. <b>Samples/s</b>: chunks per
second of all learners together, validation not counted. <b>Exposed communication</b>:
part of the training time in which a learner's training thread waited for
communication: in gossip, and in the gradient allreduce after the last gradient was
ready (waiting for a slower learner of the same super-learner is part of it).
<b>Consensus distance</b>: mean over the validations; see its plot. All trained runs
have the same alignment, decoding graph, model, start, schedule, batch and number of
samples; they differ in the strategy alone. <b>gmm</b> is the monophone Gaussian mixture
model that made the alignment.</p>
"""


def write_report(
    path: Path,
    results: Sequence[Result],
    facts: Mapping[str, str],
    title: str,
    race: Sequence[Entrant] = (),
) -> None:
    """Writes the report, whole or not at all.

    Args:
        path: path of the HTML file.
        results: results in the order of the table.
        facts: how it was measured: machine, commit, command ...; shown as given.
        title: title of the page.
        race: methods of the race; none: there was none.
    """
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        _html_table(table(results)),
        *_race(race),
        "<h2>Word errors</h2>",
        _html_table(_error_table(results)),
        "<h2>What training did</h2>",
        *(_figure(*plot, results) for plot in _PLOTS),
        "<h2>What was measured</h2>",
        _MEANING,
        "<h2>How</h2>",
        _definitions(facts),
    ]
    _write(path, _page(title, "\n".join(parts)))


def _race(race: Sequence[Entrant]) -> list[str]:
    if not race:
        return []
    return [
        "<h2>The same seconds, one slow machine</h2>",
        f"<p>{html.escape(race_in_words(race))}</p>",
        _html_table(race_table(race)),
        f"<p>{html.escape(comparison(*race))}</p>",
        _picture("The race", race_figure(race), RACE_CAPTION),
    ]


def _page(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _html_table(lines: Sequence[Sequence[str]]) -> str:
    header, *body = lines
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    rows = [
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>"
        for line in body
    ]
    return f"<table><tr>{head}</tr>\n" + "\n".join(rows) + "\n</table>"


def _definitions(facts: Mapping[str, str]) -> str:
    pairs = [
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(fact)}</dd>"
        for name, fact in facts.items()
    ]
    return "<dl>\n" + "\n".join(pairs) + "\n</dl>"


def _error_table(results: Sequence[Result]) -> list[list[str]]:
    header = ["run, part", "words", "sub.", "del.", "ins.", "WER"]
    return [
        header,
        *(_errors(r.name, part, e) for r in results for part, e in r.errors.items()),
    ]


def _errors(run: str, part: str, errors: Errors) -> list[str]:
    return [f"{run}, {part}", *map(str, errors), f"{errors.wer:.2%}"]


def _figure(
    title: str,
    draw: Callable[[Sequence[Result]], Figure],
    caption: str,
    results: Sequence[Result],
) -> str:
    return _picture(title, draw(results), caption)


def _picture(title: str, figure: Figure, caption: str) -> str:
    image = base64.b64encode(plots.png(figure)).decode()
    return (
        f'<figure><img alt="{html.escape(title)}" src="data:image/png;base64,{image}">'
        f"<figcaption><b>{html.escape(title)}.</b> {html.escape(caption)}"
        "</figcaption></figure>"
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as file:
        file.write(text)
