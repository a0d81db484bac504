"""What an installed wheel must do, whatever else is in the environment."""

import sys
from importlib.metadata import distribution, entry_points
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.fabric import Fabric

import lightning_adpsgd
from lightning_adpsgd import __main__ as command_line
from tests.matrix import CELLS, Cell, interpreter_of, main, renamed

POINTS = entry_points(group="torch.backends", name="lightning_adpsgd")
IS_INSTALLED = "lightning_adpsgd_names:install" in [point.value for point in POINTS]


@pytest.mark.skipif(not IS_INSTALLED, reason="no wheel of this version")
def test_the_doctor_finds_the_names_and_nothing_amiss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an interpreter that it starts, away from the clone."""
    monkeypatch.chdir(tmp_path)
    command_line.main(["doctor"])
    said = capsys.readouterr().out
    amiss = [line for line in said.splitlines() if line.startswith("!")]
    # A torch before 2.10 loads checkpoints that run code: of that it warns.
    assert [line for line in amiss if "torch" not in line] == [], said
    assert "known without an import: sdpsgd, adpsgd" in said


def test_names_make_the_strategies_of_this_lightning() -> None:
    trainer = pl.Trainer(strategy="adpsgd", accelerator="cpu", devices=1, logger=False)
    assert isinstance(trainer.strategy, lightning_adpsgd.HADPSGDStrategy)
    fabric = Fabric(strategy="hadpsgd", accelerator="cpu", devices=1)
    assert isinstance(fabric.strategy, lightning_adpsgd.HADPSGDFabricStrategy)


def test_the_metadata_name_what_the_core_needs() -> None:
    needs = distribution("lightning-adpsgd").requires or []
    core = {one.partition(">")[0].partition("<")[0] for one in needs if ";" not in one}
    assert {name.partition("!")[0] for name in core} == {
        "lightning",
        "torch",
        "xxhash",
    }


# --- the matrix itself


def test_tests_are_rewritten_for_the_other_import_name() -> None:
    text = "import lightning.pytorch as pl\nfrom lightning.fabric import Fabric\n"
    text += "import lightning as L\nimport lightning\nimport lightning_adpsgd\n"
    assert renamed(text).splitlines() == [
        "import " + "pytorch_lightning as pl",
        "from " + "lightning_fabric import Fabric",
        "import " + "pytorch_lightning as L",
        "import " + "pytorch_lightning",
        "import lightning_adpsgd",
    ]


def test_an_unknown_cell_is_refused_with_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["python-2.7"])
    assert "CELL must be one of floor, " in capsys.readouterr().err


def test_a_cell_whose_interpreter_is_absent_has_none() -> None:
    assert interpreter_of(Cell(python="3.99")) is None
    assert interpreter_of(Cell()) == sys.executable


def test_no_cell_installs_a_malicious_release() -> None:
    needs = [need for cell in CELLS.values() for need in cell.needs]
    pinned = [need for need in needs if "==" in need]
    assert needs == pinned
    assert not [need for need in needs if need.endswith(("==2.6.2", "==2.6.3"))]
