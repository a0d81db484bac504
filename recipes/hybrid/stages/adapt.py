"""Stage `adapt`: what the network is told of each speaker beside log-mel energies.

For each split it leaves the streams that are asked for: `fmllr/` (the frames, mapped to
where the mixtures expect them) and `ivector/` (the speaker in a hundred numbers). It
also leaves `report.json`. Training speakers are known from their transcripts,
development and test speakers only from their sound and from decoding it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_adpsgd.files import write_json
from recipes.hybrid.adaptation import kaldi
from recipes.hybrid.adaptation.fmllr import make_fmllr
from recipes.hybrid.adaptation.ivectors import make_ivectors
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError

Maker = Callable[[Settings, Path], dict[str, Any]]
"""Writes a stream of every split, and returns what is to be reported."""


def adapt(settings: Settings, output: Path) -> None:
    """Writes the streams of every split; interrupted, it continues with the next split.

    Machines share the conversation sides. Streams of Kaldi are of the leader alone.

    Raises:
        StageError: There is too little speech for what is asked for.
    """
    report: dict[str, Any] = {"streams": settings.adapt.streams}
    try:
        if settings.adapt.fmllr:
            make = _copied(kaldi.make_fmllr) if settings.kaldi.fmllr else make_fmllr
            report["fmllr"] = make(settings, output)
        if settings.adapt.ivectors:
            taken = bool(settings.kaldi.ivectors)
            make = _copied(kaldi.make_ivectors) if taken else make_ivectors
            report["ivectors"] = make(settings, output)
    except ValueError as error:
        problem = f"`adapt`: the speakers cannot be adapted to: {error}"
        raise StageError(problem) from error
    if settings.crew.leads:
        write_json(output / "report.json", report)


def _copied(make: Maker) -> Maker:
    """Streams of archives, which the leader copies alone."""
    return lambda settings, output: (
        make(settings, output) if settings.crew.leads else {}
    )
