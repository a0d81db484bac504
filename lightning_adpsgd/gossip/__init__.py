"""The asynchronous engine: averaging with peers in the background, without waiting.

Begin with `engine`, the training thread's side; its docstring lists the other files.
"""
