"""Checkpoints that survive crashes, and the state that an exact resume needs."""
