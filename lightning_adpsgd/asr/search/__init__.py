"""Graphs of words, and the search in them: alignment, decoding, n-best, rescoring."""
