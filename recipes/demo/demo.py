"""The demo: one corpus, one alignment, two trainings, three word error rates; a race.

`gmm` decodes with the model that made the alignment. `ddp` and `hadpsgd` train the same
network from the same start on the same number of samples: 4 learners that allreduce
every gradient, and 2 super-learners of 2 that gossip asynchronously. Then `race` gives
two methods the same seconds, with one slow learner.
"""

import dataclasses
from pathlib import Path

from lightning_adpsgd.callbacks.loggers import is_available
from recipes.demo.facts import facts_of
from recipes.demo.race import (
    Entrant,
    comparison,
    draw_race,
    race_in_words,
    race_of,
    race_table,
    read_entrant,
)
from recipes.demo.report import write_report
from recipes.demo.results import (
    Result,
    as_text,
    read_baseline,
    read_result,
    speeds_in_words,
    table,
    trainings_compared,
)
from recipes.generated.corpus import write_corpus
from recipes.hybrid.pipeline.runner import run_stages
from recipes.hybrid.pipeline.settings import TEST_SPLITS, Settings
from recipes.hybrid.pipeline.stage import StageError
from recipes.hybrid.stages import STAGES
from recipes.hybrid.training.tracking import log_later, offline_runs, sync_line

STRATEGIES = ("ddp", "hadpsgd")


def run_demo(
    settings: Settings,
    generated_minutes: tuple[float, float] | None,
    race_seconds: float = 0.0,
) -> list[Result]:
    """Runs unfinished stages, prints the table, and writes `settings.out/report.html`.

    Args:
        settings: settings of all runs; each run replaces its name and the strategy.
        generated_minutes: minutes of training and of test speech to generate at
            `settings.corpus`; None if the corpus is there.
        race_seconds: training time of each method with a slow learner; 0 for no race.

    Returns:
        The results in the order of the table, without those of the race.

    Raises:
        ValueError: `settings` already describe a race, or the corpus has no test set.
    """
    if settings.timed is not None:
        raise ValueError(
            f"`race.seconds` must be 0 in the demo, got {settings.race.seconds:g}: "
            "trainings of the first table have epochs; the race has --race-seconds"
        )
    if generated_minutes is not None:
        _say("speak a corpus of Switchboard's shape")
        _generate(settings, generated_minutes)
    _say("prepare the speech, align it and build the graph, once for all runs")
    _run_stages(settings, last="realign")
    if not {*TEST_SPLITS} & {*settings.splits()}:
        raise ValueError(
            "`corpus` must hold a test set, because the demo compares its runs by word "
            "error rate; recipes.switchboard trains without one"
        )
    _say("decode with the model that made the alignment")
    _run_stages(settings, first="adapted_baseline", last="baseline")
    runs = [_run(settings, name) for name in STRATEGIES]
    for run in runs:
        _say(f"train and decode: {run.run}")
        _run_stages(run, first="train")
    race = race_of(runs[0], race_seconds)
    for run in race:
        _say(f"{race_seconds:g} seconds with a slow learner: {run.run}")
        _run_stages(run, first="train", last="score")
    results = [read_baseline(settings), *(read_result(run) for run in runs)]
    facts = facts_of([*runs, *race], _corpus_in_words(settings, generated_minutes))
    report = settings.out / "report.html"
    _tell(report, results, facts, [read_entrant(run) for run in race])
    _track(runs, report)
    return results


def _run_stages(
    settings: Settings, first: str | None = None, last: str | None = None
) -> None:
    """Runs unfinished stages; a refusal advises what this command can do."""
    try:
        run_stages(settings, STAGES, first, last)
    except StageError as error:
        made = settings.out / "exp"
        remedy = (
            ". Repeat the demo with the earlier settings, choose another --out, or "
            f"delete {made} to run all stages again"
        )
        raise StageError(error.problem, remedy if error.remedy else "") from error


def _run(settings: Settings, name: str) -> Settings:
    train = dataclasses.replace(settings.train, strategy=name)
    return dataclasses.replace(settings, run=name, train=train)


def _generate(settings: Settings, minutes: tuple[float, float]) -> None:
    training, test = minutes
    write_corpus(
        settings.corpus,
        minutes=training,
        test_minutes=test,
        seed=settings.seed,
        processes=settings.cores,
    )


def _corpus_in_words(settings: Settings, minutes: tuple[float, float] | None) -> str:
    if minutes is None:
        return str(settings.corpus)
    return (
        f"generated with seed {settings.seed}: {minutes[0]:g} minutes of training "
        f"speech, {minutes[1]:g} of test speech, by other speakers"
    )


def _tell(
    report: Path,
    results: list[Result],
    facts: dict[str, str],
    race: list[Entrant],
) -> None:
    title = "lightning-adpsgd: from audio to words"
    print(f"\n{as_text(table(results))}\n{trainings_compared(results)}")
    print(speeds_in_words(results))
    if race:
        facts = {**facts, "race": race_in_words(race)}
        draw_race(race, report.with_name("race.png"))
        print(f"\n{race_in_words(race)}\n\n{as_text(race_table(race))}")
        print(comparison(*race))
    write_report(report, results, facts, title, race)
    print(f"\nreport: {_short(report)}")


def _track(runs: list[Settings], report: Path) -> None:
    """Adds the report to each run of Weights & Biases, and says where they are."""
    if not is_available():
        return
    import wandb

    for run in runs:
        folder = run.directory("score") / "report"
        if folder.exists():
            continue
        page = wandb.Html(report.read_text(encoding="utf-8"), inject=False)
        log_later(run, folder, {"report": page})
    parts = offline_runs(run.out / "exp" for run in runs[:1])
    if parts:
        folder = _short(runs[0].out)
        print(f"\nWeights & Biases, offline in {folder}; to send the runs:")
        print(f"  {sync_line(map(_short, parts))}", flush=True)


def _short(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _say(purpose: str) -> None:
    print(f"\n== {purpose}", flush=True)
