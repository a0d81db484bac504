"""Mutation testing: `python -m tests.mutants`; docs/mutants.md has what it found."""
