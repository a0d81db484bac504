"""Faults on purpose, each with what must survive it."""
