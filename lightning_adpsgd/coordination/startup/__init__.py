"""The checks before learners start: who they are, and whether they can connect."""
