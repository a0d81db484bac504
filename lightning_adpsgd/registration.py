"""Makes the strategies known to Lightning by name, in any order of imports.

`install` hooks the imports of Lightning's two registries, the Trainer's and Fabric's,
under both of its import names, and registers the strategies in each as soon as it
exists. It runs when this package is imported, and also when torch is imported, through
`installation/lightning_adpsgd_names.py`, an entry point of the group `torch.backends`.
So `Trainer(strategy="hadpsgd")` needs no import of this package.
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns the entry point off.

Because this module is loaded in the middle of torch's own import, it and its imports
use only the standard library, and it never raises.
"""

import sys
import warnings
from contextlib import suppress
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from lightning_adpsgd.import_names import ROOTS, import_names, refusal
from lightning_adpsgd.strategy.names import NAMES

# Only the Trainer has this name. It has no launcher, because it runs in one process.
VIRTUAL = "hadpsgd_virtual"
_LAUNCHERS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


def install() -> None:
    """Registers the names now, or when Lightning is imported; may be called again."""
    try:
        import_names()
        for name in _REGISTRIES:
            if name in sys.modules:
                _register(sys.modules[name])
            elif not any(getattr(f, "registry", "") == name for f in sys.meta_path):
                sys.meta_path.insert(0, _RegistryFinder(name))
    except Exception as error:
        _warn(error)


def _warn(error: Exception) -> None:
    with suppress(Exception):  # warnings may be made errors
        warnings.warn(f"lightning_adpsgd did not register: {error}", stacklevel=3)


def _register(module: ModuleType) -> None:
    attribute, kind = _REGISTRIES[module.__name__]
    registry = getattr(module, attribute, None)
    if registry is None:  # still being imported; the loader registers later
        return
    root = ROOTS[module.__name__.partition(".")[0]]
    chosen = import_names().chosen
    if chosen not in (None, root) and attribute == _FABRIC[0]:  # the Trainer needs it
        warnings.warn(refusal(chosen, root), stacklevel=2)
    for name, dials in NAMES.items():
        for suffix, start_method in _LAUNCHERS.items():
            if name + suffix not in registry:
                registry.register(
                    name + suffix,
                    partial(_make, root, kind),
                    description=f"{name} of lightning_adpsgd, by {start_method}",
                    start_method=start_method,
                    **dials,
                )
    if attribute == _TRAINER[0] and VIRTUAL not in registry:
        registry.register(
            VIRTUAL,
            partial(_make, root, "virtual.strategy:VirtualHADPSGDStrategy"),
            description="hadpsgd of lightning_adpsgd, simulated on one device",
        )


def _make(root: str, kind: str, **dials: Any) -> Any:
    import_names().choose(root)
    return resolve_name(f"lightning_adpsgd.{kind}")(**dials)


# The name of a registry in its module, and the class of which its strategies are made.
_TRAINER = ("StrategyRegistry", "strategy.trainer:HADPSGDStrategy")
_FABRIC = ("STRATEGY_REGISTRY", "strategy.fabric:HADPSGDFabricStrategy")
_REGISTRIES = {
    "lightning.pytorch.strategies": _TRAINER,
    "lightning.fabric.strategies": _FABRIC,
    "pytorch_lightning.strategies": _TRAINER,
    "lightning_fabric.strategies": _FABRIC,
}


class _RegistryFinder(MetaPathFinder):
    def __init__(self, registry: str) -> None:
        self.registry = registry

    def find_spec(self, fullname: str, *_: Any, **__: Any) -> ModuleSpec | None:
        if fullname != self.registry or self not in sys.meta_path:
            return None
        # It is needed once, and without it the search below cannot come back here.
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            _register(module)
        except Exception as error:
            _warn(error)
