"""Readers for corpora as they come on discs, with transcripts in one form.

`corpus` defines an utterance, and `discs` finds files on discs. Each corpus has a
module, and `sources` chooses among them. `transcripts`, `turns` and `acronyms` have the
rules for words.
"""
