"""Word errors as NIST's SCTK counts them, without SCTK.

`score_files` compares a time-marked hypothesis (ctm) with a reference (stm) after the
rules of a global mapping file (glm), as `hubscr.pl -h hub5` does, to the word. `score`
does the same for lists of words.
"""

from lightning_adpsgd.asr.scoring.errors import Errors, ScoringError, total_of
from lightning_adpsgd.asr.scoring.glm import NO_RULES, Glm, parse_glm, read_glm
from lightning_adpsgd.asr.scoring.scorer import Scores, score_files
from lightning_adpsgd.asr.scoring.utterances import score
from lightning_adpsgd.asr.scoring.words import ALL_MARKS, WordOptions

__all__ = [
    "ALL_MARKS",
    "NO_RULES",
    "Errors",
    "Glm",
    "Scores",
    "ScoringError",
    "WordOptions",
    "parse_glm",
    "read_glm",
    "score",
    "score_files",
    "total_of",
]
