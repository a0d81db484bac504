"""Stage `decode`: the words of every test utterance, by the network of a training.

If the epoch with the lowest held-out loss is not the last, its words are in `best/`.
The way of an utterance: `recognition.recognise` takes its frames (`data.inputs`),
scores them (`recognition.scorers`), and searches words (`asr.search.decoding`).
"""

import json
from pathlib import Path

import torch

from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError
from recipes.hybrid.recognition.recognise import recognise
from recipes.hybrid.recognition.scorers import NetworkScorer, network
from recipes.hybrid.training.saving import BEST, best_is_another


def decode(settings: Settings, output: Path) -> None:
    """Recognises dev and the test sets with the network of `settings.run`."""
    trained = settings.directory("train")
    scorer = network(trained / "model.ckpt")
    _check_outputs(settings)
    _recognise(settings, output, scorer)
    if settings.decode.best_epoch and best_is_another(trained):
        if settings.crew.leads:
            print("  the epoch with the lowest held-out loss:", flush=True)
        _recognise(settings, output, network(trained / "best.ckpt"), BEST)


def _recognise(
    settings: Settings, output: Path, scorer: NetworkScorer, within: str = ""
) -> None:
    scales, nbest = settings.decode.acoustic_scales, settings.decode.nbest
    recognise(settings, output, scorer, scales, nbest, within)


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
