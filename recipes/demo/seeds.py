"""What `hadpsgd` loses or gains beside `ddp`, over demos of several seeds.

    for seed in 1 2 3 4 5; do
        python -m recipes.demo --seed $seed --race-seconds 0 --out runs/seed$seed
    done
    python -m recipes.demo.seeds runs/seed1 runs/seed2 ... > recipes/demo/seeds.json

A seed draws the corpus, its speakers, the weights and the order of the samples.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_DRAWS = 2000


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the figures of finished demos as JSON."""
    parser = argparse.ArgumentParser(prog="python -m recipes.demo.seeds")
    parser.add_argument(
        "folders", nargs="+", type=Path, help="folders of `recipes.demo --out`"
    )
    seeds = [figures_of(folder) for folder in parser.parse_args(arguments).folders]
    print(json.dumps({"rows": seeds, **summary_of(seeds)}, indent=1))


def figures_of(folder: Path) -> dict[str, Any]:
    """Both trainings of one demo: loss, words, and what else ran on the machine."""
    ddp, hadpsgd = (_run(folder / "exp", name) for name in ("ddp", "hadpsgd"))
    compared = _read(folder / "exp/score/hadpsgd/score.json")["compared"]["ddp"]
    return {
        "folder": folder.name,
        "ddp": ddp,
        "hadpsgd": hadpsgd,
        "loss_ratio": hadpsgd["frame_loss"] / ddp["frame_loss"],
        "points": 100 * compared["difference"],
        "z": compared["z"],
    }


def summary_of(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds with 95 % of means of as many drawn with replacement.

    `z` adds the seeds' matched pairs up (Stouffer); none if one has too few to tell.
    """
    scores = [seed["z"] for seed in seeds]
    tells = None not in scores
    return {
        "loss_ratio": _mean_of(seed["loss_ratio"] for seed in seeds),
        "points": _mean_of(seed["points"] for seed in seeds),
        "z": sum(scores) / len(scores) ** 0.5 if tells else None,
    }


def _run(folder: Path, name: str) -> dict[str, Any]:
    summary = _read(folder / "train" / name / "summary.json")
    total = _read(folder / "score" / name / "score.json")["parts"]["total"]
    return {
        "frame_loss": summary["frame_loss"],
        "exchanges_per_second": summary["exchanges_per_second"],
        "steps": summary["steps"],
        "other_cores": summary["other_cores"],
        "words_wrong": round(total["wer"] * total["num_words"]),
        "words": total["num_words"],
    }


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _mean_of(values: Iterable[float]) -> dict[str, float]:
    found = np.array(list(values))
    drawn = np.random.default_rng(0).choice(found, (_DRAWS, len(found))).mean(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"mean": float(found.mean()), "low": float(low), "high": float(high)}


if __name__ == "__main__":
    main()
