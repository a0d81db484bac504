"""A network that is of one process scores as one that is copied to several."""

import numpy as np
import torch

from lightning_adpsgd.asr.model import AcousticModel
from recipes.hybrid.data.inputs import Inputs
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.recognition.scorers import NetworkScorer
from recipes.hybrid.recognition.searching import Task, searched


def scorer() -> NetworkScorer:
    torch.manual_seed(0)
    model = AcousticModel(
        7, input_size=4, num_layers=1, hidden_size=4, bottleneck_size=4
    )
    return NetworkScorer(model)


def test_blocks_in_this_process_give_what_processes_give(tmp_path, monkeypatch):
    dice = np.random.default_rng(0)
    frames = [dice.normal(size=(n, 4)).astype(np.float32) for n in range(3, 14)]
    loads = [lambda one=one: Inputs.of(one) for one in frames]
    settings = Settings(corpus=tmp_path, out=tmp_path, cores=2)

    def search(matrix: np.ndarray) -> float:
        return float(matrix.sum())

    found = []
    for alone in (False, True):
        monkeypatch.setattr(NetworkScorer, "needs_this_process", alone)
        task = Task(settings, tmp_path, "", scorer(), None)  # pyright: ignore
        several = searched(task, "sums", loads, search)
        found.append({index: one for index, one, _ in several})
    assert found[0].keys() == found[1].keys() == set(range(len(frames)))
    assert found[0] == found[1]
