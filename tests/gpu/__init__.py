"""Tests on a GPU, which skip where there is none."""
