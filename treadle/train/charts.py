"""Line charts as SVG text that stands inside an HTML page and takes its colours from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from treadle.train.curves import Points, quantile, thinned, ticks

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 34  # margins around the drawing area
MARK = 3  # radius of a mark
GROUPS = 380  # of neighbouring steps in a curve, so that a page stays small however long the run
LEGEND_STEP = 150

STYLE = """
.chart { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
.chart text { fill: var(--muted); }
.chart .grid { stroke: var(--line); stroke-width: 1; }
.chart .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.chart .faint { fill: none; stroke-width: 1; opacity: .45; }
.chart .band { stroke: none; opacity: .18; }
.chart .a { stroke: var(--a); fill: var(--a); }
.chart .b { stroke: var(--b); fill: var(--b); }
.chart .c { stroke: var(--c); fill: var(--c); }
.chart .curve.a, .chart .curve.b, .chart .faint.a { fill: none; }
"""


@dataclass(frozen=True)
class Series:
    """A curve. colour: "a", "b" or "c"; kind: "curve", "band" (with a faint line of means inside
    the range of each group), "marks" (dots on a line) or "flags" (ticks at the bottom)."""

    name: str
    points: Points
    colour: str = "a"
    kind: str = "curve"


def number(value: float) -> str:
    """A number as an axis shows it: `1,000`, `0.25`, `1e-05`."""
    if value and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3g}"
    return f"{value:,.4f}".rstrip("0").rstrip(".")


def chart(title: str, series: Sequence[Series]) -> str:
    """An SVG of curves over the step; nothing where there is no point at all."""
    drawn = [s for s in series if s.points]
    values = [y for s in drawn if s.kind != "flags" for _, y in s.points]
    if not values:
        return ""
    frame = _Frame([x for s in drawn for x, _ in s.points], min(values), _top(values))
    name = "clip-" + "".join(c for c in title if c.isalnum())
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<clipPath id="{name}"><rect x="{LEFT}" y="{TOP}" '
        f'width="{WIDTH - LEFT - RIGHT + MARK}" height="{HEIGHT - TOP - BOTTOM}"/></clipPath>',
        *frame.axes(),
        f'<g clip-path="url(#{name})">',
        *(part for s in drawn for part in _DRAWERS[s.kind](frame, s)),
        "</g>",
        *_legend(drawn),
        "</svg>",
    ]
    return "\n".join(parts)


def _top(values: Sequence[float]) -> float:
    """The upper end of the axis: the largest value, unless that is an outlier by far."""
    low, high = min(values), quantile(values, 0.995)
    return min(max(values), high + 0.5 * (high - low)) if high > low else max(values)


class _Frame:
    """Where values lie in the drawing."""

    def __init__(self, xs: Sequence[float], low: float, high: float) -> None:
        self.x0, self.x1 = min(xs), max(xs)
        margin = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
        self.y0, self.y1 = low - margin, high + margin
        if low >= 0 > self.y0:
            self.y0 = 0.0

    def x(self, value: float) -> float:
        part = (value - self.x0) / (self.x1 - self.x0 or 1.0)
        return LEFT + part * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        part = (value - self.y0) / (self.y1 - self.y0)
        return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Points) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)

    def axes(self) -> list[str]:
        parts = []
        for value in ticks(self.y0, self.y1):
            y = f"{self.y(value):.1f}"
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(
                f'<text x="{LEFT - 8}" y="{y}" dy=".35em" text-anchor="end">{number(value)}</text>'
            )
        for value in ticks(self.x0, self.x1, 8):
            x, end = f"{self.x(value):.1f}", HEIGHT - BOTTOM
            parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{end}" y2="{end + 4}"/>')
            parts.append(
                f'<text x="{x}" y="{end + 19}" text-anchor="middle">{number(value)}</text>'
            )
        return parts


# ---------------------------------------------------------------- kinds of curves


def _curve(frame: _Frame, s: Series) -> list[str]:
    means = [(x, mean) for x, mean, _, _ in thinned(s.points, GROUPS)]
    return [f'<polyline class="curve {s.colour}" points="{frame.path(means)}"/>']


def _band(frame: _Frame, s: Series) -> list[str]:
    groups = thinned(s.points, GROUPS)
    outline = [(x, high) for x, _, _, high in groups] + [(x, low) for x, _, low, _ in groups[::-1]]
    means = [(x, mean) for x, mean, _, _ in groups]
    return [
        f'<polygon class="band {s.colour}" points="{frame.path(outline)}"/>',
        f'<polyline class="faint {s.colour}" points="{frame.path(means)}"/>',
    ]


def _marks(frame: _Frame, s: Series) -> list[str]:
    parts = [f'<polyline class="curve {s.colour}" points="{frame.path(s.points)}"/>']
    for x, y in s.points:
        note = f"{escape(s.name)} {y:.4f} at step {x:,.0f}"
        parts.append(
            f'<circle class="{s.colour}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="{MARK}">'
            f"<title>{note}</title></circle>"
        )
    return parts


def _flags(frame: _Frame, s: Series) -> list[str]:
    end = HEIGHT - BOTTOM
    return [
        f'<line class="{s.colour}" x1="{frame.x(x):.1f}" x2="{frame.x(x):.1f}" y1="{end - 10}" '
        f'y2="{end}"><title>{escape(s.name)} at step {x:,.0f}</title></line>'
        for x, _ in s.points
    ]


_DRAWERS = {"curve": _curve, "band": _band, "marks": _marks, "flags": _flags}


def _legend(series: Sequence[Series]) -> list[str]:
    named = [s for s in series if s.name]
    parts = []
    for i, s in enumerate(named):
        x = WIDTH - RIGHT - LEGEND_STEP * (len(named) - i)
        parts.append(f'<rect class="{s.colour}" x="{x}" y="{TOP + 4}" width="14" height="3"/>')
        parts.append(f'<text x="{x + 20}" y="{TOP + 10}">{escape(s.name)}</text>')
    return parts
