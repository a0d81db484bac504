"""The asynchronous engine: averaging with peers in the background, without waiting.

`engine` is what the training thread sees of it; its docstring lists the other files.
"""
