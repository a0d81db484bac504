"""The report of a demo: what the page of a run's figures needs besides them.

`python -m lightning_adpsgd report FOLDER` makes the page of any folder of trainings.
That of a demo has its tables, its meaning and its facts from `demo.page.json`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_adpsgd.files import write_json
from lightning_adpsgd.report import collect, write_page
from recipes.demo.race import Entrant, comparison, race_in_words, race_table
from recipes.demo.results import (
    Result,
    speeds_in_words,
    table,
    trainings_compared,
    were_alone,
)

_RACE = "The same seconds, one slow machine"
_SPEEDS = ("samples_per_second", "exposed_share", "train_seconds")
_SPEED_CHARTS = ("Speed of learners", "Waiting")
_CONTROL = (
    "The trained runs have seen the same samples, and no learner was slow: they should "
    "be alike. What the headings mean is under How it was measured."
)

_MEANING = {
    "WER": "Word errors (substitutions, deletions, insertions) per word of the "
    "reference. SWB and CH are the two halves of the test set, which a corpus of "
    "Switchboard's shape takes from Switchboard and from CallHome. In brackets: 95 % "
    "of a bootstrap over speakers.",
    "frame loss, frame accuracy": "Of the consensus model, the mean of all "
    "super-learners, on held-out training speakers: the loss on chunks as in training, "
    "the accuracy on whole utterances as in decoding.",
    "samples/s": "Chunks per second of all learners together, validation not counted.",
    "exposed comm., waited": "Part of the training time in which a learner's training "
    "thread waited for communication: in gossip, and in the gradient allreduce after "
    "the last gradient was ready. Waiting for a slower learner is part of it. "
    "Mean over learners; Timeline has each learner's own, as part of its steps.",
    "others' cores": "Cores that programs other than the demo kept busy meanwhile.",
    "steps, fast and slow": "Steps of the learner that made most, and of the slow one.",
    "mean consensus dist.": "Distance of the super-learners from their mean, relative "
    "to its length; mean over the validations. The last one is under Runs.",
    "what is equal": "Trained runs of the first table have the same alignment, "
    "decoding graph, model, start, schedule, batch and number of samples; they differ "
    "in the strategy alone. gmm is the monophone Gaussian mixture model that made "
    "the alignment.",
}


def write_report(
    path: Path,
    results: Sequence[Result],
    facts: Mapping[str, str],
    title: str,
    race: Sequence[Entrant] = (),
) -> None:
    """Writes `demo.page.json` and the page of all that lies beside it, each whole.

    Args:
        path: path of the HTML file, in the folder of the demo.
        results: results in the order of the table.
        facts: how it was measured: machine, commit, command ...; shown as given.
        title: title of the page.
        race: methods of the race; none: there was none.

    Raises:
        ValueError: A file of figures in the folder is broken; the message names it.
    """
    text = [_CONTROL, trainings_compared(results), speeds_in_words(results)]
    first = _table("Results", table(results), text)
    notes = {
        "title": title,
        "tables": [first, *_race_tables(race)],
        "facts": {**_MEANING, **facts},
        # The tables above have them.
        "hide": [*_SPEEDS, *(() if were_alone(results) else _SPEED_CHARTS)],
    }
    write_json(path.with_name("demo.page.json"), notes)
    write_page(collect([path.parent]), path)


def _race_tables(race: Sequence[Entrant]) -> list[dict[str, Any]]:
    if not race:
        return []
    text = [race_in_words(race), comparison(*race)]
    runs = [entrant.result.name for entrant in race]
    chart = {"runs": runs, "against": "seconds"}
    return [{**_table(_RACE, race_table(race), text), "chart": chart}]


def _table(
    title: str, lines: Sequence[Sequence[str]], text: Sequence[str]
) -> dict[str, Any]:
    head, *rows = lines
    return {"title": title, "text": list(text), "head": head, "rows": rows}
