"""Long cables: frames between a host and the switch that arrive late, or not at all.

The kernel's own emulator (`netem`) is often not compiled in. So both ends of a cable
are TAP devices, and this program carries frames from one to the other. Each waits for
its delay in a queue, and some are lost. It is a process of its own, because the hosts'
programs are not to wait for it.

    python benchmarks/cables.py DELAY_S LOSS SWITCH HOST [HOST ...]

It prints "ready" once all cables are connected, and ends when it is killed.
"""

import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from pathlib import Path

NAMESPACES = Path("/run/netns")
MTU = 9000
"""Jumbo frames, so that carrying them takes little of the hosts' cores."""
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_LARGEST_FRAME = 1 << 16


class Direction:
    """The frames that are on their way from one end to the other."""

    def __init__(self, begin: int, end: int, delay_s: float, loss: float) -> None:
        self.begin, self._end = begin, end
        self._delay_s, self._loss = delay_s, loss
        self._frames = deque[tuple[float, bytes]]()

    def take(self) -> None:
        """Takes the frames that have come to its begin."""
        due = time.monotonic() + self._delay_s
        while True:
            try:
                frame = os.read(self.begin, _LARGEST_FRAME)
            except BlockingIOError:
                return
            if random.random() >= self._loss:
                self._frames.append((due, frame))

    def deliver(self, now: float) -> float:
        """Delivers what is due; returns the seconds until the next frame is."""
        while self._frames and self._frames[0][0] <= now:
            os.write(self._end, self._frames.popleft()[1])
        return self._frames[0][0] - now if self._frames else 1.0


def enter(namespace: str) -> None:
    """Moves the calling thread to the network of a namespace."""
    with (NAMESPACES / namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), namespace)


def _open(namespace: str, device: str) -> int:
    enter(namespace)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    name = struct.pack("16sH", device.encode(), _IFF_TAP | _IFF_NO_PI)
    fcntl.ioctl(tap, _TUNSETIFF, name)
    return tap


def carry(directions: list[Direction]) -> None:
    """Carries frames, for ever."""
    poll, by_begin = select.epoll(), {one.begin: one for one in directions}
    for begin in by_begin:
        poll.register(begin, select.EPOLLIN)
    wait = 1.0
    while True:
        for begin, _ in poll.poll(max(0.0, wait)):
            by_begin[begin].take()
        now = time.monotonic()
        wait = min(one.deliver(now) for one in directions)


def main(words: list[str]) -> None:
    """The command line."""
    delay_s, loss, switch, *hosts = float(words[0]), float(words[1]), *words[2:]
    directions = list[Direction]()
    for number, host in enumerate(hosts):
        near, far = _open(host, "eth0"), _open(switch, f"port{number}")
        directions += [
            Direction(near, far, delay_s, loss),
            Direction(far, near, delay_s, loss),
        ]
    print("ready", flush=True)
    carry(directions)


if __name__ == "__main__":
    main(sys.argv[1:])
