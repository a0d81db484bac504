"""The stages of every speech recipe, from sound to word error rate.

Begin with `stages/__init__.py`, the table of stages. In its order, those on the way
from a recording to words begin with `check`, `prepare` (utterances), `lexicon`, `lm`
(language model) and `features` (frames). Then come `align` or `triphone` (labels),
`graph` (search graph), `train` (network), `decode` (words) and `score`.
"""
