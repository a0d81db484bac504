"""How fast a cluster would be, from a few measured numbers."""
