"""Estimates for a speaker: fMLLR transforms and i-vectors."""
