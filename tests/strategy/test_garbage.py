"""What a training's collections of garbage look at."""

import gc
from collections.abc import Iterator

import pytest

from lightning_adpsgd.strategy.garbage import OldObjects


@pytest.fixture(autouse=True)
def as_in_a_fresh_program() -> Iterator[None]:
    """The tests' own processes leave theirs out, or collect nothing at all."""
    was_enabled, kept = gc.isenabled(), gc.get_freeze_count()
    gc.unfreeze()
    gc.enable()
    yield
    if kept:
        gc.freeze()
    if not was_enabled:
        gc.disable()


def test_what_lives_is_left_out_until_the_end() -> None:
    old, mine = OldObjects(), [[]]
    assert any(one is mine for one in gc.get_objects())
    old.leave_out()
    assert not any(one is mine for one in gc.get_objects())
    old.look_again()
    assert any(one is mine for one in gc.get_objects())


def test_garbage_of_before_is_freed_first() -> None:
    gc.disable()
    loop: list[object] = []
    loop.append(loop)
    address = id(loop)
    del loop
    gc.enable()
    OldObjects().leave_out()
    gc.unfreeze()
    assert address not in map(id, gc.get_objects())


def test_a_program_that_sees_to_it_is_left_alone() -> None:
    gc.freeze()
    old, count = OldObjects(), gc.get_freeze_count()
    old.leave_out()
    old.look_again()
    assert gc.get_freeze_count() >= count


def test_without_collections_nothing_happens() -> None:
    gc.disable()
    OldObjects().leave_out()
    assert gc.get_freeze_count() == 0
