"""Word error rates and aligned words, from the files of a scored recognition."""

import base64
from pathlib import Path
from typing import Any

from lightning_adpsgd.report.reading import read_json

UTTERANCES = "utterances.json"


def read_score(path: Path) -> dict[str, Any] | None:
    """The error counts of each part of a test; None if the file has other contents."""
    score = read_json(path, object)
    parts = score.get("parts") if isinstance(score, dict) else None
    if not isinstance(parts, dict):
        return None
    for part, counts in parts.items():
        if not isinstance(counts, dict) or "num_words" not in counts:
            raise ValueError(f"{path}: part {part!r} must have `num_words`")
    kept = ("frame_accuracy", "scorer", "compared")
    found = {name: score[name] for name in kept if name in score}
    return {"name": score.get("name", path.parent.name), "parts": parts, **found}


def read_utterances(path: Path) -> list[dict[str, Any]]:
    """The utterances with aligned words, the worst first, some with their sound."""
    listed = read_json(path, list)
    return [_with_sound(path, number, one) for number, one in enumerate(listed)]


def _with_sound(path: Path, number: int, one: Any) -> dict[str, Any]:
    where = f"{path}, utterance {number}"
    if not isinstance(one, dict) or not isinstance(one.get("pairs"), list):
        raise ValueError(f"{where} must have a list of `pairs`")
    if not all(isinstance(pair, list) and len(pair) == 4 for pair in one["pairs"]):
        raise ValueError(f"{where}: a pair must be [kind, said, heard, confidence]")
    if not one.get("audio"):
        return one
    sound = path.parent / one["audio"]
    if not sound.resolve().is_relative_to(path.parent.resolve()):
        raise ValueError(f"{where}: its sound {sound} must lie below {path.parent}")
    if not sound.is_file():
        raise ValueError(f"{where}: its sound {sound} is missing")
    coded = base64.b64encode(sound.read_bytes()).decode()
    return {**one, "audio": f"data:audio/wav;base64,{coded}"}
