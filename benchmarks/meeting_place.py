"""The rendezvous of islands, on the first of the emulated hosts."""

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.hosts import Hosts
from lightning_adpsgd.islands import rendezvous


@contextmanager
def meeting_place(hosts: Hosts, port: int) -> Iterator[None]:
    """A process that serves the rendezvous meanwhile."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_serve, args=(hosts, port), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _serve(hosts: Hosts, port: int) -> None:
    hosts.enter(0)
    rendezvous.serve(hosts.addresses[0], port, threading.Event())
