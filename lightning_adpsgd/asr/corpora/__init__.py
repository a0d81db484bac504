"""Corpora as they come on discs, and their transcripts in one form.

`corpus` says what an utterance is, `discs` where on a disc it lies; each corpus has a
module, and `sources` chooses among them. `transcripts`, `turns` and `acronyms` are the
rules for words.
"""
