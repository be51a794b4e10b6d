"""Loss curves as a picture: one self-contained SVG, in text, without a plotting library."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, MARGIN = 720, 400, 56
COLOURS = ("#1f5fa8", "#c2551a", "#3d7d3a", "#7a4aa0")
TICKS = 5


def curves_svg(curves: Mapping[str, Sequence[float]], *, title: str) -> str:
    """`curves`: name -> loss by step, all finite and none empty. The picture is `WIDTH` x `HEIGHT`."""
    steps = max(len(values) for values in curves.values())
    low = min(min(values) for values in curves.values())
    high = max(max(values) for values in curves.values())
    span = high - low or 1.0

    def x(step: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * step / max(1, steps - 1)

    def y(loss: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (loss - low) / span

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
             'font-family="sans-serif" font-size="12">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
             f'<text x="{MARGIN}" y="24" font-size="14">{escape(title)}</text>']
    for tick in range(TICKS + 1):
        loss, step = low + span * tick / TICKS, (steps - 1) * tick / TICKS
        parts += [f'<path d="M{MARGIN} {y(loss):.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>',
                  f'<text x="{MARGIN - 6}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>',
                  f'<text x="{x(step):.1f}" y="{HEIGHT - MARGIN + 18}" '
                  f'text-anchor="middle">{step:.0f}</text>']
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">step</text>')
    for number, (name, values) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(values))
        parts += [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
                  f'<text x="{WIDTH - MARGIN}" y="{MARGIN + 16 * number}" text-anchor="end" '
                  f'fill="{colour}">{escape(name)}</text>']
    return "\n".join((*parts, "</svg>", ""))
