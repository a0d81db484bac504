"""Frames stored once and read as chunks, and what is made of them before a model."""
