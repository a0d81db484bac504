"""The stages: three of this recipe, the others as for Switchboard."""

from recipes.librispeech import data
from recipes.switchboard.stages import STAGES as SWITCHBOARD

_OWN = {"check": data.check, "prepare": data.prepare, "lexicon": data.lexicon}
STAGES = tuple(
    stage._replace(run=_OWN[stage.name]) if stage.name in _OWN else stage
    for stage in SWITCHBOARD
)
