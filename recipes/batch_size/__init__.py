"""How large a batch does each algorithm bear? A sweep over virtual learners."""
