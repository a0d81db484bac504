"""The settings that turn one strategy into a family of algorithms, and their bounds."""

import math
from dataclasses import dataclass, fields
from datetime import timedelta
from types import NoneType
from typing import Any, Literal, TypedDict, get_args, get_origin

import torch
from torch.distributed.constants import default_pg_timeout

from lightning_adpsgd.islands.rendezvous import RendezvousAddress
from lightning_adpsgd.mixing.synchronous import Order
from lightning_adpsgd.topology.live import check_any_size
from lightning_adpsgd.topology.named import Topology

DEFAULT_TIMEOUT = timedelta(minutes=5)
"""How long a peer may say nothing."""

CommunicationName = Literal["sync", "delay_by_one", "async", "ready_pairs"]
InsideName = Literal["ddp", "model_parallel"]
WireDtypeName = Literal["float32", "bfloat16", "float16", "int8"]
WireDtype = torch.dtype | WireDtypeName
"""What travels; by its name where a type cannot be written, as in YAML."""
_WIRE_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16, torch.int8)
_ORDERS = (None, "step_then_average", "average_then_step")


_CALLED: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a string",
    timedelta: "a timedelta",
    NoneType: "None",
}
# Options that are None where they do not apply, and the modes that have them.
_MODES_OF = {
    "wire_dtype": ("async", "ready_pairs"),
    "link_budget": ("async",),
    "max_staleness": ("async",),
    "max_wait": ("ready_pairs",),
}
_UNITS = {
    "timeout": " of seconds",
    "link_budget": " of bytes per second",
    "max_wait": " of seconds",
}
_EXAMPLES = {
    "super_learner_size": 1,
    "mixing_gain": 1.0,
    "gossip_every": 1,
    "link_budget": 1e6,
    "cpu_share": 0.01,
    "exchange_frozen": False,
    "work_sharing": True,
    "save_learners": True,
    "islands": "tcp://10.0.0.1:29400",
    "seed": 0,
    "timeout": 300,
    "max_staleness": 100,
    "max_wait": 0.05,
    "max_reloads": 3,
}


class TunedDials(TypedDict, total=False):
    """What a simulated cluster takes of `Dials` by name, with the same defaults."""

    order: Order | None
    mixing_gain: float
    gossip_every: int
    wire_dtype: WireDtype | None
    link_budget: float | None
    max_staleness: int | None
    max_wait: float | None


@dataclass(frozen=True)
class Dials:
    """What `strategy.HADPSGDOptions` documents, checked.

    Raises:
        TypeError: An argument has a wrong type; names its value and one that would do.
        ValueError: An argument is out of its bounds; names the bound and the value.
    """

    topology: Topology
    communication: CommunicationName
    super_learner_size: int | Literal["node"]
    inside: InsideName = "ddp"
    order: Order | None = None
    mixing_gain: float = 1.0
    gossip_every: int = 1
    wire_dtype: torch.dtype | None = None
    exchange_frozen: bool = True
    link_budget: float | None = None
    cpu_share: float = 0.01
    work_sharing: bool | None = None
    after_evaluation: Literal["restore", "adopt"] = "restore"
    save_learners: bool = False
    islands: str | None = None
    seed: int = 0
    timeout: timedelta = DEFAULT_TIMEOUT
    max_staleness: int | None = None
    max_reloads: int | None = 3
    max_wait: float | None = None

    def __post_init__(self) -> None:
        communications = get_args(CommunicationName)
        _check_one_of("communication", self.communication, communications)
        _check_one_of("inside", self.inside, ("ddp", "model_parallel"))
        _check_one_of("order", self.order, _ORDERS)
        _check_one_of("wire_dtype", self.wire_dtype, _WIRE_DTYPES)
        _check_one_of("after_evaluation", self.after_evaluation, ("restore", "adopt"))
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), field.type)
        if not 0 < self.mixing_gain <= 1:
            raise ValueError(f"`mixing_gain` must be in (0, 1], got {self.mixing_gain}")
        if not 0 < self.cpu_share <= 1:
            raise ValueError(f"`cpu_share` must be in (0, 1], got {self.cpu_share}")
        if self.link_budget is not None and self.link_budget <= 0:
            raise ValueError(f"`link_budget` must be positive, got {self.link_budget}")
        if self.max_reloads is not None and self.max_reloads < 0:
            raise ValueError(
                f"`max_reloads` must be at least 0, got {self.max_reloads}"
            )
        if self.timeout.total_seconds() <= 0:
            raise ValueError(f"`timeout` must be positive, got {self.timeout}")
        for name in ("super_learner_size", "gossip_every", "max_staleness"):
            _check_positive(name, getattr(self, name))
        self._check_combinations()
        self._check_max_wait()
        if self.inside == "model_parallel":
            self._check_with_shards()
        if self.islands is not None:
            self._check_with_islands(self.islands)

    @property
    def start_patience(self) -> timedelta:
        """How long a learner waits at the start for those that come later.

        Machines and queues take minutes, whatever the timeout is once all are there.
        """
        return max(self.timeout, default_pg_timeout)

    @property
    def in_lockstep(self) -> bool:
        """Whether all super-learners make step k before any makes the next."""
        return self.communication in ("sync", "delay_by_one")

    @property
    def effective_order(self) -> Order:
        """The order asked for, or the default of the communication."""
        hidden = self.communication == "delay_by_one"
        default: Order = "average_then_step" if hidden else "step_then_average"
        return self.order or default

    def _check_with_shards(self) -> None:
        one_place = "learner 0 would collect the weights of all super-learners"
        if self.communication == "ready_pairs":
            raise ValueError(
                "`communication` must be 'sync', 'delay_by_one' or 'async' with "
                "`inside=\"model_parallel\"`, got 'ready_pairs': pairs of sharded "
                "super-learners are not tried"
            )
        for name, allowed, reason in (
            ("save_learners", False, one_place),
            ("islands", None, "an island sends whole models to those that join"),
            ("exchange_frozen", True, "shards that are frozen are not told apart"),
        ):
            if (value := getattr(self, name)) != allowed:
                raise ValueError(
                    f'`{name}` must be {allowed!r} with `inside="model_parallel"`, got '
                    f"{value!r}: {reason}"
                )

    def _check_with_islands(self, islands: str) -> None:
        RendezvousAddress.parse(islands)
        check_any_size(self.topology)
        no_rounds = "islands come and go, so that none can be waited for"
        no_peer = "an island may be alone, with no peer to wait for"
        for name, allowed, reason in (
            ("communication", "async", no_rounds),
            ("max_staleness", None, no_peer),
            ("exchange_frozen", True, "who joins takes all weights from the others"),
        ):
            if (value := getattr(self, name)) != allowed:
                raise ValueError(
                    f"`{name}` must be {allowed!r} with `islands`, got {value!r}: "
                    f"{reason}"
                )

    def _check_combinations(self) -> None:
        for name, modes in _MODES_OF.items():
            if getattr(self, name) is not None and self.communication not in modes:
                names = " and ".join(f'`communication="{mode}"`' for mode in modes)
                raise ValueError(
                    f"`{name}` applies to {names} alone, got "
                    f"{getattr(self, name)} with {self.communication!r}"
                )
        if self.work_sharing and self.in_lockstep:
            raise ValueError(
                '`work_sharing` applies to `communication="async"` and "ready_pairs", '
                f"got {self.communication!r}, where all learners make their steps "
                "together and so get equal shares"
            )
        if self.communication == "ready_pairs" and (
            self.effective_order != "step_then_average"
        ):
            raise ValueError(
                '`order` must be "step_then_average" with '
                '`communication="ready_pairs"`, whose average is complete before the '
                f"next forward, got {self.order!r}"
            )
        if self.communication == "delay_by_one" and (
            self.effective_order == "step_then_average"
        ):
            raise ValueError(
                '`order` must be "average_then_step" with '
                '`communication="delay_by_one"`, whose average is joined before the '
                f"step, got {self.order!r}"
            )

    def _check_max_wait(self) -> None:
        seconds = self.timeout.total_seconds()
        if self.max_wait is not None and not 0 < self.max_wait < seconds:
            raise ValueError(
                "`max_wait` must be positive and less than the `timeout` of "
                f"{seconds:g} seconds, got {self.max_wait}"
            )


def as_duration(timeout: timedelta | float | None) -> timedelta | None:
    """A timeout that is given as a duration or in seconds, as a duration."""
    _check_type("timeout", timeout, timedelta | float | None)
    if timeout is None or isinstance(timeout, timedelta):
        return timeout
    if not math.isfinite(timeout):
        raise ValueError(f"`timeout` must be finite, got {timeout} seconds")
    return timedelta(seconds=timeout)


def as_dtype(wire_dtype: WireDtype | None) -> torch.dtype | None:
    """A type that travels, given as itself or by its name, as itself."""
    if not isinstance(wire_dtype, str):
        return wire_dtype
    _check_one_of("wire_dtype", wire_dtype, get_args(WireDtypeName))
    return getattr(torch, wire_dtype)


def _check_type(name: str, value: Any, annotation: Any) -> None:
    kinds = get_args(annotation) or (annotation,)
    texts = [kind for kind in kinds if get_origin(kind) is Literal]
    plain = [kind for kind in kinds if kind in _CALLED]
    if len(plain) + len(texts) < len(kinds):
        return  # its values are listed, or another check knows them
    types = (*plain, *((str,) if texts else ()), *((int,) if float in plain else ()))
    # A bool is an int in Python, and True would pass for 1.
    as_number = isinstance(value, bool) and bool not in plain
    if isinstance(value, types) and not as_number:
        return
    unit = _UNITS.get(name, "")
    called = [_CALLED[k] + (unit if k is float else "") for k in plain]
    called += [f'"{get_args(kind)[0]}"' for kind in texts]
    raise TypeError(
        f"`{name}` must be {' or '.join(called)}, got {value!r} of type "
        f"{type(value).__name__}; for example `{name}={_EXAMPLES[name]!r}`"
    )


def _check_one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {allowed}, got {value!r}")


def _check_positive(name: str, value: int | str | None) -> None:
    if isinstance(value, str):
        if value != "node":
            raise ValueError(f'`{name}` must be an integer or "node", got {value!r}')
    elif value is not None and value < 1:
        raise ValueError(f"`{name}` must be at least 1, got {value}")
