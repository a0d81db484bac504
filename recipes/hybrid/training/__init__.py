"""The training of an acoustic model: its learners and its figures."""
