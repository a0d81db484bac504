"""Many learners in one process, on a simulated clock, with the engine's own arithmetic.

`cluster` is what a notebook uses, `strategy` what Lightning's Trainer does; `clock` and
`timeline` say who does what when, without weights.
"""
