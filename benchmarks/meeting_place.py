"""The rendezvous of islands, on one of the emulated hosts or on this one."""

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

from benchmarks.hosts import Hosts
from lightning_adpsgd.islands import rendezvous


@contextmanager
def meeting_place(hosts: Hosts, port: int) -> Iterator[None]:
    """A context in which a process serves the rendezvous on the first host."""
    process = start(hosts.addresses[0], port, hosts)
    try:
        yield
    finally:
        end(process)


def start(
    address: str, port: int, hosts: Hosts | None = None, host: int = 0
) -> BaseProcess:
    """Serves the rendezvous in a process; without emulated hosts, on this one."""
    context = multiprocessing.get_context("fork")
    process = context.Process(
        target=_serve, args=(address, port, hosts, host), daemon=True
    )
    process.start()
    return process


def end(process: BaseProcess) -> None:
    """Kills the rendezvous, so that the next one is empty."""
    process.kill()
    process.join()


def _serve(address: str, port: int, hosts: Hosts | None, host: int) -> None:
    if hosts is not None:
        hosts.enter(host)
    rendezvous.serve(address, port, threading.Event())
