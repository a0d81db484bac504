"""The programs of docs/extending.md run, and what they define fits the package."""

from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_adpsgd import HADPSGDStrategy, VirtualCluster, dials
from lightning_adpsgd.gossip import wire
from lightning_adpsgd.gossip.codecs import Codec
from lightning_adpsgd.topology.named import TOPOLOGIES
from lightning_adpsgd.transport.base import PeerLost
from tests.helpers import engines_over, random_rows, running
from tests.pages.blocks import programs

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
TITLES = ("A topology", "A wire format", "A transport", "A stage")


@cache
def names_of(title: str) -> dict[str, Any]:
    """What the program of a section leaves."""
    if title == "A stage":
        pytest.importorskip("soundfile")  # the extra `asr`
    (program,) = programs(PAGE, title)
    names: dict[str, Any] = {"__name__": "program"}
    exec(program, names)
    return names


@pytest.mark.parametrize("title", TITLES)
def test_the_program_of_a_section_runs(title: str) -> None:
    names_of(title)


def test_the_topology_can_be_given_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = names_of("A topology")["ROUND_ROBIN"]
    monkeypatch.setitem(TOPOLOGIES, found.name, found)
    assert HADPSGDStrategy(topology="round_robin").dials.topology is found


def test_the_wire_format_can_be_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = names_of("A wire format")["FixedPoint"]
    monkeypatch.setattr(dials, "_WIRE_DTYPES", (*dials._WIRE_DTYPES, torch.int16))
    made: list[Codec] = []

    def make_codec(chosen: torch.dtype | None, dtype: torch.dtype) -> Codec:
        assert chosen == torch.int16
        made.append(codec())
        return made[-1]

    monkeypatch.setattr(wire, "make_codec", make_codec)
    cluster = VirtualCluster(
        torch.nn.Linear(4, 1),
        num_super_learners=4,
        wire_dtype=torch.int16,
        loss=lambda module, batch: module(batch[0]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    report = cluster.fit(data, max_samples=256, local_batch_size=8)
    assert made
    assert report.points[-1].loss < report.points[1].loss


def test_the_engine_runs_over_the_transport(tmp_path: Path) -> None:
    connect = names_of("A transport")["FolderTransport"]
    rows = random_rows(2)
    vectors = [row.clone() for row in rows]
    across = [connect(index, 2, tmp_path) for index in range(2)]
    gossips = engines_over(across, vectors, "ring", max_staleness=1)
    with running(gossips):
        for _ in range(3):
            for gossip in gossips:
                gossip.before_update()
                gossip.after_update()
    found = torch.stack(vectors)
    assert sum(gossip.statistics().exchanges for gossip in gossips) > 0
    torch.testing.assert_close(found.mean(0), rows.mean(0))
    assert (found[0] - found[1]).norm() < (rows[0] - rows[1]).norm()


def test_the_transport_names_a_peer_that_does_not_come(tmp_path: Path) -> None:
    transport = names_of("A transport")["FolderTransport"](0, 2, tmp_path)
    receipt = transport.post_receive(1, 0, torch.empty(3))
    with pytest.raises(PeerLost, match="lost super-learner 1 while receiving from it"):
        receipt.wait(timedelta(milliseconds=1))
