"""The geometry of one chart: two panels over the batch, of times and of slowdowns against the fastest variant.

Batches and times are logarithmic; of slowdowns the square root is taken, so that one per cent can be told from none.
Lengths are in the units of the SVG's viewBox; the page decides about colours and fonts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from kernreg.report.data import Load, Point

WIDTH, HEIGHT = 380, 300
LEFT, RIGHT = 46, 356
TIMES = (14, 118)  # top and bottom of the upper panel
SLOWDOWNS = (142, 256)
STRIP = 278  # of the letters that the policy takes
LETTER = 10  # least distance of two letters
CAP = 0.5  # of the slowdowns shown; what is slower leaves the panel
LEAST_TOP = 0.05
SLOWDOWN_TICKS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True)
class Scale:
    """[low, high] to [start, end], straight after `bend`; all to the middle where low is high."""

    low: float
    high: float
    start: float
    end: float
    bend: Callable[[float], float] = math.log

    def __call__(self, value: float) -> float:
        low, high, at = map(self.bend, (self.low, self.high, value))
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True)
class Series:
    """One variant in a panel, as SVG paths: its line, the bars of its spread, crosses where it was disturbed."""

    letter: str
    line: str
    bars: str
    crosses: str


@dataclass(frozen=True)
class Panel:
    """taken, limit: paths of what the policy takes and of the limit. ticks: places and texts on the vertical axis."""

    top: float
    bottom: float
    series: tuple[Series, ...]
    taken: str
    limit: str
    ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class Span:
    """A piece of the strip: the policy takes this variant from x to x + width."""

    letter: str
    x: float
    width: float


@dataclass(frozen=True)
class Chart:
    """ticks: on the batch axis. letters: where each line ends. crossovers: x of each."""

    times: Panel
    slowdowns: Panel
    ticks: tuple[tuple[float, str], ...]
    letters: tuple[tuple[str, float], ...]
    spans: tuple[Span, ...]
    crossovers: tuple[float, ...]


def draw(load: Load) -> Chart:
    x = Scale(load.batches[0], load.batches[-1], LEFT + 10, RIGHT - 10)
    slow = _slowdown_scale(load)
    return Chart(
        _times(load, x),
        _slowdowns(load, x, slow),
        _batch_ticks(load.batches, x),
        _letters(load, slow),
        tuple(_spans(load, x)),
        tuple(_short(x(crossover.batch)) for crossover in load.crossovers),
    )


def _times(load: Load, x: Scale) -> Panel:
    values = [us for line in load.lines.values() for point in line for us in point.us] + list(load.limit.values())
    y = Scale(min(values) / 1.15, max(values) * 1.15, TIMES[1], TIMES[0])

    def place(point: Point, us: float) -> tuple[float, float]:
        return x(point.batch), y(us)

    series = tuple(_series(letter, [[place(p, us) for us in p.us] for p in line], line) for letter, line in load.lines.items())
    limit = _line([(x(batch), y(us)) for batch, us in sorted(load.limit.items())])
    ticks = tuple((_short(y(us)), f"{us:,.10g}") for us in _log_ticks(y.low, y.high))
    return Panel(*TIMES, series, _line([place(p, p.us[1]) for p in load.trace]), limit, ticks)


def _slowdowns(load: Load, x: Scale, y: Scale) -> Panel:
    def place(point: Point, us: float) -> tuple[float, float]:
        return x(point.batch), y(max(us / point.fastest - 1, 0.0))

    series = tuple(_series(letter, [[place(p, us) for us in p.us] for p in line], line) for letter, line in load.lines.items())
    ticks = tuple((_short(y(share)), f"+{share:.0%}" if share else "fastest") for share in SLOWDOWN_TICKS if share <= y.high)
    return Panel(*SLOWDOWNS, series, _line([place(p, p.us[1]) for p in load.trace]), "", ticks)


def _slowdown_scale(load: Load) -> Scale:
    worst = max(point.slowdown for line in load.lines.values() for point in line) - 1
    top = min(CAP, max(LEAST_TOP, worst * 1.1))
    return Scale(0.0, top, SLOWDOWNS[1] - 6, SLOWDOWNS[0] + 4, math.sqrt)


def _series(letter: str, points: Sequence[Sequence[tuple[float, float]]], line: Sequence[Point]) -> Series:
    """points: for each point of the line its places at the 20th, 50th and 80th percentile."""
    middle = [places[1] for places in points]
    bars = "".join(f"M{_pair(low)}V{_short(high[1])}" for low, _, high in points)  # round ends make a dot of a short one
    marked = (place for place, point in zip(middle, line, strict=True) if point.marks)
    crosses = "".join(f"M{_short(a - 5)} {_short(b - 5)}l10 10m0-10l-10 10" for a, b in marked)
    return Series(letter, _line(middle), bars, crosses)


def _line(places: Iterable[tuple[float, float]]) -> str:
    path = "L".join(map(_pair, places))
    return f"M{path}" if path else ""


def _pair(place: tuple[float, float]) -> str:
    return f"{_short(place[0])} {_short(place[1])}"


def _short(value: float) -> float:
    """To a tenth: whole numbers without a fraction keep the page small."""
    rounded = round(value, 1)
    return int(rounded) if rounded == int(rounded) else rounded


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... where that gives few enough, else powers of ten."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    within = [value for value in fine if low <= value <= high]
    return within if len(within) <= 6 else [10.0**decade for decade in decades if low <= 10.0**decade <= high]


def _batch_ticks(batches: Sequence[int], x: Scale) -> tuple[tuple[float, str], ...]:
    """All measured batches; no text where it would run into the one before."""
    ticks: list[tuple[float, str]] = []
    free = 0.0
    for batch in batches:
        text = str(batch) if x(batch) >= free else ""
        free = x(batch) + 8 * (len(text) + 1) if text else free
        ticks.append((_short(x(batch)), text))
    return tuple(ticks)


def _letters(load: Load, y: Scale) -> tuple[tuple[str, float], ...]:
    """Each line's letter at the height where it ends, moved apart."""
    last = load.batches[-1]
    ends = {letter: point.slowdown - 1 for letter in load.lines if (point := load.at(letter, last))}
    wanted = sorted((y(min(end, y.high)), letter) for letter, end in ends.items())
    return tuple((letter, _short(at)) for at, letter in _apart(wanted, SLOWDOWNS[1] - 2))


def _apart(wanted: Sequence[tuple[float, str]], bottom: float) -> list[tuple[float, str]]:
    """From the lowest up: nobody below `bottom`, nobody nearer than `LETTER` to the one below."""
    placed: list[tuple[float, str]] = []
    for at, letter in reversed(wanted):
        placed.append((min(at, (placed[-1][0] if placed else bottom + LETTER) - LETTER), letter))
    return placed


def _spans(load: Load, x: Scale) -> Iterable[Span]:
    """What the policy takes, batch by batch; it changes half way between two measured ones."""
    batches = load.batches
    half = [x.start - 10, *((x(a) + x(b)) / 2 for a, b in pairwise(batches)), x.end + 10]
    sides: Mapping[int, tuple[float, float]] = dict(zip(batches, pairwise(half), strict=True))
    for letter, run in groupby(batches, key=load.chosen.get):
        mine = list(run)
        left, right = sides[mine[0]][0], sides[mine[-1]][1]
        if letter:
            yield Span(letter, _short(left), _short(right - left))
