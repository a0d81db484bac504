"""The rates from which sound can be resampled, by the memory that this takes.

torchaudio keeps a filter for each phase of the wanted rate, as long as a period of both
rates together. Usual rates share large divisors. 8,001 Hz, or what a damaged header
says, would take gigabytes.
"""

import math

_MOST_VALUES = 1 << 24  # of all filters: 22,050 to 8,000 Hz has 70,560


def odd_rate(found: int, wanted: int) -> str:
    """Why a rate cannot be resampled to the wanted one; empty if it can."""
    shared = math.gcd(found, wanted)
    if (found // shared) * (wanted // shared) <= _MOST_VALUES:
        return ""
    return (
        f"its rate of {found} Hz is in no simple ratio to {wanted}; if its header is "
        "right, resample it by another program: `sox old.wav -r 16000 new.wav`"
    )
