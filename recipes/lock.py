"""A lock on a folder: one process of several writes there.

The system frees the lock when that process ends, however it does. Some file systems of
clusters have no locks; there, one command is trusted to be alone.
"""

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}


@contextmanager
def locked(lock: Path, refusal: Exception) -> Iterator[None]:
    """Hold a lock; where there are no locks, say so and go on.

    Args:
        lock: file of the lock, made if absent.
        refusal: what is raised if another process holds it.
    """
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise refusal from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                error.filename = str(lock)
                raise
            print(
                f"WARNING: {lock}: this file system has no locks ({error.strerror}); "
                "a second command that writes here is not noticed: run one at a time",
                flush=True,
            )
        yield
