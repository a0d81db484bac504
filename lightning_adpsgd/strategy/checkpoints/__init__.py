"""Checkpoints that survive, and what an exact resume needs beside the weights.

`format` is the file, `io` what Lightning calls to write and read it, `saving` does so
beside the training, and `last_good` finds the newest that is whole. `rng_state` and
`mid_epoch` tell where random numbers and epochs were.
"""
