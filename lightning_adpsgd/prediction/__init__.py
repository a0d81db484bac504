"""Predicts the speed of a cluster from a few measured numbers."""
