"""The stages of every speech recipe, from sound to word error rate.

Begin with `stages/__init__.py`, the table of stages. On the way from a recording to
words they are `prepare` (utterances), `features` (frames), `align` or `triphone`
(labels), `graph` (search graph), `train` (network), `decode` (words) and `score`.
"""
