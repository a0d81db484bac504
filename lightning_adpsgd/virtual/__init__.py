"""Many learners in one process, on a simulated clock, with the engine's own arithmetic.

`cluster` needs no Trainer; `strategy` works behind Lightning's Trainer. `clock` and
`timeline` decide what happens when, without weights.
"""
