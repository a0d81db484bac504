"""Calls laid out and written as Fisher's: LDC2004S13 and LDC2004T19."""

from collections.abc import Iterable
from pathlib import Path

from recipes.generated.conversation import Conversation, Plan, Turn
from recipes.generated.layout import SIDES, as_said, times, write_sphere, write_text

_TRANSCRIPTS = "LDC2004T19/fe_03_p1_tran"
CALLDATA = f"{_TRANSCRIPTS}/doc/fe_03_p1_calldata.tbl"
_COLUMNS = (
    "CALL_ID,DATE_TIME,TOPICID,SIG_GRADE,CNV_GRADE,"
    "APIN,ASX.DL,APHNUM,APHSET,APHTYP,BPIN,BSX.DL,BPHNUM,BPHSET,BPHTYP"
)
_NOISES = {"[laughter]": "[laugh]", "[vocalized-noise]": "[breath]"}


def write_conversation(tree: Path, conversation: Conversation) -> None:
    """Write the transcript of a call and then its SPHERE file."""
    name = conversation.plan.name
    folder = name.removeprefix("fe_03_")[:3]
    text = tree / f"{_TRANSCRIPTS}/data/trans/{folder}/{name}.txt"
    write_text(text, transcript(name, conversation.turns))
    disc = f"LDC2004S13/fisher_eng_tr_sp_d{int(name[-1]) % 2 + 1}"
    write_sphere(tree / disc / f"audio/{folder}/{name}.sph", conversation)


def transcript(name: str, turns: Iterable[Turn]) -> str:
    """Return the lines `start end A: words` of both sides."""
    head = f"# {name}.sph\n# Transcribed at the LDC\n\n"
    return head + "".join(
        f"{times(turn)} {SIDES[turn.side]}: {' '.join(map(_as_text, turn.tokens))}\n\n"
        for turn in turns
    )


def calldata(plans: Iterable[Plan]) -> str:
    """Return the table of callers; each has a number of his own."""
    rows = [_COLUMNS]
    for plan in plans:
        call = int(plan.name.removeprefix("fe_03_"))
        sexes = [speaker.gender.lower() for speaker in plan.speakers]
        sides = (
            f"{2 * call + side},{sex}.a,{5550 + side},4,1"
            for side, sex in enumerate(sexes)
        )
        rows.append(",".join((f"{call:05d},20030101_00:00:00,ENG01,4,4", *sides)))
    return "\n".join(rows) + "\n"


def _as_text(token: str) -> str:
    return _NOISES.get(token, as_said(token))
