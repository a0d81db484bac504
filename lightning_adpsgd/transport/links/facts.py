"""What a member tells another about itself, and in what the two must agree. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lightning_adpsgd import __version__
from lightning_adpsgd.weights.flat import first_difference

PROTOCOL = 1
"""Raised when members with the one before could not talk to those with this one."""

_LONGEST_NAME, _MOST = 100, 1 << 31


@dataclass(frozen=True)
class Facts:
    """A learner of a member, as the handshake presents it.

    Attributes:
        member: Number that the membership has given to its super-learner.
        incarnation: Differs for every start of a super-learner's processes.
        job: Name of the job.
        model: `FlatParameters.layout()`: names, shapes and dtypes of the weights.
        super_learner_size: Learners of the super-learner.
        shard: Which of them this one is.
        settings: What else must be equal at both ends, such as the wire's dtype.
        version: Of this package.
    """

    member: int
    incarnation: str
    job: str
    model: str
    super_learner_size: int = 1
    shard: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)
    version: str = __version__

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` reads; of JSON's types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: object) -> "Facts":
        """Facts that another process has written.

        Raises:
            ValueError: They are malformed.
        """
        if not isinstance(content, dict) or set(content) != _NAMES:
            raise ValueError(f"facts must have the fields {sorted(_NAMES)}")
        for name, kind in _KINDS.items():
            # A bool is an int to Python, and no number of a member.
            if type(content[name]) is not kind:
                raise ValueError(f"`{name}` of facts must be a {kind.__name__}")
        facts = cls(**content)
        numbers = facts.member, facts.shard, facts.super_learner_size - 1
        if not all(0 <= number < _MOST for number in numbers):
            raise ValueError(f"facts must have numbers from 0 to {_MOST}")
        if not all(type(value) is str for value in facts.settings.values()):
            raise ValueError("`settings` of facts must be of strings")
        return facts

    def __str__(self) -> str:
        return f"super-learner {self.member} (incarnation {_short(self.incarnation)})"


_KINDS: dict[str, type] = {
    "member": int,
    "incarnation": str,
    "job": str,
    "model": str,
    "super_learner_size": int,
    "shard": int,
    "settings": dict,
    "version": str,
}
_NAMES = {one.name for one in fields(Facts)}


def differences(ours: Facts, theirs: Facts) -> list[str]:
    """One sentence for each thing in which two members must agree and do not."""
    found = list(_unequal(ours, theirs))
    if ours.model != theirs.model:
        found.append(f"models differ: {first_difference(theirs.model, ours.model)}")
    if ours.member == theirs.member:
        found.append(f"both are super-learner {ours.member}")
    return found


def _unequal(ours: Facts, theirs: Facts) -> Iterator[str]:
    names = ("version", "job", "super_learner_size", "shard")
    pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in names}
    for name in sorted({*ours.settings, *theirs.settings}):
        mine, other = (f.settings.get(name, "absent") for f in (ours, theirs))
        pairs[name[:_LONGEST_NAME]] = mine, other
    for name, (mine, other) in pairs.items():
        if mine != other:
            yield f"`{name}` is {_short(mine)} here and {_short(other)} there"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}..."
