"""A bounded wait at the start of an island, which says in the log what it waits for."""

import logging
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

_FIRST_NOTICE_S = 2.0


class Wait:
    """A bounded wait that is logged after 2 s, 4 s, 8 s and so on.

    Args:
        whom: what is waited for, as messages name it.
        remedy: advice to the reader of the log, as an imperative.
        seconds: longest wait.
        check: function that `go_on` calls first; its exception ends the wait.
        usual_s: seconds that the wait usually takes, in which it is not logged.
    """

    def __init__(
        self,
        whom: str,
        remedy: str,
        seconds: float,
        check: Callable[[], None],
        usual_s: float = 0.0,
    ) -> None:
        self._whom, self._remedy, self._check = whom, remedy, check
        self._begin, self._seconds = time.monotonic(), seconds
        self._notice_s = usual_s + _FIRST_NOTICE_S

    def go_on(self, reason: str) -> None:
        """Returns while time is left; the caller polls in between.

        Args:
            reason: why the wait is not over; may be empty.

        Raises:
            RuntimeError: The time is over.
        """
        self._check()
        waited = time.monotonic() - self._begin
        if waited > self._seconds:
            raise RuntimeError(
                f"training has not started: it waited {self._seconds:g} s for "
                f"{self._whom} ({reason or 'no answer'}). To fix this, {self._remedy}"
            )
        if waited >= self._notice_s:
            self._notice_s = 2 * waited
            _log.warning(
                "training has not started: it has waited %.0f s for %s, and waits at "
                "most %g s (%s). To fix this, %s; Ctrl-C or SIGTERM ends the wait",
                *(waited, self._whom, self._seconds, reason or "no answer yet"),
                self._remedy,
            )
