"""The strategies that Lightning sees, the job behind them, and checkpoints.

`trainer` has the Trainer's strategy and `fabric` Fabric's; both share the constructor
in `options`. `run` adds what a Trainer's `fit` needs. `job` is one training in one
learner, and `engines` chooses the code that averages its weights.
"""
