"""What learners are told before they begin: who differs, who is absent, who is deaf."""

import errno
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, fields, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from lightning_adpsgd import HADPSGDStrategy, __version__
from lightning_adpsgd.coordination.startup import barrier, checks, learner_info
from lightning_adpsgd.coordination.startup.barrier import StartupBarrier, StartUpError
from lightning_adpsgd.coordination.startup.checks import (
    LaunchPlacement,
    check_same_layout,
    check_start,
    open_store,
)
from lightning_adpsgd.coordination.startup.learner_info import (
    LearnerInfo,
    describe,
    disagreements,
    scattered,
    settings_of,
)
from lightning_adpsgd.coordination.startup.reachability import (
    LearnerLocation,
    ReachabilityServer,
    explain,
    loopback_traps,
    neighbours,
    visit,
    visit_all,
)
from lightning_adpsgd.transport import network_interfaces
from lightning_adpsgd.transport.links import sockets
from lightning_adpsgd.transport.links.peer_info import PROTOCOL
from lightning_adpsgd.transport.links.sockets import Address
from lightning_adpsgd.transport.network_interfaces import (
    Interface,
    NoSuchInterface,
    gloo_addresses,
)
from lightning_adpsgd.weights.flat import FlatParameters, first_difference
from tests.helpers import (
    PATIENCE,
    Outcome,
    default_timeout,
    free_port,
    together,
    until,
)
from tests.learners import Linear, gossip, learners, loader, trainer_of, values

SHORT = timedelta(seconds=0.2)


def location(
    rank: int, host: str = "a", at: str = "10.0.0.1", **changes: Any
) -> LearnerLocation:
    plain = LearnerLocation(
        rank, host, f"machine {host}", [Address(at, 40_000 + rank)], [], ""
    )
    return replace(plain, **changes)


def info(rank: int, host: str = "a", **dials: Any) -> LearnerInfo:
    settings = settings_of(vars(HADPSGDStrategy(**dials).dials), {"world size": 4})
    return LearnerInfo(location(rank, host), settings)


# --- in what learners must agree


def test_an_introduction_survives_its_journey() -> None:
    one = info(3)
    away = replace(one.place, interfaces=[Interface("eth0", "10.0.0.1/24")])
    one = replace(one, place=away, trouble="none")
    assert LearnerInfo.from_json(json.dumps(asdict(one))) == one


def test_an_introduction_of_another_version_is_read_as_far_as_it_is_known() -> None:
    told = json.loads(json.dumps(asdict(info(3))))
    told["place"]["planet"], told["mood"] = "earth", "good"
    told["settings"]["version"]["lightning_adpsgd"] = "99.0"
    (line,) = disagreements([info(1), LearnerInfo.from_json(json.dumps(told))])
    assert line.startswith(f"`lightning_adpsgd` differs: {__version__} in learner 1")
    assert "and 99.0 in learner 3" in line


def test_equal_learners_do_not_disagree() -> None:
    assert disagreements([info(rank) for rank in range(4)]) == []


def test_every_dial_must_agree() -> None:
    told = settings_of(vars(HADPSGDStrategy().dials), {})["dial"]
    assert set(told) == {field.name for field in fields(HADPSGDStrategy().dials)}


@pytest.mark.parametrize(
    ("dials", "message"),
    [
        ({"topology": "complete"}, "`topology` differs: ring in .* and complete in"),
        ({"communication": "sync"}, "`communication` differs: 'async' in .* 'sync' in"),
        ({"super_learner_size": 2}, "`super_learner_size` differs: 'node' .* and 2 in"),
        ({"gossip_every": 3}, "`gossip_every` differs: 1 in .* and 3 in"),
        ({"mixing_gain": 0.5}, r"`mixing_gain` differs: 1\.0 in .* and 0\.5 in"),
        ({"seed": 7}, "`seed` differs: 0 in .* and 7 in"),
        (
            {"wire_dtype": torch.bfloat16},
            r"`wire_dtype` .* 'auto' in .*torch\.bfloat16",
        ),
        ({"order": "average_then_step"}, "`order` differs: None in .*average_then"),
        ({"timeout": timedelta(1)}, "`timeout` differs: 0:05:00 in .* 1 day, 0:00:00"),
    ],
)
def test_a_differing_dial_is_told_with_both_values_and_hosts(
    dials: dict[str, Any], message: str
) -> None:
    told = [info(0), info(1), info(2, "b", **dials)]
    (line,) = disagreements(told)
    assert re.search(message, line)
    assert "in learners 0-1 (host a) and" in line
    assert "in learner 2 (host b). Start the same program" in line


@pytest.mark.parametrize(
    ("kind", "name", "remedy"),
    [
        ("version", "python", "Install the same versions on all hosts"),
        ("version", "torch", "Install the same versions on all hosts"),
        ("version", "lightning", "Install the same versions on all hosts"),
        ("version", "protocol", "Install the same versions on all hosts"),
        ("version", "lightning_adpsgd", "Install the same versions on all hosts"),
        ("job", "world size", "Give the launcher of every host the same job"),
    ],
)
def test_whatever_else_differs_has_its_own_remedy(
    kind: str, name: str, remedy: str
) -> None:
    told = [info(0), info(1, "b")]
    assert name in told[1].settings[kind]
    told[1].settings[kind][name] = "another"  # type: ignore[index]
    (line,) = disagreements(told)
    assert line.startswith(f"`{name}` differs: ")
    assert "another in learner 1 (host b)" in line
    assert remedy in line


def test_a_setting_that_a_release_lacks_is_absent_there() -> None:
    told = [info(0), info(1, "b")]
    del told[1].settings["dial"]["seed"]  # type: ignore[attr-defined]
    (line,) = disagreements(told)
    assert "`seed` differs: 0 in learner 0 (host a) and absent in learner 1" in line


def test_builds_of_one_torch_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.6.0+cpu")
    told = info(0)
    monkeypatch.setattr(torch, "__version__", "2.6.0+cu124")
    assert disagreements([told, info(1, "b")]) == []


def test_ranks_are_written_as_runs_and_hosts_once() -> None:
    locations = [
        location(r, h) for r, h in [(0, "a"), (1, "a"), (2, "b"), (5, "b"), (7, "c")]
    ]
    assert describe(locations) == "learners 0-2, 5, 7 (hosts a, b, c)"
    assert describe([location(i, f"h{i}") for i in range(10)]).endswith(
        "h7 and 2 more)"
    )


# --- super-learners of one machine


def test_ranks_dealt_host_by_host_make_whole_super_learners() -> None:
    assert scattered([location(r, "aabb"[r]) for r in range(4)], 2) == []
    # Two Trainers of two learners on one of the hosts.
    assert scattered([location(r, "aaaabb"[r]) for r in range(6)], 2) == []


def test_ranks_dealt_in_turn_are_refused_with_the_launchers_option() -> None:
    (line,) = scattered([location(r, "abab"[r]) for r in range(4)], 2)
    assert "learners 0-1 (hosts a, b) would form one across machines" in line
    assert "`srun --distribution=block`" in line
    assert "`mpirun --map-by slot`" in line


def test_hosts_with_unequal_numbers_are_refused_with_the_numbers() -> None:
    (line,) = scattered([location(r, "aaab"[r]) for r in range(4)], 2)
    assert "learners 2-3 (hosts a, b) would form one across machines" in line
    assert "as `devices` says (there are 3 on a, 1 on b)" in line


# --- which learners one probes


@pytest.mark.parametrize(("hosts", "size"), [(1, 4), (2, 1), (3, 2), (4, 2), (17, 1)])
def test_few_hosts_are_all_probed(hosts: int, size: int) -> None:
    machines = [f"h{rank // size}" for rank in range(hosts * size)]
    for rank, own in enumerate(machines):
        chosen = neighbours(rank, machines)
        assert rank not in chosen
        assert {machines[other] for other in chosen} | {own} == set(machines)
        assert {other % size for other in chosen if machines[other] != own} <= {
            rank % size
        }


@pytest.mark.parametrize("hosts", [18, 64, 1000, 4097])
def test_many_hosts_take_few_probes_and_form_one_net(hosts: int) -> None:
    machines = [str(host) for host in range(hosts)]
    chosen = neighbours(5, machines)
    assert len(chosen) <= 2 * hosts.bit_length()
    assert {4, 6} <= set(chosen)


# --- causes


def test_loopback_is_fine_on_one_host_and_a_trap_on_two() -> None:
    eth0 = [Interface("lo", "127.0.0.1/8"), Interface("eth0", "10.0.0.3/24")]
    here = location(0, "a")
    trapped = location(1, "b", "127.0.1.1", interfaces=eth0)
    assert loopback_traps([trapped, replace(trapped, rank=2)]) == []
    (line,) = loopback_traps([here, trapped, replace(trapped, rank=2)])
    assert "learner 1 on host b would listen at 127.0.1.1, a loopback address" in line
    assert "the name 'b' resolves to it there, most likely in /etc/hosts" in line
    assert "Set GLOO_SOCKET_IFNAME on host b" in line
    assert "it has eth0 10.0.0.3/24" in line
    (line,) = loopback_traps([here, replace(trapped, chosen="lo")])
    assert "GLOO_SOCKET_IFNAME=lo is set there" in line


ETH0 = Interface("eth0", "10.0.0.2/24")
ETH1 = Interface("eth1", "192.168.7.2/24")


@pytest.mark.parametrize(
    ("wrong", "at", "seen_from", "expected"),
    [
        ("timed out", "10.0.0.2", "10.0.0.1/24", ["nothing answers", "firewall drops"]),
        ("refused", "10.0.0.2", "10.0.0.1/24", ["is refused", "firewall rejects"]),
        (
            "no route",
            "192.168.7.2",
            "10.0.0.1/24",
            ["no route", "wrong interface", "Set GLOO_SOCKET_IFNAME=eth0 on host b"],
        ),
        ("timed out", "192.168.7.2", "10.9.0.1/24", ["firewall", "eth1 192.168.7.2"]),
        ("not as itself", "10.0.0.2", "10.0.0.1/24", ["something else", "sidecar"]),
    ],
)
def test_what_was_met_has_a_cause_and_a_remedy(
    wrong: str, at: str, seen_from: str, expected: list[str]
) -> None:
    source = location(0, "a", interfaces=[Interface("eth0", seen_from)])
    target = location(3, "b", at, interfaces=[ETH0, ETH1])
    text = explain(source, target, target.endpoints[0], wrong)
    interface = "eth0" if at.startswith("10.") else "eth1"
    assert text.startswith(
        "learner 3 on host b cannot be reached from learner 0 on host a at "
        f"{at}:40003 (interface {interface}): "
    )
    assert [part for part in expected if part not in text] == []


def test_an_address_that_both_hosts_have_is_a_local_bridge() -> None:
    bridge = [Interface("docker0", "172.17.0.1/16"), ETH0]
    source, target = (
        location(rank, host, "172.17.0.1", interfaces=bridge)
        for rank, host in enumerate("ab")
    )
    text = explain(source, target, target.endpoints[0], "refused")
    assert "Both hosts have the address 172.17.0.1" in text
    assert "docker0 172.17.0.1/16, eth0 10.0.0.2/24" in text


# --- the model


def layout(*widths: int, dtype: torch.dtype = torch.float32) -> str:
    layers = [torch.nn.Linear(width, 2, dtype=dtype) for width in widths]
    return FlatParameters(torch.nn.Sequential(*layers)).layout()


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        (
            layout(3, 4),
            layout(3, 5),
            "`1.weight` of shape (2, 5) in torch.float32, and there `1.weight` of "
            "shape (2, 4) in torch.float32",
        ),
        (layout(3), layout(3, 4), "`1.weight` of shape (2, 4) in torch.float32, and "),
        (layout(3, 4), layout(3), "is none, and there `1.weight` of shape (2, 4)"),
        (layout(3), layout(3, dtype=torch.float64), "torch.float64, and there `0."),
    ],
)
def test_the_first_differing_weight_is_named(
    theirs: str, ours: str, message: str
) -> None:
    assert message in first_difference(theirs, ours)


def test_only_learners_whose_model_differs_are_named() -> None:
    store = HashStore()

    def learner(rank: int) -> None:
        check_same_layout(
            store, rank, 3, layout(3 if rank == 0 else 2 + rank), PATIENCE
        )

    errors = together(
        [lambda rank=rank: caught(lambda: learner(rank)) for rank in (0, 1, 2)]
    )
    assert len(set(errors)) == 1
    assert errors[0].count("the model of learner 2 on host") == 1
    assert "the model of learner 1" not in errors[0]


def caught(action: Callable[[], object]) -> str:
    """The message with which something was refused."""
    try:
        action()
    except StartUpError as error:
        return str(error)
    raise AssertionError("nothing was refused")


# --- the barrier call


def test_all_hear_what_learner_0_made_of_all_words() -> None:
    store = HashStore()
    rolls = [StartupBarrier(store, rank, 3, PATIENCE) for rank in range(3)]
    answers = together(
        [
            lambda r=r, i=i: r.ask("words", "abc"[i], "+".join)
            for i, r in enumerate(rolls)
        ]
    )
    assert answers == ["a+b+c"] * 3


def test_the_absent_are_named_to_those_who_came() -> None:
    store, names = HashStore(), [f"learner {r} on host h{r}" for r in range(4)]
    first, third = (StartupBarrier(store, rank, 4, SHORT, names) for rank in (0, 2))

    def come_later() -> str:
        until(lambda: store.add("words/come", 0) == 1, "the third")
        return caught(lambda: first.ask("words", "", str))

    errors = together([come_later, lambda: caught(lambda: third.ask("words", "", str))])
    for error in errors:
        assert "2 of 4 learners have not arrived" in error
        assert ": learner 1 on host h1, learner 3 on host h3. On a busy" in error


def test_a_silent_learner_0_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_adpsgd.coordination.startup.barrier._GRACE", SHORT)
    barrier = StartupBarrier(
        HashStore(), 1, 2, SHORT, ["learner 0 on host a", "learner 1"]
    )
    message = caught(lambda: barrier.ask("words", "", str))
    assert message.startswith("learner 0 on host a did not answer learner 1")


def test_ctrl_c_ends_a_learner_that_waits_for_learner_0() -> None:
    store, ended = HashStore(), threading.Event()
    was_heard: list[bool] = []

    def interrupt() -> None:
        until(lambda: store.add("words/come", 0) == 1, "the learner")
        os.kill(os.getpid(), signal.SIGINT)
        was_heard.append(ended.wait(PATIENCE.total_seconds()))
        store.set("words/answer", "fine ")

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        StartupBarrier(store, 1, 2, 4 * PATIENCE).ask("words", "", str)
    ended.set()
    helper.join()
    assert was_heard == [True]


def test_who_waits_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_adpsgd.coordination.startup.barrier.NOTICE_S", 0.0)
    store = HashStore()
    first, second = (StartupBarrier(store, rank, 2, PATIENCE) for rank in range(2))

    def late() -> str:
        until(lambda: "still waiting" in caplog.text, "the notice")
        return second.ask("words", "b", "".join)

    assert together([lambda: first.ask("words", "a", "".join), late]) == ["ab", "ab"]
    assert "1 of 2 learners have not arrived at start-up after" in caplog.text


def test_learner_0_stays_until_all_that_came_have_heard_why_nothing_starts() -> None:
    """The store may be in its process, and would be gone with its answer."""

    def refuse(words: list[str]) -> str:
        raise StartUpError("+".join(words))

    store, errors = HashStore(), list[str]()
    store.set("words/1", "b")
    store.add("words/come", 1)
    first = StartupBarrier(store, 0, 2, PATIENCE)
    waits = threading.Thread(
        target=lambda: errors.append(caught(lambda: first.ask("words", "a", refuse)))
    )
    waits.start()
    until(lambda: store.check(["words/heard"]), "the answer")
    assert waits.is_alive()
    assert errors == []
    store.add("words/heard", 1)
    waits.join()
    assert errors == ["a+b"]


def test_who_came_does_not_wait_until_others_have_heard() -> None:
    """It holds no store."""
    store = HashStore()
    store.set("words/answer", "wrong the reason")
    store.add("words/come", 5)
    second = StartupBarrier(store, 1, 6, PATIENCE)
    begin = time.monotonic()
    assert caught(lambda: second.ask("words", "b", str)) == "the reason"
    assert time.monotonic() - begin < barrier._HEARING_S / 2


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of a wait, which pass at once."""
    found = list[float]()
    clock = SimpleNamespace(monotonic=lambda: sum(found), sleep=found.append)
    monkeypatch.setattr(barrier, "time", clock)
    return found


def test_a_wait_looks_ever_less_often_warns_once_and_ends(
    pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    def describe(wrong: str, waited_s: float) -> str:
        return f"{wrong} after {waited_s:.0f} s"

    patience = timedelta(seconds=100)
    wait = lambda: barrier.wait_while(lambda: "dark", patience, describe)  # noqa: E731
    assert caught(wait) == "dark after 100 s"
    assert caplog.messages == ["dark after 30 s; still waiting"]
    assert pauses[:3] == pytest.approx([0.001, 0.0015, 0.00225])
    assert max(pauses) == 0.05


def test_a_wait_without_trouble_is_none(pauses: list[float]) -> None:
    wrong = iter(["dark", "dark", ""])
    barrier.wait_while(lambda: next(wrong), PATIENCE, lambda *_: "")
    assert len(pauses) == 2


@pytest.mark.parametrize(("num", "ends"), [(9, "learner 8"), (10, "learner 8, ...")])
def test_of_many_that_are_absent_some_are_named(num: int, ends: str) -> None:
    store = HashStore()
    store.set("words/0", "")
    told = StartupBarrier(store, 0, num, SHORT)._absent("words", 3.0)
    assert told.startswith(f"{num - 1} of {num} learners have not arrived at start-up")
    assert "after 3 s: learner 1, learner 2, learner 3, " in told
    assert f", {ends}. On a busy machine" in told


def test_a_learner_beyond_the_devices_of_its_machine_is_told() -> None:
    assert LaunchPlacement(2, 1).trouble() == ""
    told = LaunchPlacement(2, 2).trouble()
    assert told.startswith("it is learner 3 of its machine")
    assert "`devices` is 2" in told


def test_of_many_reasons_eight_are_told_and_the_others_counted() -> None:
    checks._refuse([])
    for num in (8, 9):
        lines = caught(lambda num=num: checks._refuse(["no"] * num)).splitlines()
        assert lines[:9] == ["training cannot start:", *["no"] * 8]
        assert lines[9:] == ["... and 1 more"] * (num - 8)


def test_learners_of_one_host_tell_once_of_another_host() -> None:
    locations = [location(0), location(1), location(2, "b", "10.0.0.2")]
    met = json.dumps([[2, ["10.0.0.2", 40_002], "refused"]])
    judged: Any = SimpleNamespace(ask=lambda _, word, judge: judge([met, met, "[]"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "visit_all", lambda *_: [])
        told = caught(lambda: checks._check_reachability(judged, locations, 0))
    assert told.count("learner 2 on host b cannot be reached from") == 1


# --- addresses and reachability


def listening_ports() -> set[tuple[str, int]]:
    """IPv4 listeners of this network namespace, as the kernel lists them."""
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    locations = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {
        (socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16))
        for host, port in locations
    }


needs_linux = pytest.mark.skipif(
    not os.path.exists("/proc/net/tcp"), reason="interfaces are known on Linux alone"
)


@needs_linux
@pytest.mark.parametrize("chosen", ["", "lo"])
def test_the_address_is_the_one_that_gloo_takes(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)

    def program(rank: int) -> set[str]:
        before = listening_ports()
        if chosen:
            device = dist.ProcessGroupGloo.create_device(interface=chosen)
        else:
            device = dist.ProcessGroupGloo.create_default_device()
        new = {host for host, _ in listening_ports() - before}
        del device
        return new

    [new] = values(learners(1, program))
    chosen_ones = set(gloo_addresses())
    assert chosen_ones
    assert chosen_ones <= new


@needs_linux
def test_interfaces_are_told_with_their_networks() -> None:
    assert Interface("lo", "127.0.0.1/8") in network_interfaces.interfaces()
    assert Interface("lo", "127.0.0.1/8").holds("127.5.5.5")
    assert not Interface("eth0", "10.0.0.1/24").holds("10.0.1.1")
    assert not Interface("eth0", "10.0.0.1/24").holds("fe80::1")


def test_an_interface_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch0")
    with pytest.raises(NoSuchInterface, match="GLOO_SOCKET_IFNAME=nonesuch0 names"):
        gloo_addresses()


def test_a_host_name_without_an_address_means_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert gloo_addresses() == ["127.0.0.1"]


def test_a_server_is_heard_until_it_is_closed() -> None:
    with closing(ReachabilityServer(3, ["127.0.0.1"])) as server:
        (end,) = server.endpoints
        assert visit(end, 3, PATIENCE) == ""
        assert visit(end, 4, PATIENCE) == "not as itself"
        names = {thread.name for thread in server._threads}
    assert visit(end, 3, PATIENCE) == "refused"
    assert not names & {thread.name for thread in threading.enumerate()}


def test_a_server_waits_for_visitors_whatever_the_default_timeout_of_sockets() -> None:
    with (
        default_timeout(0.05),
        closing(ReachabilityServer(3, ["127.0.0.1"])) as server,
    ):
        time.sleep(0.2)
        assert visit(server.endpoints[0], 3, PATIENCE) == ""


def test_an_error_of_its_process_ends_no_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accept, left = socket.socket.accept, [3]

    def accepts_at_last(sock: socket.socket) -> object:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", accepts_at_last)
    with closing(ReachabilityServer(3, ["127.0.0.1"])) as server:
        assert visit(server.endpoints[0], 3, PATIENCE) == ""
    assert left == [0]


def test_a_proxy_that_takes_every_connection_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        end = Address(*proxy.getsockname())

        def hang_up() -> None:
            proxy.accept()[0].close()

        assert together([lambda: visit(end, 0, PATIENCE), lambda: hang_up() or ""]) == [
            "not as itself",
            "",
        ]


def test_an_answer_that_is_no_text_is_somebody_elses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        end = Address(*server.getsockname())

        def answer() -> str:
            visitor, _ = server.accept()
            with visitor:
                visitor.sendall(b"\x15\x03\x01\xff\n")  # as TLS refuses plain text
            return ""

        met = together([lambda: visit(end, 0, PATIENCE), answer])
        assert met == ["not as itself", ""]


@pytest.mark.parametrize(
    ("error", "trouble"),
    [
        (TimeoutError("timed out"), "timed out"),
        (ConnectionRefusedError("refused"), "refused"),
        (OSError(errno.EHOSTUNREACH, "unreachable"), "no route"),
        (OSError(errno.ENETUNREACH, "unreachable"), "no route"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "not as itself"),
    ],
)
def test_a_visit_tells_what_it_has_met(
    error: OSError, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: object) -> None:
        raise error

    monkeypatch.setattr(socket, "create_connection", connect)
    assert visit(Address("192.0.2.1", 1), 0, PATIENCE) == trouble


def test_of_all_visits_those_that_failed_are_told() -> None:
    with closing(ReachabilityServer(1, ["127.0.0.1", "127.0.0.2"])) as server:
        closed = Address("127.0.0.1", free_port())
        well = location(1, endpoints=server.endpoints)
        badly = location(2, endpoints=[closed, server.endpoints[1]])
        assert visit_all([well, badly], PATIENCE) == [
            (2, closed, "refused"),
            (2, server.endpoints[1], "not as itself"),
        ]
    assert visit_all([location(3, endpoints=[])], PATIENCE) == []


def test_an_address_that_is_not_here_is_left_out() -> None:
    with closing(ReachabilityServer(0, ["192.0.2.1"])) as server:
        assert server.endpoints == []


# --- the store


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        error = caught(lambda: open_store("127.0.0.1", port, 0, 2, SHORT))
    assert "could not host the job's store" in error
    assert "MASTER_PORT a port that nothing else uses" in error


def test_a_store_that_is_not_there_is_named(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    error = caught(lambda: open_store("127.0.0.1", port, 1, 2, SHORT))
    assert f"learner 1 on host {socket.gethostname()} cannot reach" in error
    assert f"store at 127.0.0.1:{port}" in error
    assert "refused" in error
    assert "MASTER_ADDR" in error


def test_an_address_that_leads_to_another_host_is_told_by_learner_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = "MASTER_ADDR must lead to the host of learner 0; still waiting"

    def connect(*_: object, **__: object) -> None:
        until(lambda: told in caplog.text, "the notice")
        raise dist.DistError("timed out")

    monkeypatch.setattr(barrier, "NOTICE_S", 0.0)
    monkeypatch.setattr(checks, "store_at", connect)
    monkeypatch.setattr(checks, "_listener_at", lambda *_: None)
    error = caught(lambda: open_store("127.0.0.1", free_port(), 0, 2, SHORT))
    assert "could not host the job's store" in error


def test_a_port_at_which_another_program_is_mute_is_told_by_those_that_join(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Learner 0 has ended, perhaps nobody ends the others, and torch has no bound."""
    monkeypatch.setattr(barrier, "NOTICE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = caught(lambda: open_store("127.0.0.1", port, 1, 2, SHORT))
    what = f"learner 1 on host .* has reached 127.0.0.1:{port}, and no store has"
    assert re.match(what, error)
    (told,) = caplog.messages
    assert re.match(f"{what} answered .* nothing else uses there; still waiting", told)


def test_a_store_that_comes_late_is_found() -> None:
    port = free_port()

    def late() -> Any:
        time.sleep(0.1)
        return open_store("127.0.0.1", port, 0, 2, PATIENCE)

    stores = together([lambda: open_store("127.0.0.1", port, 1, 2, PATIENCE), late])
    stores[0].set("word", "here")
    assert stores[1].get("word") == b"here"


def test_the_store_listens_at_the_interface_that_was_named_alone() -> None:
    port = free_port()
    store = open_store("127.0.0.1", port, 0, 1, PATIENCE)
    assert sockets.probe(Address("127.0.0.1", port)) is None
    for other in ("127.0.0.2", "::1"):
        assert isinstance(sockets.probe(Address(other, port)), OSError)
    # As torch does, which then connects once more.
    again = open_store("127.0.0.1", port, 0, 1, PATIENCE)
    again.set("word", "here")
    assert store.get("word") == b"here"


@pytest.mark.parametrize(
    ("name", "addresses", "listens_at_one"),
    [
        ("node0", ["127.0.0.2", "127.0.0.3"], False),
        ("node0", ["127.0.0.2", "127.0.0.2"], False),  # a loopback
        ("localhost", ["127.0.0.2", "127.0.0.3"], True),
        ("127.0.0.2", ["127.0.0.2"], True),
    ],
)
def test_a_store_whose_name_has_several_addresses_listens_at_all(
    name: str,
    addresses: list[str],
    listens_at_one: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other hosts may have found any of them."""
    kind = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
    found = [(*kind, (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    # Here they are those of a loopback, because no other can be listened at.
    is_loopback = len(set(addresses)) == 1 and name == "node0"
    monkeypatch.setattr(checks, "is_loopback", lambda _: is_loopback)
    listener = checks._listener_at(name, 0)
    assert (listener is not None) == listens_at_one
    if listener is not None:
        socket.socket(fileno=listener).close()


# --- real learners


def told(num: int, program: Callable[[int], Any]) -> list[Outcome]:
    """Learners that all end with an error."""
    outcomes = learners(num, program)
    assert [outcome.exit_code for outcome in outcomes] == [1] * num
    return outcomes


def train(rank: int, num: int, **dials: Any) -> None:
    trainer_of(gossip(**dials), num).fit(Linear(), loader(8, rank, num))


def test_learners_with_differing_dials_are_told() -> None:
    for outcome in told(
        3, lambda rank: train(rank, 3, seed=rank // 2, topology="ring")
    ):
        assert "`seed` differs: 0 in learners 0-1" in outcome.error
        assert "and 1 in learner 2 (host " in outcome.error


def test_learners_with_differing_versions_are_told() -> None:
    def program(rank: int) -> None:
        if rank == 1:
            torch.__version__ = "1.13.1+cpu"  # type: ignore[assignment]
            learner_info.__version__ = "0.0.1"  # type: ignore[attr-defined]
            learner_info.PROTOCOL = 99  # type: ignore[attr-defined]
        train(rank, 2)

    for outcome in told(2, program):
        assert "`torch` differs: " in outcome.error
        assert "and 1.13.1 in learner 1 (host " in outcome.error
        assert (
            f"`lightning_adpsgd` differs: {__version__} in learner 0" in outcome.error
        )
        assert "and 0.0.1 in learner 1 (host " in outcome.error
        assert f"`protocol` differs: {PROTOCOL} in learner 0" in outcome.error
        assert "and 99 in learner 1 (host " in outcome.error
        assert "Install the same versions on all hosts" in outcome.error


def test_a_learner_behind_a_closed_port_is_told() -> None:
    """Its address is there, but nothing answers at the port that it published."""

    def program(rank: int) -> None:
        if rank == 1:
            original = ReachabilityServer.__init__

            def deaf(self: ReachabilityServer, *arguments: Any) -> None:
                original(self, *arguments)
                self.endpoints = [Address("127.0.0.1", free_port())]

            ReachabilityServer.__init__ = deaf  # type: ignore[method-assign]
        train(rank, 2)

    for outcome in told(2, program):
        assert "learner 1 on host" in outcome.error
        assert "the connection is refused" in outcome.error
        assert "Most likely a firewall rejects it" in outcome.error


def test_a_wrong_interface_name_is_told() -> None:
    def program(rank: int) -> None:
        if rank == 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "nonesuch0"
        train(rank, 2)

    for outcome in told(2, program):
        assert "learner 1 on host" in outcome.error
        assert "GLOO_SOCKET_IFNAME=nonesuch0 names 'nonesuch0'" in outcome.error


def test_a_loopback_address_of_another_host_is_told() -> None:
    def program(rank: int) -> None:
        socket.gethostname = lambda: f"host{rank}"  # type: ignore[assignment]
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        train(rank, 2)

    for outcome in told(2, program):
        assert "learner 1 on host host1 would listen at 127.0.0.1" in outcome.error


def test_an_absent_learner_is_named() -> None:
    def program(rank: int) -> None:
        if rank == 2:
            return
        port = int(os.environ["MASTER_PORT"])
        store = open_store("127.0.0.1", port, rank, 3, PATIENCE)
        dials = vars(HADPSGDStrategy(super_learner_size=1).dials)
        store.set(f"about to come: {rank}", "")
        store.wait([f"about to come: {other}" for other in range(2)], PATIENCE)
        check_start(store, rank, 3, dials, LaunchPlacement(1, 0), timedelta(seconds=3))

    outcomes = learners(3, program)
    for outcome in outcomes[:2]:
        assert "1 of 3 learners have not arrived" in outcome.error
        assert ": learner 2 (machine 2). On a busy" in outcome.error


def test_eight_learners_start_and_start_again() -> None:
    """The store is counted in, so that a second start has keys of its own."""
    stores = [PrefixStore("job", HashStore())] * 8
    dials = vars(HADPSGDStrategy(super_learner_size=1).dials)
    for _ in range(2):
        together(
            [
                lambda rank=rank: check_start(
                    stores[rank], rank, 8, dials, LaunchPlacement(8, rank), PATIENCE
                )
                for rank in range(8)
            ]
        )
    assert stores[0].add("lightning_adpsgd/attempt/0/starts", 0) == 16
