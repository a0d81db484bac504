"""The house: floors, public names, what committed files must not name."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_adpsgd

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_adpsgd"
NAME = "lightning_adpsgd"

# From the ground up: a module imports only those before it.
CORE = (
    "files",
    "plain",
    "matrices",
    "shares",
    "given",
    "topology",
    "streams",
    "parameters",
    "ties",
    "transport",
    "links",
    "replica",
    "background",
    "node",
    "coordination",
    "sickness",
    "shuffling",
    "portions",
    "sampling",
    "mixing",
    "circle",
    "gossip",
    "consensus",
    "interfaces",
    "islands",
    "dials",
    "groups",
    "failures",
    "startup",
    "job",
    "work_sharing",
    "catching_up",
    "checkpoints",
    "trainer",
    "fresh",
    "strategy",
    "fabric",
    "virtual",
    "runs",
    "loggers",
    "callbacks",
    "prediction",
    "calibration",
    "__main__",
)
# The same within packages.
WITHIN = {
    "links": (
        "sockets",
        "frames",
        "facts",
        "credentials",
        "handshake",
        "connection",
        "listener",
        "transport",
        "__init__",
    ),
    "mixing": (
        "schedule",
        "statistics",
        "communication",
        "averages",
        "rounds",
        "synchronous",
        "__init__",
    ),
    "gossip": (
        "wire",
        "messages",
        "pacing",
        "protocol",
        "disagreement",
        "exchange",
        "health",
        "account",
        "merging",
        "traffic",
        "threads",
        "asking",
        "answering",
        "recovery",
        "engine",
        "__init__",
    ),
    "islands": (
        "errands",
        "rendezvous",
        "membership",
        "following",
        "ledger",
        "holding",
        "pool",
        "batches",
        "edges",
        "mean",
        "island",
        "__init__",
    ),
    "startup": (
        "reachability",
        "rollcall",
        "linking",
        "introductions",
        "checks",
        "__init__",
    ),
    "checkpoints": (
        "format",
        "io",
        "saving",
        "last_good",
        "generators",
        "places",
        "__init__",
    ),
    "trainer": (
        "compatibility",
        "signals",
        "agreement",
        "clocks",
        "averages",
        "pruning",
        "__init__",
    ),
    "callbacks": (
        "reporting",
        "clock",
        "progress",
        "curve",
        "allreduce",
        "gossip",
        "algorithms",
        "convergence",
        "probe",
        "consensus",
        "within_epoch",
        "__init__",
    ),
    "virtual": (
        "clock",
        "timeline",
        "rows",
        "row_rounds",
        "row_exchanges",
        "learners",
        "objective",
        "learner_data",
        "report",
        "gradients",
        "cluster",
        "strategy",
        "__init__",
    ),
}
BESIDE = ("registration", "__init__")
# And within packages of the speech tower.
WITHIN_ASR = {
    "corpora": (
        "acronyms",
        "corpus",
        "discs",
        "turns",
        "fisher",
        "hub5",
        "librispeech",
        "transcripts",
        "callhome",
        "sources",
        "__init__",
    ),
    "sound": (
        "segments",
        "byte_order",
        "sphere",
        "channels",
        "features",
        "audio",
        "noise",
        "speeds",
        "__init__",
    ),
    "language": (
        "arpa",
        "dictionary_repairs",
        "lexicon",
        "ngram",
        "pruning",
        "__init__",
    ),
    "frames": (
        "cepstra",
        "lda",
        "mllt",
        "front_end",
        "shards",
        "readahead",
        "store",
        "augmentation",
        "streams",
        "data",
        "__init__",
    ),
    "hmm": (
        "gmm",
        "tree",
        "clustering",
        "states",
        "contexts",
        "growing",
        "__init__",
    ),
    "search": (
        "arcs",
        "nbest",
        "graphs",
        "alignment",
        "decoding",
        "rescoring",
        "__init__",
    ),
    "speakers": (
        "fmllr",
        "ubm",
        "ivectors",
        "adaptation",
        "__init__",
    ),
    "scoring": (
        "errors",
        "glm",
        "filters",
        "words",
        "aligner",
        "segments",
        "scorer",
        "utterances",
        "reports",
        "nist",
        "__init__",
    ),
    "kaldi": (
        "errors",
        "parsing",
        "model",
        "archives",
        "alignments",
        "graph",
        "language",
        "decoding",
        "export",
        "experiment",
        "__init__",
    ),
}
# A module of the first kinds imports none of the later ones.
ASR_TOWER = ("scoring", "frames", "search", "model")
SPEECH_LIBRARIES = {
    "espeakng_loader",
    "kaldi_decoder",
    "kaldi_native_io",
    "kaldifst",
    "kaldilm",
    "matplotlib",
    "numpy",
    "soundfile",
    "torchaudio",
    "tqdm",
}


def core_modules() -> list[str]:
    packages = [path.parent for path in PACKAGE.glob("*/__init__.py")]
    paths = [*PACKAGE.glob("*.py"), *packages]
    return sorted(path.stem for path in paths if path.name != "asr")


def core_files() -> list[Path]:
    within = (path for name in WITHIN for path in (PACKAGE / name).glob("*.py"))
    return sorted([*PACKAGE.glob("*.py"), *within])


def files_of(module: str) -> list[Path]:
    """A module's file, or all files of a package."""
    file = PACKAGE / f"{module}.py"
    return [file] if file.exists() else sorted((PACKAGE / module).glob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path: Path, prefix: str = NAME) -> set[str]:
    """Names of this package's modules that a file imports."""
    starts = (name.removeprefix(prefix + ".") for name in imports(path))
    folder = PACKAGE.joinpath(*prefix.split(".")[1:])
    known = {p.stem for p in folder.iterdir() if p.suffix in (".py", "")}
    return {name.partition(".")[0] for name in starts} & known


def test_every_core_module_has_a_floor() -> None:
    assert set(core_modules()) <= {*CORE, *BESIDE}


@pytest.mark.parametrize("module", core_modules())
def test_a_module_imports_only_those_below_it(module: str) -> None:
    if module in BESIDE:
        # Loaded while torch itself is being imported: what it needs, it needs lazily.
        allowed = {
            "registration",
            "strategy",
            "fabric",
            "topology",
            "virtual",
        }
    else:
        allowed = {*CORE[: CORE.index(module)], "registration"}
    for path in files_of(module):
        assert own_imports(path) - {module} <= allowed


@pytest.mark.parametrize("package", WITHIN)
def test_a_package_has_floors_of_its_own(package: str) -> None:
    floors = WITHIN[package]
    files = files_of(package)
    assert {path.stem for path in files} == set(floors)
    for path in files:
        below = {*floors[: floors.index(path.stem)]}
        assert own_imports(path, f"{NAME}.{package}") <= below, path.stem


@pytest.mark.parametrize("package", WITHIN_ASR)
def test_a_package_of_the_tower_has_floors_of_its_own(package: str) -> None:
    floors = WITHIN_ASR[package]
    files = files_of(f"asr/{package}")
    assert {path.stem for path in files} == set(floors)
    for path in files:
        below = {*floors[: floors.index(path.stem)]}
        assert own_imports(path, f"{NAME}.asr.{package}") <= below, path.stem


@pytest.mark.parametrize(
    "path", core_files(), ids=lambda path: "/".join(path.parts[-2:])
)
def test_the_core_needs_no_speech_library(path: Path) -> None:
    roots = {name.partition(".")[0] for name in imports(path)}
    assert not roots & SPEECH_LIBRARIES
    assert "asr" not in own_imports(path)


def test_the_engine_knows_nothing_of_lightning() -> None:
    engine = CORE[: CORE.index("dials")]
    for path in (path for module in engine for path in files_of(module)):
        roots = {name.partition(".")[0] for name in imports(path)}
        assert "lightning" not in roots, path


def test_scoring_and_search_know_no_model_and_frames_no_search() -> None:
    for place, module in enumerate(ASR_TOWER):
        for path in files_of(f"asr/{module}"):
            above = set(ASR_TOWER[place + 1 :])
            assert not own_imports(path, f"{NAME}.asr") & above, module


def test_the_tower_of_speech_has_no_circles() -> None:
    graph: dict[str, set[str]] = {}
    for path in (PACKAGE / "asr").rglob("*.py"):
        module = path.relative_to(PACKAGE / "asr").parts[0].removesuffix(".py")
        needs = own_imports(path, f"{NAME}.asr") - {module, "__init__"}
        graph[module] = graph.get(module, set()) | needs
    del graph["__init__"]
    while graph:
        ground = {module for module, needs in graph.items() if not needs & set(graph)}
        assert ground, f"modules import one another: {sorted(graph)}"
        graph = {module: graph[module] for module in set(graph) - ground}


def test_public_names_are_these() -> None:
    assert sorted(lightning_adpsgd.__all__) == [
        "HADPSGDFabricStrategy",
        "HADPSGDStrategy",
        "Topology",
        "VirtualCluster",
        "__version__",
    ]
    assert (PACKAGE / "py.typed").exists()


def committed_text_files() -> Iterator[Path]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and b"\0" not in path.read_bytes()[:1024]:
            yield path


def test_no_committed_file_names_a_registry_or_a_machine() -> None:
    """Locks and settings must serve whatever index the reader's machine uses."""
    pattern = re.compile(
        r"(index-url|trusted-host|find-links)"
        r"|https?://[^\s\"'<>)]*(pypi|pythonhosted|simple/|/artifact)"
        r"|https?://(\d{1,3}\.){3}\d"
        r"|/(root|home)/\w",
        re.IGNORECASE,
    )
    this = Path(__file__).resolve()
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in committed_text_files()
        if path.resolve() != this
        for number, line in enumerate(path.read_text("utf-8", "replace").split("\n"), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_no_module_delays_its_annotations() -> None:
    """`from __future__ import annotations` would switch the shape checks off."""
    for path in PACKAGE.rglob("*.py"):
        assert "__future__" not in set(imports(path)), path


# Whoever can write to a socket or a file must not be able to run code here.
UNPICKLING = re.compile(
    r"(pickle|dill|cloudpickle|marshal|shelve)\.(loads?|open|Unpickler)$"
    r"|gather_object$|_object_list$|^torch\.load$"
)
# What they read is restricted by `weights_only`, unless a caller has said otherwise.
LOADERS = (
    "strategy/checkpoints/format.py",
    "lightning_adpsgd/coordination/gather.py",
    "asr/recogniser.py",
)


def test_nothing_unpickles_what_comes_from_a_network_or_a_file() -> None:
    for path in PACKAGE.rglob("*.py"):
        calls = (
            node
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and UNPICKLING.search(ast.unparse(node.func))
        )
        for call in calls:
            where = f"{path}:{call.lineno}"
            assert "/".join(path.parts[-2:]) in LOADERS, where
            (allowed,) = (k.value for k in call.keywords if k.arg == "weights_only")
            assert ast.unparse(allowed) in ("True", "weights_only"), where
