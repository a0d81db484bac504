"""Averaging with the other super-learners: rounds, and their place around a step.

`communication` is the interface of every mode for a training loop, and `statistics` its
counters. `averages` has the arithmetic of rounds, `rounds` applies it among
processes, and `synchronous` waits for a round or hides it. The asynchronous modes are
in `gossip`. `super_learner` keeps the learners of a super-learner equal, and
`consensus` takes the mean of all super-learners.
"""
