"""Files that a training does not need: an error of the disk does not end it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class DiagnosticFiles:
    """The files of one callback. A write error only warns, and only the first time."""

    def __init__(self) -> None:
        self._has_warned = False

    @contextmanager
    def may_fail(self) -> Iterator[None]:
        """A context in which files are written, and which no `OSError` leaves."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"A file could not be written: {error}. Training continues; later "
                    "errors of this callback's files are not reported",
                    stacklevel=3,
                )
