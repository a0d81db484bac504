"""The flat vectors that weights are views of, and the replica that exchanges read."""
