"""Where islands of the race find one another: a process on the first host."""

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.hosts import Hosts
from benchmarks.racing.entrants import ISLANDS_PORT
from lightning_adpsgd.islands import rendezvous


@contextmanager
def around(hosts: Hosts, wanted: bool) -> Iterator[None]:
    """A rendezvous while learners run, if they are islands."""
    if not wanted:
        yield
        return
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_serve, args=(hosts,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _serve(hosts: Hosts) -> None:
    hosts.enter(0)
    rendezvous.serve(hosts.addresses[0], ISLANDS_PORT, threading.Event())
