"""Choosing: from the results of one policy row to the variants that it takes.

A *group* is what one row may hold side by side: the variants of one numerics class, a different one for each batch if need be,
or a single variant whose fingerprint is not known for every static key of the row. A cell's regret is a variant's time over
the fastest one's, whatever their bits, with what a step spends around the call added to both. A row takes the group whose worst
regret is least; inside it each measured batch takes the variant whose worst regret over the cells of that batch is least, and
neighbouring batches share a variant where that costs next to nothing. What was taken before stays unless the gain exceeds
3 % and the measured noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from statistics import median
from typing import TypeAlias, TypeVar

from kernreg.contract import FactValue
from kernreg.numerics import classes, facts_key
from kernreg.policy_file import Row, Use
from kernreg.tuning.journal import Result

LEAST_GAIN = 0.03  # an incumbent stays for less
TIE = 1.006  # regrets closer than this are equal: with the noise, choosing the other one costs less than 1 %
# What a step spends around a call that serves many layers. Without it, 6 us lost at batch 1 would outweigh 1.5 ms lost at
# batch 128. A call that serves one layer is made once for each layer, and bears its part.
FLOOR_US = 10.0
LAYERS_A_STEP = 32
KEPT_VARIANTS = 8
WINNERS = 2  # places among the kept for the fastest of single cells
CONTENDERS, BEHIND = (4, 1.2)  # so many groups, and no more behind the best, are thought to have a chance to win

T = TypeVar("T", "Choice", "Standing")


@dataclass(frozen=True)
class Group:
    """numerics: id of the class, or None for a single variant without fingerprints. members: variant ids in order."""

    numerics: str | None
    members: tuple[str, ...]


@dataclass(frozen=True)
class Standing:
    """Regrets of a variant, or of one variant for each batch, over some cells: the worst, where that is, the geometric mean.

    slowest: the worst without the floor. order: the variants in a form that sorts.
    """

    worst: float
    where: str
    mean: float
    slowest: float
    order: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Span:
    """Neighbouring measured batches, in ascending order, that take one variant."""

    variant: str
    batches: tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """What a row takes."""

    group: Group
    spans: tuple[Span, ...]
    standing: Standing

    def variant(self, batch: int) -> str:
        """A batch between two measured ones takes what the larger takes."""
        return next((span.variant for span in self.spans if batch <= span.batches[-1]), self.spans[-1].variant)


@dataclass(frozen=True)
class Close:
    """Variants that decide something in a cell and are close there. gap: how close, as a part of the time."""

    cell: str
    gap: float
    variants: frozenset[str]


Incumbent: TypeAlias = "Callable[[Table], Mapping[int, str]]"  # what each measured batch takes now, as far as it was timed


def nobody(table: Table) -> Mapping[int, str]:
    return {}


def of_row(row: Row | None) -> Incumbent:
    """What a row of a policy file takes."""
    if row is None:
        return nobody
    return lambda table: {batch: found for batch in table.batches if (found := table.find(row.entry(batch).use)) is not None}


def of_choice(choice: Choice) -> Incumbent:
    return lambda table: {batch: choice.variant(batch) for batch in table.batches if choice.variant(batch) in table.variants}


def matches(use: Use, kernel: str, config: Mapping[str, FactValue]) -> bool:
    """Is this the variant that the file names? A file may leave out parameters that stand at their default."""
    return kernel == use.kernel and all(config.get(name) == value for name, value in use.config.items())


# --- what is known


class Timings:
    """What was measured of one row: times, failures, fingerprints.

    times: for each cell and variant the newest full timing, else the newest quick one.
    failed: variants that are out of the row.
    bits: by variant and static key, the fingerprint.
    """

    def __init__(self) -> None:
        self.times: dict[str, dict[str, Result]] = {}
        self.failed: set[str] = set()
        self.bits: dict[str, dict[str, str]] = {}
        self._compiler = ""

    def add(self, results: Sequence[Result]) -> None:
        """The results of one run, in any order. A variant that failed is out until a run in which it does not."""
        self.failed -= {result.variant for result in results}
        self.failed |= {result.variant for result in results if result.stage == "failed"}
        self._learn([result for result in results if result.stage == "bits"])
        timed: dict[tuple[str, str], list[Result]] = {}
        for result in results:
            if result.timed:
                timed.setdefault((result.cell_key, result.variant), []).append(result)
        for (key, variant), part in timed.items():
            result, cell = merged(part), self.times.setdefault(key, {})
            if result.stage == "full" or variant not in cell or cell[variant].stage == "quick":
                cell[variant] = result

    def _learn(self, lines: Sequence[Result]) -> None:
        """Fingerprints count together where one compiler made them; one that came out in two ways is none."""
        if not lines:
            return
        newest = max((line.date, compiler(line)) for line in lines)[1]
        if newest != self._compiler:
            self.bits, self._compiler = {}, newest
        found: dict[tuple[str, str], set[str]] = {}
        for line in lines:
            if compiler(line) == newest:
                found.setdefault((line.variant, line.key), set()).add(line.bits)
        for (variant, key), bits in found.items():
            known = self.bits.setdefault(variant, {})
            known.pop(key, None)
            if len(bits) == 1:
                known |= {key: next(iter(bits))}

    def table(self) -> Table:
        """Everything that a choice is made of, as it is now."""
        fair = {key: {v: r for v, r in cell.items() if v not in self.failed} for key, cell in self.times.items()}
        return Table({key: cell for key, cell in fair.items() if cell}, self.bits)


def compiler(line: Result) -> str:
    """The software that decides bits: the driver does not."""
    return facts_key({name: version for name, version in line.software.items() if name != "driver"})


def merged(part: Sequence[Result]) -> Result:
    """One run's timings of a variant in a cell as one: full before quick, undisturbed before disturbed, the median of the rest.

    Its spread covers them all, so what they differ by counts as noise.
    """
    full = [result for result in part if result.stage != "quick"]
    clean = [result for result in full or part if not result.disturbed] or full or part
    newest = max(clean, key=lambda result: (result.date, result.to_line())) if len(clean) > 1 else clean[0]
    times = [result.us for result in clean if result.us is not None]
    middle = median(us[1] for us in times)
    spread = (min(us[0] for us in times), middle, max(us[2] for us in times))
    return replace(newest, us=spread, samples=sum(r.samples for r in clean), stage="full" if full else "quick")


# --- the choice


class Table:
    """The cells that decide, and what each variant takes in them.

    cells: by cell and variant. Judged are those cells that the most widely timed variants share, so that an unfinished run is
        judged on what is there.
    batches: by batch, its cells. variants: any one result of each.
    """

    def __init__(self, fair: Mapping[str, Mapping[str, Result]], bits: Mapping[str, Mapping[str, str]]) -> None:
        finalists = {key: _finalists(cell) for key, cell in fair.items()}
        variants = {v: r for cell in fair.values() for v, r in cell.items()}
        covered = {v: frozenset(key for key, those in finalists.items() if v in those) for v in variants}
        widest = max(map(len, covered.values()), default=0)
        self.wide = sorted(v for v in variants if len(covered[v]) == widest)
        shared = sorted(frozenset.intersection(*(covered[v] for v in self.wide))) if self.wide else []
        self.cells = {key: fair[key] for key in shared}
        self.variants = {v: r for cell in self.cells.values() for v, r in cell.items()}
        self.batches: dict[int, tuple[str, ...]] = {}
        for key in sorted(shared, key=lambda key: (self._any(key).batch, key)):
            self.batches[self._any(key).batch] = (*self.batches.get(self._any(key).batch, ()), key)
        self._timed = {v: {b for b, keys in self.batches.items() if covered[v].issuperset(keys)} for v in self.variants}
        self._bits = bits
        self._alone: dict[tuple[int, str], Standing] = {}

    def _any(self, key: str) -> Result:
        return next(iter(self.cells[key].values()))

    def find(self, use: Use) -> str | None:
        """The timed variant that a file means."""
        return min((v for v, r in self.variants.items() if matches(use, r.use, r.config)), default=None)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Those that can serve every batch."""
        keys = {self._any(key).key for key in self.cells}
        known = {v: {key: self._bits[v][key] for key in keys} for v in self.variants if keys <= self._bits.get(v, {}).keys()}
        groups = [Group(name, members) for name, members in classes({v: known[v] for v in known if self._timed[v]}).items()]
        groups += [Group(None, (v,)) for v in self.wide if v not in known and v in self.variants]
        able = [group for group in groups if all(self.members(group, batch) for batch in self.batches)]
        return tuple(able) if self.batches else ()

    def members(self, group: Group, *batches: int) -> list[str]:
        """Those that were timed in all cells of these batches."""
        return [v for v in group.members if self._timed[v].issuperset(batches)]

    def standing(self, taken: Mapping[int, str]) -> Standing:
        """Of one variant for each of these batches, over their cells."""
        regrets: dict[str, float] = {}
        slowest = 1.0
        for batch, variant in taken.items():
            for key in self.batches[batch]:
                mine, least = self.cells[key][variant], self._least[key]
                floor = _floor(mine)
                regrets[key] = (mine.median + floor) / (least + floor)
                slowest = max(slowest, mine.median / least)
        where = max(sorted(regrets), key=regrets.__getitem__)
        mean = math.exp(math.fsum(map(math.log, regrets.values())) / len(regrets))
        return Standing(regrets[where], where, mean, slowest, self._order(taken.values()))

    @cached_property
    def _least(self) -> dict[str, float]:
        return {key: min(result.median for result in cell.values()) for key, cell in self.cells.items()}

    def _order(self, variants: Iterable[str]) -> tuple[tuple[str, str], ...]:
        results = [self.variants[v] for v in dict.fromkeys(variants)]
        return tuple((result.use, facts_key(result.config)) for result in results)

    def alone(self, batch: int, variant: str) -> Standing:
        """A variant in one batch."""
        if (batch, variant) not in self._alone:
            self._alone[batch, variant] = self.standing({batch: variant})
        return self._alone[batch, variant]

    def everywhere(self, variant: str, batches: Iterable[int]) -> Standing:
        return self.standing(dict.fromkeys(batches, variant))

    def noise(self, *taken: tuple[Standing, Callable[[int], str]]) -> float:
        """The largest spread, at the cells that decide between these, of what each takes there."""
        cells = [(self._any(standing.where).batch, self.cells[standing.where]) for standing, _ in taken]
        return max(cell[takes(batch)].spread for batch, cell in cells for _, takes in taken)

    def threshold(self, one: Choice, other: Choice) -> float:
        """The gain that it takes to replace one choice by another."""
        return max(LEAST_GAIN, self.noise((one.standing, one.variant), (other.standing, other.variant)))

    def threshold_at(self, batch: int, one: str, other: str) -> float:
        """The same of two variants in one batch."""
        pair = [(self.alone(batch, variant), lambda _, variant=variant: variant) for variant in (one, other)]
        return max(LEAST_GAIN, self.noise(*pair))

    # --- one group

    def choice(self, group: Group, held: Mapping[int, str] | None = None) -> Choice:
        """The best that a group can do; `held` is what each batch takes now."""
        admitted = [(batch, self._admitted(group, batch, (held or {}).get(batch))) for batch in self.batches]
        spans: list[Span] = []
        for batches, variants in _runs(admitted):
            taken = min(variants) if len(variants) == 1 else self._best_of(variants, batches)
            if spans and spans[-1].variant == taken:
                spans[-1] = Span(taken, spans[-1].batches + batches)
            else:
                spans.append(Span(taken, batches))
        return Choice(group, tuple(spans), self.standing({b: span.variant for span in spans for b in span.batches}))

    def _admitted(self, group: Group, batch: int, held: str | None) -> frozenset[str]:
        """The variants that a batch may take: what it holds if the gain is within the threshold, else all near the best."""
        standings = {v: self.alone(batch, v) for v in self.members(group, batch)}
        if held in standings:
            challenger = self._best_of(standings, (batch,))
            gain = standings[held].worst / standings[challenger].worst - 1
            if gain <= self.threshold_at(batch, held, challenger):
                return frozenset([held])
        bound = min(standing.worst for standing in standings.values()) * TIE
        return frozenset(v for v, standing in standings.items() if standing.worst <= bound)

    def _best_of(self, variants: Iterable[str], batches: Sequence[int]) -> str:
        standings = {self.everywhere(v, batches): v for v in sorted(variants)}
        return standings[best(list(standings))]

    # --- all groups

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """What each group can do, the best first."""
        choices = (self.choice(group) for group in self.groups)
        return tuple(sorted(choices, key=lambda choice: (choice.standing.worst, choice.standing.mean, choice.standing.order)))

    def choose(self, incumbent: Incumbent = nobody) -> Choice | None:
        """The best, or the group in place where the gain is within the threshold; inside a group batch by batch likewise."""
        if not self.choices:
            return None
        challenger = best(self.choices)
        held = incumbent(self)
        for group in self.groups:
            if held and set(held.values()) <= set(group.members):
                kept = self.choice(group, held)
                gain = kept.standing.worst / challenger.standing.worst - 1
                return kept if group == challenger.group or gain <= self.threshold(kept, challenger) else challenger
        return challenger

    def runner_up(self, choice: Choice, span: Span) -> str | None:
        """The variant that would come next: of the same class if it has another one, else any."""
        others = [v for v in self.members(choice.group, *span.batches) if v != span.variant]
        others = others or [v for v in self.variants if self._timed[v].issuperset(span.batches) and v != span.variant]
        return self._best_of(others, span.batches) if others else None

    def largest(self, span: Span) -> str:
        """The cell with the most work among those of a span."""
        cells = {key: self.cells[key][span.variant] for batch in span.batches for key in self.batches[batch]}
        return max(cells, key=lambda key: (cells[key].work, key))

    def close(self, incumbent: Incumbent = nobody) -> list[Close]:
        """Where the choice might fall the other way: the cells that decide between what is taken, what comes near it and what was
        taken before, the closest first."""
        choice = self.choose(incumbent)
        if choice is None:
            return []
        found: dict[str, list[tuple[float, str]]] = {}
        for gap, cells, variants in (*self._close_batches(choice, incumbent(self)), *self._close_choices(choice)):
            for key in cells:
                at = self._any(key).batch
                found.setdefault(key, []).extend((gap, takes(at)) for takes in variants)
        closes = [Close(key, min(gap for gap, _ in part), frozenset(v for _, v in part)) for key, part in found.items()]
        return sorted(closes, key=lambda close: (close.gap, close.cell))

    def _close_batches(self, choice: Choice, held: Mapping[int, str]) -> Iterator[_Contest]:
        for batch in self.batches:
            taken, mine = choice.variant(batch), self.alone(batch, choice.variant(batch))
            for other in {*self.members(choice.group, batch), *([held[batch]] if batch in held else [])} - {taken}:
                if other not in self.variants or batch not in self._timed[other]:
                    continue
                theirs = self.alone(batch, other)
                gap = abs(theirs.worst / mine.worst - 1)
                if gap <= self.threshold_at(batch, taken, other):
                    both = (lambda _, taken=taken: taken, lambda _, other=other: other)
                    yield gap, {mine.where, theirs.where}, both

    def _close_choices(self, choice: Choice) -> Iterator[_Contest]:
        for other in self.choices:
            gap = abs(other.standing.worst / choice.standing.worst - 1)
            if other.group != choice.group and gap <= self.threshold(choice, other):
                yield gap, {choice.standing.where, other.standing.where}, (choice.variant, other.variant)


_Contest: TypeAlias = "tuple[float, set[str], Sequence[Callable[[int], str]]]"  # gap, deciding cells, who takes what at a batch


def _finalists(cell: Mapping[str, Result]) -> frozenset[str]:
    """The variants timed in full, where there are any: a quick timing does not make a variant eligible beside them."""
    full = frozenset(v for v, result in cell.items() if result.stage == "full")
    return full or frozenset(cell)


def _floor(result: Result) -> float:
    return FLOOR_US if result.load.get("layers", 1) > 1 else FLOOR_US / LAYERS_A_STEP


def _runs(admitted: Sequence[tuple[int, frozenset[str]]]) -> Iterator[tuple[tuple[int, ...], frozenset[str]]]:
    """The fewest runs of neighbouring batches that share a variant, each as long as can be, with the variants that they share."""
    batches: tuple[int, ...] = ()
    shared: frozenset[str] = frozenset()
    for batch, variants in admitted:
        if batches and not shared & variants:
            yield batches, shared
            batches = ()
        shared = shared & variants if batches else variants
        batches = (*batches, batch)
    yield batches, shared


def best(among: Sequence[T]) -> T:
    """Least worst regret, then least mean regret, then the first by name; what differs by less than `TIE` is equal."""
    standings = {one: one.standing if isinstance(one, Choice) else one for one in among}
    bound = min(s.worst for s in standings.values()) * TIE
    near = {one: s for one, s in standings.items() if s.worst <= bound}
    bound = min(s.mean for s in near.values()) * TIE
    return min((one for one, s in near.items() if s.mean <= bound), key=lambda one: standings[one].order)


def replay(results: Iterable[Result], incumbent: Incumbent = nobody) -> tuple[Table, Choice] | None:
    """What a row takes after all runs, in their order, and what is known of it then."""
    timings = Timings()
    by_run: dict[str, list[Result]] = {}
    for result in results:
        by_run.setdefault(result.run, []).append(result)
    found: tuple[Table, Choice] | None = None
    for run in sorted(by_run):
        timings.add(by_run[run])
        table = timings.table()
        choice = table.choose(of_choice(found[1]) if found else incumbent)
        found = (table, choice) if choice else None
    return found


# --- staged screening


def leaders(results: Iterable[Result], count: int = KEPT_VARIANTS) -> list[str]:
    """The variants of one row worth timing everywhere, by the timings of its first cells.

    The groups that may win draw in turns: what each would take, then the next best of each batch. The last places go to the
    fastest of single cells, which tell what the choice costs.
    """
    timings = Timings()
    timings.add(list(results))
    table = timings.table()
    bound = min((choice.standing.worst for choice in table.choices), default=1.0) * BEHIND
    ahead = [choice for choice in table.choices if choice.standing.worst <= bound][:CONTENDERS]
    others = [choice for choice in table.choices if choice not in ahead]
    drawn = [v for part in (ahead, others) for v in _turns([_queue(table, choice) for choice in part])]
    winners = [min((r.median, v) for v, r in cell.items() if v in drawn)[1] for _, cell in sorted(table.cells.items()) if drawn]
    return list(dict.fromkeys([*drawn[: count - WINNERS], *winners, *drawn]))[:count]


def _queue(table: Table, choice: Choice) -> list[str]:
    """A group's variants: those of its choice, then by turns the next best of each batch."""
    ranked = []
    for batch in reversed(table.batches):
        standings = {v: table.alone(batch, v) for v in table.members(choice.group, batch)}
        ranked.append(sorted(standings, key=lambda v: (standings[v].worst, standings[v].mean, standings[v].order)))
    return list(dict.fromkeys([*(span.variant for span in choice.spans), *_turns(ranked)]))


def _turns(queues: Sequence[Sequence[str]]) -> list[str]:
    """The first of each, then the second of each, and so on."""
    return [one for turn in zip_longest(*queues) for one in turn if one is not None]
