"""What learners agree on apart from weights: store, failures, groups, start-up checks."""
