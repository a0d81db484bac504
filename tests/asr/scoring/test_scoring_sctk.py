"""The own scorer against NIST's SCTK: every pair of words of every alignment.

`recorded_by_sctk.json` holds what SCTK 2.4.10 made of some random cases; where SCTK is
installed, others are made anew. `python -m
tests.asr.scoring.test_scoring_sctk` records again.
"""

import json
import re
from pathlib import Path

import pytest

from lightning_adpsgd.asr.scoring import ALL_MARKS, WordOptions, read_glm
from lightning_adpsgd.asr.scoring.nist import find_hubscr, read_sgml, run_hubscr
from lightning_adpsgd.asr.scoring.reports import alignments
from lightning_adpsgd.asr.scoring.scorer import score_files
from tests.asr.sctk_cases import (
    Case,
    by_hubscr,
    by_sclite,
    in_order,
    is_installed,
    ours,
    random_case,
)

RECORDED = Path(__file__).parent / "recorded_by_sctk.json"
live = pytest.mark.skipif(
    not is_installed(), reason="NIST's SCTK is not installed (Debian package sctk)"
)


def recorded() -> list[dict]:
    return json.loads(RECORDED.read_text(encoding="utf-8"))


@pytest.mark.parametrize("number", range(24))
def test_alignments_are_those_that_hubscr_made(tmp_path: Path, number: int) -> None:
    entry = recorded()[number]
    case = Case(*entry["case"])
    glm = read_glm(case.write(tmp_path)[2])
    assert ours(case, tmp_path, glm, ALL_MARKS) == entry["alignments"]


@live
@pytest.mark.parametrize("seed", range(1000, 1006))
def test_alignments_are_those_of_hubscr(tmp_path: Path, seed: int) -> None:
    case = random_case(seed)
    expected = by_hubscr(case, tmp_path)
    if expected is None:
        pytest.skip("NIST's tools break off on this case")
    glm = read_glm(case.write(tmp_path)[2])
    assert ours(case, tmp_path, glm, ALL_MARKS) == expected


@live
@pytest.mark.parametrize("seed", range(2000, 2020))
def test_without_rules_alignments_are_those_of_sclite(
    tmp_path: Path, seed: int
) -> None:
    case = in_order(random_case(seed))
    options = WordOptions(fragments=seed % 2 == 0, optional=seed % 3 == 0)
    expected = by_sclite(case, tmp_path, options)
    if expected is None:
        pytest.skip("NIST's tools break off on this case")
    assert ours(case, tmp_path, None, options) == expected


@live
def test_counts_and_readable_alignments_are_those_of_hubscr(tmp_path: Path) -> None:
    stm, ctm, glm = random_case(1001).write(tmp_path)
    hubscr = find_hubscr()
    assert hubscr is not None
    theirs = read_sgml(run_hubscr(hubscr, stm, ctm, glm))
    scores = score_files(stm, ctm, read_glm(glm))
    assert theirs == scores.by_speaker_of_file
    text = ctm.with_name("hyp.ctm.filt.pra").read_text(encoding="utf-8")
    assert _blocks(alignments(scores)) == _blocks(text)


def _blocks(text: str) -> list[list[list[str]]]:
    """The fields of the lines of each segment; NIST pads by bytes, not by letters."""
    parts = text.partition("id: (")[2].split("\nid: (")
    lines = ([re.sub(r"\*+", "*", line) for line in part.split("\n")] for part in parts)
    return [
        [line.split() for line in part if line and "utts:" not in line]
        for part in lines
    ]


def main() -> None:
    """Records NIST's alignments of random cases."""
    import tempfile

    entries = []
    for seed in range(40):
        case = random_case(seed)
        with tempfile.TemporaryDirectory() as folder:
            aligned = by_hubscr(case, Path(folder))
        if aligned and len(entries) < 24:
            entries.append({"case": case, "alignments": aligned})
    lines = [json.dumps(entry, ensure_ascii=False) for entry in entries]
    RECORDED.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
