"""The report of one learner's failure, and the errors with which the others end."""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import DistError

from lightning_adpsgd.coordination.store import (
    Coordinator,
    LearnerDiverged,
    LearnerFailed,
    LearnerFollows,
)
from lightning_adpsgd.files import printable
from lightning_adpsgd.transport.base import PeerLost

_DIVERGED = " diverged: "
# Failures that may not say which learner has ended.
_UNNAMED = re.compile(r"lost (a super-|another )learner| raised \w+: \[\S*gloo")

# Gloo raises plain RuntimeErrors: its macros put the file and line in front, and one
# message has none. The type of what a user's program raises is no evidence either way.
_GLOO = re.compile(
    r"\[[^\]\n]*/(gloo/[^\]\n]*|ProcessGroupGloo)\.(cc|cpp|h|hpp):\d+\] "
    r"|Application timeout caused pair closure$"
)


class SuperLearnerBroken(RuntimeError):
    """A learner of a super-learner did not join a collective."""


def _is_lost_connection(error: BaseException) -> bool:
    is_gloos = isinstance(error, RuntimeError) and bool(_GLOO.match(str(error)))
    return is_gloos or isinstance(error, DistError | SuperLearnerBroken)


class FailureReport:
    """Turns the loss of a connection into the failure that caused it.

    Args:
        super_learner: ranks of the learners of this one's super-learner.
    """

    def __init__(
        self, coordinator: Coordinator, rank: int, super_learner: list[int]
    ) -> None:
        self._coordinator, self._rank = coordinator, rank
        self._name = f"learner {rank} on host {socket.gethostname()}"
        self._super_learner = super_learner

    @contextmanager
    def named(self, collective: str = "") -> Iterator[None]:
        """A context for code in which a peer may turn out to be lost.

        Args:
            collective: what it does with other learners, such as "a broadcast of all
                learners". Empty: allreduces of the super-learner.

        Raises:
            LearnerFailed: In learner 0, with the message of the failed learner.
            LearnerDiverged: In learner 0, if a learner's training has diverged; learner
                0 may learn of it before its own weights show it.
            LearnerFollows: In all others, whose traces would only repeat the message.
        """
        try:
            yield
        except (PeerLost, LearnerFailed) as error:
            self._follow(self._whole(str(error)), error)
        except RuntimeError as error:
            if not _is_lost_connection(error):
                raise
            self._follow(self._whole(self._lost_neighbour(error, collective)), error)

    def lost_peer(self, message: str) -> None:
        """Reports a lost peer; for communication threads."""
        self._coordinator.explain(f"{self._name} {message}")

    def announce(self, exception: BaseException) -> None:
        """Tells all learners about this one's exception, unless it only followed."""
        if isinstance(exception, LearnerFailed | LearnerFollows):
            return
        text = " ".join(str(exception).split())[:500]
        # A file name may not be valid text, which the store would refuse.
        what = f"{type(exception).__name__}: {printable(text)}".removesuffix(": ")
        diverged = isinstance(exception, FloatingPointError)
        verb = _DIVERGED if diverged else " raised "
        message = f"{self._name}{verb}{what}"
        if not _is_lost_connection(exception):
            self._coordinator.announce_failure(message)
            return
        # A collective of the program or of a metric may have met another's end. The
        # report of the job and that of all else may both note it.
        reason = self._coordinator.explain(message)
        if reason not in (message, *getattr(exception, "__notes__", ())):
            exception.add_note(reason)

    def _whole(self, symptom: str) -> str:
        """The failure behind a symptom, with who is silent if it names no learner."""
        message = self._coordinator.explain(symptom)
        # Outside of training, nobody says that it is alive.
        if _UNNAMED.search(message) is None or not self._super_learner:
            return message
        if silent := self._coordinator.silent_learners():
            message += f". No sign of life from learner {silent}"
        return message

    def _follow(self, message: str, cause: BaseException) -> None:
        if self._rank != 0:
            self._coordinator.show_for_learner_0()
            raise LearnerFollows(1) from cause
        repeats = isinstance(cause, LearnerFailed)
        kind = LearnerDiverged if _DIVERGED in message else LearnerFailed
        raise kind(message) from (cause.__cause__ if repeats else cause)

    def _lost_neighbour(self, error: BaseException, collective: str) -> str:
        if collective:
            return (
                f"{self._name} lost another learner in {collective}: {error}. Check "
                "what the others printed last"
            )
        return (
            f"{self._name} lost another learner of its super-learner "
            f"{self._super_learner} in an allreduce: {error}. Check what those "
            "processes printed last; learners of one super-learner need equal numbers "
            "of batches, and none may be more than `timeout` behind the others"
        )
