"""What a learner tells a peer about itself, and in what the two must agree. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lightning_adpsgd import __version__
from lightning_adpsgd.weights.flat import first_difference

PROTOCOL = 1
"""Raised when learners with the previous one cannot talk to those with this one."""

_LONGEST_NAME, _MOST = 100, 1 << 31


@dataclass(frozen=True)
class PeerInfo:
    """A learner of a super-learner, as the handshake presents it.

    Attributes:
        member: number that the membership has given to its super-learner.
        incarnation: identifier of this start of the super-learner's processes.
        job: name of the job.
        model: `FlatParameters.layout()`: names, shapes and dtypes of the weights.
        super_learner_size: number of learners in the super-learner.
        shard: index of this learner among them.
        settings: what else must be equal at both ends, such as the wire's dtype.
        version: version of this package.
    """

    member: int
    incarnation: str
    job: str
    model: str
    super_learner_size: int = 1
    shard: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)
    version: str = __version__

    @classmethod
    def from_dict(cls, content: object) -> "PeerInfo":
        """Reads what another process has made of it by `dataclasses.asdict`.

        Raises:
            ValueError: The content is malformed.
        """
        if not isinstance(content, dict) or set(content) != set(_KINDS):
            raise ValueError(f"peer info must have the fields {sorted(_KINDS)}")
        for name, kind in _KINDS.items():
            # To Python a bool is an int, but it is no number of a member.
            if type(content[name]) is not kind:
                raise ValueError(f"`{name}` of peer info must be a {kind.__name__}")
        info = cls(**content)
        numbers = info.member, info.shard, info.super_learner_size - 1
        if not all(0 <= number < _MOST for number in numbers):
            raise ValueError(f"peer info must have numbers from 0 to {_MOST}")
        if not all(type(value) is str for value in info.settings.values()):
            raise ValueError("`settings` of peer info must hold strings")
        return info

    def __str__(self) -> str:
        return f"super-learner {self.member} (incarnation {_short(self.incarnation)})"


_KINDS: dict[str, Any] = {one.name: one.type for one in fields(PeerInfo)}
_KINDS["settings"] = dict


def differences(ours: PeerInfo, theirs: PeerInfo) -> list[str]:
    """Returns a sentence for each thing in which two peers differ and must not."""
    found = list(_unequal(ours, theirs))
    if ours.model != theirs.model:
        found.append(f"models differ: {first_difference(theirs.model, ours.model)}")
    if ours.member == theirs.member:
        found.append(f"both are super-learner {ours.member}")
    return found


def _unequal(ours: PeerInfo, theirs: PeerInfo) -> Iterator[str]:
    names = ("version", "job", "super_learner_size", "shard")
    pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in names}
    for name in sorted({*ours.settings, *theirs.settings}):
        mine, other = (one.settings.get(name, "absent") for one in (ours, theirs))
        pairs[name[:_LONGEST_NAME]] = mine, other
    for name, (mine, other) in pairs.items():
        if mine != other:
            yield f"`{name}` is {_short(mine)} here and {_short(other)} there"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}..."
