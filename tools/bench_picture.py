"""A suite's rows as a picture: one bar a row, its ratio on a logarithmic scale; a mark where the target is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from kvpool.tools.bench_suite import Row

__all__ = ["picture"]

LEFT, WIDTH, LINE, TOP = 430, 360, 20, 46
COLOURS = {"met": "#2a7f4f", "missed": "#b5482f"}
STYLE = "text{font:12px sans-serif;fill:#222}.t{font-weight:bold;font-size:14px}.n{text-anchor:end}.s{fill:#777}"


def _scale(rows: Sequence[Row]) -> tuple[float, float]:
    """Powers of ten around all ratios and targets."""
    values = [row.ratio for row in rows] + [1.0]
    return math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9) or 1


def picture(title: str, rows: Sequence[Row], about: str) -> str:
    """SVG text of the ratios of all rows to their bounds."""
    low, high = _scale(rows)

    def at(value: float) -> float:
        return LEFT + (math.log10(value) - low) / (high - low) * WIDTH

    height = TOP + LINE * len(rows) + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 80}" height="{height}">',
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>',
        f'<text class="t" x="10" y="20">{escape(title)}: measured / bound of the same run</text>',
        f'<text class="s" x="10" y="36">{escape(about)}</text>',
    ]
    for power in range(int(low), int(high) + 1):
        x = at(10.0**power)
        parts.append(f'<path d="M{x:.1f} {TOP}V{height - 22}" stroke="#ddd"/>')
        parts.append(f'<text class="s" x="{x - 6:.1f}" y="{height - 8}">{10.0**power:g}</text>')
    for i, row in enumerate(rows):
        y = TOP + LINE * i
        colour = COLOURS.get(row.verdict.split()[0], "#4a6a8a")
        start, end = sorted((at(1.0), at(row.ratio)))
        parts.append(f'<text class="n" x="{LEFT - 8}" y="{y + 14}">{escape(row.name)}</text>')
        shape = f'x="{start:.1f}" y="{y + 4}" width="{max(end - start, 1.5):.1f}" height="{LINE - 8}"'
        parts.append(f'<rect {shape} fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + WIDTH + 8}" y="{y + 14}">{row.ratio:.3g}</text>')
        if row.target is not None and "(" not in row.verdict:
            x = at(min(max(row.target, 10.0**low), 10.0**high))
            parts.append(f'<path d="M{x:.1f} {y + 1}v{LINE - 2}" stroke="#111" stroke-width="2"/>')
    return "\n".join([*parts, "</svg>\n"])
