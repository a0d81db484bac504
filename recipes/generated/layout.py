"""Where a corpus of Switchboard's shape keeps what, and how each file is written.

LDC97S62 (training calls and their MS-State transcripts and dictionary), LDC2002S09
(Hub5'00 audio and segments) and LDC2002T43 (its references). Files appear whole: each
is written under a hidden name and then renamed.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import soundfile

from recipes.generated.acoustics import SAMPLE_RATE
from recipes.generated.conversation import Conversation, Turn
from recipes.generated.grammar import NOISES, is_partial, laughed_word
from recipes.generated.speakers import Speaker

DICTIONARY = "LDC97S62/swb_ms98_transcriptions/sw-ms98-dict.text"
SEGMENTS = "LDC2002S09/hub5e_00/english/hub5e_00.pem"
REFERENCE = "LDC2002T43/reference/hub5e00.english.000405.stm"
MAPPINGS = "LDC2002T43/reference/en20000405_hub5.glm"
SIDES = "AB"

_STM_LABELS = """\
;; LABEL "O" "Overall" "Overall"
;; LABEL "en" "callhm" "CallHome"
;; LABEL "sw" "swbd" "Switchboard"
"""
_GLM_HEAD = """\
;; word mappings in the form of a NIST global mapping file
* name "generated"
* case_sensitive = "F"
[uh] => [%hesitation] / [ ] __ [ ]
[um] => [%hesitation] / [ ] __ [ ]
"""
_ENDINGS = {"'m": "am", "'ve": "have", "n't": "not"}
_NOISES_IN_TEXT = {"[laughter]": "{laugh}", "[vocalized-noise]": "{breath}"}


def write_text(path: Path, text: str) -> None:
    """Write a whole text file, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}.part")
    hidden.write_text(text, encoding="utf-8")
    os.replace(hidden, path)


def write_conversation(tree: Path, conversation: Conversation) -> None:
    """Write the transcripts of a conversation and then its SPHERE file."""
    name, turns = conversation.plan.name, conversation.turns
    if name.startswith(("sw_", "en_")):
        text = tree / "LDC2002T43/reference/english" / f"{name}.txt"
        write_text(text, test_transcript(name, turns))
    else:
        for side in (0, 1):
            text = training_transcript(name, side, turns, len(conversation.samples))
            write_text(tree / training_transcript_path(name, side), text)
    write_sphere(tree / sphere_path(name), conversation)


def sphere_path(name: str) -> str:
    """Return where the audio of conversation `name` lies in the tree."""
    if name.startswith(("sw_", "en_")):
        return f"LDC2002S09/hub5e_00/english/{name}.sph"
    disc = (int(name[2:]) - 2001) % 4 + 1
    return f"LDC97S62/swb1_d{disc}/data/{name}.sph"


def training_transcript_path(name: str, side: int) -> str:
    """Return where the MS-State transcript of one side of `sw0NNNN` lies."""
    call = name[3:]
    folder = f"LDC97S62/swb_ms98_transcriptions/{call[:2]}/{call}"
    return f"{folder}/sw{call}{SIDES[side]}-ms98-a-trans.text"


def training_transcript(name: str, side: int, turns: Iterable[Turn], end: int) -> str:
    """Return the lines `id start end words` of one side, from 0 to sample `end`."""
    lines: list[str] = []
    now = 0
    for turn in turns:
        if turn.side == side:
            lines += [_ms98(now, turn.start, "[silence]")] if turn.start > now else []
            lines.append(_ms98(turn.start, turn.end, " ".join(turn.tokens)))
            now = turn.end
    lines += [_ms98(now, end, "[silence]")] if end > now else []
    label = f"sw{name[3:]}{SIDES[side]}-ms98-a"
    return "".join(f"{label}-{k:04d} {line}\n" for k, line in enumerate(lines, 1))


def test_transcript(name: str, turns: Iterable[Turn]) -> str:
    """Return the text that accompanies a test recording."""
    head = f"#Language: eng\n#File id: {name}\n\n"
    return head + "".join(
        f"{times(turn)} {SIDES[turn.side]}: {' '.join(map(_as_text, turn.tokens))}\n\n"
        for turn in turns
    )


def segments(name: str, turns: Iterable[Turn]) -> str:
    """Return the PEM lines of one test recording."""
    return "".join(
        f"{name} {SIDES[turn.side]} unknown_speaker {times(turn)}\n" for turn in turns
    )


def reference(name: str, speakers: tuple[Speaker, ...], turns: Iterable[Turn]) -> str:
    """Return the STM lines of one test recording; what may be missed is in brackets."""
    part = name[:2]
    lines: list[str] = []
    for turn in turns:
        side, gender = SIDES[turn.side], speakers[turn.side].gender
        who = f"{name} {side} {name}_{side} {times(turn)}"
        words = " ".join(_scored(turn.tokens))
        lines.append(f"{who} <O,{part},{gender},{part}-{gender}> {words}\n")
    return "".join(lines)


def reference_file(lines: Iterable[str]) -> str:
    """Return an STM file made of the lines of all test recordings."""
    return _STM_LABELS + "".join(lines)


def mappings(words: Iterable[str]) -> str:
    """Return the GLM: hesitations are one word, contractions may be written out."""
    return _GLM_HEAD + "".join(
        f"[{word}] => {{{word} / [{stem} {full}]}} / [ ] __ [ ]\n"
        for word in words
        for ending, full in _ENDINGS.items()
        if word.endswith(ending) and (stem := word.removesuffix(ending)) != "ca"
    )


def write_sphere(path: Path, conversation: Conversation) -> None:
    """Write both sides as mu-law in a SPHERE file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}.part")
    samples = conversation.samples
    soundfile.write(hidden, samples, SAMPLE_RATE, subtype="ULAW", format="NIST")
    os.replace(hidden, path)


def _ms98(start: int, end: int, words: str) -> str:
    return f"{start / SAMPLE_RATE:.6f} {end / SAMPLE_RATE:.6f} {words}"


def times(turn: Turn) -> str:
    """Return begin and end of a turn in seconds."""
    return f"{turn.start / SAMPLE_RATE:.2f} {turn.end / SAMPLE_RATE:.2f}"


def as_said(token: str) -> str:
    """Return a word without the marks of MS-State: `bo-` for `bo[ught]-`."""
    plain = laughed_word(token) or token
    return plain.split("[")[0] + "-" if is_partial(plain) else plain


def _as_text(token: str) -> str:
    plain = laughed_word(token) or _NOISES_IN_TEXT.get(token, token)
    return plain.split("[")[0] + "-" if is_partial(plain) else plain


def _scored(tokens: Iterable[str]) -> Iterator[str]:
    """Yield the words that count; hesitations and broken words may be left out."""
    for token in tokens:
        if token in ("uh", "um"):
            yield "(%HESITATION)"
        elif is_partial(token):
            yield f"({_as_text(token).upper()})"
        elif token not in NOISES:
            yield _as_text(token).upper()
