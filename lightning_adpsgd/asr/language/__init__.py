"""Words: how they are spoken, and which follow which."""
