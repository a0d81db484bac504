"""The settings that turn one strategy into a family of algorithms, and their bounds."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.distributed.constants import default_pg_timeout

from lightning_adpsgd.islands.rendezvous import Place
from lightning_adpsgd.mixing.synchronous import Order
from lightning_adpsgd.topology.live import check_any_size
from lightning_adpsgd.topology.named import Topology

DEFAULT_TIMEOUT = timedelta(minutes=5)
"""For how long a peer may say nothing."""

CommunicationName = Literal["sync", "delay_by_one", "async"]
TransportName = Literal["gloo", "links"]
_WIRE_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16, torch.int8)
_ORDERS = (None, "step_then_average", "average_then_step")


@dataclass(frozen=True)
class Dials:
    """What `HADPSGDStrategy` documents, checked.

    Raises:
        ValueError: Names the argument, the bound and the value.
    """

    topology: Topology
    communication: CommunicationName
    super_learner_size: int | Literal["node"]
    order: Order | None
    mixing_gain: float
    gossip_every: int
    wire_dtype: torch.dtype | None
    link_budget: float | None
    cpu_share: float
    max_staleness: int | None
    after_evaluation: Literal["restore", "adopt"]
    save_learners: bool
    seed: int
    timeout: timedelta
    work_sharing: bool = False
    islands: str | None = None
    max_reloads: int | None = 3
    transport: TransportName = "gloo"

    def __post_init__(self) -> None:
        communications = ("sync", "delay_by_one", "async")
        _check_one_of("communication", self.communication, communications)
        _check_one_of("order", self.order, _ORDERS)
        _check_one_of("wire_dtype", self.wire_dtype, _WIRE_DTYPES)
        _check_one_of("transport", self.transport, ("gloo", "links"))
        _check_one_of("after_evaluation", self.after_evaluation, ("restore", "adopt"))
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
        if self.islands is not None:
            self._check_with_islands(self.islands)

    @property
    def start_patience(self) -> timedelta:
        """For how long a learner waits at the start for those that come later.

        Machines and queues take minutes, whatever the timeout is once all are there.
        """
        return max(self.timeout, default_pg_timeout)

    @property
    def effective_order(self) -> Order:
        """The order asked for, or the default of the communication."""
        hidden = self.communication == "delay_by_one"
        default: Order = "average_then_step" if hidden else "step_then_average"
        return self.order or default

    def _check_with_islands(self, islands: str) -> None:
        Place.parse(islands)
        check_any_size(self.topology)
        refused: tuple[tuple[str, Any, Any, str], ...] = (
            (
                "communication",
                self.communication,
                "async",
                "islands come and go, and all others wait for nobody",
            ),
            (
                "max_staleness",
                self.max_staleness,
                None,
                "an island may be alone, and does not wait for others",
            ),
        )
        for name, value, allowed, reason in refused:
            if value != allowed:
                raise ValueError(
                    f"`{name}` must be {allowed!r} with `islands`, got {value!r}: "
                    f"{reason}"
                )

    def _check_combinations(self) -> None:
        if self.communication != "async":
            if self.transport == "links":
                raise ValueError(
                    '`transport` must be "gloo" with `communication='
                    f'"{self.communication}"`, got "links": rounds in which all take '
                    "part are collectives of a process group"
                )
            for name in ("wire_dtype", "link_budget", "max_staleness"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f'`{name}` applies to `communication="async"` alone, got '
                        f"{getattr(self, name)} with {self.communication!r}"
                    )
        if self.work_sharing and self.communication != "async":
            raise ValueError(
                '`work_sharing` applies to `communication="async"` alone, got '
                f"{self.communication!r}, where all learners make their steps together "
                "and so get equal shares"
            )
        if self.communication == "delay_by_one" and (
            self.effective_order == "step_then_average"
        ):
            raise ValueError(
                '`order` must be "average_then_step" with '
                '`communication="delay_by_one"`, whose average is joined before the '
                f"step, got {self.order!r}"
            )


def _check_one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {allowed}, got {value!r}")


def _check_positive(name: str, value: int | str | None) -> None:
    if isinstance(value, str):
        _check_one_of(name, value, ("node",))
    elif value is not None and value < 1:
        raise ValueError(f"`{name}` must be at least 1, got {value}")
