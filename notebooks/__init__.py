"""Notebooks that answer a question each, and what executes them."""
