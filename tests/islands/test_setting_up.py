"""What `islands=` means and refuses, and where a Trainer goes on that has joined."""

import signal
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging

from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.__main__ import main
from lightning_adpsgd.gossip.protocol import Position
from lightning_adpsgd.islands import rendezvous
from lightning_adpsgd.islands.rendezvous import ENVIRONMENT_VARIABLE, RendezvousAddress
from lightning_adpsgd.strategy.compatibility import check_island
from lightning_adpsgd.strategy.fast_forward import batch_size, catch_up
from tests.helpers import free_port
from tests.learners import Linear, loader

URL = "tcp://10.0.0.1:29400/my-job"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("tcp://10.0.0.1:29400", RendezvousAddress("10.0.0.1", 29400, "job")),
        (URL, RendezvousAddress("10.0.0.1", 29400, "my-job")),
        ("tcp://[fe80::1]:1/a", RendezvousAddress("fe80::1", 1, "a")),
        (f"tcp://a:65535/{64 * 'b'}", RendezvousAddress("a", 65535, 64 * "b")),
    ],
)
def test_a_rendezvous_is_a_url(url: str, address: RendezvousAddress) -> None:
    assert RendezvousAddress.parse(url) == address
    assert RendezvousAddress.parse(str(address)) == address


@pytest.mark.parametrize(
    "url",
    [
        *("", "10.0.0.1:1", "tcp://:1", "tcp://a", "tcp://a:x", "tcp://a:1/b/c"),
        *("tcp://a:0", "tcp://a:65536", "http://a:1", "tcp://me@a:1"),
        *("tcp://a:1?b=c", "tcp://a:1/b?c", "tcp://a:1#b", f"tcp://a:1/{65 * 'b'}"),
    ],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="`islands` must be tcp://host:port"):
        RendezvousAddress.parse(url)


@pytest.mark.parametrize("port", ["0", "70000", "-1", "x"])
def test_a_port_of_no_rendezvous_is_refused(
    port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["rendezvous", f"--port={port}"])
    assert f"a port is from 1 to 65535, got '{port}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"communication": "sync"}, "`communication` must be 'async' with `islands`"),
        ({"max_staleness": 3}, "`max_staleness` must be None with `islands`, got 3"),
        ({"topology": "hypercube"}, "`topology` must exist for any number"),
        ({"islands": "http://a:1"}, "`islands` must be tcp://host:port"),
    ],
)
def test_what_does_not_go_with_islands_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        HADPSGDStrategy(**{"islands": URL, **arguments})


def test_the_environment_stands_for_the_argument_and_does_not_beat_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert HADPSGDStrategy().dials.islands is None
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, URL)
    assert HADPSGDStrategy().dials.islands == URL
    other = "tcp://b:2"
    assert HADPSGDStrategy(islands=other).dials.islands == other


def test_an_island_is_one_super_learner() -> None:
    check_island(2, 2)
    check_island("node", 3)
    with pytest.raises(ValueError, match=r"must be \"node\" .* 4 learners, got 2"):
        check_island(2, 4)
    check_island((2, 4), 4)
    with pytest.raises(ValueError, match=r"has 3 learners, got \(2, 4\)"):
        check_island((2, 4), 3)


class KeepsAnAverage(pl.Callback):
    """As `WeightAveraging` does, which Lightning has since 2.6."""

    _average_model = None


@pytest.mark.parametrize(
    "callback",
    [
        StochasticWeightAveraging(0.1),
        KeepsAnAverage(),
        ModelPruning("l1_unstructured", parameter_names=["weight"]),
    ],
    ids=["SWA", "EMA", "pruning"],
)
def test_an_average_or_mask_that_one_island_would_keep_is_refused(
    tmp_path: Path, callback: pl.Callback
) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=HADPSGDStrategy(islands=URL),
        callbacks=[callback],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    with pytest.raises(ValueError, match=r"`\w+` cannot be used with `islands`"):
        trainer.fit(Linear(), loader(4))


def trainer_of(folder: Path, steps: int, **arguments: Any) -> Any:
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        max_steps=steps,
        **arguments,
    )


def trainer_with(
    interval: str, folder: Path, steps: int, of: type[Linear] = Linear, **arguments: Any
) -> Any:
    """A Trainer, ended, whose schedule halves the learning rate."""

    class Scheduled(of):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 1.0)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": interval}]

    trainer = trainer_of(folder, steps, **arguments)
    trainer.fit(Scheduled(), loader(4))
    return trainer


class JoinAt(pl.Callback):
    """Begins where others are."""

    def __init__(self, position: Position) -> None:
        self._position = position

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        catch_up(trainer, self._position)


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_joiner_ends_where_one_ends_that_began_at_the_beginning(
    tmp_path: Path, interval: str
) -> None:
    whole = trainer_with(interval, tmp_path, 12)
    joined = trainer_with(interval, tmp_path, 12, callbacks=[JoinAt(Position(8, 0, 2))])
    assert joined.global_step == whole.global_step == 12
    assert joined.current_epoch == whole.current_epoch == 3
    rates = [t.optimizers[0].param_groups[0]["lr"] for t in (whole, joined)]
    assert rates[0] == rates[1] == 0.5 ** (12 if interval == "step" else 3)


def test_a_joiner_that_has_made_more_steps_still_comes_to_the_epoch_of_the_others(
    tmp_path: Path,
) -> None:
    """As among islands that share epochs where the others accumulate more batches."""
    for interval in ("step", "epoch"):
        trainer = trainer_with(interval, tmp_path, 8)
        catch_up(trainer, Position(3, 0, 6))
        assert (trainer.global_step, trainer.current_epoch) == (8, 6)
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        assert rate == 0.5 ** (8 if interval == "step" else 6)


class Manual(Linear):
    """Halves its learning rate with each step, and says so or not."""

    def __init__(self, interval: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._interval = interval

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        schedule: Any = self.lr_schedulers()
        schedule.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": self._interval}]


def test_a_joiner_with_manual_optimization_goes_by_the_interval_that_it_says(
    tmp_path: Path,
) -> None:
    trainer = trainer_of(tmp_path, 12, callbacks=[JoinAt(Position(8, 0, 2))])
    trainer.fit(Manual("step"), loader(4))
    assert trainer.global_step == 12
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5**12


def test_a_joiner_steps_schedules_as_its_module_does(tmp_path: Path) -> None:
    class Quarters(Linear):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()
            scheduler.step()

    trainer = trainer_with("epoch", tmp_path, 4, of=Quarters)
    catch_up(trainer, Position(12, 0, 3))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25**3


def test_a_schedule_of_every_second_epoch_counts_those_before(tmp_path: Path) -> None:
    trainer = trainer_with("epoch", tmp_path, 4)
    trainer.lr_scheduler_configs[0].frequency = 2
    for epochs, expected in ((2, 1), (3, 1), (4, 2), (7, 3)):
        catch_up(trainer, Position(4, 0, epochs))
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        assert rate == 0.5 ** (1 + expected)  # and once at the end of the first


def test_who_is_further_than_the_others_stays_there(tmp_path: Path) -> None:
    trainer = trainer_with("step", tmp_path, 5)
    catch_up(trainer, Position(3, 0, 7))
    assert (trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"]) == (
        5,
        0.5**5,
    )


def test_a_batch_that_cannot_be_counted_counts_nothing() -> None:
    assert batch_size(torch.zeros(3, 2)) == 3
    assert batch_size("") in (0, 1)
    assert batch_size(object()) == 0


def test_a_port_that_is_taken_is_an_error_that_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["rendezvous", "--port", port, "--host", "127.0.0.1"]) == 2
    said = capsys.readouterr()
    assert "in use" in said.err
    assert "rendezvous at" not in said.out


def test_a_host_without_an_address_is_named_with_its_argument(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = Mock(side_effect=socket.gaierror(-2, "Name or service not known"))
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(["rendezvous", "--port", "29400", "--host", "nosuch"]) == 2
    told = "`--host` must be a name or an address of this machine, got 'nosuch': Name"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "found", "place", "warns"),
    [
        ("", "127.0.1.1", "*", False),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", False),
        ("localhost", "127.0.0.1", "127.0.0.1", False),
        ("a-name", "127.0.1.1", "127.0.1.1", True),
        ("::1", "::1", "[::1]", False),
    ],
)
def test_it_says_where_it_listens_and_that_no_other_host_reaches_it_there(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    host: str,
    found: str,
    place: str,
    warns: bool,
) -> None:
    """Debian gives a host's own name a loopback address."""
    family = socket.AF_INET6 if ":" in found else socket.AF_INET
    kind = family, socket.SOCK_STREAM, 6, ""
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda _, port, **named: [(*kind, (found, port))]
    )
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(rendezvous, "serve", partial(_served_at_once, rendezvous.serve))
    port = str(free_port())
    assert main(["rendezvous", "--port", port, "--host", host]) == 0
    said = capsys.readouterr().out
    assert f"rendezvous at {place}:{port}\n" in said
    trap = f"! 'a-name' is {found} on this host, a loopback address, which no other"
    assert (trap in said) is warns


def _served_at_once(
    serve: Any, host: str, port: int, stop: threading.Event, **named: Any
) -> None:
    stop.set()
    serve(host, port, stop, **named)
