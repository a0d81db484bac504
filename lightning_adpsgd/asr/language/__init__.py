"""Lexica and n-gram language models."""
