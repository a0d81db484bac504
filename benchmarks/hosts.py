"""Emulated hosts: network namespaces behind a switch, each port shaped to a rate.

::

    host 0  eth0 10.77.0.1 --- port0 \
    host 1  eth0 10.77.0.2 --- port1  >  bridge, in a namespace of its own
    ...                              /

Token buckets shape what a host sends, at its `eth0`, and what it receives, at the
switch's port. The loopback of a host is not shaped, so learners of one host are near
each other. The namespaces hold everything: when they are removed, so are the links.

With a delay, the cable between `eth0` and the switch is a long one (`cables`).

Needs root, `ip` and `tc`.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks import cables
from benchmarks.results import Report

_NAMES = Path("/etc/netns")  # `ip netns exec` shows a host its own /etc/hosts from here
_PREFIX = "adpsgd"
_BRIDGE, _APART = "bridge", "apart"
MASTER_PORT = 29400
BURST = 256 * 1024  # bytes


def reason_against() -> str | None:
    """The reason why this machine cannot emulate hosts; None if it can."""
    if not hasattr(os, "geteuid") or os.geteuid():
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)} on this machine (package iproute2)"
    probe = f"{_PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return None


def are_missing(report: Report) -> bool:
    """Whether this machine cannot emulate hosts; then the report says why."""
    if reason := reason_against():
        report.skipped["everything"] = reason
    return bool(reason)


class Finished(NamedTuple):
    """The end of the command of one host; `code` is -9 if it was killed."""

    host: int
    code: int
    output: str


def check_ended_well(finished: Sequence[Finished]) -> None:
    """Raises a `RuntimeError` with its last words if a host has failed."""
    for one in finished:
        if one.code:
            said = one.output[-500:]
            raise RuntimeError(f"host {one.host} ended with {one.code}: {said}")


class Hosts:
    """Hosts that `emulated` has made.

    Args:
        namespaces: One name for each host.
        switch: The name of the switch's namespace.
    """

    def __init__(self, namespaces: Sequence[str], switch: str) -> None:
        self._namespaces, self._switch = list(namespaces), switch

    def __len__(self) -> int:
        return len(self._namespaces)

    @property
    def addresses(self) -> list[str]:
        """The IPv4 address of each host."""
        return [f"10.77.0.{host + 1}" for host in range(len(self))]

    def namespace(self, host: int) -> str:
        """The name of a host for `ip netns exec`."""
        return self._namespaces[host]

    def environment(self, host: int) -> dict[str, str]:
        """The variables that a learner on a host needs to find the others."""
        return {
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "NCCL_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "GROUP_RANK": str(host),
        }

    def shape(self, rate: str | None, burst: int = BURST) -> None:
        """Limits what every host sends and receives.

        Args:
            rate: As `tc` writes it, "200mbit" say; none for no limit.
            burst: Bytes that pass at once. With more, whole messages of a few megabytes
                would exceed the rate.
        """
        for host, namespace in enumerate(self._namespaces):
            _shape(namespace, "eth0", rate, burst)
            _shape(self._switch, f"port{host}", rate, burst)

    def plug(self, host: int, plugged: bool) -> None:
        """Plugs the cable of a host into the switch, or unplugs it."""
        state = "up" if plugged else "down"
        _ip("-n", self._switch, "link", "set", f"port{host}", state)

    def part(self, hosts: Sequence[int], apart: bool) -> None:
        """Lets some hosts reach only one another, or ends that."""
        bridge = _APART if apart else _BRIDGE
        for host in hosts:
            _ip("-n", self._switch, "link", "set", f"port{host}", "master", bridge)

    def mute(self, host: int, muted: bool) -> None:
        """Drops all that a host sends, while it hears all others; then no limit."""
        if muted:
            queue = ["dev", "eth0", "root", "pfifo", "limit", "0"]
            _check(["tc", "-n", self._namespaces[host], "qdisc", "replace", *queue])
        else:
            _shape(self._namespaces[host], "eth0", None, BURST)

    def enter(self, host: int) -> None:
        """Moves the calling process (its only thread) to the network of a host."""
        cables.enter(self._namespaces[host])

    def run(
        self,
        command: Callable[[int], Sequence[str]],
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> list[Finished]:
        """Runs a command on every host at once, and kills what is left at the end.

        A host has a name of its own, `host0` and so on, which all of them resolve.

        Args:
            command: The words of the command of a host.
            timeout_s: Seconds after which everything is killed.
            environment: Variables besides those of this process and `environment`.
        """
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder) / str(host) for host in range(len(self))]
            processes = [
                self._start(host, command(host), output, environment or {})
                for host, output in enumerate(outputs)
            ]
            codes = wait_or_kill(processes, timeout_s)
            texts = [output.read_text(errors="replace") for output in outputs]
        pairs = zip(codes, texts, strict=True)
        return [Finished(host, code, text) for host, (code, text) in enumerate(pairs)]

    def _start(
        self,
        host: int,
        command: Sequence[str],
        output: Path,
        environment: Mapping[str, str],
    ) -> "subprocess.Popen[bytes]":
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
        inside = ["ip", "netns", "exec", self._namespaces[host], *named, f"host{host}"]
        with output.open("wb") as stream:
            return subprocess.Popen(
                [*inside, *command],
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **self.environment(host), **environment},
            )


@contextmanager
def emulated(
    num_hosts: int, rate: str | None = None, delay_s: float = 0.0, loss: float = 0.0
) -> Iterator[Hosts]:
    """Makes hosts and removes them at the end, after an error or a SIGTERM too.

    Args:
        num_hosts: At least one, at most 250.
        rate: As in `Hosts.shape`.
        delay_s: Seconds that a frame takes from one host to another.
        loss: Part of the frames that get lost on the way.

    Raises:
        RuntimeError: The machine cannot emulate hosts.
    """
    if reason := reason_against():
        raise RuntimeError(f"cannot emulate hosts: {reason}")
    _remove_leftovers()
    names = [
        f"{_PREFIX}-{os.getpid()}-{name}" for name in ("switch", *range(num_hosts))
    ]
    hosts = Hosts(names[1:], switch=names[0])
    with _terminated_as_exit():
        try:
            is_long = bool(delay_s or loss)
            _build(names[0], names[1:], is_long)
            hosts.shape(rate)
            # A frame passes two cables.
            words = (delay_s / 2, 1 - (1 - loss) ** 0.5, *names)
            with _carried(words) if is_long else nullcontext():
                yield hosts
        finally:
            for name in names:
                _remove(name)


def wait_or_kill(
    processes: "Sequence[subprocess.Popen[bytes]]", timeout_s: float
) -> list[int]:
    """Waits; returns exit codes. No process group is left at the end, in any case."""
    deadline = time.monotonic() + timeout_s
    try:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return [process.wait() for process in processes]


@contextmanager
def _carried(words: Sequence[object]) -> Iterator[None]:
    command = [sys.executable, cables.__file__, *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as carrier:
        assert carrier.stdout is not None
        try:
            if carrier.stdout.readline() != b"ready\n":
                raise RuntimeError("the cables of emulated hosts do not start")
            yield
        finally:
            carrier.kill()


def _build(switch: str, hosts: Sequence[str], is_long: bool) -> None:
    _ip("netns", "add", switch)
    for bridge in (_BRIDGE, _APART):
        _ip("-n", switch, "link", "add", bridge, "type", "bridge")
        _ip("-n", switch, "link", "set", bridge, "up")
    for host, namespace in enumerate(hosts):
        port, address = f"port{host}", f"10.77.0.{host + 1}/24"
        _ip("netns", "add", namespace)
        _lay_cable(switch, port, namespace, is_long)
        _ip("-n", switch, "link", "set", port, "master", _BRIDGE, "up")
        _ip("-n", namespace, "address", "add", address, "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        _write_names(namespace, len(hosts))


def _lay_cable(switch: str, port: str, namespace: str, is_long: bool) -> None:
    if not is_long:
        far_end = ["peer", "name", "eth0", "netns", namespace]
        _ip("-n", switch, "link", "add", port, "type", "veth", *far_end)
        return
    for end, device in ((switch, port), (namespace, "eth0")):
        _ip("-n", end, "tuntap", "add", device, "mode", "tap")
        _ip("-n", end, "link", "set", device, "mtu", str(cables.MTU))


def _write_names(namespace: str, num_hosts: int) -> None:
    lines = ["127.0.0.1 localhost"]
    lines += [f"10.77.0.{host + 1} host{host}" for host in range(num_hosts)]
    folder = _NAMES / namespace
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosts").write_text("\n".join(lines) + "\n")


def _shape(namespace: str, device: str, rate: str | None, burst: int) -> None:
    command = ["tc", "-n", namespace, "qdisc"]
    if rate is None:
        # Fails where there is no limit to remove.
        subprocess.run([*command, "del", "dev", device, "root"], capture_output=True)
        return
    sizes = ["burst", f"{burst}b", "limit", f"{burst * 400 // 256}b"]
    bucket = ["tbf", "rate", rate, *sizes]
    _check([*command, "replace", "dev", device, "root", *bucket])


def _remove(namespace: str) -> None:
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
    shutil.rmtree(_NAMES / namespace, ignore_errors=True)


def _remove_leftovers() -> None:
    """Removes the hosts of runs that were killed before they could clean up."""
    for path in cables.NAMESPACES.glob(f"{_PREFIX}-*"):
        owner = re.match(rf"{_PREFIX}-(\d+)-", path.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            _remove(path.name)


@contextmanager
def _terminated_as_exit() -> Iterator[None]:
    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ip(*words: str) -> None:
    _check(["ip", *words])


def _check(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
