"""The training speech with its copies at other speeds, as the stage `features` has it.

`prepare` lists what was recorded, whose words are counted once. Frames, labels and
streams are of that and of a copy of every training utterance at each of
`features.speeds`, with a name, a speaker and a conversation side of its own. The copies
come after what was recorded, so that the versions of an utterance lie far apart.
"""

from collections.abc import Iterator

from lightning_adpsgd.asr.corpora.corpus import Utterance, iterate_utterances
from recipes.switchboard.settings import Settings


def speeds_of(settings: Settings, split: str) -> tuple[float, ...]:
    """Of the copies of a split; none but for `train`."""
    return settings.features.speeds if split == "train" else ()


def with_copies(settings: Settings, split: str) -> Iterator[Utterance]:
    """The utterances of a split and their copies, in the order of the features."""
    path = settings.directory("prepare") / f"{split}.jsonl"
    yield from iterate_utterances(path)
    for speed in speeds_of(settings, split):
        for utterance in iterate_utterances(path):
            yield utterance.at_speed(speed)
