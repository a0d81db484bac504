"""Commands of `wav.scp` that only unpack a file, which is read here without them.

    sph2pipe -f wav -p -c 1 sw02001.sph |      one side of a conversation
    flac -c -d -s 1088-134315-0000.flac |      all of a file

No command is run: others may do anything.
"""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

_FLAGS = {
    "sph2pipe": re.compile("-[pua]"),
    "flac": re.compile("-[cds]+|--(stdout|decode|silent)"),
}
_VALUES = {"sph2pipe": ("-f", "-c"), "flac": ()}
# What a shell would replace by something else.
_FOR_A_SHELL = re.compile(r"[$`*?]|(^|\s)~")


class Unpacked(NamedTuple):
    """The file that a command unpacks, and the channel of it, from 0; None for all."""

    path: Path
    channel: int | None


def unpacked(command: str) -> Unpacked | None:
    """The file of a command that ends with a bar; None if it may do more than unpack.

    Args:
        command: As in `wav.scp`, after the name of the recording.
    """
    try:
        program, *words = shlex.split(command.rstrip().removesuffix("|"))
    except ValueError:  # an open quotation mark, or nothing
        return None
    name = Path(program).name
    if name not in _FLAGS or _FOR_A_SHELL.search(command):
        return None
    files, values = list[str](), dict[str, str]()
    rest = iter(words)
    for word in rest:
        if word in _VALUES[name]:
            values[word] = next(rest, "")
        elif not word.startswith("-"):
            files.append(word)
        elif not _FLAGS[name].fullmatch(word):
            return None
    channel = values.get("-c", "")
    if len(files) != 1 or channel not in ("", "1", "2"):
        return None
    return Unpacked(Path(files[0]), int(channel) - 1 if channel else None)
