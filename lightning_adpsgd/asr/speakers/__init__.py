"""Speaker adaptation: fMLLR transforms and i-vectors."""
