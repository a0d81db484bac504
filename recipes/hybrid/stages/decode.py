"""Stage `decode`: the words of every test utterance, by the network of a training."""

import json
from pathlib import Path

import torch

from recipes.hybrid.pipeline.runner import StageError
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.recognition.recognise import recognise
from recipes.hybrid.recognition.scorers import network


def decode(settings: Settings, output: Path) -> None:
    """Recognises dev and the test sets with the network of `settings.run`."""
    scorer = network(settings.directory("train") / "model.ckpt")
    _check_outputs(settings)
    if settings.decode.nbest and not settings.lm.large_order:
        raise StageError("`decode.nbest` needs a larger model: set `lm.large_order`")
    recognise(
        settings,
        output,
        scorer,
        settings.decode.acoustic_scales,
        nbest=settings.decode.nbest,
    )


def _check_outputs(settings: Settings) -> None:
    """Refuses a network that was trained on other labels than these."""
    path = settings.directory("train") / "model.ckpt"
    checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    found = checkpoint["hyper_parameters"]["num_states"]
    states = settings.directory("states") / "states.json"
    expected = json.loads(states.read_text())["num_states"]
    if found != expected:
        raise StageError(
            f"{path} has {found} outputs, but {states} lists {expected} states; train "
            "again with these labels"
        )
