"""The asynchronous engine: averaging with peers in the background, which nobody awaits.

`engine` is what the training thread sees of it. `exchange` is one lane to one peer,
`asking` and `answering` are its two threads there, and `wire` and `messages` say what
travels. `protocol`, `pacing` and `traffic` decide when, `merging` and `recovery` what a
learner does with what came, and `account` keeps the figures.
"""
