"""Averaging with the other super-learners: rounds of it, and when a step takes part.

`schedule` says which matrix applies in which round, `communication` is what a training
loop sees of any mode, and `statistics` what came of it. `averages` is the arithmetic of
every mode, `rounds` applies it among processes, and `synchronous` waits for it or hides
it; the asynchronous mode is the package `gossip`.
"""
