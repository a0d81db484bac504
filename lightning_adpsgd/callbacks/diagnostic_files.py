"""Files that a training can do without: an error of the disk does not end it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class DiagnosticFiles:
    """The files of one callback. The first error of the disk is a warning."""

    def __init__(self) -> None:
        self._has_warned = False

    @contextmanager
    def may_fail(self) -> Iterator[None]:
        """A context in which files are written; it keeps errors of the disk inside."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"A file could not be written: {error}. This does not end the "
                    "training; later errors of this callback's files are not told",
                    stacklevel=3,
                )
