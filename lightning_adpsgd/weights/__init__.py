"""One flat vector, of which weights are views, and the replica that exchanges read."""
