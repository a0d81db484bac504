"""Names are known by import in any order, at no cost; subprocesses start clean."""

import shutil
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from hashlib import sha256
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

import lightning_adpsgd
from lightning_adpsgd import HADPSGDFabricStrategy, HADPSGDStrategy, registration
from lightning_adpsgd import __main__ as command_line
from lightning_adpsgd.registration import NAMES
from lightning_adpsgd.strategy import doctor
from tests import warm
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
ROOT = Path(__file__).parents[1]
NAMES_MODULE = "lightning_adpsgd_names.py"
ENTRY_POINT = "lightning_adpsgd_names:install"
GUARDED = EntryPoint("lightning_adpsgd", ENTRY_POINT, "torch.backends")
LIGHTNING = "import lightning.pytorch as pl"
PACKAGE = "import lightning_adpsgd"


# Of a warm process: as if torch alone had been imported.
AS_NEW = """
import sys
own = "lightning", "lightning_fabric", "pytorch_lightning", "lightning_adpsgd"
is_own = lambda name: name.partition(".")[0] in own
sys.meta_path[:] = [finder for finder in sys.meta_path if not is_own(finder.__module__)]
for name in filter(is_own, list(sys.modules)):
    del sys.modules[name]
"""


def in_clean_process(program: str) -> str:
    """What a program prints; torch is there, and Lightning is yet to be imported."""
    return printed_by(warm.python(), AS_NEW + program)


def in_new_process(program: str, **environment: str) -> str:
    """What a program prints that begins with nothing."""
    return printed_by(sys.executable, program, **environment)


def printed_by(python: str, program: str, **environment: str) -> str:
    result = subprocess.run(
        [python, "-W", "ignore", "-c", program],
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


# --- a package that cannot be imported


def wheel(folder: Path) -> Path:
    """What an editable wheel of this clone puts into an environment."""
    clone, site = folder / "clone", folder / "site"
    (clone / "lightning_adpsgd").mkdir(parents=True)
    version = '__version__ = "7.8.9"\n'
    (clone / "lightning_adpsgd" / "__init__.py").write_text(version)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    shutil.copytree(ROOT / "installation", clone / "installation")
    site.mkdir()
    build = "import backend; print(backend.build_editable('../site'))"
    printed = subprocess.run(
        [sys.executable, "-c", build],
        cwd=clone,
        env={"PYTHONPATH": str(clone / "installation")},
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=True,
    )
    with zipfile.ZipFile(site / printed.stdout.split()[-1]) as archive:
        archive.extractall(site)
    shutil.rmtree(clone)
    return site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel(tmp_path_factory.mktemp("installed"))


def test_every_wheel_lists_the_module_that_torch_calls(site: Path) -> None:
    (record,) = site.glob("*.dist-info/RECORD")
    (row,) = (r for r in record.read_text().splitlines() if r.startswith(NAMES_MODULE))
    name, digest, size = row.split(",")
    content = (site / name).read_bytes()
    expected = urlsafe_b64encode(sha256(content).digest()).decode().rstrip("=")
    assert (digest, int(size)) == (f"sha256={expected}", len(content))
    points = points_of(site)
    assert points["torch.backends"].module == ENTRY_POINT.partition(":")[0]


def points_of(site: Path) -> dict[str, EntryPoint]:
    """The entry points of what is installed in a folder, by their groups."""
    (installed,) = distributions(path=[str(site)])
    return {point.group: point for point in installed.entry_points}


def test_the_package_and_its_wheel_have_one_version(site: Path) -> None:
    (installed,) = distributions(path=[str(site)])
    assert installed.version == "7.8.9"


def test_the_console_script_is_the_command_line(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = points_of(site)["console_scripts"]
    assert script.name == "lightning-adpsgd"
    with pytest.raises(SystemExit) as ended:
        script.load()(["--version"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said == f"lightning-adpsgd {lightning_adpsgd.__version__}\n"


LIKE_TORCH = """
from importlib.metadata import entry_points
for point in entry_points(group="torch.backends", name="lightning_adpsgd"):
    point.load()()
"""
MOVED = "import sys; sys.modules['lightning_adpsgd'] = None\n"
# The clone that this environment itself was installed from would be found as well.
ALONE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in f.__module__]
"""


def in_environment(site: Path, folder: Path, program: str, filters: str) -> str:
    """What a program says where the package is installed; it must end well."""
    ran = subprocess.run(
        [sys.executable, "-W", f"{filters}::RuntimeWarning", "-c", ALONE + program],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        cwd=folder,
        env={"PYTHONPATH": f"{folder}:{site}"},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


def test_torch_is_imported_though_the_clone_was_moved(
    site: Path, tmp_path: Path
) -> None:
    said = in_environment(site, tmp_path, f"{MOVED}import torch", "default")
    assert "RuntimeWarning: Lightning does not know the strategies of" in said
    assert "install it again" in said


@pytest.mark.parametrize(
    "content",
    ["def broken(:", "raise KeyError('broken')", "import sys; sys.exit(3)", ""],
    ids=["does not compile", "raises", "exits", "is empty"],
)
@pytest.mark.parametrize("filters", ["default", "error"])
def test_what_torch_calls_never_fails(
    site: Path, tmp_path: Path, content: str, filters: str
) -> None:
    (tmp_path / "lightning_adpsgd").mkdir()
    (tmp_path / "lightning_adpsgd" / "__init__.py").write_text(content)
    said = in_environment(site, tmp_path, LIKE_TORCH, filters)
    assert ("does not know the strategies of" in said) == (filters == "default")


# --- the doctor


def examined(monkeypatch: pytest.MonkeyPatch, **environment: str) -> Any:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return {finding.what: finding for finding in doctor.examine()}


def test_the_doctor_tells_what_is_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {*doctor.NAMES, "ddp"}
    monkeypatch.setattr(doctor, "_known_without_import", lambda: (known, ""))
    monkeypatch.setattr(doctor, "entry_points", lambda **_: [GUARDED])
    monkeypatch.setattr(doctor, "flawed_loader", lambda: "")  # as from torch 2.10 on
    assert command_line.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "names        known without an import: sdpsgd, adpsgd",
        f"torch        {torch.__version__}",
        "Lightning    2.",
        "Gloo         listens at ",
        "NCCL         ",
        "interfaces   lo 127.0.0.1/8",
    ):
        assert f"  {words}" in printed


def test_the_doctor_asks_a_process_that_has_imported_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And tells why the names are unknown there."""
    monkeypatch.chdir(tmp_path)
    found = examined(monkeypatch, TORCH_DEVICE_BACKEND_AUTOLOAD="0")["names"]
    assert "not known without an import: sdpsgd, adpsgd" in found.found
    if doctor.entry_points(group="torch.backends", name="lightning_adpsgd"):
        assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches it off" in found.remedy


def test_the_doctor_tells_an_absent_package_from_a_broken_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.setattr(doctor, "_known_without_import", lambda: (set(), "SyntaxError"))
    monkeypatch.setattr(doctor, "entry_points", lambda **_: [])
    assert "pip install" in examined(monkeypatch)["names"].remedy
    monkeypatch.setattr(doctor, "entry_points", lambda **_: [GUARDED])
    assert "SyntaxError; or write `import" in examined(monkeypatch)["names"].remedy


def test_the_doctor_warns_of_a_flawed_torch_and_of_interfaces_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_known_without_import", lambda: (set(), ""))
    monkeypatch.setattr(doctor, "flawed_loader", lambda: "CVE-2026-24747")
    found = examined(monkeypatch, GLOO_SOCKET_IFNAME="no_such0")
    assert "CVE" in found["torch"].remedy
    assert "no_such0" in found["Gloo"].found
    assert "interfaces below" in found["Gloo"].remedy


def test_an_import_costs_nothing() -> None:
    program = (
        f"import sys\n{PACKAGE}\nprint({{'torch', 'lightning'}} & set(sys.modules))"
    )
    assert in_new_process(program) == "set()"


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
        assert strategy.dials.communication == NAMES[name]["communication"]
        assert strategy.dials.topology.name == NAMES[name]["topology"]


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
