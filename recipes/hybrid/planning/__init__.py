"""What a corpus will need: hours, disk and memory, from costs measured on a run."""
