"""Names are known by import in any order, at no cost; subprocesses start clean."""

import subprocess
import sys
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

import pytest

import lightning_adpsgd
from lightning_adpsgd import HADPSGDFabricStrategy, HADPSGDStrategy, registration
from lightning_adpsgd.registration import NAMES
from tests.helpers import PROGRAM_S

TRAINER = """
import lightning.pytorch as pl
trainer = pl.Trainer(strategy={name!r}, accelerator="cpu", devices=2, logger=False)
assert type(trainer.strategy).__name__ == "HADPSGDStrategy"
"""
FABRIC = """
from lightning.fabric import Fabric
fabric = Fabric(strategy={name!r}, accelerator="cpu", devices=2)
assert type(fabric.strategy).__name__ == "HADPSGDFabricStrategy"
"""
LIGHTNING = "import lightning.pytorch as pl"
PACKAGE = "import lightning_adpsgd"


def in_clean_process(program: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize(
    "imports",
    [PACKAGE, f"{LIGHTNING}\n{PACKAGE}", f"import lightning.fabric\n{PACKAGE}"],
    ids=["before lightning", "after lightning", "after fabric"],
)
def test_an_import_in_any_order_makes_the_names_known(imports: str) -> None:
    """To Fabric first and then to the Trainer."""
    programs = [FABRIC.format(name="hadpsgd"), TRAINER.format(name="hadpsgd")]
    in_clean_process("\n".join([imports, *programs]))


def test_the_registry_of_the_trainer_can_come_first() -> None:
    programs = [TRAINER.format(name="sdpsgd"), FABRIC.format(name="sdpsgd")]
    in_clean_process("\n".join([PACKAGE, *programs]))


def test_an_installed_package_makes_the_names_known_without_an_import() -> None:
    """Torch calls the entry point in the middle of its own import."""
    if not entry_points(group="torch.backends", name=PACKAGE.split()[1]):
        pytest.skip("the package is not installed")
    programs = [make.format(name="adpsgd_random") for make in (TRAINER, FABRIC)]
    in_clean_process("\n".join(programs), TORCH_DEVICE_BACKEND_AUTOLOAD="1")


def test_an_import_costs_nothing() -> None:
    program = (
        f"import sys\n{PACKAGE}\nprint({{'torch', 'lightning'}} & set(sys.modules))"
    )
    assert in_clean_process(program) == "set()"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("registry", "kind"),
    [
        ("lightning.pytorch.strategies.StrategyRegistry", HADPSGDStrategy),
        ("lightning.fabric.strategies.STRATEGY_REGISTRY", HADPSGDFabricStrategy),
    ],
    ids=["trainer", "fabric"],
)
def test_every_name_has_its_launchers_and_dials(
    name: str, registry: str, kind: Any
) -> None:
    for suffix, start_method in (
        ("", "popen"),
        ("_spawn", "spawn"),
        ("_fork", "fork"),
        ("_notebook", "fork"),
    ):
        strategy = resolve_name(registry).get(name + suffix)
        assert isinstance(strategy, kind)
        assert strategy._start_method == start_method
        assert strategy._dials.communication == NAMES[name]["communication"]
        assert strategy._dials.topology.name == NAMES[name]["topology"]


def test_the_names_are_the_settings_of_the_papers() -> None:
    dials = {
        name: (d["topology"], d["communication"], d["super_learner_size"])
        for name, d in NAMES.items()
    }
    assert dials == {
        "sdpsgd": ("ring", "sync", 1),
        "adpsgd": ("ring", "async", 1),
        "adpsgd_random": ("random_ring", "async", 1),
        "d1psgd": ("complete", "delay_by_one", 1),
        "rdpsgd": ("complete", "ready_pairs", 1),
        "hadpsgd": ("ring", "async", "node"),
    }


def test_installing_twice_changes_nothing() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    before = dict(StrategyRegistry)
    finders = list(sys.meta_path)
    registration.install()
    registration.install()
    assert dict(StrategyRegistry) == before
    assert sys.meta_path == finders


def test_an_error_in_the_entry_point_becomes_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Raised, it would break every `import torch` on the machine."""

    def fail(module: object) -> None:
        raise KeyError("no registry")

    monkeypatch.setattr(registration, "_register", fail)
    with pytest.warns(UserWarning, match="did not register.*no registry"):
        registration.install()


def test_an_error_while_lightning_is_imported_becomes_a_warning() -> None:
    program = (
        "import lightning_adpsgd.registration as r\n"
        "r.NAMES['broken'] = 3\n"
        f"{LIGHTNING}\n"
        "print(pl.Trainer.__name__)"
    )
    assert in_clean_process(program) == "Trainer"


def test_the_public_names_can_be_imported_and_others_not() -> None:
    assert lightning_adpsgd.HADPSGDStrategy is HADPSGDStrategy
    for name in lightning_adpsgd.__all__:
        assert getattr(lightning_adpsgd, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'HadpsgdStrategy'"):
        lightning_adpsgd.HadpsgdStrategy  # noqa: B018
