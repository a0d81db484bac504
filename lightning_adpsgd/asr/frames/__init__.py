"""Stored frames, their chunks, and the transforms before a model."""
