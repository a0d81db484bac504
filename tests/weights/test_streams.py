"""The order of work on a device among threads, on the CPU and on an accelerator."""

import threading
from unittest.mock import Mock, call

import pytest
import torch

from lightning_adpsgd.weights.streams import (
    Guard,
    Mark,
    host_memory,
    side_stream,
    to_device,
    to_host,
    wait_for_stream,
)
from tests.helpers import together

pytestmark = pytest.mark.usefixtures("engine_device")


def test_what_is_done_under_a_guard_is_done_in_the_order_of_entering(
    engine_device: torch.device,
) -> None:
    guard = Guard(threading.Condition(), engine_device)
    number = torch.ones((), dtype=torch.float64)
    expected, modulus = [1], 1_000_003
    with guard:  # what the main thread has queued comes first
        pass

    def work(factor: int) -> None:
        with side_stream(engine_device):
            for _ in range(20):
                with guard:
                    expected.append((expected[-1] * factor + 1) % modulus)
                    number.mul_(factor).add_(1).fmod_(modulus)

    together([lambda f=factor: work(f) for factor in (3, 5, 7)])
    with guard:
        pass
    assert number.item() == expected[-1]


def test_a_guard_that_is_held_is_not_waited_for(engine_device: torch.device) -> None:
    guard = Guard(threading.Condition(threading.Lock()), engine_device)
    with guard:
        assert not guard.try_enter()
    assert guard.try_enter()
    guard.leave()


def test_a_stream_follows_a_mark_of_another(engine_device: torch.device) -> None:
    begun, ended = Mark(engine_device), Mark(engine_device)
    source, target = torch.zeros(1000), torch.empty(1000)
    begun.set()
    with side_stream(engine_device):
        begun.follow()
        for _ in range(50):
            source.add_(1)
        ended.set()
    ended.follow()
    target.copy_(source)
    assert target.tolist() == [50.0] * 1000


def test_bytes_come_to_the_host_and_back_whole(engine_device: torch.device) -> None:
    host = host_memory(1000, torch.float32, engine_device)
    source, target = torch.zeros(1000), torch.empty(1000)
    for number in range(20):
        source.fill_(number)
        to_host(source, host)
        source.fill_(-1)
        assert host.tolist() == [float(number)] * 1000
        to_device(host, target)
        assert target.tolist() == [float(number)] * 1000


def test_on_a_cpu_a_message_is_not_copied() -> None:
    message = torch.ones(3, device="cpu")
    to_host(message, message)
    to_device(message, message)
    assert message.tolist() == [1, 1, 1]


def test_a_thread_sleeps_while_it_waits_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it would occupy a core, and the driver."""
    told, gpu = Mock(), torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "Event", told.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: str(device))
    wait_for_stream(gpu)
    event = call.event(blocking=True)
    assert told.mock_calls == [
        event,
        call.event().record("cuda:1"),
        call.event().synchronize(),
    ]
    wait_for_stream(torch.device("cpu"))
    assert len(told.mock_calls) == 3


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_memory_from_which_a_device_copies_is_pinned(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock()
    monkeypatch.setattr(torch, "empty", made)
    host_memory(3, torch.float16, torch.device(where))
    made.assert_called_once_with(
        3, dtype=torch.float16, device="cpu", pin_memory=where == "cuda"
    )


def test_copies_between_a_device_and_the_host_are_queued() -> None:
    for copy in (to_host, to_device):
        source, target = Mock(device=torch.device("cpu")), Mock()
        copy(source, target)
        target.copy_.assert_called_once_with(source, non_blocking=True)
