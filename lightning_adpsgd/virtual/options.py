"""The options of a simulated cluster, for `VirtualCluster` and the strategy."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypedDict, TypeVar

from lightning_adpsgd.dials import (
    Communication,
    Dials,
    WireDtype,
    as_dtype,
    as_mode,
    as_plain,
    check_positive,
)
from lightning_adpsgd.mixing.synchronous import Order
from lightning_adpsgd.topology.named import TopologyLike, find_topology
from lightning_adpsgd.virtual.clock import Compute, Link
from lightning_adpsgd.virtual.timeline import Scenario

_T = TypeVar("_T")


class ClusterOptions(TypedDict, total=False):
    """The keyword options of a simulated cluster, which `VirtualCluster` documents."""

    compute: Compute | None
    link: Link | None
    inner_link: Link | None
    seed: int
    order: Order | None
    mixing_gain: float
    gossip_every: int
    wire_dtype: WireDtype | None
    max_staleness: int | None


def dials_and_scenario(
    num_super_learners: int,
    super_learner_size: int,
    topology: TopologyLike,
    communication: Communication,
    *,
    compute: Compute | None = None,
    link: Link | None = None,
    inner_link: Link | None = None,
    wire_dtype: WireDtype | None = None,
    **dials: Any,
) -> tuple[Dials, Scenario]:
    """Checks all options, of averaging and super-learners; TypeError or ValueError."""
    if isinstance(super_learner_size, str | Sequence):
        raise ValueError(
            "`super_learner_size` must be one number in a virtual cluster, which has "
            f"no machines, got {super_learner_size!r}"
        )
    if wire_dtype == "auto":
        raise ValueError(
            '`wire_dtype` must name what travels in a virtual cluster, got "auto", '
            "which measures real links; leave it out, or name a dtype, such as "
            "`torch.int8`"
        )
    if others := [name for name in dials if name not in ClusterOptions.__annotations__]:
        raise TypeError(
            f"`{others[0]}` is not an option of a virtual cluster, got "
            f"{dials[others[0]]!r}; its options are "
            f"{', '.join(ClusterOptions.__annotations__)}"
        )
    num_super_learners = as_plain(num_super_learners)
    super_learner_size = as_plain(super_learner_size)
    mode = as_mode(communication)
    if isinstance(max_wait := as_plain(mode.get("max_wait")), int | float):
        check_positive("max_wait", max_wait)
    checked = Dials(
        topology=find_topology(topology),
        **mode,
        super_learner_size=super_learner_size,
        wire_dtype=as_dtype(wire_dtype),
        cpu_share=1.0,  # simulated exchanges take nothing from training
        timeout=timedelta.max,  # no bound on `max_wait`, which is in simulated seconds
        **dials,
    )
    scenario = Scenario(
        checked.topology,
        num_super_learners,
        super_learner_size,
        checked.mixing_gain,
        checked.gossip_every,
        _of_type("compute", compute, Compute(), "seconds=0.1"),
        _of_type("link", link, Link(), "bandwidth=1e8"),
        _of_type("inner_link", inner_link, Link(), "bandwidth=1e10"),
        checked.seed,
    )
    return checked, scenario


def _of_type(name: str, value: _T | None, default: _T, example: str) -> _T:
    if value is None:
        return default
    if not isinstance(value, type(default)):
        kind = type(default).__name__
        raise TypeError(
            f"`{name}` must be a `lightning_adpsgd.virtual.clock.{kind}`, got "
            f"{value!r}; for example `{kind}({example})`"
        )
    return value
