"""A corpus of Switchboard's shape, small enough to be written inside a test."""

from pathlib import Path

import numpy as np
import soundfile

RATE = 8000


def write_sphere(
    path: Path, samples: np.ndarray, rate: int = RATE, coding: str = "ULAW"
) -> Path:
    """Write [samples] or [samples, channels] as NIST SPHERE."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        soundfile.write(file, samples, rate, format="NIST", subtype=coding)
    return path


def noise(seconds: float, channels: int = 2, seed: int = 0) -> np.ndarray:
    """Noise of a level that differs from second to second."""
    generator = np.random.default_rng(seed)
    shape = (round(seconds * RATE), channels)
    level = 0.02 + 0.1 * (np.arange(shape[0]) // RATE % 2)
    return (level[:, None] * generator.standard_normal(shape)).clip(-0.9, 0.9)


def voice(seconds: float) -> np.ndarray:
    """Something like vowels: harmonics of 120 Hz that come and go, pauses between."""
    time = np.arange(round(seconds * RATE)) / RATE
    harmonics = (np.sin(2 * np.pi * 120 * k * time + k * k) / k for k in range(1, 25))
    syllables = np.sin(2 * np.pi * 2 * time).clip(0)
    return 0.2 * syllables * sum(harmonics, np.zeros_like(time))


def write_transcript(root: Path, number: int, side: str, lines: list[str]) -> Path:
    """Write lines of `start end words` as the transcript of one side."""
    folder = root / f"LDC97S62/swb_ms98_transcriptions/{number // 100}/{number}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"sw{number}{side}-ms98-a-trans.text"
    rows = [f"sw{number}{side}-ms98-a-{i:04d} {x}" for i, x in enumerate(lines, 1)]
    path.write_text("".join(f"{row}\n" for row in rows))
    return path


def write_corpus(root: Path, conversations: int = 3, seconds: float = 6.0) -> Path:
    """Write a whole tree: training conversations, a dictionary, both test parts."""
    lines = ["0.0 0.5 [silence]", "0.5 2.5 yes no [noise]", "3.0 5.5 no yes yes"]
    for number in range(2001, 2001 + conversations):
        audio = root / f"LDC97S62/swb1_d1/data/sw0{number}.sph"
        write_sphere(audio, noise(seconds, seed=number))
        for side in "AB":
            write_transcript(root, number, side, lines)
    dictionary = root / "LDC97S62/swb_ms98_transcriptions/sw-ms98-dict.text"
    dictionary.write_text("no n ow\nyes y eh s\n")
    _write_test_set(root, seconds)
    return root


def write_fisher_call(
    root: Path, number: int, lines: list[str], seconds: float = 6.0
) -> Path:
    """Write a Fisher call; lines are `start end A: words`. Returns the transcript."""
    name, folder = f"fe_03_{number:05d}", f"{number // 100:03d}"
    part = 1 if number <= 5850 else 2
    disc = root / f"LDC200{3 + part}S13/fe_03_p{part}_sph1/audio/{folder}"
    write_sphere(disc / f"{name}.sph", noise(seconds, seed=number))
    tran = root / f"LDC200{3 + part}T19/fe_03_p{part}_tran"
    path = tran / f"data/trans/{folder}/{name}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = f"# {name}.sph\n# Transcribed at the LDC\n\n"
    path.write_text(head + "".join(f"{line}\n\n" for line in lines))
    table = tran / f"doc/fe_03_p{part}_calldata.tbl"
    table.parent.mkdir(parents=True, exist_ok=True)
    old = table.read_text() if table.exists() else CALLDATA_HEAD
    date = "20021204_01:00:02"
    sides = f"{number},f.a,5551,h,lnd,{number + 1},m.a,5552,c,cel"
    table.write_text(f"{old}{number:05d},{date},ENG01,4,3,{sides}\n")
    return path


CALLDATA_HEAD = (
    "CALL_ID,DATE_TIME,TOPICID,SIG_GRADE,CNV_GRADE,"
    "APIN,ASX.DL,APHNUM,APHSET,APHTYP,BPIN,BSX.DL,BPHNUM,BPHSET,BPHTYP\n"
)


def write_callhome_call(
    root: Path, number: int, lines: list[str], seconds: float = 6.0
) -> Path:
    """Write a CallHome call; lines are `start end A: words`. Returns the transcript."""
    name = f"en_{number}"
    audio = root / f"LDC97S42/data/train/{name}.sph"
    write_sphere(audio, noise(seconds, seed=number))
    path = root / f"LDC97T14/transcrpt/train/{name}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n\n" for line in lines), encoding="latin-1")
    return path


def _write_test_set(root: Path, seconds: float) -> None:
    audio, text = root / "LDC2002S09/english", root / "LDC2002T43/reference"
    text.mkdir(parents=True)
    pem, stm = [], [';; LABEL "O" "Overall" "Overall"']
    for name in ("sw_4390", "en_4156"):
        write_sphere(audio / f"{name}.sph", noise(seconds, seed=len(pem)))
        pem.append(f"{name} A unknown_speaker 0.50 2.50")
        stm.append(f"{name} A {name}_A 0.50 2.50 <O,sw,M,sw-M> YES NO")
    (audio / "hub5e_00.pem").write_text("\n".join(pem) + "\n")
    (text / "hub5e00.english.000405.stm").write_text("\n".join(stm) + "\n")
    (text / "en20000405_hub5.glm").write_text(";; no rules\n")
