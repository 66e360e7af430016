"""Charts of the site as HTML: a row of marks per case, with texts that wrap and colours that follow the page's theme.

Positions are percentages, so that a chart is as wide as its page while texts keep their size. On phones a label is
above its marks (docs/assets/site.css). The colours are variables, which docs/conf.py defines for both themes.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from saccade.plot.providers import LIBRARIES, Provider, provider

# the outline of each marker around (0, 0), in pixels
PATHS = {
    "o": "M5 0A5 5 0 1 1-5 0A5 5 0 1 1 5 0Z",
    ".": "M3 0A3 3 0 1 1-3 0A3 3 0 1 1 3 0Z",
    "s": "M-4.5-4.5H4.5V4.5H-4.5Z",
    "D": "M0-6L6 0L0 6L-6 0Z",
    "d": "M0-6.5L4 0L0 6.5L-4 0Z",
    "^": "M0-5.5L5.5 4.5H-5.5Z",
    "v": "M0 5.5L5.5-4.5H-5.5Z",
    "<": "M-5.5 0L4.5-5.5V5.5Z",
    ">": "M5.5 0L-4.5-5.5V5.5Z",
    "P": "M-2-5.5H2V-2H5.5V2H2V5.5H-2V2H-5.5V-2H-2Z",
    "X": "M0-2.6L2.9-5.5L5.5-2.9L2.6 0L5.5 2.9L2.9 5.5L0 2.6L-2.9 5.5L-5.5 2.9L-2.6 0L-5.5-2.9L-2.9-5.5Z",
    "*": "M0-6.8L1.7-2.2L6.6-2L2.7 1L4.1 5.7L0 3L-4.1 5.7L-2.7 1L-6.6-2L-1.7-2.2Z",
    "h": "M0-6L5.2-3V3L0 6L-5.2 3V-3Z",
    "p": "M0-6L5.7-1.9L3.5 4.9H-3.5L-5.7-1.9Z",
}
MOST_TICKS = 7
# percent of the width that is left empty at both ends of an axis
EDGE = 4


class Line(NamedTuple):
    """A row of a chart.

    label: its words; value: the figure in words, at its end; marks: figures by provider; every: further figures, each a
    thin line; span: the lowest and the highest of several figures; target: a figure that was required; group: a heading
    above this row.
    """

    label: str
    value: str
    marks: dict[str, float]
    every: Sequence[float] = ()
    span: tuple[float, float] | None = None
    target: float | None = None
    group: str = ""

    @property
    def figures(self) -> list[float]:
        """All figures of this row."""
        return [*self.marks.values(), *self.every, *(self.span or ()), *([self.target] if self.target else [])]


class Chart(NamedTuple):
    """Rows over one axis.

    unit: the axis in words; lines: the rows; notes: sentences above them; log: a logarithmic axis; origin: the figure
    from which a stem leads to each mark.
    """

    unit: str
    lines: list[Line]
    notes: Sequence[str] = ()
    log: bool = False
    origin: float | None = None


def variable(library: str) -> str:
    """The name of the variable with a library's colour, without its dashes at the start."""
    return f"mark-{re.sub('[^a-z0-9]+', '-', library.lower())}"


def variables(theme: str) -> dict[str, str]:
    """The colour of every library in a theme, light or dark, by its variable."""
    return {variable(library): getattr(colours, theme) for library, colours in LIBRARIES.items()}


def figure(x: float) -> str:
    """A number of three digits."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def times(x: float) -> str:
    """A ratio with two digits after the point, from 10 on with fewer."""
    return f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 100 else f"{x:.0f}"


def axis(chart: Chart) -> tuple[list[float], Callable[[float], float]]:
    """The ticks of a chart and the place of a figure in percent of the width; raises ValueError without figures."""
    figures = [x for line in chart.lines for x in line.figures] + ([chart.origin] if chart.origin else [])
    if not any(line.figures for line in chart.lines):
        raise ValueError(f"{len(chart.lines)} rows without a figure in {chart.unit}: nothing to draw")
    low, high = (min(figures), max(figures)) if chart.log else (0.0, max(figures))
    if chart.log and low <= 0:
        raise ValueError(f"a figure of {low:g} {chart.unit} has no place on a logarithmic axis")
    change = math.log if chart.log else float
    start, width = change(low), (change(high) - change(low)) or 1.0
    return _ticks(low, high, chart.log), lambda x: EDGE + (100 - 2 * EDGE) * (change(x) - start) / width


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        for base in (2, 4, 10, 100):
            first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
            if 1 <= last - first < MOST_TICKS:
                return [float(base) ** e for e in range(first, last + 1)]
    # the smallest step of 1, 2 or 5 times a power of ten that has few enough ticks
    ten = 10 ** math.floor(math.log10((high - low) / MOST_TICKS))
    step = next(step for step in (ten, 2 * ten, 5 * ten, 10 * ten) if (high - low) / step < MOST_TICKS)
    first = math.ceil(low / step)
    return [step * n for n in range(first, math.floor(high / step + 1e-9) + 1)]


def html_of(chart: Chart, name: str) -> str:
    """A chart as one element of HTML without blank lines."""
    ticks, place = axis(chart)
    providers = list(dict.fromkeys(provider(x) for line in chart.lines for x in line.marks))
    target = any(line.target for line in chart.lines)
    parts = [f'<figure class="chart" id="chart-{name}">']
    if chart.notes:
        parts.append(f"<figcaption>{' '.join(map(html.escape, chart.notes))}</figcaption>")
    if len(providers) > 1 or target:
        parts.append(_legend(providers, target))
    parts.append('<div class="rows">')
    for line in chart.lines:
        if line.group:
            parts.append(f'<div class="group">{html.escape(line.group)}</div>')
        parts.append(_row(line, chart, ticks, place))
    at = "".join(f'<span style="left:{place(x):.2f}%">{x:g}</span>' for x in ticks)
    parts.append(f'<div class="row axis"><span class="label"></span><span class="track">{at}</span></div>')
    parts.append(f'<div class="unit">{html.escape(chart.unit)}</div></div></figure>')
    return "\n".join(parts)


def _row(line: Line, chart: Chart, ticks: Sequence[float], place: Callable[[float], float]) -> str:
    def upright(kind: str, x: float) -> str:
        return f'<line class="{kind}" x1="{place(x):.2f}%" x2="{place(x):.2f}%" y1="0" y2="100%"/>'

    def across(kind: str, start: float, end: float) -> str:
        return f'<line class="{kind}" x1="{place(start):.2f}%" x2="{place(end):.2f}%" y1="50%" y2="50%"/>'

    drawn = [upright("origin" if x == chart.origin else "tick", x) for x in {*ticks, chart.origin or ticks[0]}]
    drawn += [upright("each", x) for x in line.every]
    if line.span:
        drawn.append(across("span", *line.span))
    elif chart.origin:
        drawn += [across("stem", chart.origin, x) for x in list(line.marks.values())[:1]]
    if line.target:
        drawn.append(upright("target", line.target))
    # the first provider is above the others
    for name, x in reversed(line.marks.items()):
        shown = provider(name)
        title = html.escape(f"{shown.name}: {figure(x)} {chart.unit}")
        drawn.append(f'<svg x="{place(x):.2f}%" y="50%">{_mark(shown, title)}</svg>')
    return (
        f'<div class="row"><span class="label">{html.escape(line.label)}</span>'
        f'<span class="value">{html.escape(line.value)}</span>'
        f'<span class="track"><svg aria-hidden="true">{"".join(drawn)}</svg></span></div>'
    )


def _mark(shown: Provider, title: str = "") -> str:
    text = f"<title>{title}</title>" if title else ""
    form = "mark" if shown.filled else "mark hollow"
    return f'<path class="{form}" style="--mark:var(--{variable(shown.library)})" d="{PATHS[shown.mark]}">{text}</path>'


def _legend(providers: Sequence[Provider], target: bool) -> str:
    box = '<svg class="key" viewBox="-8 -8 16 16" aria-hidden="true">'
    items = [f"<li>{box}{_mark(shown)}</svg>{html.escape(shown.name)}</li>" for shown in providers]
    if target:
        line = '<line class="target" x1="0" x2="0" y1="-7" y2="7"/>'
        items.append(f"<li>{box}{line}</svg>target, set before the measurement</li>")
    return f"<ul>{''.join(items)}</ul>"
