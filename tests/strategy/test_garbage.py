"""What a training's collections of garbage look at."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from lightning_adpsgd.strategy.garbage import without_old_objects


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """The tests' own processes leave out what they import, or collect nothing."""
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    gc.freeze()
    if not was_enabled:
        gc.disable()


def leaves_out(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """As in a program that leaves out so many objects by itself."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: number)


def is_looked_at(found: object) -> bool:
    return any(one is found for one in gc.get_objects())


@pytest.mark.parametrize("of_python", [0, 375])
def test_what_lives_is_left_out_until_the_end(
    monkeypatch: pytest.MonkeyPatch, of_python: int
) -> None:
    """Also where Python itself leaves out something, as 3.12 does."""
    leaves_out(monkeypatch, of_python)
    mine = [[]]
    assert is_looked_at(mine)
    with without_old_objects():
        assert not is_looked_at(mine)
        newer = [[]]
        assert is_looked_at(newer)
    assert is_looked_at(mine)


class Loop:
    """Nothing but a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_of_before_is_freed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves_out(monkeypatch, 0)
    loop = Loop()
    gc.collect()  # it is old by then, and no collection of young objects frees it
    found = weakref.ref(loop)
    del loop
    with without_old_objects():
        assert found() is None


@pytest.mark.parametrize("sees_to_it", ["by freezing", "by disabling"])
def test_a_program_that_sees_to_it_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, sees_to_it: str
) -> None:
    leaves_out(monkeypatch, 5000 if sees_to_it == "by freezing" else 0)
    if sees_to_it == "by disabling":
        gc.disable()
    mine = [[]]
    thawed = []
    monkeypatch.setattr(gc, "unfreeze", lambda: thawed.append(True))
    with without_old_objects():
        assert is_looked_at(mine)
    assert not thawed
