"""From stored frames to words, and their errors."""
