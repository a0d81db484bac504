"""Stores of tests: one that is served here, and one whose connection is busy."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch._C._distributed_c10d import Store

from lightning_adpsgd.coordination.store import near_store, own_connection, serve_near
from tests.helpers import PATIENCE

own_connections = pytest.mark.skipif(
    not hasattr(Store, "clone"), reason="a store of torch before 2.8 has one connection"
)


@contextmanager
def while_a_call_waits(store: Store) -> Iterator[threading.Thread]:
    """A thread waits for a key of the store, and keeps its connection busy."""
    waiting = threading.Thread(target=store.get, args=["at last"])
    waiting.start()
    time.sleep(0.05)  # until the call is on its way
    try:
        yield waiting
    finally:
        own_connection(store).set("at last", "")
        waiting.join()


def served_and_near() -> tuple[Store, Store]:
    served, address = serve_near("127.0.0.1", PATIENCE)
    return served, near_store(address, PATIENCE)
