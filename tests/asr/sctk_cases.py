"""Random references, hypotheses and rules, and what NIST's SCTK makes of them."""

import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lightning_adpsgd.asr.scoring import Glm, Scores, WordOptions, score_files
from lightning_adpsgd.asr.scoring.nist import DEBIAN, find_hubscr, run_hubscr

_WORDS = (
    "A B C D E DOG DOGS DOGHOUSE UH UM he's I'M gonna CAT-FISH A-B-C UH-HUH OKAY the "
    "a%b 42 7 o. O. naïve ÉTÉ DO- DOG- -OG - -- A- -S CAT- a- UH- DOG* * A** FOO;BAR "
    "A\\B [NOISE] A--B @ A_B A/B DOG-S-"
)
WORDS = _WORDS.split(" ")
OPTIONAL = ("UH", "UM", "DOG-", "OKAY", "42", "-OG", "B", "UH-HUH")
_RULES = """OKAY => OK / [ ] __ [ ]
[UH] => %HESITATION / [ ] __ [ ]
UH-HUH => %BCACK / [ ] __ [ ]
GONNA => GOING TO
DOG => CAT
[A B] => [AB] / [ ] __ [ ]
A => [B] / [C ] __ [ ]
B => D / [ ] __ [ C]
[DOGS] => [] / [ ] __ [ ]
[E] => / [ ] __ [ ]
C => [{A / B C}] / [ ] __ [ ]
C => {A / @} / [ ] __ [ ]
D => [{A / B}] / [ ] __ [ ]
O. => OH / [ ] __ [ ]
the => / [ ] __ [ ]
A => a ;; comment
HE'S => [{HE IS / HE HAS}] / [ ] __ [ ]
I'M => [I AM] / [ ] __ [ ]
"B" => "C D" / " " __ " "
CAT => KAT / [ ] __
- => -
A-B => AB
B => 5 / [ ] __ [ ]
 E => F G
[DO] => [DI] / [ ] __
E => [{E / {F / G}}] / [ ] __ [ ]"""
RULES = _RULES.split("\n")
LABELS = ("<O,sw,M>", "<O>", "", " <o,sw>")
IGNORED = ("IGNORE_TIME_SEGMENT_IN_SCORING", "a ignore_time_segment_in_scoring b")


class Case(NamedTuple):
    """The lines of a reference, a hypothesis and a GLM."""

    stm: list[str]
    ctm: list[str]
    glm: list[str]

    def write(self, folder: Path) -> tuple[Path, Path, Path]:
        paths = folder / "ref.stm", folder / "hyp.ctm", folder / "rules.glm"
        for path, lines in zip(paths, self, strict=True):
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return paths


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    sides = [
        (rng.choice(["sw_%d", "en_%d", "SW_%d"]) % (4000 + file), channel)
        for file in range(rng.randint(1, 4))
        for channel in rng.choice(["A", "AB"])
    ]
    stm = [line for side in sides for line in _stm_side(rng, *side)]
    ctm = [line for side in sides for line in _ctm_side(rng, *side)]
    if rng.random() < 0.3:
        rng.shuffle(stm)
        rng.shuffle(ctm)
    labels = [f';; LABEL "{name}" "{name}" ""' for name in ("O", "sw", "M")]
    return Case([*labels, *stm], ctm, _glm(rng))


def in_order(case: Case) -> Case:
    """The same with files as sclite wants them when nothing sorts them before."""
    stm = sorted(case.stm[3:], key=lambda line: _place(line, 3))
    return Case(stm, sorted(case.ctm, key=lambda line: _place(line, 2)), case.glm)


def _place(line: str, time_field: int) -> tuple[str, str, float]:
    fields = line.split()
    return fields[0], fields[1], float(fields[time_field])


def _text(rng: random.Random, length: int, depth: int = 0) -> str:
    return " ".join(_item(rng, depth) for _ in range(length))


def _item(rng: random.Random, depth: int) -> str:
    kind = rng.random()
    if kind < 0.08:
        return f"({rng.choice(OPTIONAL)})"
    if kind < 0.11:
        several = " ".join(rng.choices(OPTIONAL, k=rng.randint(1, 3)))
        return f"( {several} )"
    if kind < 0.22 and depth < 2:
        parts = [
            "@" if rng.random() < 0.2 else _text(rng, rng.randint(1, 2), depth + 1)
            for _ in range(rng.randint(1, 3))
        ]
        return "{ " + " / ".join(parts) + " }"
    return _word(rng)


def _word(rng: random.Random) -> str:
    return rng.choice(WORDS[:8] if rng.random() < 0.5 else WORDS)


def _stm_side(rng: random.Random, file: str, channel: str) -> list[str]:
    lines, time = [], 0.0
    for _ in range(rng.randint(1, 6)):
        begin = max(0.0, time + rng.choice([0, 0, 0.5, -0.3, 1.0]))
        time = begin + rng.choice([0.31, 0.5, 1.0, 1.37, 2.61])
        speaker = rng.choice([f"{file}{channel}", f"{file}_{channel}", "x", "X"])
        text = _text(rng, rng.choice([0, 1, 1, 2, 3, 3, 4, 5, 8]))
        if rng.random() < 0.1:
            text = rng.choice(IGNORED)
        times = f"{begin:.2f} {time:.2f}"
        label = rng.choice(LABELS)
        lines.append(f"{file} {channel} {speaker} {times} {label} {text}")
    return lines


def _ctm_side(rng: random.Random, file: str, channel: str) -> list[str]:
    lines, time = [], rng.choice([0, 0.2])
    with_confidence = rng.choice([0.0, 0.0, 1.0, 0.5])
    for _ in range(rng.choice([0, 1, 3, 6, 10, 16])):
        time = round(max(0, time + rng.choice([0, 0, 0.01, 0.1, 0.4, -0.1])), 2)
        duration = rng.choice([0.05, 0.1, 0.13, 0.2, 0.4, 0.0])
        word = f"({rng.choice(OPTIONAL)})" if rng.random() < 0.03 else _word(rng)
        confidence = f" {rng.random():.2f}" if rng.random() < with_confidence else ""
        lines.append(f"{file} {channel} {time} {duration} {word}{confidence}")
        time += duration
    return lines


def _glm(rng: random.Random) -> list[str]:
    lines = [";; random rules", "* name 'random'"]
    if rng.random() < 0.7:
        lines.append("* case_sensitive = 'F'")
    lines += rng.sample(RULES, rng.randint(1, 10))
    if rng.random() < 0.5:
        kind = rng.choice(["ctm", "hyp", "(hyp|ref)", "STM", "ref"])
        lines.append(f';; INPUT_DEPENDENT_APPLICATION = "{kind}"')
        lines += rng.sample(RULES, rng.randint(1, 6))
    return lines


Aligned = list[list]
"""Of each segment speaker, file, channel and [kind, reference, hypothesis] pairs."""


def by_hubscr(case: Case, folder: Path) -> Aligned | None:
    """None where NIST's tools fail on the case."""
    stm, ctm, glm = case.write(folder)
    hubscr = find_hubscr()
    assert hubscr is not None
    return _aligned(lambda: run_hubscr(hubscr, stm, ctm, glm))


def by_sclite(case: Case, folder: Path, options: WordOptions) -> Aligned | None:
    stm, ctm, _ = case.write(folder)
    flags = ["-F"] * options.fragments + ["-D"] * options.optional

    def run() -> Path:
        command = ["sclite", "-r", stm.name, "stm", "-h", ctm.name, "ctm"]
        path = f"{DEBIAN}{os.pathsep}{os.environ['PATH']}"
        subprocess.run(
            [*command, "-o", "sgml", *flags],
            cwd=folder,
            env={**os.environ, "PATH": path},
            capture_output=True,
            check=True,
        )
        return ctm.with_name(f"{ctm.name}.sgml")

    return _aligned(run)


def _aligned(run: Callable[[], Path]) -> Aligned | None:
    try:
        path = run()
    except (RuntimeError, subprocess.CalledProcessError):
        return None
    return read_alignments(path)


def read_alignments(path: Path) -> Aligned:
    lines = path.read_text(encoding="utf-8").split("\n")
    header = re.compile(
        r'<PATH id="\((.*)-\d+\)" .* file="(.*?)" channel="(.*?)" sequence="(\d+)"'
    )
    pair = re.compile(r'(?:^|:)([CSDI]),(?:"([^"]*)")?,(?:"([^"]*)")?')
    found = []
    for number, line in enumerate(lines):
        match = header.match(line)
        if match:
            # what follows a semicolon is a tag and no part of the word
            pairs = [
                [kind, reference.split(";")[0], hypothesis.split(";")[0]]
                for kind, reference, hypothesis in pair.findall(lines[number + 1])
            ]
            found.append((int(match[4]), [match[1], match[2], match[3], pairs]))
    return [segment for _, segment in sorted(found)]


def ours(case: Case, folder: Path, glm: Glm | None, options: WordOptions) -> Aligned:
    stm, ctm, _ = case.write(folder)
    return as_lists(score_files(stm, ctm, glm, options))


def as_lists(scores: Scores) -> Aligned:
    return [
        [
            scored.segment.speaker,
            *scored.segment.side,
            [
                [
                    pair.kind,
                    pair.reference.text if pair.reference else "",
                    pair.hypothesis.text if pair.hypothesis else "",
                ]
                for pair in scored.pairs
            ],
        ]
        for scored in scores.segments
    ]


def is_installed() -> bool:
    return find_hubscr() is not None and (
        (DEBIAN / "sclite").exists() or shutil.which("sclite") is not None
    )
