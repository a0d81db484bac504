"""Draws super_learners.svg: `python docs/images/draw_super_learners.py`."""

import math
import os
from pathlib import Path

WIDTH, HEIGHT = 760, 330
BOX_WIDTH, BOX_HEIGHT, RADIUS = 200, 112, 17
# Centres of the super-learners, in the order of the ring.
CENTRES = ((130, 76), (630, 76), (630, 254), (130, 254))
NUM_LEARNERS = 3
INK, WITHIN, BETWEEN, PAPER = "#24292f", "#0969da", "#bc4c00", "#ffffff"


def learners(x: float, y: float) -> list[tuple[float, float]]:
    """Places of the learners of the super-learner at (x, y)."""
    angles = [2 * math.pi * n / NUM_LEARNERS - math.pi / 2 for n in range(NUM_LEARNERS)]
    return [(x + 46 * math.cos(a), y + 18 + 30 * math.sin(a)) for a in angles]


def text(x: float, y: float, words: str, colour: str = INK, size: int = 13) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}" font-size="{size}" '
        f'text-anchor="middle">{words}</text>'
    )


def super_learner(number: int, x: float, y: float) -> list[str]:
    left, top = x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2
    places = learners(x, y)
    corners = " ".join(f"{px:.0f},{py:.0f}" for px, py in places)
    return [
        f'<rect x="{left:.0f}" y="{top:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" '
        f'rx="10" fill="#f6f8fa" stroke="{INK}"/>',
        f'<polygon points="{corners}" fill="none" stroke="{WITHIN}" stroke-width="3"/>',
        *(
            f'<circle cx="{px:.0f}" cy="{py:.0f}" r="{RADIUS}" fill="{PAPER}" '
            f'stroke="{WITHIN}" stroke-width="2"/>'
            for px, py in places
        ),
        *(text(px, py + 5, str(n)) for n, (px, py) in enumerate(places)),
        text(left + 42, top + 20, f"w<tspan dy='4' font-size='10'>{number}</tspan>"),
        text(left + BOX_WIDTH - 40, top + 20, "allreduce", WITHIN),
    ]


def edge(begin: tuple[float, float], end: tuple[float, float]) -> str:
    (x1, y1), (x2, y2) = (_shifted(begin, end), _shifted(end, begin))
    return (
        f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" '
        f'stroke="{BETWEEN}" stroke-width="3" stroke-dasharray="7 5" '
        'marker-start="url(#tip)" marker-end="url(#tip)"/>'
    )


def _shifted(
    point: tuple[float, float], to: tuple[float, float]
) -> tuple[float, float]:
    """From the centre of a box to a little beyond its border, towards another box."""
    horizontal, vertical = to[0] - point[0], to[1] - point[1]
    if horizontal:
        return point[0] + math.copysign(BOX_WIDTH / 2 + 12, horizontal), point[1]
    return point[0], point[1] + math.copysign(BOX_HEIGHT / 2 + 12, vertical)


def drawing() -> str:
    ring = zip(CENTRES, CENTRES[1:] + CENTRES[:1], strict=True)
    boxes = [part for i, c in enumerate(CENTRES) for part in super_learner(i, *c)]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" font-family="sans-serif">',
        "<title>Four super-learners of three learners on a ring</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="4" '
        f'markerHeight="4" orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" '
        f'fill="{BETWEEN}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
        *boxes,
        *(edge(begin, end) for begin, end in ring),
        text(WIDTH / 2, 152, "gossip: two exchange weights", BETWEEN, 15),
        text(WIDTH / 2, 172, "and both take the average;", BETWEEN, 15),
        text(WIDTH / 2, 192, "nobody waits", BETWEEN, 15),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    path = Path(__file__).with_name("super_learners.svg")
    partial = path.with_suffix(".partial")
    partial.write_text(drawing())
    os.replace(partial, path)


if __name__ == "__main__":
    main()
