"""Coordination of learners apart from weights: store, failures, groups, start-up."""
