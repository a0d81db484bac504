"""NIST's own scorer, `hubscr.pl` of SCTK, where it is installed.

Debian's package `sctk` puts it into /usr/lib/sctk/bin, which is not on the path.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from lightning_adpsgd.asr.scoring.errors import Errors
from lightning_adpsgd.files import written_whole

DEBIAN = Path("/usr/lib/sctk/bin")
_PATH = re.compile(r'<PATH id="\((.*)-\d+\)" .* file="(.*?)" channel=')
_EVALUATED = re.compile(r'(?:^|:)([CSDI]),(?:"[^"]*")?,')
# rfilter1 fails on a file without a rule
_NO_RULES = ";; no rules\nUH => UH / [ ] __ [ ]\n"


class NistError(RuntimeError):
    """NIST's scorer did not finish; the message has its last output."""


def find_hubscr() -> Path | None:
    """The program on the path or where Debian puts it; None if it is not there."""
    folders = os.pathsep.join([os.environ.get("PATH", ""), str(DEBIAN)])
    found = shutil.which("hubscr.pl", path=folders)
    return Path(found) if found else None


def run_hubscr(hubscr: Path, stm: Path, ctm: Path, glm: Path | None) -> Path:
    """Scores a hypothesis; writes the reports next to `ctm` and `stm`.

    Args:
        hubscr: Program; SCTK's other programs must be in the same folder.
        stm: Reference file.
        ctm: Hypothesis file, in the same folder.
        glm: File of rules; None for no rules.

    Returns:
        The alignments, in sclite's SGML.

    Raises:
        NistError: The program fails.
    """
    if glm is None:
        glm = ctm.with_suffix(".glm")
        with written_whole(glm) as file:
            file.write(_NO_RULES)
    command = [
        str(hubscr),
        "-V",
        "-l",
        "english",
        "-h",
        "hub5",
        "-g",
        str(glm.resolve()),
    ]
    command += ["-r", stm.name, ctm.name]
    search = f"{hubscr.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        command,
        cwd=ctm.parent,
        env={**os.environ, "PATH": search},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    aligned = ctm.with_name(f"{ctm.name}.filt.sgml")
    if done.returncode != 0 or not aligned.exists():
        said = (done.stdout + done.stderr).strip()[-500:]
        raise NistError(f"{' '.join(command)} failed ({done.returncode}): {said}")
    return aligned


def read_sgml(path: Path) -> dict[tuple[str, str], Errors]:
    """The errors of each speaker of each file, from the alignments of sclite."""
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    sums: dict[tuple[str, str], Errors] = {}
    for number, line in enumerate(lines):
        match = _PATH.match(line)
        if match:
            key = match[1], match[2]
            errors = _errors(_EVALUATED.findall(lines[number + 1]))
            sums[key] = sums.get(key, Errors()).plus(errors)
    return sums


def _errors(kinds: list[str]) -> Errors:
    substituted, deleted, inserted = (kinds.count(kind) for kind in "SDI")
    is_wrong = substituted + deleted + inserted > 0
    num_words = len(kinds) - inserted
    return Errors(num_words, substituted, deleted, inserted, 1, int(is_wrong))
