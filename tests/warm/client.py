"""The command `python`: it asks the server for a process, and stands for it.

It hands over its words, folder, environment and open files, passes signals on, and ends
as the process ends. If it is killed, the server kills the process. Imports little, and
nothing that is not in Python's library: its own start is what a test waits for. The
modules `socket`, `signal` and `json` would take 25 of 35 ms.
"""

import _signal as signal  # pyright: ignore[reportMissingImports]
import _socket as socket
import marshal
import os
import sys

_PASSED_ON = {
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
}


def main() -> int:
    """Returns the exit code, negative for a signal."""
    # None may interrupt the request.
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    try:
        return int(_served(socket.socket(socket.AF_UNIX)))
    except (OSError, ValueError) as error:
        message = f"the server of warm programs has ended: {error}"
        print(message, file=sys.stderr)
        return 70


def _served(link: socket.socket) -> bytes:
    """The exit code that the server answers; nothing if it ends before that."""
    link.connect(os.path.join(os.path.dirname(__file__), "socket"))
    _ask(link)
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: link.send(bytes([number])))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    answer = link.recv(16)
    # There is nobody left to whom one could be passed on.
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    return answer


def _ask(link: socket.socket) -> None:
    files = [fd for fd in _open_files() if fd != link.fileno()]
    request = {
        "pid": os.getpid(),
        "command": os.path.abspath(__file__),
        "words": sys.argv[1:],
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "files": files,
    }
    content = marshal.dumps(request)
    numbers = b"".join(fd.to_bytes(4, sys.byteorder) for fd in files)
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)
    link.sendmsg([len(content).to_bytes(8, "big")], [rights])
    link.sendall(content)


def _open_files() -> list[int]:
    listed = [int(name) for name in os.listdir("/proc/self/fd")]
    # The listing itself was open too.
    return [fd for fd in listed if os.path.exists(f"/proc/self/fd/{fd}")]


def _end(code: int) -> None:
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    _end(main())
