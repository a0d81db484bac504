"""The largest batch each algorithm scales to: a sweep over virtual learners."""
