"""What each of several learners is given of a store of frames."""

from pathlib import Path

import pytest

from lightning_adpsgd.asr.frames.data import SpeechData
from tests.asr.frames.test_data import Counter, write_store
from tests.learners import gossip, learners, trainer_of, values


@pytest.mark.parametrize("work_sharing", [False, True])
def test_learners_train_on_every_chunk_between_them(
    tmp_path: Path, work_sharing: bool
) -> None:
    for split in ("train", "dev"):
        write_store(tmp_path / split, tmp_path / f"align/{split}/labels.npy")

    def program(rank: int) -> list[int]:
        trainer = trainer_of(
            gossip("ring", work_sharing=work_sharing), 2, use_distributed_sampler=True
        )
        module = Counter()
        trainer.fit(module, SpeechData(tmp_path, tmp_path / "align", batch_size=2))
        return module.seen

    first, second = values(learners(2, program))
    assert len(set(first + second)) == len(first + second) == 8
    assert first
    assert second
