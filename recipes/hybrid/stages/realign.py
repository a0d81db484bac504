"""Stage `realign`: labels from the network of an earlier training run.

The states and their graph stay. Only the state of each frame is found again, by the
network of `realign.run` in place of the mixtures. The network gets streams (stage
`adapt`) if it was trained with them.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from lightning_adpsgd.asr.hmm.states import read_topology
from lightning_adpsgd.asr.language.lexicon import read_lexicon
from lightning_adpsgd.asr.model import AcousticModel
from lightning_adpsgd.asr.search.graphs import TrainingGraphs
from recipes.hybrid.data.inputs import Inputs, StoredInputs
from recipes.hybrid.data.labels import Stored, alignment_options, label_splits
from recipes.hybrid.data.splits import with_copies
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError
from recipes.hybrid.recognition.scorers import read_network

_BLOCK = 512  # utterances whose inputs are in memory at a time: some 150 MB


def realign(settings: Settings, output: Path) -> None:
    """Labels every frame by a trained network.

    Raises:
        StageError: There is no such network, it has other inputs or outputs than there
            are, or no utterance can be aligned.
    """
    lexicon = read_lexicon(settings.directory("lexicon"))
    topology = read_topology(settings.directory("mixtures") / "tree.json")
    model = read_network(settings.directory("aligner") / "model.ckpt")
    _check_outputs(settings, model.hparams["num_states"], topology.num_states)
    adapted = _is_adapted(settings, model)
    dims = [part.shape[1] for part in StoredInputs(settings, "train", None, adapted)(0)]

    def read(settings: Settings, split: str) -> Iterator[Stored]:
        return _with_inputs(settings, split, adapted)

    def scorer(together: np.ndarray, states: np.ndarray) -> np.ndarray:
        inputs = torch.from_numpy(together).split(dims, dim=1)
        return model.log_likelihoods(*inputs).numpy()[:, states]

    graphs = TrainingGraphs(lexicon, topology, settings.align.silence_probability)
    scale = settings.realign.acoustic_scale
    options = alignment_options(settings, acoustic_scale=scale)
    label_splits(settings, output, lexicon, graphs, scorer, options, read, _BLOCK)


def _check_outputs(settings: Settings, found: int, expected: int) -> None:
    """Refuses a network that was trained on other states."""
    if found != expected:
        raise StageError(
            f"the network of run {settings.realign.run} has {found} outputs, but "
            f"{settings.directory('mixtures') / 'tree.json'} has {expected} states; "
            "name a run that was trained on these states, or set `states` as for that "
            "run"
        )


def _is_adapted(settings: Settings, model: AcousticModel) -> bool:
    """Whether the network takes streams; if so, they must match the settings."""
    expected, mels = model.hparams["input_size"], settings.features.num_mels
    if expected in (mels, 3 * mels):
        return False
    found = sum(part.shape[1] for part in StoredInputs(settings, "train")(0)[1:])
    if expected not in (mels + found, 3 * mels + found):
        raise StageError(
            f"the network of run {settings.realign.run} takes {expected} inputs, but "
            f"there are {mels} or {3 * mels} of a frame and {found} of streams; set "
            "`adapt.streams` as for that run"
        )
    return True


def _with_inputs(settings: Settings, split: str, adapted: bool) -> Iterator[Stored]:
    """The utterances of a split, each with its inputs side by side."""
    inputs = StoredInputs(settings, split, adapted=adapted)
    for utterance in with_copies(settings, split):
        if utterance.id in inputs.store:
            found = inputs(inputs.store.position(utterance.id))
            yield utterance, _together(found)


def _together(inputs: Inputs) -> np.ndarray:
    return torch.cat([part.float() for part in inputs], dim=1).numpy()
