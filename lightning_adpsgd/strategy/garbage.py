"""Python's garbage collection, which would stop a learner for several steps.

A full collection looks at every live object: about a million with torch and Lightning,
a quarter of a second every few hundred steps. Objects that live when training begins
rarely become garbage before it ends. So collections leave them out until then.
"""

import gc

# Python 3.12 itself freezes 375 objects; a program that calls `gc.freeze`, many more.
_OF_PYTHON = 1000


class FrozenObjects:
    """The objects that live when training begins, left out of later collections.

    Nothing is done if the program has disabled collections or frozen objects itself.
    """

    def __init__(self) -> None:
        self._are_frozen = False

    def freeze(self) -> None:
        """Collects once, then leaves all live objects out of later collections."""
        if not gc.isenabled() or gc.get_freeze_count() > _OF_PYTHON:
            return
        gc.collect()
        gc.freeze()
        self._are_frozen = True

    def unfreeze(self) -> None:
        """Includes them again."""
        if self._are_frozen:
            gc.unfreeze()
            self._are_frozen = False
