"""Styles of the demo's picture, and the picture as a file.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; lines
also differ in their dashes.
"""

import io

from matplotlib.figure import Figure

STYLES = (("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"))


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
