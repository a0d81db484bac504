"""Many learners in one process, on a simulated clock, with the engine's own arithmetic.

Notebooks use `cluster`, Lightning's Trainer uses `strategy`. `clock` and `timeline` say
what happens when, without weights.
"""
