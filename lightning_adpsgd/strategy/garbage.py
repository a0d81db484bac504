"""Python's garbage collection, which would stop a learner for several steps.

A full collection looks at every live object: about a million with torch and Lightning.
That takes a quarter of a second, every few hundred steps, in which no Python code runs,
neither a step's nor an exchange's. What lives when training begins is rarely garbage
before it ends. So it is left out until then.
"""

import gc

# Python 3.12 itself leaves out 375; a program that calls `gc.freeze`, many more.
_OF_PYTHON = 1000


class OldObjects:
    """The objects that live when training begins.

    Nothing is done if the program has disabled collections or frozen objects itself.
    """

    def __init__(self) -> None:
        self._are_left_out = False

    def leave_out(self) -> None:
        """Collects once; later collections look only at newer objects."""
        if not gc.isenabled() or gc.get_freeze_count() > _OF_PYTHON:
            return
        gc.collect()
        gc.freeze()
        self._are_left_out = True

    def look_again(self) -> None:
        """Ends `leave_out`."""
        if self._are_left_out:
            gc.unfreeze()
            self._are_left_out = False
