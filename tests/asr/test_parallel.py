import errno
import os
import signal

import pytest

from lightning_adpsgd.asr.parallel import fork_map
from tests.helpers import expect_all_to_end


@pytest.mark.parametrize("num_processes", [1, 2, 5])
def test_every_item_is_mapped_once(num_processes):
    results = dict(fork_map(lambda item: item**2, range(7), num_processes))
    assert results == {index: index**2 for index in range(7)}


def test_no_items_give_no_results():
    assert list(fork_map(str, [], 3)) == []


def test_several_processes_share_the_items():
    together = fork_map(lambda _: os.getpid(), range(4), 2)
    assert os.getpid() not in dict(together).values()


def test_an_error_in_a_process_comes_with_its_traceback():
    def fail(item: int) -> int:
        raise ValueError(f"item {item} is bad")

    with pytest.raises(RuntimeError, match=r"item [01] is bad"):
        list(fork_map(fail, range(2), 2))


@pytest.mark.parametrize("num_processes", [1, 2])
def test_an_error_of_the_system_is_raised_as_it_is(num_processes):
    def fail(item: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "frames.npy")

    with pytest.raises(OSError, match=r"No space left on device: 'frames\.npy'"):
        list(fork_map(fail, range(2), num_processes))


def test_a_process_that_the_system_kills_is_told_with_the_likely_reason():
    with pytest.raises(RuntimeError, match=r"exit code -9; .* lack of memory"):
        list(fork_map(lambda _: os.kill(os.getpid(), signal.SIGKILL), range(2), 2))


def test_a_process_that_dies_ends_the_mapping():
    with pytest.raises(RuntimeError, match="exit code 7"):
        list(fork_map(lambda _: os._exit(7), range(2), 2))


def test_leaving_early_ends_the_processes():
    results = fork_map(lambda _: os.getpid(), range(1000), 2)
    _, pid = next(results)
    results.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def _map_and_be_killed() -> None:
    # More than a pipe takes: a process that nobody reads from would wait.
    for _ in fork_map(lambda _: bytes(1 << 17), range(1 << 20), 2):
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_processes_end_when_the_calling_one_is_killed():
    expect_all_to_end(_map_and_be_killed)
