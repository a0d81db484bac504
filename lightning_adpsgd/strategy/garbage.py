"""Python's garbage collection, which would stop a learner for several steps.

A full collection looks at every live object: about a million with torch and Lightning,
a quarter of a second every few hundred steps. Objects that live when training begins
rarely become garbage before it ends. So collections exclude them until then.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Python 3.12 itself freezes 375 objects; a program that calls `gc.freeze`, many more.
_OF_PYTHON = 1000


@contextmanager
def without_old_objects() -> Iterator[None]:
    """Collects everything once; collections within the context exclude survivors.

    Does nothing if the program has disabled collections or frozen objects itself.
    """
    if not gc.isenabled() or gc.get_freeze_count() > _OF_PYTHON:
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
