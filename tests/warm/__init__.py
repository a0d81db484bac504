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
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
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
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="adpsgd-tests-"))
        command = self._folder / "python"
        client = (_FOLDER / "client.py").read_text()
        command.write_text(_HEAD.format(python=sys.executable) + client)
        command.chmod(0o700)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._folder / "socket"))
            listener.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, _FOLDER / "server.py", str(listener.fileno())],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                # An interrupt from the keyboard reaches programs by their commands.
                start_new_session=True,
            )
        os.environ[_VARIABLE] = str(command)

    def close(self) -> None:
        """Ends the server, and with it programs that still run."""
        del os.environ[_VARIABLE]
        self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)


def start() -> Server | None:
    """A server for all processes of this session; none if one is there or cannot be."""
    if _VARIABLE in os.environ or not hasattr(os, "pidfd_open"):
        return None
    return Server()
