"""What is estimated for a speaker: fMLLR transforms and i-vectors."""
