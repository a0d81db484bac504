"""A Python that has torch and Lightning imported: its processes start in milliseconds.

`import lightning` takes four seconds of a core. A server imports it once for all tests,
and forks a process for each program. `python()` is a command that takes the words of
Python's own command line; like any command it has its own output, folder, environment,
signals and exit code. This package is not imported beforehand, so programs still import
what they use of it. A test that is about an interpreter's start takes `sys.executable`.

A program differs from one of `sys.executable` in this: its parent is the server, its
process id is not that of the command, and libraries have read their environment
variables when the server imported them. After its threads and exit handlers it ends at
once, without the destruction of all modules; `-Xfinalize` asks for that too.

`Server.worker` is such a command for workers of pytest-xdist. A nursery forks them, a
child of the server that has also imported all modules of the tests, once for all.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_FOLDER = Path(__file__).parent
_VARIABLE = "ADPSGD_TESTS_PYTHON"
# Not a plain `#!` line: the kernel cuts long paths and splits them at blanks.
_HEAD = """#!/bin/sh
'''exec' "{python}" -IS "$0" "$@"
'''
"""


def python() -> str:
    """The command of warm programs; `sys.executable` where there is no server."""
    return os.environ.get(_VARIABLE, sys.executable)


def processor_seconds() -> dict[str, float]:
    """What ended programs and the processes that they waited for took, by test file."""
    path = Path(python()).with_name("seconds")
    lines = path.read_text().splitlines() if path.exists() else []
    seconds: dict[str, float] = {}
    for took, file in map(str.split, lines):
        seconds[file] = seconds.get(file, 0.0) + float(took)
    return seconds


class Server:
    """The server of one test session: it imports nothing before its first program.

    It ends at `close`, or with the process that has made it.

    Args:
        arguments: those of the pytest whose modules the nursery imports.

    Attributes:
        worker: command of workers.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="adpsgd-tests-"))
        with self._listener("python") as programs, self._listener("worker") as workers:
            listeners = programs.fileno(), workers.fileno()
            command = str(self._folder / "python")
            self.worker = str(self._folder / "worker")
            words = *map(str, listeners), *arguments
            self._process = subprocess.Popen(
                [sys.executable, _FOLDER / "server.py", *words],
                env={**os.environ, "OMP_NUM_THREADS": "1", _VARIABLE: command},
                pass_fds=listeners,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                # An interrupt from the keyboard reaches programs by their commands.
                start_new_session=True,
            )
        os.environ[_VARIABLE] = command

    def _listener(self, name: str) -> socket.socket:
        """Where a command of this name, which it makes, asks for its process."""
        command = self._folder / name
        client = (_FOLDER / "client.py").read_text()
        command.write_text(_HEAD.format(python=sys.executable) + client)
        command.chmod(0o700)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{command}.socket")
        listener.listen(64)
        return listener

    def close(self) -> None:
        """Ends the server; programs that run go on."""
        del os.environ[_VARIABLE]
        self._process.kill()
        self._process.communicate()
        # The nursery, which ends by itself, may do the same.
        shutil.rmtree(self._folder, ignore_errors=True)


def start(arguments: Sequence[str]) -> Server | None:
    """A server for all processes of this session; none if one is there or cannot be."""
    if _VARIABLE in os.environ or not hasattr(os, "pidfd_open"):
        return None
    return Server(arguments)
