"""Forks a process for each request of `client`, after torch and Lightning are imported.

    python server.py LISTENER

The server also passes on signals and exit codes: a second process for each program
would copy as many page tables. It has no thread, so that what it forks has no lock that
nobody releases.
"""

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import importlib.metadata
import marshal
import multiprocessing
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

_MOST_FILES = 250
_TAKES_VALUE = ("-W", "-X")
_NAMESPACES = ("uts", "net", "mnt")


class Request(NamedTuple):
    """What a program begins with.

    Attributes:
        pid: Process id of its command, whose namespaces it enters.
        command: Path of the command.
        words: All after the command.
        folder: Its working directory.
        environment: All variables.
        files: The numbers under which it has the files.
    """

    pid: int
    command: str
    words: list[str]
    folder: str
    environment: dict[str, str]
    files: list[int]


# --- the server


def serve(listener: socket.socket) -> tuple[Request, list[int]]:
    """Returns in processes of programs, each with its request and files."""
    lifeline = sys.stdin.fileno()
    select.select([listener, lifeline], [], [])
    if not _is_readable(lifeline):
        _import()
    running = list[Program]()
    while True:
        waits = [fd for program in running for fd in program.waits]
        ready, _, _ = select.select([listener, lifeline, *waits], [], [])
        if lifeline in ready:
            _leave(listener, running)
        for program in running:
            program.watch(ready)
        running = [program for program in running if program.waits]
        if listener in ready:
            link, _ = listener.accept()
            if (asked := _heard(link)) is None:
                continue
            if (pid := os.fork()) == 0:
                for other in (listener, link, *running):
                    other.close()
                return asked
            running.append(Program(*asked, link, pid))


def _leave(listener: socket.socket, running: "list[Program]") -> None:
    """Ends the server, whose session has ended or was killed, and all programs."""
    for program in running:
        program.kill()
    shutil.rmtree(os.path.dirname(listener.getsockname()), ignore_errors=True)
    os._exit(0)


def _is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def _import() -> None:
    # Every Trainer reads them from the metadata of all that is installed.
    importlib.metadata.entry_points = cache(importlib.metadata.entry_points().select)
    importlib.metadata.entry_points(group="lightning.pytorch.callbacks_factory")

    import lightning  # noqa: F401

    # Of torch, what the strategies import besides: 45 ms of each program.
    import torch.distributed.algorithms.ddp_comm_hooks
    import torch.distributed.checkpoint.state_dict  # noqa: F401

    # What each run of wandb imports for its launcher, for 0.5 s; it goes on without.
    sys.modules["wandb.sdk.launch.inputs.internal"] = None  # pyright: ignore[reportArgumentType]
    # wandb's models read their own source for descriptions that no run shows: 0.5 s.
    descriptions = types.ModuleType("pydantic._internal._docs_extraction")
    descriptions.extract_docstrings_from_cls = lambda *_, **__: {}  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules[descriptions.__name__] = descriptions
    # At an exit torch would take its libraries apart, and so copy what programs share.
    for one in weakref.finalize._registry:  # pyright: ignore[reportAttributeAccessIssue]
        one.atexit = False

    names = [
        task.joinpath("comm").read_text().strip()
        for task in Path("/proc/self/task").iterdir()
    ]
    # The allocator of pyarrow, where that is installed, looks after forks itself.
    others = [name for name in names if name != "jemalloc_bg_thd"]
    assert len(others) == 1, f"an import has left threads: {names}"
    # Collections in programs leave alone what they share.
    gc.collect()
    gc.freeze()
    # Each fit asks how many there are, and Python counts them one by one: 25 ms.
    gc.get_freeze_count = cache(gc.get_freeze_count)
    gc.get_freeze_count()


def _heard(link: socket.socket) -> tuple[Request, list[int]] | None:
    """What a command asks for, and its files; nothing if it was killed."""
    files = list[int]()
    try:
        head, files, _, _ = socket.recv_fds(link, 8, _MOST_FILES)
        content = link.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
        return Request(**marshal.loads(content)), files
    except (OSError, ValueError, EOFError):
        for fd in (*files, link.detach()):
            os.close(fd)
        return None


# --- the watch over one program


class Program:
    """A program that runs: it gets its command's signals, which gets its exit code.

    Attributes:
        waits: What to wait for; nothing once the program has ended.
    """

    def __init__(
        self, request: Request, files: list[int], link: socket.socket, pid: int
    ) -> None:
        self._request, self._link, self._pid = request, link, pid
        self._end = os.pidfd_open(pid)
        self.waits: list[Any] = [self._end, link]
        for fd in files:
            os.close(fd)

    def watch(self, ready: list[Any]) -> None:
        """Does what is due, if something of what it waits for is ready."""
        if self._end in ready:
            self._tell()
        elif self._link in ready:
            self._pass_on()

    def kill(self) -> None:
        """Ends the program, and so its command."""
        os.kill(self._pid, signal.SIGKILL)
        self._tell()

    def close(self) -> None:
        """Leaves the program alone."""
        os.close(self._end)
        self._link.close()
        self.waits = []

    def _pass_on(self) -> None:
        numbers = b""
        with suppress(OSError):
            numbers = self._link.recv(16)
        for number in numbers or [signal.SIGKILL]:
            os.kill(self._pid, number)
        if not numbers:  # its command is gone
            self.waits = [self._end]

    def _tell(self) -> None:
        _, status, used = os.wait4(self._pid, 0)
        _note(self._request, used.ru_utime + used.ru_stime)
        with suppress(OSError):
            self._link.send(str(os.waitstatus_to_exitcode(status)).encode())
        self.close()


def _note(request: Request, seconds: float) -> None:
    """Tells the session what a program took of the processor, and for which test."""
    test = request.environment.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    path = Path(request.command).with_name("seconds")
    # The session may have ended before.
    with suppress(OSError), path.open("a") as file:
        print(seconds, test or "-", file=file)


# --- the program


def run(request: Request, files: list[int]) -> None:
    """Does what Python does with these words."""
    os.setpgid(0, 0)
    # The session may ignore it, as jobs of a shell in the background do.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _enter(request.pid)
    _place(files, request.files)
    # Who dies of a signal says where its threads were.
    faulthandler.enable()
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.executable = request.command
    multiprocessing.set_executable(request.command)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    words = iter(request.words)
    kind = _options(words)
    if "finalize" in sys._xoptions:
        _obey(kind, words)
    else:
        _end(_exit_code_of(partial(_obey, kind, words)))


def _exit_code_of(program: Callable[[], None]) -> int:
    try:
        program()
    except SystemExit as ending:
        if isinstance(ending.code, int | None):
            return ending.code or 0
        print(ending.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(code: int) -> NoReturn:
    """Ends as the interpreter does, but for the destruction of all modules.

    That would write to each object, and so copy all memory that programs share.
    """
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _obey(kind: str, words: Iterator[str]) -> None:
    if kind == "-c":
        _begin("-c", "", words, then=next(words))
    elif kind == "-m":
        name = next(words)
        _arguments("-m", os.getcwd(), words)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        path = Path(kind)
        _begin(kind, str(path.resolve().parent), words, then=path.read_text())


def _options(words: Iterator[str]) -> str:
    """Obeys options of the interpreter; returns -c, -m or the path of a script."""
    for word in words:
        if word in ("-c", "-m") or not word.startswith("-"):
            return word
        if word == "-u":
            sys.stdout.reconfigure(write_through=True)  # pyright: ignore
        elif word.startswith(_TAKES_VALUE):
            value = word[2:] or next(words)
            if word.startswith("-W"):
                warnings.simplefilter(value)  # pyright: ignore[reportArgumentType]
            else:
                sys._xoptions[value] = True
        elif word not in ("-B", "-E", "-s"):
            raise ValueError(f"a warm program takes no option {word}")
    raise ValueError("a warm program must be given -c, -m or a script")


def _begin(name: str, folder: str, words: Iterator[str], then: str) -> None:
    """Runs source code as `__main__`, which stays until the interpreter's end."""
    _arguments(name, folder, words)
    main = types.ModuleType("__main__")
    if name != "-c":
        main.__file__ = name
    sys.modules["__main__"] = main
    exec(compile(then, "<string>" if name == "-c" else name, "exec"), main.__dict__)


def _arguments(name: str, folder: str, words: Iterator[str]) -> None:
    sys.argv = [name, *words]
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [folder, *filter(None, added)]


def _place(files: list[int], numbers: list[int]) -> None:
    """Gives files the numbers that they had in the command."""
    beyond = max([*files, *numbers], default=0) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, beyond) for fd in files]
    for fd in files:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _enter(pid: int) -> None:
    """Moves to the host name, network and file systems of another process."""
    for kind in _NAMESPACES:
        there = f"/proc/{pid}/ns/{kind}"
        if os.readlink(there) == os.readlink(f"/proc/self/ns/{kind}"):
            continue
        with open(there) as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter {there}")


if __name__ == "__main__":
    run(*serve(socket.socket(fileno=int(sys.argv[1]))))
