"""What became of each mutant: a line for each trial, in a file that only grows.

The first outcome of a mutant says what the tests of that day noticed, and the last one
what tests notice that were written since.
"""

import difflib
import json
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutants.drawing import Mutant
from tests.mutants.trials import Ended


class Result(NamedTuple):
    """A mutant, and what its trials were.

    Args:
        room: room of which its tests are.
        mutant: the change.
        change: lines that it takes away and adds, as a diff has them.
        outcomes: of each trial, as `Ended` has them; the oldest comes first.
        failed: the test that failed in the last trial; empty: none, or no test began.
    """

    room: str
    mutant: Mutant
    change: list[str]
    outcomes: list[str]
    failed: str = ""

    @property
    def key(self) -> str:
        """The mutant's name in its room."""
        return key(self.room, self.mutant)

    @property
    def first(self) -> str:
        """What the first tests said. One trial that timed out says nothing yet."""
        return next((one for one in self.outcomes if one != "timed out"), "timed out")

    @property
    def last(self) -> str:
        """What the newest tests said."""
        return self.outcomes[-1]

    @property
    def killer(self) -> list[str]:
        """The test that failed, with all its parameters; empty if there is none."""
        return [self.failed.partition("[")[0]] if self.failed else []

    @property
    def is_late_once(self) -> bool:
        """Whether it timed out at its last trial alone: the machine may be why."""
        return self.last == "timed out" and self.outcomes[-2:].count("timed out") == 1


def key(room: str, mutant: Mutant) -> str:
    """The name of a mutant in its room."""
    return f"{room} {mutant.file} {mutant.operator} {mutant.occurrence}"


def change_of(root: Path, mutant: Mutant) -> list[str]:
    """The lines that the mutant takes away and adds, as a diff has them."""
    before = (root / mutant.file).read_text(encoding="utf-8").splitlines()
    after = mutant.source(root).splitlines()
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))
    return lines[3:]


def write(out: Path, root: Path, room: str, mutant: Mutant, ended: Ended) -> None:
    """Adds the line of a trial."""
    last = [line for line in ended.output.splitlines() if line.startswith("FAILED")]
    line = {
        "room": room,
        **mutant._asdict(),
        "change": change_of(root, mutant),
        "outcome": ended.outcome,
        "seconds": round(ended.seconds, 1),
        "by": last[0].split()[1] if last else "",
    }
    with (out / "results.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def read(out: Path) -> dict[str, Result]:
    """All mutants that had a trial, by their keys."""
    path = out / "results.jsonl"
    results: dict[str, Result] = {}
    for line in map(json.loads, path.read_text().splitlines() if path.exists() else []):
        result = _result(line)
        before = results.get(result.key, result).outcomes
        outcomes = [*before, line["outcome"]]
        results[result.key] = result._replace(outcomes=outcomes, failed=line["by"])
    return results


def _result(line: dict[str, Any]) -> Result:
    line["position"] = tuple(line["position"])
    mutant = Mutant(**{name: line[name] for name in Mutant._fields})
    return Result(line["room"], mutant, line["change"], [])


def report(results: list[Result]) -> str:
    """A table of the rooms and a list of what survived, in Markdown."""
    rows = ["| room | mutants | killed at first | killed | of these timed out | left |"]
    rows += ["|---|---|---|---|---|---|"]
    for room in dict.fromkeys(result.room for result in results):
        rows.append(_row(room, [r for r in results if r.room == room]))
    rows += [_row("all", results), ""]
    for result in results:
        if result.last == "survived":
            mutant = result.mutant
            line = f"line {mutant.position[0]}, {mutant.operator}"
            rows += [f"- `{mutant.file}`, {line}:", ""]
            rows += [f"      {change}" for change in result.change] + [""]
    return "\n".join(rows)


def _row(room: str, results: list[Result]) -> str:
    left = sum(result.last == "survived" for result in results)
    before = sum(result.first != "survived" for result in results)
    late = sum(result.last == "timed out" for result in results)
    return (
        f"| {room} | {len(results)} | {_share(before, results)} "
        f"| {_share(len(results) - left, results)} | {late} | {left} |"
    )


def _share(number: int, results: list[Result]) -> str:
    return f"{number} ({number / len(results):.0%})" if results else "none"
