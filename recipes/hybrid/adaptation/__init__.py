"""What the network is told of a speaker beside the frames: fMLLR and i-vectors."""
