"""What happens to islands that are processes: killed, stopped, ended, cut off."""

import random
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.faults.world import World, until, world


def goes_on(islands: World, names: str, num: int = 20) -> None:
    """All of these make steps as before."""
    begin = {name: len(islands.steps(name)) for name in names.split()}

    def all_have() -> bool:
        return all(len(islands.steps(n)) > seen + num for n, seen in begin.items())

    until(all_have, f"steps of {names}")


def three(islands: World) -> None:
    for name in "abc":
        islands.start(name)
        until(lambda n=name: bool(islands.steps(n)), "the first step")
    until(lambda: islands.all_see("a b c", 3), "all three")


@pytest.mark.parametrize("seed", [0])
def test_one_is_killed_and_comes_back(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    # Who comes back is no neighbour of the dead one, whom only silence betrays to it.
    with world(tmp_path, silence_s=8.0) as islands:
        three(islands)
        victim = generator.choice("abc")
        others = " ".join(set("abc") - {victim})
        goes_on(islands, others, generator.randrange(10))
        islands.signal(victim, signal.SIGKILL)
        # Its connections break, which needs no silence.
        until(lambda: islands.all_see(others, 2), "the closed ring")
        goes_on(islands, others)
        islands.start("again")
        until(lambda: islands.all_see(f"{others} again", 3), "the newcomer")
        goes_on(islands, f"{others} again")
        # It began where the others were by then, and not at its first step.
        furthest = max(islands.steps(name)[-1].number for name in others.split())
        assert 10 < islands.steps("again")[0].number <= furthest
        told = [islands.output(name) for name in others.split()]
        assert all(text.count("lost island") == 1 for text in told)


def test_the_rendezvous_is_killed_and_comes_back(tmp_path: Path) -> None:
    with world(tmp_path) as islands:
        three(islands)
        islands.signal("rendezvous", signal.SIGKILL)
        until(lambda: "cannot be reached" in islands.output("a"), "the loss")
        goes_on(islands, "a b c")
        assert islands.all_see("a b c", 3)
        islands.start_rendezvous()
        until(lambda: "is back" in islands.output("a"), "the rendezvous")
        goes_on(islands, "a b c")
        assert islands.all_see("a b c", 3)
        islands.start("d")
        until(lambda: islands.all_see("a b c d", 4), "a newcomer")


def test_a_rendezvous_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    """It is stopped: it takes connections and requests, and answers none."""
    with world(tmp_path, silence_s=3.0) as islands:
        three(islands)
        islands.signal("rendezvous", signal.SIGSTOP)
        islands.signal("c", signal.SIGKILL)
        until(lambda: islands.all_see("a b", 2), "the closed ring")
        goes_on(islands, "a b", 68)  # 3.4 s, for which a silence would be a death
        islands.signal("rendezvous", signal.SIGCONT)
        islands.start("d")
        until(lambda: islands.all_see("a b d", 3), "a newcomer")
        goes_on(islands, "a b d")
        assert "it takes their weights" not in islands.output("a")


def test_one_is_stopped_for_longer_than_the_others_wait(tmp_path: Path) -> None:
    with world(tmp_path, silence_s=3.0) as islands:
        three(islands)
        islands.signal("b", signal.SIGSTOP)
        until(lambda: islands.all_see("a c", 2), "the closed ring")
        stopped_at = islands.steps("b")[-1].number
        until(
            lambda: all(islands.steps(n)[-1].number > stopped_at + 50 for n in "ac"),
            "steps without it",
        )
        islands.signal("b", signal.SIGCONT)
        until(lambda: islands.all_see("a b c", 3), "its return")
        assert "it takes their weights" in islands.output("b")
        goes_on(islands, "a b c")
        # It has come to the steps of the others, who made more than 50 meanwhile.
        numbers = [step.number for step in islands.steps("b")]
        assert max(later - before for before, later in pairwise(numbers)) > 20


def test_one_is_stopped_for_less_and_nobody_notices(tmp_path: Path) -> None:
    with world(tmp_path) as islands:
        three(islands)
        islands.signal("b", signal.SIGSTOP)
        goes_on(islands, "a c", 16)  # 0.8 s
        islands.signal("b", signal.SIGCONT)
        goes_on(islands, "a b c")
        assert islands.all_see("a b c", 3)
        assert "lost" not in islands.output("a") + islands.output("c")


def test_one_is_told_to_end_saves_and_leaves(tmp_path: Path) -> None:
    with world(tmp_path) as islands:
        three(islands)
        islands.signal("b", signal.SIGTERM)
        assert islands.exit_code("b") == 0
        until(lambda: islands.all_see("a c", 2), "the closed ring")
        assert "lost" not in islands.output("a") + islands.output("c")
        (path,) = tmp_path.glob("preempted-*.ckpt")
        saved = torch.load(path, weights_only=True)
        assert saved["global_step"] == islands.steps("b")[-1].number
        assert saved["state_dict"]["weight"].isfinite().all()
        goes_on(islands, "a c")


def test_islands_that_end_leave_the_mean_in_their_models(tmp_path: Path) -> None:
    with world(tmp_path) as islands:
        islands.start("a", steps=80)
        until(lambda: bool(islands.steps("a")), "the first step")
        islands.start("b", steps=80)
        assert islands.exit_code("a") == 0
        assert islands.exit_code("b") == 0
        told = "".join(islands.output(name) for name in "ab").splitlines()
        of_a, of_b = (line for line in told if line.startswith("ended at "))
        assert of_a.startswith("ended at 80: ")
        # Who ends last may be alone by then.
        assert of_a.endswith(" of 2") or of_b.endswith(" of 2")
        assert "lost" not in islands.output("a") + islands.output("b")
