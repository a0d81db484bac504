"""What a learner tells a peer about itself, and where the two must agree. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from lightning_adpsgd import __version__
from lightning_adpsgd.weights.flat import first_difference

PROTOCOL = 5
"""The protocol's version. Raise it with every incompatible change, and whenever
`PeerInfo` gets other fields: an older version can read nothing but this number."""

_LONGEST_NAME, _MOST = 100, 1 << 31


@dataclass(frozen=True)
class PeerInfo:
    """What a learner states about itself in the handshake.

    Attributes:
        member: number of its super-learner on the member list.
        incarnation: unique identifier of this start of the super-learner.
        model: `FlatParameters.layout()`: names, shapes and dtypes of the weights.
        super_learner_size: number of shards. Each shard has one owner among the
            learners of the super-learner. It equals the number of learners if all
            super-learners have one size.
        shard: index of the shard that the connection carries.
        settings: further settings, equal at both ends, such as the wire dtype.
        origin: training that its weights come from; empty before it takes any.
    """

    member: int
    incarnation: str
    job: str
    model: str
    super_learner_size: int = 1
    shard: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)
    version: str = __version__
    origin: str = ""

    @classmethod
    def from_dict(cls, content: object) -> "PeerInfo":
        """Reads what `dataclasses.asdict` made in another process.

        Raises:
            ValueError: The content is malformed.
        """
        if not isinstance(content, dict) or set(content) != set(_KINDS):
            expected = f"must have the fields {sorted(_KINDS)}"
            raise ValueError(f"peer info {expected}, got {_short(content)}")
        for name, kind in _KINDS.items():
            # A bool is an int in Python, but not a member's number.
            if type(value := content[name]) is not kind:
                expected = f"must be of type {kind.__name__}, got {_short(value)}"
                raise ValueError(f"`{name}` of peer info {expected}")
        for name, least in (("member", 0), ("shard", 0), ("super_learner_size", 1)):
            if not least <= (value := content[name]) < least + _MOST:
                bound = f"from {least} to {least + _MOST - 1}, got {_short(value)}"
                raise ValueError(f"`{name}` of peer info must be {bound}")
        info = cls(**content)
        if not all(type(value) is str for value in info.settings.values()):
            expected = f"must be strings, got {_short(info.settings)}"
            raise ValueError(f"`settings` of peer info {expected}")
        return info

    def __str__(self) -> str:
        return f"super-learner {self.member} (incarnation {_short(self.incarnation)})"


class Wanted(NamedTuple):
    """The listener that a dialer expects, according to the member list.

    Attributes:
        member: number of its super-learner.
        incarnation: incarnation of its super-learner; empty: any.
        address: address that was dialed; empty: any. The listener compares it with its
            own address. They differ if the member list is forged to name a relay.
    """

    member: int
    incarnation: str = ""
    address: str = ""

    @classmethod
    def from_row(cls, row: object) -> "Wanted":
        """Reads a JSON row; a malformed row matches no listener."""
        if isinstance(row, list) and [type(one) for one in row] == [int, str, str]:
            return cls(*row)
        return cls(-1)

    def objection(self, listener: PeerInfo, address: str) -> str:
        """The reason why the listener is not the expected one; empty if it is.

        Args:
            address: address at which it listens; empty if unknown.
        """
        if self.member != listener.member:
            return f"{listener} listens where super-learner {self.member} was expected"
        if self.incarnation not in ("", listener.incarnation):
            return (
                f"{listener} listens where its incarnation {_short(self.incarnation)} "
                "was expected"
            )
        if self.address and address not in ("", self.address):
            return (
                f"{listener} was dialed at {_short(self.address)} and listens at "
                f"{_short(address)}: the member list was changed, or a relay is "
                "between the two"
            )
        return ""


_KINDS: dict[str, Any] = {one.name: one.type for one in fields(PeerInfo)}
_KINDS["settings"] = dict


def differences(ours: PeerInfo, theirs: PeerInfo) -> list[str]:
    """One sentence for each forbidden difference between two peers."""
    found = list(_unequal(ours, theirs))
    if ours.model != theirs.model:
        found.append(f"models differ: {first_difference(theirs.model, ours.model)}")
    if ours.member == theirs.member:
        found.append(f"both are super-learner {ours.member}")
    if ours.origin and theirs.origin and ours.origin != theirs.origin:
        found.append(
            "their weights come from two trainings, begun by super-learners "
            f"{_short(ours.origin[:8])} and {_short(theirs.origin[:8])}, and are not "
            "averaged: the one that is behind takes the weights of the other"
        )
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
