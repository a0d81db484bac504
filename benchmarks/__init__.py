"""Measurements of the engine, each beside a physical limit of the same run."""
