"""Recordings: files and channels, speech in them, noise upon them, log-mel frames."""
