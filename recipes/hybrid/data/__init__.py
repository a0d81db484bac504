"""What stages read and leave: discs, utterances, frames, labels."""
