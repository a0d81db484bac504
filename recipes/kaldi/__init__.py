"""Data directories of Kaldi's as a corpus."""
