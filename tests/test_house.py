"""The house: rooms and floors, sizes, public names, what files must not name."""

import ast
import re
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

import lightning_adpsgd

ROOT = Path(__file__).parents[1]
NAME = "lightning_adpsgd"
PACKAGE = ROOT / NAME

# The rooms of the package, floor by floor from the ground up: a room imports only rooms
# of the floors below it.
FLOORS = (
    ("files", "import_names", "topology", "weights", "reference"),
    ("transport",),
    ("coordination",),
    ("mixing",),
    ("gossip",),
    ("islands",),
    ("epochs", "dials"),
    ("strategy",),
    ("virtual",),
    ("callbacks", "prediction", "report"),
    ("asr", "__main__"),
)
# The first floor that may know Lightning: what is below is an engine for any loop.
LIGHTNING_FROM = "dials"
# Public names and entry points import what they need when they are asked for it.
FACES = ("__init__", "registration")
MOST_FLOORS, MOST_FLAT_FILES, MOST_CORE_LINES = 11, 6, 32_063
MOST_METHODS, MOST_CLASS_LINES = 30, 350
# Tests that start interpreters, because a warm program would not do or is no quicker.
INTERPRETERS = {
    "benchmarks/test_benchmarks.py",  # on emulated hosts; they import no torch
    "conformance.py",
    "coordination/startup/test_launching_integration.py",  # by mpirun
    "faults/test_wide_islands.py",  # torchrun, whose children are looked for
    "matrix.py",
    "pages/test_ray.py",
    "report/test_page.py",
    "strategy/checkpoints/test_own_folders.py",
    "test_house.py",
    "test_registration.py",
    "test_release.py",
    "warm/__init__.py",
    "warm/test_warm.py",
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
    "rapidfuzz",
    "soundfile",
    "torchaudio",
    "tqdm",
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports, wherever in the file it does."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {node.module, *names}
    return frozenset(found)


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def rooms_in(folder: Path) -> set[str]:
    """The modules and packages that lie directly in a folder."""
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    return packages | {path.stem for path in folder.glob("*.py")}


def room_of(path: Path, folder: Path) -> str:
    """The name of the module or package of a folder to which a file belongs."""
    return path.relative_to(folder).parts[0].removesuffix(".py")


def prefix_of(folder: Path) -> str:
    return ".".join(folder.relative_to(ROOT).parts) + "."


def rooms_that_it_imports(path: Path, folder: Path) -> set[str]:
    """Names of a folder's modules and packages that a file imports."""
    prefix = prefix_of(folder)
    inside = (name[len(prefix) :] for name in imports(path) if name.startswith(prefix))
    return {name.partition(".")[0] for name in inside} & rooms_in(folder)


def graph_of(folder: Path) -> dict[str, set[str]]:
    """Which of a folder's modules and packages import which, without its faces."""
    graph: dict[str, set[str]] = {room: set() for room in rooms_in(folder)}
    for path in files_of(folder):
        room = room_of(path, folder)
        graph[room] |= rooms_that_it_imports(path, folder) - {room}
    faces = set(FACES) if folder == PACKAGE else {"__init__"}
    return {room: needs - faces for room, needs in graph.items() if room not in faces}


def floors_of(graph: dict[str, set[str]]) -> list[set[str]]:
    """The rooms of each floor, from the ground up; fails where a circle is left."""
    left, floors = dict(graph), []
    while left:
        ground = {room for room, needs in left.items() if not needs & set(left)}
        assert ground, f"modules import one another: {sorted(left)}"
        floors.append(ground)
        left = {room: needs for room, needs in left.items() if room not in ground}
    return floors


def folders(*names: str) -> list[Path]:
    """These packages and every package within them."""
    inits = (path for name in names for path in (ROOT / name).rglob("__init__.py"))
    return sorted(path.parent for path in inits)


# --- rooms and floors


def test_every_room_has_a_floor() -> None:
    rooms = {room for floor in FLOORS for room in floor}
    assert rooms_in(PACKAGE) == {*rooms, *FACES}
    assert len(FLOORS) <= MOST_FLOORS


def test_few_files_lie_beside_the_rooms() -> None:
    files = [path.stem for path in PACKAGE.glob("*.py")]
    # `__init__` and `__main__` are Python's own names.
    assert len(set(files) - {"__init__", "__main__"}) <= MOST_FLAT_FILES, files


def test_a_room_imports_only_those_below_it() -> None:
    below: set[str] = set()
    graph = graph_of(PACKAGE)
    for rooms in FLOORS:
        for room in rooms:
            assert graph[room] <= below, room
        below |= set(rooms)


def test_no_modules_of_a_folder_import_one_another() -> None:
    for folder in folders(NAME, "recipes"):
        floors_of(graph_of(folder))


def test_hybrid_knows_no_recipe_that_chooses() -> None:
    graph = graph_of(ROOT / "recipes")
    assert not graph["hybrid"] & {
        "switchboard",
        "swb300",
        "swb2000",
        "librispeech",
        "kaldi",
    }
    # `generated` is its synthesiser as well, which pronounces words of no dictionary.
    assert "demo" not in graph["hybrid"]


# --- what a room may know


def core_files() -> list[Path]:
    return [path for path in files_of(PACKAGE) if room_of(path, PACKAGE) != "asr"]


def test_the_core_needs_no_speech_library() -> None:
    for path in core_files():
        roots = {name.partition(".")[0] for name in imports(path)}
        assert not roots & SPEECH_LIBRARIES, path
        assert "asr" not in rooms_that_it_imports(path, PACKAGE), path


def test_the_engine_knows_nothing_of_lightning() -> None:
    first = next(n for n, rooms in enumerate(FLOORS) if LIGHTNING_FROM in rooms)
    engine = {room for rooms in FLOORS[:first] for room in rooms}
    for path in (p for p in core_files() if room_of(p, PACKAGE) in engine):
        roots = {name.partition(".")[0] for name in imports(path)}
        assert "lightning" not in roots, path


def test_scoring_and_search_know_no_model_and_frames_no_search() -> None:
    graph = graph_of(PACKAGE / "asr")
    for place, module in enumerate(ASR_TOWER):
        assert not graph[module] & set(ASR_TOWER[place + 1 :]), module


# --- sizes


def classes_of(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef))


def methods_of(found: ast.ClassDef) -> Sequence[ast.stmt]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in found.body if isinstance(node, kinds)]


@pytest.mark.parametrize("folder", [NAME, "recipes", "benchmarks"])
def test_no_class_is_too_large_to_be_read(folder: str) -> None:
    for path in files_of(ROOT / folder):
        for found in classes_of(path):
            assert found.end_lineno is not None
            lines = found.end_lineno - found.lineno + 1
            assert lines <= MOST_CLASS_LINES, f"{path}: {found.name} has {lines} lines"
            methods = len(methods_of(found))
            assert methods <= MOST_METHODS, f"{path}: {found.name} has {methods}"


def test_the_algorithm_fits_on_one_page() -> None:
    assert (PACKAGE / "reference.py").read_text().count("\n") <= 100


def test_the_core_stays_small() -> None:
    texts = (path.read_text(encoding="utf-8") for path in core_files())
    assert sum(text.count("\n") for text in texts) <= MOST_CORE_LINES


# --- names


def test_public_names_are_these() -> None:
    assert sorted(lightning_adpsgd.__all__) == [
        "Async",
        "HADPSGDFabricStrategy",
        "HADPSGDStrategy",
        "ModelParallel",
        "ReadyPairs",
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
        r"(index[-]url|trusted[-]host|find[-]links)"
        r"|https?://[^\s\"'<>)]*(pypi|pythonhosted|simple/|/artifact)"
        r"|https?://(\d{1,3}\.){3}\d"
        r"|/(root|home)/\w",
        re.IGNORECASE,
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in committed_text_files()
        for number, line in enumerate(path.read_text("utf-8", "replace").split("\n"), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_no_module_delays_its_annotations() -> None:
    """`from __future__ import annotations` would switch the shape checks off."""
    for path in files_of(PACKAGE):
        assert "__future__" not in imports(path), path


# What can be written to a socket or a file must not run as code here.
UNPICKLING = re.compile(
    r"(pickle|dill|cloudpickle|marshal|shelve)\.(loads?|open|Unpickler)$"
    r"|gather_object$|_object_list$|^torch\.load$"
)
# What they read is restricted by `weights_only`, unless a caller has said otherwise.
LOADERS = ("strategy/checkpoints/format.py", "strategy/checkpoints/sharded.py")
LOADERS += ("coordination/gather.py", "asr/recogniser.py")


def test_nothing_unpickles_what_comes_from_a_network_or_a_file() -> None:
    for path in files_of(PACKAGE):
        calls = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))
        for call in calls:
            if not UNPICKLING.search(ast.unparse(call.func)):
                continue
            where = f"{path}:{call.lineno}"
            assert str(path.relative_to(PACKAGE)) in LOADERS, where
            (allowed,) = (k.value for k in call.keywords if k.arg == "weights_only")
            assert ast.unparse(allowed) in ("True", "weights_only"), where


def files_of_tests() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        yield str(path.relative_to(ROOT / "tests")), path.read_text(encoding="utf-8")


def test_marks_stand_before_tests_alone() -> None:
    """A helper that came between a test and its marks would have taken them."""
    for name, text in files_of_tests():
        is_marked = False
        for line in text.splitlines():
            is_marked |= line.startswith("@pytest.mark.")
            if line.startswith(("def ", "class ")):
                is_test = line.startswith(("def test_", "class Test"))
                assert is_test or not is_marked, f"{name}: {line}"
                is_marked = False


def test_few_tests_start_an_interpreter() -> None:
    """One that imports torch and Lightning takes five seconds of a core."""
    found = {name for name, text in files_of_tests() if "sys.executable, " in text}
    assert found == INTERPRETERS
