"""Checkpoints that survive crashes, and the state that an exact resume needs.

`format` defines the file, `io` is the plugin with which Lightning writes and reads it,
`saving` writes in the background, and `last_good` finds the newest intact one.
`rng_state` and `mid_epoch` keep the positions in random sequences and epochs.
"""
