"""Python's search for garbage, which would stop a learner for several steps.

A full collection looks at every object that lives: with torch and Lightning a million,
which takes a quarter of a second, some hundred steps apart. Nothing else runs in the
meantime: no step, and no exchange. What lives when a training begins is rarely garbage
before it ends. So it is left out until then, and the collections of the training look
only at what the training has made.
"""

import gc


class OldObjects:
    """What lives when a training begins; left alone where the program sees to it."""

    def __init__(self) -> None:
        self._are_left_out = False

    def leave_out(self) -> None:
        """Collects once, and from here on looks only at new objects."""
        if not gc.isenabled() or gc.get_freeze_count():
            return
        gc.collect()
        gc.freeze()
        self._are_left_out = True

    def look_again(self) -> None:
        """Ends `leave_out`."""
        if self._are_left_out:
            gc.unfreeze()
            self._are_left_out = False
