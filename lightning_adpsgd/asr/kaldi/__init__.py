"""Kaldi's files: reads models, alignments, graphs, features; writes log-likelihoods."""
