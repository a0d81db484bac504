"""Kaldi's files: models, alignments, graphs and features in, log-likelihoods out."""
