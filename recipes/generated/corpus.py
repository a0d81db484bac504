"""A whole generated corpus: which conversations, made by whom, finished or not.

Every conversation is drawn from the seed and its own name. It is synthesised in a
process of its own, because eSpeak's state outlives a sentence. So the bytes depend
neither on the number of processes nor on interruptions. The folder `.generated` of the
tree holds the arguments, per finished conversation its record, and the lock of the
process that writes.
"""

import json
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from tqdm import tqdm

from recipes.generated import callhome, fisher, layout, librispeech
from recipes.generated.conversation import Conversation, Plan, Turn, render
from recipes.generated.grammar import vocabulary
from recipes.generated.pronunciations import dictionary
from recipes.generated.rules import TOPICS
from recipes.generated.speakers import draw_speakers
from recipes.lock import locked

#: Changes whenever the same arguments give other bytes.
VERSION = 3
MAX_MINUTES_A_CALL = 5.0
LEAST_CALLS = {
    **{"train": 20, "sw": 3, "en": 3, "fisher": 4, "callhome": 2},
    **{"train-clean-5": 10, "dev-clean-2": 2, "test-clean": 3},
}
#: Names of the calls of a part, and the layout of its files.
_PARTS = {
    "train": ("sw{:05d}", "switchboard"),
    "sw": ("sw_{:04d}", "hub5"),
    "en": ("en_{:04d}", "hub5"),
    "fisher": ("fe_03_{:05d}", "fisher"),
    "callhome": ("en_{:04d}", "callhome"),
    "train-clean-5": ("train-clean-5-{:04d}", "librispeech"),
    "dev-clean-2": ("dev-clean-2-{:04d}", "librispeech"),
    "test-clean": ("test-clean-{:04d}", "librispeech"),
}
#: Number of the first call, and from one to the next.
_NUMBERS = {
    **{"train": (2001, 1), "sw": (4390, 4), "en": (4392, 4)},
    **{"fisher": (1, 1), "callhome": (6001, 1)},
    **{"train-clean-5": (1, 1), "dev-clean-2": (1001, 1), "test-clean": (2001, 1)},
}
_MAX_TRAINING_CALLS = 9999 - 2000
_STATE = ".generated"
_ARGUMENTS, _LOCK = "arguments.json", "lock"


def write_corpus(
    tree: Path,
    *,
    minutes: float = 24.0,
    test_minutes: float = 5.0,
    fisher_minutes: float = 0.0,
    callhome_minutes: float = 0.0,
    seed: int = 1,
    processes: int = 2,
) -> None:
    """Write the corpus, or what is missing of it.

    Args:
        tree: folder that gets LDC97S62, LDC2002S09 and LDC2002T43; LDC2004S13,
            LDC2004T19 for Fisher and LDC97S42, LDC97T14 for CallHome.
        minutes: least speech of both sides together, for training; silence not counted.
        test_minutes: the same for the two halves of the test set together.
        fisher_minutes: the same for calls laid out as Fisher's; 0 for none.
        callhome_minutes: the same for calls laid out as CallHome's; 0 for none.
        seed: the same seed and minutes give the same bytes.
        processes: conversations made at the same time.

    Raises:
        ValueError: an argument out of range.
        FileExistsError: `tree` holds something else, or a corpus of other arguments.
        RuntimeError: a conversation could not be made.
        BlockingIOError: another process writes into `tree`.
    """
    per_part = {"train": minutes, "sw": test_minutes / 2, "en": test_minutes / 2}
    more = {"fisher": fisher_minutes, "callhome": callhome_minutes}
    more = {part: amount for part, amount in more.items() if amount}
    plans = plan_parts(per_part | more, seed)
    arguments = {"minutes": minutes, "test_minutes": test_minutes, "seed": seed}
    arguments |= {f"{part}_minutes": amount for part, amount in more.items()}
    tree = tree.absolute()  # the processes that speak may have another folder
    with _alone(tree):
        _speak(tree, plans, arguments, processes)
        _write_shared_files(tree, plans)


def write_librispeech(
    tree: Path,
    *,
    minutes: float = 12.0,
    test_minutes: float = 2.0,
    seed: int = 1,
    processes: int = 2,
) -> None:
    """Write a corpus in the layout of mini LibriSpeech: one turn is one utterance.

    Args:
        tree: folder that gets LibriSpeech.
        minutes: least speech for training.
        test_minutes: the same for each of `dev-clean-2` and `test-clean`.
        seed: the same seed and minutes give the same bytes.
        processes: conversations made at the same time.

    Raises:
        ValueError, FileExistsError, RuntimeError, BlockingIOError: see `write_corpus`.
    """
    per_part = {
        **{"train-clean-5": minutes},
        **{"dev-clean-2": test_minutes, "test-clean": test_minutes},
    }
    plans = plan_parts(per_part, seed)
    tree = tree.absolute()
    arguments = {"minutes": minutes, "test_minutes": test_minutes, "seed": seed}
    with _alone(tree):
        _speak(tree, plans, arguments | {"librispeech": True}, processes)
        lexicon = librispeech.lexicon(dictionary())
        layout.write_text(tree / librispeech.LEXICON, lexicon)
        speakers = librispeech.speakers_table(plans)
        layout.write_text(tree / librispeech.SPEAKERS, speakers)


@contextmanager
def _alone(tree: Path) -> Iterator[None]:
    """Refuses a tree into which another process writes, or with other files."""
    _refuse_other_files(tree)
    lock = tree / _STATE / _LOCK
    lock.parent.mkdir(parents=True, exist_ok=True)
    taken = BlockingIOError(
        f"`tree` {tree} is being written by another process (it holds {lock}): "
        "wait until that has ended, or give another folder"
    )
    with locked(lock, taken):
        yield


def _refuse_other_files(tree: Path) -> None:
    if not tree.exists() or (tree / _STATE / _ARGUMENTS).exists():
        return
    if {path.name for path in tree.iterdir()} - {_STATE}:
        raise FileExistsError(
            f"`tree` {tree} holds files that are not a generated corpus: "
            "give an empty or absent folder"
        )


def _speak(
    tree: Path, plans: list[Plan], arguments: Mapping[str, float], processes: int
) -> None:
    """Make the conversations that are not finished."""
    if processes < 1:
        raise ValueError(f"`processes` must be at least 1, got {processes}")
    _claim(tree, {**arguments, "version": VERSION})
    missing = [plan for plan in plans if not _record(tree, plan.name).exists()]
    bar = tqdm(total=len(plans), desc="speaking", unit="call")
    with bar:
        bar.update(len(plans) - len(missing))
        for _ in _make_each_alone(tree, missing, processes):
            bar.update()


def plan_parts(per_part: Mapping[str, float], seed: int) -> list[Plan]:
    """Return the conversations of parts, given with their minutes."""
    counts = {part: _num_calls(part, amount) for part, amount in per_part.items()}
    speakers = draw_speakers({part: 2 * n for part, n in counts.items()}, seed)
    return [
        Plan(
            name=call_name(part, index),
            topic=list(TOPICS)[(index + (part == "en")) % len(TOPICS)],
            speakers=(speakers[part][2 * index], speakers[part][2 * index + 1]),
            speech_s=60 * per_part[part] / count,
            seed=seed,
            layout=_PARTS[part][1],
        )
        for part, count in counts.items()
        for index in range(count)
    ]


def call_name(part: str, index: int) -> str:
    """Return `sw02001` ... for training, `sw_4390` and `en_4392` ... for the test."""
    first, step = _NUMBERS[part]
    return _PARTS[part][0].format(first + step * index)


def read_turns(tree: Path, name: str) -> list[Turn]:
    """Return the turns of a finished conversation."""
    record = json.loads(_record(tree, name).read_text(encoding="utf-8"))
    return [
        Turn(**turn | {"tokens": tuple(turn["tokens"])}) for turn in record["turns"]
    ]


def _num_calls(part: str, minutes: float) -> int:
    if not (math.isfinite(minutes) and minutes > 0):
        raise ValueError(
            f"`minutes` of {part} must be a positive number, got {minutes}"
        )
    calls = max(LEAST_CALLS[part], math.ceil(minutes / MAX_MINUTES_A_CALL))
    if calls > _MAX_TRAINING_CALLS:
        most = _MAX_TRAINING_CALLS * MAX_MINUTES_A_CALL
        raise ValueError(f"`minutes` of {part} must be at most {most}, got {minutes}")
    return calls


def _claim(tree: Path, arguments: Mapping[str, float]) -> None:
    """Note the arguments in the tree; refuse a corpus of other ones."""
    stamp = tree / _STATE / _ARGUMENTS
    if stamp.exists():
        found = json.loads(stamp.read_text(encoding="utf-8"))
        if found != arguments:
            raise FileExistsError(
                f"`tree` {tree} was generated with {found}, not with {arguments}: "
                "give another folder, or delete this one"
            )
    else:
        layout.write_text(stamp, json.dumps(arguments, indent=1) + "\n")


def _record(tree: Path, name: str) -> Path:
    return tree / _STATE / f"{name}.json"


def _make_each_alone(tree: Path, plans: list[Plan], processes: int) -> Iterator[Plan]:
    """Make every conversation in a fresh process; yield each as it is finished."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    running: dict[int, tuple[BaseProcess, Plan]] = {}
    waiting = list(reversed(plans))
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                process = context.Process(target=_make, args=(tree, waiting[-1]))
                process.start()
                running[process.sentinel] = process, waiting.pop()
            for sentinel in wait(list(running)):
                assert isinstance(sentinel, int)
                yield _finished(*running.pop(sentinel))
    finally:
        for process, _ in running.values():
            process.terminate()
            process.join()


def _finished(process: BaseProcess, plan: Plan) -> Plan:
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(
            f"conversation {plan.name} was not made: its process ended with "
            f"{process.exitcode}; what was finished is kept, so run the command again"
        )
    return plan


def _make(tree: Path, plan: Plan) -> None:
    """Make one conversation; its record, written last, says that it is whole."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children itself
    threading.Thread(target=_end_with_parent, daemon=True).start()
    conversation = render(plan)
    _WRITERS[plan.layout](tree, conversation)
    record = {
        "plan": asdict(plan),
        "num_samples": len(conversation.samples),
        "turns": [asdict(turn) for turn in conversation.turns],
    }
    layout.write_text(_record(tree, plan.name), json.dumps(record) + "\n")


def _end_with_parent() -> None:
    """Ends this process with a parent that was killed, whose lock is free by then."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


_WRITERS: dict[str, Callable[[Path, Conversation], None]] = {
    "switchboard": layout.write_conversation,
    "hub5": layout.write_conversation,
    "fisher": fisher.write_conversation,
    "callhome": callhome.write_conversation,
    "librispeech": librispeech.write_conversation,
}


def _write_shared_files(tree: Path, plans: list[Plan]) -> None:
    """Write the files that speak of all conversations: dictionary, PEM, STM, GLM."""
    tests = sorted(
        (p for p in plans if p.layout == "hub5"), key=lambda plan: plan.name[3:]
    )
    turns = {plan.name: read_turns(tree, plan.name) for plan in tests}
    pem = "".join(layout.segments(plan.name, turns[plan.name]) for plan in tests)
    stm = [layout.reference(p.name, p.speakers, turns[p.name]) for p in tests]
    layout.write_text(tree / layout.SEGMENTS, pem)
    layout.write_text(tree / layout.REFERENCE, layout.reference_file(stm))
    layout.write_text(tree / layout.MAPPINGS, layout.mappings(vocabulary()))
    layout.write_text(tree / layout.DICTIONARY, "\n".join(dictionary()) + "\n")
    calls = [plan for plan in plans if plan.layout == "fisher"]
    if calls:
        layout.write_text(tree / fisher.CALLDATA, fisher.calldata(calls))
