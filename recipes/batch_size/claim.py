"""What all runs of a folder have in common: settings, model and data.

A folder holds the runs of one sweep, which later calls go on with. `settings.json` says
what they are runs of, and a sweep of anything else is refused.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from recipes.batch_size.outcomes import Outcome, write_whole
from recipes.batch_size.settings import Settings
from recipes.batch_size.training import start_loss
from recipes.batch_size.workloads import Workload

NAME = "settings.json"
# Claims of before do not have these.
_LATER = ("num_classes", "parameters", "data")
# Between processors; starts of other models and seeds differ by far more.
_ROUNDING = 1e-5


class SettingsChanged(ValueError):
    """A folder holds runs of other settings, of another model or of other data."""


def claim(
    out: Path, workload: Workload, settings: Settings, outcomes: Sequence[Outcome]
) -> None:
    """Notes what the runs of a folder have in common, or checks that they do.

    Args:
        out: folder of the runs.
        workload: workload before its samples are cut.
        settings: settings of all runs.
        outcomes: outcomes of the runs that are there.

    Raises:
        SettingsChanged: They do not.
    """
    path, common = out / NAME, in_common(workload, settings)
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    later = [name for name in _LATER if name not in before]
    if before:
        _compare(out, before, {k: v for k, v in common.items() if k not in later})
    first = next((o for o in outcomes if o.losses and math.isfinite(o.losses[0])), None)
    if first is not None:
        _compare_start(out, workload, first)
    if later:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(common, indent=1))
    if later and first is not None:
        print(_adopted(path, later), file=sys.stderr)


def in_common(workload: Workload, settings: Settings) -> dict[str, Any]:
    """What runs must share to be comparable, for JSON."""
    model = workload.make()
    return {
        "workload": workload.name,
        **settings.in_common(),
        "samples": len(workload.train[0]),
        "num_classes": workload.num_classes,
        "parameters": {n: list(p.shape) for n, p in model.named_parameters()},
        "data": checksum(workload),
    }


def checksum(workload: Workload) -> str:
    """The XXH3 hash of training and held-out samples, of their forms and bits."""
    digest = xxhash.xxh3_64()
    for tensor in (*workload.train, *workload.held_out):
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _compare(out: Path, before: Mapping[str, Any], common: Mapping[str, Any]) -> None:
    changed = sorted(k for k in common if before.get(k) != common[k])
    if changed:
        told = (_told(k, before.get(k, "absent"), common[k]) for k in changed)
        raise SettingsChanged(
            f"`out` {out} holds runs of something else ({'; '.join(told)}): choose "
            "another folder"
        )


def _told(name: str, there: Any, here: Any) -> str:
    """Both values; of many parameters, the first that differs."""
    if isinstance(there, dict):
        first = next(n for n in there | here if there.get(n) != here.get(n))
        values = (several.get(first, "absent") for several in (there, here))
        return _told(f"{name} {first}", *values)
    return f"{name}: {there} there, {here} here"


def _compare_start(out: Path, workload: Workload, known: Outcome) -> None:
    """A seed begins at the same loss in every run of one model on the same samples.

    It tells what the claim does not: another activation, start or loss. Where the claim
    of before knows neither model nor data, it tells models and held-out samples.
    """
    there, here = known.losses[0], start_loss(known.seed, workload)
    if not math.isclose(here, there, rel_tol=_ROUNDING):
        raise SettingsChanged(
            f"`out` {out} holds runs of another model, loss or held-out samples (seed "
            f"{known.seed} begins at a held-out loss of {there:.6g} there, {here:.6g} "
            "here): choose another folder"
        )


def _adopted(path: Path, later: Sequence[str]) -> str:
    return (
        f"note: {path} had no {', '.join(later)}. Its runs begin at the loss of this "
        "model on these held-out samples, so they are taken for the same; their "
        "training samples were compared by number alone"
    )
