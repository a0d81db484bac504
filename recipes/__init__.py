"""Recipes: corpora, stages and the demo; run from a checkout, not installed."""
