"""Random programs: `python -m tests.programs --seeds 0 100 [--faults raise] [--out X]`.

Each seed is a Lightning program, which two to four forked learners run under this
package's strategy. What is wrong counts as a finding, unless `ddp` does the same. With
`--faults raise` a hook of one learner raises, with `--faults kill` one learner gets a
signal: all others must end in time and name it. A program with a finding leaves its
folder, with what each learner wrote; the others leave nothing.
"""

import argparse
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.programs.choices import FAULTS, draw
from tests.programs.judge import Finding, beyond, judge, refusal
from tests.programs.program import Program
from tests.programs.run import run


class Verdict(NamedTuple):
    """What became of a program.

    Args:
        program: what ran.
        seconds: how long it ran, without DDP.
        refused: message with which it was refused at set-up; empty if it was not.
        findings: what is wrong.
        as_ddp: what is wrong with DDP too.
    """

    program: Program
    seconds: float
    refused: str = ""
    findings: tuple[Finding, ...] = ()
    as_ddp: tuple[Finding, ...] = ()


def main(arguments: Sequence[str]) -> int:
    """Runs programs, one at a time; returns 1 if there are findings."""
    options = _parse(arguments)
    verdicts = list[Verdict]()
    for seed in range(*options.seeds):
        verdicts.append(try_seed(seed, options.faults, options.out.resolve()))
        print(line_of(verdicts[-1]), flush=True)
    print(summary(verdicts, options.faults))
    return int(any(verdict.findings for verdict in verdicts))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.programs")
    parser.add_argument(
        "--seeds", type=int, nargs=2, default=[0, 100], help="the first, and the end"
    )
    parser.add_argument("--faults", choices=list(FAULTS), default="none")
    parser.add_argument("--out", type=Path, default=Path("runs/programs"))
    return parser.parse_args(arguments)


def try_seed(seed: int, faults: str, out: Path) -> Verdict:
    """Runs the program of a seed and, if something is wrong without a fault, DDP."""
    program, folder = draw(seed, faults), out / f"{faults}-{seed}"
    done = run(program, folder)
    message, found = refusal(done), judge(done)
    if message or not found:
        shutil.rmtree(folder)
        return Verdict(program, done.seconds, message)
    if program.fault is not None:
        return Verdict(program, done.seconds, findings=tuple(found))
    reference = judge(run(program, folder / "ddp", is_ddp=True))
    left = beyond(found, reference)
    same = [one for one in found if one not in left]
    return Verdict(program, done.seconds, "", tuple(left), tuple(same))


def line_of(verdict: Verdict) -> str:
    """A line of a program, and one more for each finding."""
    begin = f"{verdict.program.seed:6} {verdict.seconds:5.1f} s"
    if verdict.refused:
        return f"{begin}  refused: {verdict.refused}"
    if not verdict.findings:
        same = "; ".join(map(str, verdict.as_ddp))
        return f"{begin}  {'as ddp: ' + same if same else 'clean'}"
    lines = [f"{begin}  WRONG  {verdict.program}", *map(str, verdict.findings)]
    return "\n        ".join(lines)


def summary(verdicts: Sequence[Verdict], faults: str) -> str:
    """Programs, refusals by their messages, and findings with their commands."""
    refused = Counter(verdict.refused for verdict in verdicts if verdict.refused)
    wrong = [verdict for verdict in verdicts if verdict.findings]
    same = sum(bool(verdict.as_ddp) and not verdict.findings for verdict in verdicts)
    lines = [
        f"{len(verdicts)} programs: {refused.total()} refused at set-up, "
        f"{same} wrong as with ddp, {len(wrong)} with findings"
    ]
    lines += [f"  refused {number}: {text}" for text, number in refused.most_common()]
    for verdict in wrong:
        seeds = f"{verdict.program.seed} {verdict.program.seed + 1}"
        lines += [f"  python -m tests.programs --seeds {seeds} --faults {faults}"]
        lines += [f"    {finding}" for finding in verdict.findings]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
