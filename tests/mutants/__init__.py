"""Mutation testing: `python -m tests.mutants`; docs/testing.md has what it found."""
