"""Conventions of the core: flags, defaults and fixed numbers mean the same everywhere.

They are read from the files, so that a changed one is noticed even where it would
show on a slow network, on a GPU, or in a training of days alone.
"""

import ast
import importlib
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from tests.fixed_numbers import NUMBERS

PACKAGE = Path(__file__).parents[1] / "lightning_adpsgd"

# Of calls; a flag that is not here differs from call to call.
FLAGS = {
    "async_op": True,
    "copy": True,  # what is saved while training goes on is nobody else's memory
    "daemon": True,  # a thread that hangs does not keep its process
    "do_handshake_on_connect": False,  # it would outlast the deadline
    "exist_ok": True,
    "flush": True,
    "frozen": True,
    "ignore_errors": True,
    "missing_ok": True,
    "non_blocking": True,
    "parents": True,
    "repr": False,
    "strict": True,  # lists that belong together are as long
    "use_libuv": False,
    "wait_for_workers": False,  # learners meet by names of their own
    "weights_only": True,  # a file runs no code
}
OTHER_FLAGS = {
    ("mixing/consensus.py", "strict"),  # buffers that only one of both has
    ("strategy/checkpoints/mid_epoch.py", "strict"),  # as many generators as before
}
# All other values do not change.
MUTABLE = {
    "epochs/batches.py": {"EpochUnderWay"},
    "gossip/exchange.py": {"Channel"},
    "mixing/statistics.py": {"Statistics"},
    "report/collect.py": {"Report"},
    "virtual/clock.py": {"_Transfer"},
    "virtual/cluster.py": {"_Curve"},
    "virtual/objective.py": {"Update"},
}
# Functions that keep what they have computed, and how much of it.
CACHES = {
    ("epochs/batches.py", "draw"): None,
    ("epochs/work_units.py", "checksum"): None,
    ("files.py", "_pid_namespace"): None,
    ("files.py", "boot_id"): None,
    ("gossip/codecs.py", "_narrower"): None,
    ("gossip/codecs.py", "_scales"): None,
    ("import_names.py", "lightning_version"): None,
    ("mixing/lattice_mean.py", "words_for_places"): None,
    ("strategy/fabric.py", "jobs"): None,
    ("strategy/options.py", "_unfreezing"): None,
    ("topology/custom.py", "_checked"): 8,
    ("topology/named.py", "_drawn_order"): 16,
    ("topology/schedule.py", "_is_mean"): 64,
    ("virtual/row_rounds.py", "_changing"): 32,
    ("virtual/timeline.py", "_meetings"): 32,
    ("virtual/timeline.py", "parts_of"): 32,
}
# Any other default that is a number or a flag is 0 or False. Durations are in seconds.
DEFAULTS: dict[str, set[Any]] = {
    "_has_trainer": {True},
    "all": {True},
    "answer_s": {0.25},
    "busy": {1.0},
    "connections": {4096},
    "cores": {1.0},
    "cpu_share": {1.0},
    "empty_s": {6.0},
    "end_s": {3.0},
    "every": {1},
    "every_s": {2.0, 30.0},
    "exchange_frozen": {True},
    "gain": {1.0},
    "gives_way": {True},
    "gossip_every": {1},
    "holds_all": {True},
    "hurries": {True},
    "interval_s": {0.5},
    "learners_per_machine": {1},
    "is_genuine": {True},
    "is_of_loop": {True},
    "local_batch_size": {1},
    "longest_pause_s": {0.05},
    "look_s": {0.25, 0.5},
    "machine_cores": {1.0},
    "mean": {60},
    "mixing_gain": {1.0},
    "near": {True},
    "num_learners": {1},
    "num_loaders": {1},
    "num_super_learners": {8},
    "of_address": {1024},
    "of_all": {True},
    "on_host": {True},
    "patience": {1},
    "poll": {0.25},
    "pull": {20},
    "requests": {True},
    "seconds": {0.0, 1.0},
    "shards": {1},
    "shared_by": {1},
    "should_sync": {True},
    "silence_s": {3.0},
    "start": {30 * 60},
    "start_s": {20.0},
    "steps": {0, 2000},
    "steps_alone": {True},
    "strict": {True},
    "super_learner_size": {1},
    "tensor_parallel_size": {1},
    "timeout": {5 * 60},
    "wait_s": {0.05},
    "warns": {True},
    "weights_only": {True},
    "with_frozen": {True},
}


@cache
def trees() -> dict[str, ast.Module]:
    """The core's files, by their paths below the package."""
    paths = (path for path in PACKAGE.rglob("*.py") if "asr" not in path.parts)
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    return {str(p.relative_to(PACKAGE)): ast.parse(text) for p, text in texts.items()}


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, Any]]:
    for path, tree in trees().items():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, kinds))


def value_of(node: ast.expr) -> Any:
    """A plain value, that of a function which only returns one, or a duration's."""
    match node:
        case ast.Lambda():
            return value_of(node.body)
        case ast.Call(ast.Name("timedelta"), [], [ast.keyword(unit, number)]) if unit:
            return timedelta(**{unit: value_of(number)}).total_seconds()
        case ast.Call(ast.Name("field"), [], [ast.keyword("default", value), *_]):
            return value_of(value)
        case _:
            with suppress(ValueError, TypeError):
                return ast.literal_eval(node)
            return None


def test_a_flag_has_one_value_in_all_calls() -> None:
    given = [
        (path, word.arg, value_of(word.value), word.value.lineno)
        for path, call in nodes(ast.Call)
        for word in call.keywords
        if word.arg in FLAGS and isinstance(value_of(word.value), bool)
    ]
    others = [one for one in given if one[2] != FLAGS[one[1]]]
    assert {one[:2] for one in others} == OTHER_FLAGS, others
    assert len(others) == len(OTHER_FLAGS), others
    assert {one[1] for one in given} == set(FLAGS)


def test_a_value_does_not_change() -> None:
    mutable = {
        (path, one.name)
        for path, one in nodes(ast.ClassDef)
        for decorator in one.decorator_list
        if (made := ast.unparse(decorator)).startswith("dataclass")
        and "frozen=True" not in made
    }
    assert mutable == {(path, name) for path in MUTABLE for name in MUTABLE[path]}


def test_what_is_kept_is_kept() -> None:
    kept = {
        (path, one.name): _most_of(made)
        for path, one in nodes(ast.FunctionDef)
        for made in one.decorator_list
        if "cache" in ast.unparse(made)
    }
    assert kept == CACHES


def _most_of(decorator: ast.expr) -> Any:
    is_bounded = isinstance(decorator, ast.Call)
    return value_of(decorator.keywords[0].value) if is_bounded else None


def test_every_thread_is_a_daemon() -> None:
    made = [(path, call) for path, call in nodes(ast.Call) if _makes_a_thread(call)]
    without = [path for path, call in made if "daemon=True" not in ast.unparse(call)]
    assert made
    assert not without


def _makes_a_thread(call: ast.Call) -> bool:
    return ast.unparse(call.func) in ("threading.Thread", "Thread", "threading.Timer")


def test_a_default_is_nothing_or_known() -> None:
    defaults = [
        (f"{path}:{node.lineno}", name, value_of(node))
        for path, found in nodes(ast.FunctionDef, ast.ClassDef)
        for name, node in _defaults_of(found)
    ]
    numbers = [one for one in defaults if isinstance(one[2], (int, float))]
    wrong = [one for one in numbers if one[2] not in DEFAULTS.get(one[1], {0})]
    assert not wrong, wrong
    assert {name for _, name, _ in numbers} >= set(DEFAULTS)


def _defaults_of(found: ast.FunctionDef | ast.ClassDef) -> list[tuple[str, ast.expr]]:
    if isinstance(found, ast.ClassDef):
        fields = [one for one in found.body if isinstance(one, ast.AnnAssign)]
        return [(ast.unparse(f.target), f.value) for f in fields if f.value is not None]
    inner, only = found.args, found.args.kwonlyargs
    last = [*inner.posonlyargs, *inner.args][::-1]
    pairs = [*zip(last, inner.defaults[::-1], strict=False)]
    pairs += [(a, d) for a, d in zip(only, inner.kw_defaults, strict=True) if d]
    return [(one.arg, default) for one, default in pairs]


def test_a_fixed_number_is_the_one_that_is_written_down() -> None:
    wrong = [
        f"{module}.{name} is {is_now}"
        for module, numbers in NUMBERS.items()
        for name, number in numbers.items()
        if (is_now := getattr(_module(module), name)) != number
    ]
    assert not wrong, wrong


def _module(name: str) -> Any:
    return importlib.import_module(f"lightning_adpsgd.{name}")


def test_all_fixed_numbers_are_written_down() -> None:
    rooms = {module.partition(".")[0] for module in NUMBERS} - {"strategy"}
    missing = [
        f"{path}: {name}"
        for path, tree in trees().items()
        if (module := path.removesuffix(".py").replace("/", ".")) in NUMBERS
        or module.partition(".")[0] in rooms
        for name in _constants_of(tree)
        if name not in NUMBERS.get(module, {})
    ]
    assert not missing, missing


def _constants_of(tree: ast.Module) -> Iterator[str]:
    """Names in capitals of plain numbers, at the top of a file."""
    for one in tree.body:
        match one:
            case ast.Assign([ast.Tuple(names)], ast.Tuple(values)):
                pairs = [*zip(names, values, strict=True)]
            case ast.Assign([ast.Name() as name], value):
                pairs = [(name, value)]
            case _:
                pairs = []
        for name, value in pairs:
            is_number = isinstance(value_of(value), (int, float))
            if is_number and (text := ast.unparse(name)).isupper():
                yield text
