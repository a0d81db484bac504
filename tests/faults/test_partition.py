"""The network is cut in two, and healed: two emulated hosts and the cable between."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.world import until, world

HOSTS = {"adpsgd-west": "10.93.7.1", "adpsgd-east": "10.93.7.2"}
WEST, EAST = HOSTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and iproute2",
    ),
]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def cable() -> Iterator[Callable[[bool], None]]:
    """Two hosts and the cable between them; plugs it, or pulls it out."""
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip(*f"link add west netns {WEST} type veth peer name east netns {EAST}".split())
        for end, (host, address) in zip(("west", "east"), HOSTS.items(), strict=True):
            ip("-n", host, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "link", "set", end, "up")
        yield lambda plugged: ip(
            "-n", WEST, "link", "set", "west", "up" if plugged else "down"
        )
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr}")
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False, timeout=20)


def test_two_halves_train_on_and_come_together_again(
    tmp_path: Path, cable: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_ADPSGD_UNPROTECTED", "1")
    with world(tmp_path, HOSTS[WEST], WEST, silence_s=4.0) as islands:
        for name, host in (("a", WEST), ("b", WEST), ("c", EAST), ("d", EAST)):
            islands.start(name, namespace=host)
            until(lambda n=name: bool(islands.steps(n)), "the first step")
        until(lambda: islands.all_see("a b c d", 4), "all four")
        cable(False)
        # East has no rendezvous: only silence tells it.
        until(lambda: islands.all_see("a b c d", 2), "two rings of two")
        begin = {name: islands.steps(name)[-1].number for name in "abcd"}
        # 8 s: so long that the half with the member list has evicted the other one.
        until(
            lambda: all(
                islands.steps(n)[-1].number > s + 160 for n, s in begin.items()
            ),
            "steps of both halves",
        )
        cable(True)
        until(lambda: islands.all_see("a b c d", 4), "one ring of four")
        assert "is on the member list again" in islands.output("a")
        assert not any("it takes their weights" in islands.output(n) for n in "abcd")
