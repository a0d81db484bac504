"""The people who talk: a voice, a way of speaking and a telephone line each."""

import random
from dataclasses import dataclass

from recipes.generated.pronunciations import ACCENTS

_NEAR_MEN = ("m1", "m2", "m3", "m4", "m5", "m6", "m7", "adam", "robert", "Alex", "rob")
_NEAR_WOMEN = ("f1", "f2", "f3", "f4", "f5", "linda")
_FAR_MEN = ("m8", "max", "edward", "boris", "Andy", "Reed")
_FAR_WOMEN = ("Annie", "Andrea", "grandma", "aunty")

#: eSpeak's variants of a voice, men's and women's, by part of the corpus. The en_ files
#: have variants that no training speaker has, as CallHome's callers are unlike
#: Switchboard's.
VARIANTS = {
    "train": (_NEAR_MEN, _NEAR_WOMEN),
    "sw": (_NEAR_MEN, _NEAR_WOMEN),
    "en": (_FAR_MEN, _FAR_WOMEN),
    "fisher": (_NEAR_MEN, _NEAR_WOMEN),
    "callhome": (_FAR_MEN, _FAR_WOMEN),
    "train-clean-5": (_NEAR_MEN, _NEAR_WOMEN),
    "dev-clean-2": (_NEAR_MEN, _NEAR_WOMEN),
    "test-clean": (_FAR_MEN, _FAR_WOMEN),
}


@dataclass(frozen=True)
class Speaker:
    """One side of one conversation.

    Attributes:
        voice: eSpeak's name, an accent and a variant.
        rate: words a minute.
        pitch: 0 to 100, the variant's own at 50.
        level_db: root mean square of the speech against full scale.
        snr_db: level of the speech over the noise of the line.
        tilt_db: gain at 3400 Hz against the gain at 300 Hz.
    """

    voice: str
    rate: int
    pitch: int
    level_db: float
    snr_db: float
    tilt_db: float

    @property
    def gender(self) -> str:
        """`F` or `M`, as the labels of an STM file have it."""
        return "F" if self.voice.partition("+")[2] in _NEAR_WOMEN + _FAR_WOMEN else "M"


def draw_speakers(counts: dict[str, int], seed: int) -> dict[str, list[Speaker]]:
    """Draw the speakers of every part, no (voice, rate, pitch) twice.

    Args:
        counts: how many speakers each part of `VARIANTS` needs.
        seed: the same seed draws the same speakers.
    """
    rng = random.Random(f"speakers {seed}")
    taken: set[tuple[str, int, int]] = set()
    drawn: dict[str, list[Speaker]] = {}
    for part, count in counts.items():
        drawn[part] = []
        while len(drawn[part]) < count:
            speaker = _draw_speaker(part, len(drawn[part]), rng)
            identity = (speaker.voice, speaker.rate, speaker.pitch)
            if identity not in taken:
                taken.add(identity)
                drawn[part].append(speaker)
    return drawn


def _draw_speaker(part: str, index: int, rng: random.Random) -> Speaker:
    far = VARIANTS[part][0] is _FAR_MEN
    men_or_women = VARIANTS[part][rng.random() < 0.5]
    variant = men_or_women[index % len(men_or_women)]
    accent = rng.choices(ACCENTS, (4, 1))[0]
    return Speaker(
        voice=f"{accent}+{variant}",
        rate=rng.randint(170, 215) if far else rng.randint(155, 205),
        pitch=rng.randint(30, 70),
        level_db=round(rng.uniform(-30, -21), 1),
        snr_db=round(rng.uniform(14, 22) if far else rng.uniform(12, 26), 1),
        tilt_db=round(rng.uniform(-10, 4), 1),
    )
