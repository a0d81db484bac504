"""The settings of each stage: one small group per stage, by the name of the stage.

    corpus      prepare, lexicon, lm, features
    labels      align, triphone, realign, kaldi
    training    adapt, train, race
    search      graph, decode, export

A stage's fingerprint holds its own group (`runner.py`). A changed value therefore makes
that stage, and those that read its output, out of date. A stage without a group has
nothing to choose.
"""

from recipes.hybrid.pipeline.groups.corpus import (
    FeatureSettings,
    LexiconSettings,
    LmSettings,
    PrepareSettings,
)
from recipes.hybrid.pipeline.groups.labels import (
    AlignSettings,
    KaldiSettings,
    RealignSettings,
    TriphoneSettings,
)
from recipes.hybrid.pipeline.groups.search import (
    DecodeSettings,
    ExportSettings,
    GraphSettings,
)
from recipes.hybrid.pipeline.groups.training import (
    AdaptSettings,
    RaceSettings,
    TrainSettings,
)

__all__ = [
    "AdaptSettings",
    "AlignSettings",
    "DecodeSettings",
    "ExportSettings",
    "FeatureSettings",
    "GraphSettings",
    "KaldiSettings",
    "LexiconSettings",
    "LmSettings",
    "PrepareSettings",
    "RaceSettings",
    "RealignSettings",
    "TrainSettings",
    "TriphoneSettings",
]
