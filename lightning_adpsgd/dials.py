"""The options that turn one strategy into a family of algorithms, and their bounds."""

import math
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import torch
from torch.distributed.constants import default_pg_timeout

from lightning_adpsgd.gossip.codecs import WireChoice
from lightning_adpsgd.islands.rendezvous import RendezvousAddress
from lightning_adpsgd.mixing.synchronous import Order
from lightning_adpsgd.topology.named import Topology
from lightning_adpsgd.topology.schedule import check_any_size

DEFAULT_TIMEOUT = timedelta(minutes=5)
"""The default of `timeout`: how long a peer may be silent."""

DEFAULT_CPU_SHARE = 0.05
"""The default of `cpu_share`: the most that exchanges take of the training time."""

CommunicationName = Literal["sync", "delay_by_one", "async", "ready_pairs"]
InsideName = Literal["ddp", "model_parallel"]
WireDtypeName = Literal["float32", "bfloat16", "float16", "int8", "int4"]
WireDtype = torch.dtype | WireDtypeName
"""The dtype on the wire, or its name where a dtype cannot be written, as in YAML."""
_WIRE_DTYPES = (None, "auto", *(getattr(torch, n) for n in get_args(WireDtypeName)))
# The name of a type in messages, and an example.
_CALLED: dict[Any, tuple[str, Any]] = {
    int: ("a whole number", 1),
    float: ("a number", 1.0),
    bool: ("True or False", True),
    str: ("a string", "tcp://10.0.0.1:29400"),
    timedelta: ("a timedelta", 300),
    NoneType: ("None", None),
}
_UNITS = {"timeout": " of seconds", "max_wait": " of seconds"}
# Modes that allow a single order, and the reason.
_ORDER_OF: dict[str, tuple[Order, str]] = {
    "ready_pairs": ("step_then_average", "is complete before the next forward"),
    "delay_by_one": ("average_then_step", "is joined before the step"),
}


@dataclass(frozen=True)
class Async:
    """`communication="async"` with a user-defined look ahead.

    Args:
        look_ahead: whether exchanges average weights where the next update is expected
            to take them, since it precedes the merge (docs/concepts.md). False: as they
            are, as in the papers. None: yes, unless learners hold one model together,
            because it takes memory for one more copy of the weights in float32.
    """

    look_ahead: bool | None = None


@dataclass(frozen=True)
class ReadyPairs:
    """`communication="ready_pairs"` with a user-defined longest wait.

    Args:
        max_wait: longest wait for a partner at a step boundary, in seconds. Below about
            a tenth of a step, equally fast learners may always meet the same partners.
            None: a quarter of the median duration of the learner's last steps.
    """

    max_wait: float | None = None


Communication = CommunicationName | Async | ReadyPairs
"""A communication mode by name, or with its options."""


@dataclass(frozen=True)
class ModelParallel:
    """`inside="model_parallel"` with layers that several learners share.

    Args:
        tensor_parallel_size: T, the number of learners that share each layer; it must
            divide the number of learners of a super-learner.
    """

    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class Dials:
    """The options that `strategy.options.HADPSGDOptions` documents, checked."""

    topology: Topology
    communication: CommunicationName
    super_learner_size: int | Literal["node"] | tuple[int, ...]
    inside: InsideName = "ddp"
    order: Order | None = None
    mixing_gain: float = 1.0
    gossip_every: int = 1
    wire_dtype: WireChoice = None
    exchange_frozen: bool = True
    cpu_share: float = DEFAULT_CPU_SHARE
    work_sharing: bool | None = None
    after_evaluation: Literal["restore", "adopt"] = "restore"
    save_learners: bool = False
    islands: str | None = None
    seed: int = 0
    timeout: timedelta = DEFAULT_TIMEOUT
    max_staleness: int | None = None
    look_ahead: bool | None = None
    max_wait: float | None = None
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        _check_one_of("order", self.order, (None, *get_args(Order)))
        for field in fields(self):
            value = as_plain(getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            _check_type(field.name, value, field.type)
        _check_sizes(self.super_learner_size)
        for name in ("mixing_gain", "cpu_share"):
            if not 0 < (share := getattr(self, name)) <= 1:
                raise ValueError(f"`{name}` must be in (0, 1], got {share}")
        if self.timeout.total_seconds() <= 0:
            raise ValueError(f"`timeout` must be positive, got {self.timeout}")
        for name in ("gossip_every", "max_staleness", "tensor_parallel_size"):
            if (number := getattr(self, name)) is not None:
                check_count(name, number)
        self._check_combinations()
        most_s = self.timeout.total_seconds()
        if self.max_wait is not None and not 0 < self.max_wait < most_s:
            raise ValueError(
                "`max_wait` must be positive and less than the `timeout` of "
                f"{most_s:g} seconds, got {self.max_wait}"
            )
        if self.inside == "model_parallel":
            self._check_with_shards()
        if self.islands is not None:
            self._check_with_islands(self.islands)

    @property
    def adopts(self) -> bool:
        """Whether training continues from the mean after an evaluation."""
        return self.after_evaluation == "adopt"

    @property
    def start_patience(self) -> timedelta:
        """The time for which a learner waits at the start for later ones.

        Machines and queues may take minutes to start, even if the timeout is short.
        """
        return max(self.timeout, default_pg_timeout)

    @property
    def has_sizes(self) -> bool:
        """Whether super-learners have different sizes."""
        sizes = self.super_learner_size
        return isinstance(sizes, tuple) and len(set(sizes)) > 1

    @property
    def in_lockstep(self) -> bool:
        """Whether all super-learners make step k before any makes the next."""
        return self.communication in ("sync", "delay_by_one")

    @property
    def effective_order(self) -> Order:
        """The chosen order, or the default for the communication mode."""
        default, _ = _ORDER_OF.get(self.communication, ("step_then_average", ""))
        return self.order or default

    @property
    def looks_ahead(self) -> bool:
        """The chosen `look_ahead`; by default not with shards, which are to fit."""
        default = self.communication == "async" and self.inside == "ddp"
        return default if self.look_ahead is None else self.look_ahead

    def _check_with_shards(self) -> None:
        one_place = "learner 0 would collect the weights of all super-learners"
        inseparable = "frozen shards cannot be separated from trained ones"
        if self.communication == "ready_pairs":
            raise ValueError(
                "`communication` must be 'sync', 'delay_by_one' or 'async' with "
                "`inside=\"model_parallel\"`, got 'ready_pairs': pairs of sharded "
                "super-learners are untested"
            )
        self._check_fixed(
            '`inside="model_parallel"`',
            ("save_learners", False, one_place),
            ("exchange_frozen", True, inseparable),
        )
        if self.tensor_parallel_size > 1:
            self._check_with_shared_layers()

    def _check_with_shared_layers(self) -> None:
        what = f"`tensor_parallel_size={self.tensor_parallel_size}`"
        if self.has_sizes:
            raise ValueError(
                f"`super_learner_size` must be one number with {what}, got "
                f"{self.super_learner_size}: super-learners of different sizes are "
                "matched by rows, but a shared layer may also be cut by columns"
            )
        if self.work_sharing:
            raise ValueError(
                f"`work_sharing` must not be True with {what}: work units have a batch "
                "for each learner, but learners that share layers must read the same"
            )

    def _check_with_islands(self, islands: str) -> None:
        RendezvousAddress.parse(islands)
        check_any_size(self.topology)
        no_rounds = "islands come and go, so no island can wait for another"
        no_peer = "an island may be alone, with no peer to wait for"
        self._check_fixed(
            "`islands`",
            ("communication", "async", no_rounds),
            ("max_staleness", None, no_peer),
            ("exchange_frozen", True, "a joining island needs the frozen weights too"),
        )

    def _check_fixed(self, with_what: str, *values: tuple[str, Any, str]) -> None:
        for name, allowed, reason in values:
            if (value := getattr(self, name)) != allowed:
                raise ValueError(
                    f"`{name}` must be {allowed!r} with {with_what}, got {value!r}: "
                    f"{reason}"
                )

    def _check_combinations(self) -> None:
        mode = self.communication
        if self.in_lockstep and self.wire_dtype not in (None, "auto"):
            raise ValueError(
                '`wire_dtype` applies to `communication="async"` and '
                '`communication="ready_pairs"` alone, got '
                f"{self.wire_dtype} with {mode!r}"
            )
        if mode != "async" and self.max_staleness is not None:
            raise ValueError(
                '`max_staleness` applies to `communication="async"` alone, got '
                f"{self.max_staleness} with {mode!r}"
            )
        if self.work_sharing and self.in_lockstep:
            raise ValueError(
                '`work_sharing` applies to `communication="async"` and "ready_pairs", '
                f"got {mode!r}, where all learners step together "
                "and so get equal shares"
            )
        if self.work_sharing and self.has_sizes:
            raise ValueError(
                "`work_sharing` must not be True with super-learners of different "
                f"sizes, got `super_learner_size={self.super_learner_size}`: units of "
                "work have one batch for each learner of any super-learner"
            )
        order, why = _ORDER_OF.get(mode, (self.order, ""))
        if self.order not in (None, order):
            raise ValueError(
                f'`order` must be "{order}" with `communication="{mode}"`, whose '
                f"average {why}, got {self.order!r}"
            )


def as_plain(value: Any) -> Any:
    """A scalar of NumPy as the Python number that it is; anything else as it is."""
    return value.item() if getattr(value, "shape", None) == () else value


def as_mode(communication: Communication) -> dict[str, Any]:
    """A communication mode by its name, and the options that it has."""
    if isinstance(communication, Async):
        return {"communication": "async", **asdict(communication)}
    if isinstance(communication, ReadyPairs):
        return {"communication": "ready_pairs", **asdict(communication)}
    return {"communication": communication}


def as_inside(inside: InsideName | ModelParallel) -> tuple[InsideName, int]:
    """The name of an `inside` mode, and T."""
    if isinstance(inside, ModelParallel):
        return "model_parallel", inside.tensor_parallel_size
    return inside, 1


def as_duration(timeout: timedelta | float | None) -> timedelta | None:
    """A duration or seconds as a duration; TypeError or ValueError for any other."""
    timeout = as_plain(timeout)
    _check_type("timeout", timeout, timedelta | float | None)
    if timeout is None or isinstance(timeout, timedelta):
        return timeout
    if not 0 < timeout < timedelta.max.total_seconds():
        bound = f"positive and less than {timedelta.max.total_seconds():g} seconds"
        raise ValueError(f"`timeout` must be {bound}, got {timeout}")
    return timedelta(seconds=timeout)


def as_dtype(wire_dtype: WireDtype | Literal["auto"] | None) -> WireChoice:
    """Converts the name of a dtype into the dtype; "auto" and None stay as they are.

    Raises:
        ValueError: An exchange cannot send weights in this dtype.
    """
    if isinstance(wire_dtype, str) and wire_dtype != "auto":
        names = (None, "auto", *get_args(WireDtypeName))
        _check_one_of("wire_dtype", wire_dtype, names)
        return getattr(torch, wire_dtype)
    _check_one_of("wire_dtype", wire_dtype, _WIRE_DTYPES)
    return wire_dtype


def _check_type(name: str, value: Any, annotation: Any) -> None:
    if get_origin(annotation) is Literal:
        _check_one_of(name, value, get_args(annotation))
        return
    kinds = get_args(annotation) or (annotation,)
    if not {*kinds} <= {*_CALLED}:
        return  # another check covers its values
    types = (*kinds, int) if float in kinds else kinds
    # A bool is an int in Python, and True would pass for 1.
    as_number = isinstance(value, bool) and bool not in kinds
    if isinstance(value, types) and not as_number:
        return
    unit = _UNITS.get(name, "")
    called = (_CALLED[k][0] + (unit if k is float else "") for k in kinds)
    *others, last = " or ".join(called).split(" or ")
    wanted = f"{', '.join(others)} or {last}" if others else last
    raise TypeError(
        f"`{name}` must be {wanted}, got {value!r} of type {type(value).__name__}; for "
        f"example `{name}={_CALLED[kinds[0]][1]!r}`"
    )


def _check_one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {allowed}, got {value!r}")


def _check_sizes(sizes: Any) -> None:
    name = "super_learner_size"
    if isinstance(sizes, int) and not isinstance(sizes, bool):
        check_count(name, sizes)
    elif isinstance(sizes, tuple):
        are_whole = all(type(size) is int for size in sizes)
        if not sizes or not are_whole or min(sizes) < 1:
            raise (ValueError if are_whole else TypeError)(
                f"`{name}` must hold a whole number of at least 1 for each "
                f"super-learner, got {sizes}; for example `{name}=(2, 4)`"
            )
    elif sizes != "node":
        kind = ValueError if isinstance(sizes, str) else TypeError
        raise kind(
            f'`{name}` must be a whole number, "node" or a sequence of sizes, got '
            f"{sizes!r} of type {type(sizes).__name__}; for example `{name}=2`"
        )


def check_count(name: str, value: int) -> None:
    """Raises TypeError unless a value is a whole number, and ValueError below 1."""
    _check_type(name, as_plain(value), int)
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1, got {value}")


def check_number(name: str, value: float) -> None:
    """Raises TypeError unless a value is a number."""
    _check_type(name, as_plain(value), float)


def check_positive(name: str, value: float, or_zero: bool = False) -> None:
    """Raises TypeError unless a value is a number, and ValueError unless it is finite
    and positive; `or_zero` allows 0."""
    check_number(name, value)
    if not (0 < value < math.inf or (or_zero and value == 0)):
        bound = "at least 0" if or_zero else "positive"
        raise ValueError(f"`{name}` must be {bound} and finite, got {value}")
