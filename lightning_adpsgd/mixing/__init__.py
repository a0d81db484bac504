"""Averaging with the other super-learners: rounds of it, and when a step takes part.

`communication` is what a training loop sees of every mode, and `statistics` what it has
done. `averages` is the arithmetic of every mode, `rounds` applies it among processes,
and `synchronous` waits for a round or hides it; the asynchronous mode is `gossip`.
`super_learner` merges alike in all learners of a super-learner, and `consensus` takes
the mean of all.
"""
