"""Small SVG pictures for the pages: text built by hand, so that a page needs no library and no network.

Colours are those of Okabe and Ito (Color Universal Design, 2008), which people with any common colour blindness tell apart;
every picture also says its figures in words or in a table beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

BLUE, ORANGE, GREEN, SKY, VERMILION, PURPLE, YELLOW, GREY, INK = (
    "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#D55E00", "#CC79A7", "#F0E442", "#999999", "#222222"
)  # fmt: skip
WIDTH = 984.0  # of a picture that spans the page
SERIES = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, YELLOW, GREY)

Number = Callable[[float], str]


def tag(name: str, text: str = "", /, **attributes: object) -> str:
    """An element; `_` in attribute names stands for `-`, a trailing `_` is dropped. `text` is markup already.

    >>> tag("text", "a", x=1, font_size=9)
    '<text x="1" font-size="9">a</text>'
    """
    parts = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_cell(value))}"' for key, value in attributes.items()
    )
    return f"<{name}{parts}>{text}</{name}>"


def _cell(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def text(words: str, x: float, y: float, **attributes: object) -> str:
    """A line of text at a place."""
    return tag("text", escape(words), x=float(x), y=float(y), **attributes)


def title(words: str) -> str:
    """What a pointer or a screen reader finds on an element."""
    return tag("title", escape(words))


def picture(width: float, height: float, parts: Iterable[str], label: str) -> str:
    """An SVG that scales with the page; `label` says in words what it shows."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}" '
        f'style="max-width:{width:g}px">{"".join(parts)}</svg>'
    )


def stacked_bars(rows: Sequence[tuple[str, Sequence[tuple[str, float, str]]]], show: Number, label: str) -> str:
    """Rows of (name, parts); a part is (what, value, colour). All rows share one scale."""
    left, width, height = 110.0, WIDTH, 26.0
    longest = max((sum(value for _, value, _ in parts) for _, parts in rows), default=0.0) or 1.0
    drawn = []
    for number, (name, parts) in enumerate(rows):
        y, x = number * height, left
        drawn.append(text(name, left - 8, y + 16, text_anchor="end", font_size=12))
        for what, value, colour in parts:
            span = value / longest * (width - left - 4)
            if span <= 0:
                continue
            box = tag("rect", title(f"{name}: {what} {show(value)}"), x=x, y=y + 3, width=span, height=height - 7,
                      fill=colour, stroke="#fff", stroke_width=0.8)  # fmt: skip
            drawn.append(box)
            words = show(value)
            if span > 8 * len(words):
                ink = "#000" if colour in (YELLOW, SKY, ORANGE, "#dddddd") else "#fff"
                drawn.append(text(words, x + span / 2, y + 17, text_anchor="middle", font_size=11, fill=ink))
            x += span
    return picture(width, max(len(rows), 1) * height, drawn, label)


class Plane:
    """Two axes, linear or logarithmic, and what is drawn on them."""

    def __init__(
        self, x: tuple[float, float], y: tuple[float, float], *, log: tuple[bool, bool] = (False, False),
        size: tuple[float, float] = (WIDTH, 400.0),
    ) -> None:  # fmt: skip
        self.size, self.log = size, log
        self._low = self._scale(0, x[0]), self._scale(1, y[0])
        self._high = self._scale(0, x[1]), self._scale(1, y[1])
        self.left, self.top, self.right, self.bottom = 98.0, 14.0, size[0] - 16, size[1] - 46
        self.parts: list[str] = []

    def _scale(self, axis: int, value: float) -> float:
        return math.log10(value) if self.log[axis] else value

    def x(self, value: float) -> float:
        """Where a value stands across."""
        share = (self._scale(0, value) - self._low[0]) / ((self._high[0] - self._low[0]) or 1.0)
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        """Where a value stands up."""
        share = (self._scale(1, value) - self._low[1]) / ((self._high[1] - self._low[1]) or 1.0)
        return self.bottom - share * (self.bottom - self.top)

    def axes(
        self, names: tuple[str, str], show: tuple[Number, Number], *,
        n_ticks: tuple[int, int] = (8, 6), unit: tuple[float, float] = (1.0, 1.0),
    ) -> None:  # fmt: skip
        """Grid lines at round multiples of `unit` with their values, and the names of the axes."""
        for axis in (0, 1):
            if self.log[axis]:
                values = _log_ticks(self._low[axis], self._high[axis], n_ticks[axis])
            else:
                low, high = self._low[axis] / unit[axis], self._high[axis] / unit[axis]
                values = [unit[axis] * value for value in _ticks(low, high, n_ticks[axis])]
            for value in values:
                self._tick(axis, value, show[axis](value))
        middle = (self.left + self.right) / 2
        self.parts.append(text(names[0], middle, self.size[1] - 6, text_anchor="middle", font_size=12, fill=INK))
        y = (self.top + self.bottom) / 2
        self.parts.append(
            text(names[1], 13, y, text_anchor="middle", font_size=12, fill=INK, transform=f"rotate(-90 13 {y:g})")
        )

    def _tick(self, axis: int, value: float, words: str) -> None:
        if axis == 0:
            at = self.x(value)
            self.parts.append(tag("line", x1=at, y1=self.top, x2=at, y2=self.bottom, stroke="#e4e4e4"))
            self.parts.append(text(words, at, self.bottom + 16, text_anchor="middle", font_size=11, fill="#444"))
        else:
            at = self.y(value)
            self.parts.append(tag("line", x1=self.left, y1=at, x2=self.right, y2=at, stroke="#e4e4e4"))
            self.parts.append(text(words, self.left - 6, at + 4, text_anchor="end", font_size=11, fill="#444"))

    def line(self, points: Sequence[tuple[float, float]], colour: str, words: str = "", **more: object) -> None:
        """A polyline through values."""
        places = " ".join(f"{self.x(a):.1f},{self.y(b):.1f}" for a, b in points)
        named = title(words) if words else ""
        self.parts.append(
            tag("polyline", named, points=places, fill="none", stroke=colour, **{"stroke_width": 2, **more})
        )

    def dot(self, at: tuple[float, float], radius: float, colour: str, words: str, shape: str = "circle") -> None:
        """A marker with a title."""
        x, y = self.x(at[0]), self.y(at[1])
        style = {"fill": colour, "fill_opacity": 0.75, "stroke": "#fff", "stroke_width": 0.7}
        if shape == "circle":
            self.parts.append(tag("circle", title(words), cx=x, cy=y, r=radius, **style))
        else:
            r = radius * 1.2
            ends = {"square": "{0} {1} {2} {1} {2} {3} {0} {3}", "diamond": "{4} {1} {2} {5} {4} {3} {0} {5}"}[shape]
            places = ends.format(*(f"{v:.1f}" for v in (x - r, y - r, x + r, y + r, x, y)))
            self.parts.append(tag("polygon", title(words), points=places, **style))

    def note(self, words: str, at: tuple[float, float], **more: object) -> None:
        """Text at values."""
        self.parts.append(text(words, self.x(at[0]), self.y(at[1]), **{"font_size": 11, "fill": INK, **more}))

    def done(self, label: str) -> str:
        """The picture."""
        return picture(*self.size, self.parts, label)


def _ticks(low: float, high: float, n: int) -> list[float]:
    """Round values inside a range, about `n` of them."""
    span = (high - low) or 1.0
    step = 10.0 ** math.floor(math.log10(span / n))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= n)
    first = math.ceil(low / step)
    return [k * step for k in range(first, math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float, n: int) -> list[float]:
    """Powers of ten inside a range of logarithms, every k-th of them."""
    powers = range(math.ceil(low), math.floor(high) + 1)
    return [10.0**k for k in powers[:: max(1, -(-len(powers) // n))]]
