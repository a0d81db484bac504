"""Search graphs and searches: alignment, decoding, n-best lists, rescoring."""
