"""Stage `export`: a trained model with all that turns sound into words, in one folder.

`lightning_adpsgd.asr.export` describes what is in it; `MODEL_CARD.md` says of
what speech it was made and how often it errs.
"""

import json
from pathlib import Path

from lightning_adpsgd.asr.export import (
    Adaptation,
    KaldiStates,
    OwnStates,
    Parts,
    write_files,
)
from lightning_adpsgd.asr.model import AcousticModel
from lightning_adpsgd.asr.speakers.adaptation import AdaptationOptions
from lightning_adpsgd.files import written_whole
from recipes.hybrid.adaptation.fmllr import fmllr_options
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError
from recipes.hybrid.recognition import model_card
from recipes.hybrid.recognition.decoder import search_options


def export(settings: Settings, output: Path) -> None:
    """Gathers the files of the run; the acoustic scale is the one chosen on `dev`.

    Raises:
        StageError: The package `onnx` is asked for and not installed.
    """
    decoded = json.loads((settings.directory("decode") / "decode.json").read_text())
    checkpoint = settings.directory("train") / "model.ckpt"
    parts = Parts(
        model=AcousticModel.load_from_checkpoint(checkpoint, map_location="cpu"),
        num_mels=settings.features.num_mels,
        acoustic_scale=decoded["acoustic_scale"],
        search=search_options(settings),
        states=states_of(settings),
        graph=settings.directory("graph"),
        adaptation=adaptation_of(settings),
        least_fit=decoded.get("least_fit"),
    )
    with written_whole(output / model_card.NAME) as card:
        card.write(model_card.model_card(settings))
    try:
        write_files(parts, output, settings.export.onnx)
    except ModuleNotFoundError as error:
        raise StageError(f"`export.onnx`: {error}") from error


def states_of(settings: Settings) -> OwnStates | KaldiStates:
    """The states that the graph reads."""
    mixtures, graph = settings.directory("mixtures"), settings.directory("graph")
    if settings.uses_kaldi:
        transitions = mixtures / "transitions.npz"
        return KaldiStates(transitions=transitions, graph=graph)
    lexicon = settings.directory("lexicon")
    return OwnStates(lexicon=lexicon, tree=mixtures / "tree.json")


def adaptation_of(settings: Settings) -> Adaptation | None:
    """The means to find the streams of a call; None for a model without streams."""
    if settings.streams is None:
        return None
    chosen = settings.adapt
    options = AdaptationOptions(
        fmllr=chosen.fmllr,
        ivectors=chosen.ivectors,
        decodings=chosen.decodings,
        acoustic_scale=chosen.acoustic_scale,
        estimate=fmllr_options(settings),
        ivector_period=chosen.ivector_period,
    )
    folders = settings.directory("mixtures"), settings.streams
    return Adaptation(options=options, folders=folders)
