"""The parts of the benchmark `race`: equal wall-clock time for every method.

`problems` has the models and their data, `course` what a learner does, `entrants` the
methods, and `columns` the links and mishaps. `runs` has one training and its file,
`tuning` the search for a method's rate, `schedule` what is run in which order, and
`report` the rows and bounds.
"""
