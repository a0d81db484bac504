"""Two import names of Lightning, one strategy; subprocesses start clean."""

import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from lightning_adpsgd import import_names
from tests.test_registration import in_clean_process

# Not imported here: each worker would hold all of Lightning twice.
pytestmark = pytest.mark.skipif(
    find_spec("pytorch_lightning") is None, reason="needs both import names"
)
# It trains with the class, and makes the strategies that have a name.
PROGRAM = """
import sys
import torch
{imports}
class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
    def training_step(self, batch, batch_idx):
        return (batch @ self.weight).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
quiet = dict.fromkeys(("progress_bar", "model_summary", "checkpointing"), False)
quiet = {{"enable_" + name: value for name, value in quiet.items()}}
one = dict(accelerator="cpu", devices=1)
trainer = pl.Trainer(
    strategy=HADPSGDStrategy(), callbacks=[GossipMonitor()], max_epochs=1,
    logger=False, **one, **quiet,
)
trainer.fit(Line(), torch.utils.data.DataLoader(torch.ones(4, 3)))
assert trainer.global_step == 4
named = pl.Trainer(strategy="adpsgd", logger=False, **one)
assert isinstance(named.strategy, HADPSGDStrategy)
kind = type(Fabric(strategy="hadpsgd", **one).strategy)
assert kind.__name__ == "HADPSGDFabricStrategy"
print({other!r} in sys.modules)
"""
OURS = """
from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.callbacks import GossipMonitor
"""


@pytest.mark.parametrize(
    ("before", "after", "other"),
    [
        (
            "import lightning.pytorch as pl\nfrom lightning.fabric import Fabric",
            "",
            "pytorch_lightning",
        ),
        (
            "",
            "import pytorch_lightning as pl\nfrom lightning_fabric import Fabric",
            "lightning",
        ),
    ],
    ids=["lightning", "pytorch_lightning"],
)
def test_classes_and_names_work_under_either_import_name(
    before: str, after: str, other: str
) -> None:
    """In the order in which imports are sorted; and the other is not imported."""
    imports = f"{before}\n{OURS}\n{after}"
    assert in_clean_process(PROGRAM.format(imports=imports, other=other)) == "False"


LATE = """
import warnings
from lightning_adpsgd import HADPSGDStrategy
warnings.showwarning = lambda *warning: print("warning:", warning[0])
warnings.simplefilter("always")
exec("import pytorch_lightning as other")
try:
    other.Trainer(strategy="adpsgd", accelerator="cpu", devices=1, logger=False)
except ImportError as error:
    print("error:", error)
"""


def test_a_program_with_both_is_told_which_one_is_in_use() -> None:
    """At the import, and not by what Lightning says of a strategy that it rejects."""
    said = in_clean_process(LATE).splitlines()
    for kind in ("warning", "error"):
        (line,) = (line for line in said if line.startswith(f"{kind}: lightning_adp"))
        assert "uses `lightning` in this process" in line
        assert "do not fit a Trainer or Fabric of `pytorch_lightning`" in line


BOTH = ("lightning", "pytorch_lightning")


@pytest.mark.parametrize("told", [True, False], ids=["both", "one"])
def test_a_program_that_has_imported_both_is_told_which_one_is_used(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning's own message would only say that the strategy's name is invalid."""
    monkeypatch.setattr(import_names, "_named_by_the_importer", lambda: iter(BOTH))
    monkeypatch.delitem(sys.modules, BOTH[1], raising=False)
    if told:
        monkeypatch.setitem(sys.modules, BOTH[1], ModuleType(BOTH[1]))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert import_names.ImportNames().choose() == "lightning"
    assert ["do not fit a Trainer" in str(one.message) for one in said] == [True] * told


# --- how modules are renamed


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("lightning", "pytorch_lightning"),
        ("lightning.pytorch", "pytorch_lightning"),
        ("lightning.pytorch.callbacks.timer", "pytorch_lightning.callbacks.timer"),
        ("lightning.fabric.plugins", "lightning_fabric.plugins"),
        ("lightning_utilities.core", "lightning_utilities.core"),
        ("lightning_adpsgd.dials", "lightning_adpsgd.dials"),
        ("torch", "torch"),
    ],
)
def test_a_module_has_its_other_name(module: str, expected: str) -> None:
    assert import_names._renamed(module) == expected


def test_no_module_says_lightning_in_a_way_that_is_not_renamed() -> None:
    """`import lightning.pytorch` without `as` would leave its name in the code."""
    for path in Path(str(import_names.__file__)).parent.rglob("*.py"):
        for line in path.read_text("utf-8").splitlines():
            words = line.split()
            if words[:1] == ["import"] and words[1].partition(".")[0] == "lightning":
                assert words[2:3] == ["as"], f"{path}: {line}"


def test_without_lightning_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(import_names, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="`pip install lightning`"):
        import_names._installed()
