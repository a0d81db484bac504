"""Calls laid out and written as CallHome American English: LDC97S42 and LDC97T14."""

from collections.abc import Iterable
from pathlib import Path

from recipes.generated.conversation import Conversation, Turn
from recipes.generated.grammar import FILLERS
from recipes.generated.layout import SIDES, as_said, times, write_sphere, write_text

_NOISES = {
    "[laughter]": "{laugh}",
    "[vocalized-noise]": "{breath}",
    "[noise]": "[distortion]",
}


def write_conversation(tree: Path, conversation: Conversation) -> None:
    """Write the transcript of a call and then its SPHERE file."""
    name = conversation.plan.name
    text = tree / f"LDC97T14/transcrpt/train/{name}.txt"
    write_text(text, transcript(conversation.turns))
    write_sphere(tree / f"LDC97S42/data/train/{name}.sph", conversation)


def transcript(turns: Iterable[Turn]) -> str:
    """Return the lines `start end A: words` of both sides, with CallHome's marks."""
    return "".join(
        f"{times(turn)} {SIDES[turn.side]}: {_sentence(turn.tokens)}\n\n"
        for turn in turns
    )


def _sentence(tokens: Iterable[str]) -> str:
    return " ".join(map(_as_text, tokens)) + " ."


def _as_text(token: str) -> str:
    mark = "%" if token in FILLERS else ""
    return mark + _NOISES.get(token, as_said(token))
