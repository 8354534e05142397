"""From results, a policy and a registry to what the report says: a pure function.

Results count as they do for `kernreg.tuning.build`: of each kernel's newest source only, a variant that failed is out of its row,
and what a later run measured replaces what an earlier one did.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median
from string import ascii_uppercase
from typing import TypeVar

from kernreg import policy as policies
from kernreg.contract import ContractError, FactValue, format_facts
from kernreg.device import Device
from kernreg.evidence import changed as changed_kernels
from kernreg.evidence import installed_source
from kernreg.numerics import facts_key
from kernreg.policy import Decision, Policy, PolicyError
from kernreg.registry import Registry, UnknownError
from kernreg.report.data import Crossover, Failures, Load, Place, Point, Report, RowReport, Run, Serving, Standing
from kernreg.tuning.build import incumbents
from kernreg.tuning.choose import TIE, Timings
from kernreg.tuning.journal import JournalError, Result, current
from kernreg.tuning.prices import Prices, prices_of

COPY_BANDWIDTH = {"nvidia-h200": 4.27e12}
"""By device id, the bytes a second that a large device-to-device copy moves, read and written bytes together, as measured.
Used where no comparison beside the policy has measured it (see `kernreg.results.copy_bandwidths`)."""

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def collect(
    results: Iterable[Result],
    policy: Policy,
    registry: Registry,
    sources: Sequence[str] = (),
    bandwidths: Mapping[str, float] | None = None,
) -> Report:
    """Everything that the page shows.

    Args:
        results: lines of the journals. sources: what to call these.
        registry: the kernels here; their sources say what is stale. What is not installed here must not count as missing.
        bandwidths: as `COPY_BANDWIDTH`, and before it. A device that is in neither has no limit in the report.

    Raises:
        JournalError: a result that does not say what it was measured on.
    """
    results = list(results)
    alive = current(results)
    by_place = _grouped(results, lambda r: (r.op, str(r.device.get("id"))))
    known = {**COPY_BANDWIDTH, **(bandwidths or {})}
    places = tuple(_Place(op, tuple(part), policy, registry, known).report() for (op, _), part in sorted(by_place.items()))
    return Report(policy, places, len(results), len(results) - len(alive), tuple(sources))


@dataclass(frozen=True)
class _Place:
    op: str
    results: tuple[Result, ...]
    policy: Policy
    registry: Registry
    bandwidths: Mapping[str, float]

    def report(self) -> Place:
        by_row = _grouped(current(self.results), lambda r: r.row_key)
        rows = [_Row(self, tuple(part), self.timings(part)) for part in by_row.values()]
        rows.sort(key=lambda row: row.order)
        reports = tuple(row.report(f"{self.anchor}-{number}") for number, row in enumerate(rows, 1))
        return Place(
            self.anchor,
            self.op,
            self.device,
            self.bandwidth,
            reports,
            Prices.joined(row.price for row in reports),
            tuple(_failures(rows)),
            tuple(self.run(run, part) for run, part in sorted(_grouped(self.results, lambda r: r.run).items())),
            self.changed,
        )

    @cached_property
    def device(self) -> Device:
        """As the newest line has it."""
        newest = max(self.results, key=lambda r: r.date)
        try:
            return Device.declared(str(newest.device["name"]), str(newest.device["arch"]), int(newest.device["sms"]))
        except (KeyError, ValueError) as error:
            told = f"{newest.op}, run {newest.run}: device is {dict(newest.device)!r}"
            raise JournalError(f"{told}, wanted id, name, arch and sms") from error

    @property
    def bandwidth(self) -> float | None:
        return self.bandwidths.get(self.device.id)

    @property
    def anchor(self) -> str:
        return f"{self.op}-{self.device.id}"

    @staticmethod
    def timings(results: Iterable[Result]) -> Timings:
        timings = Timings()
        for _, part in sorted(_grouped(results, lambda r: r.run).items()):
            timings.add(part)
        return timings

    @cached_property
    def changed(self) -> Mapping[str, str]:
        """Kernels whose source here is not the one that was measured last, with what is here."""
        measured = {r.use: r.digest for r in sorted(self.results, key=lambda r: r.date)}
        here = {use: installed_source(self.registry, self.op, use) for use in measured}
        return {use: here[use] for use, digest in sorted(measured.items()) if here[use] != digest}

    def decide(self, facts: Mapping[str, FactValue], batch: int) -> Decision:
        """Raises ContractError, PolicyError or UnknownError: the policy, as it is, says nothing of such a key."""
        op = self.registry.op(self.op)
        return policies.choose(self.policy, self.registry, self.device, op, op.complete(facts), batch)

    def serving(self, decision: Decision) -> Serving:
        row, entry = decision.row, decision.entry
        assert row and entry, decision
        use = decision.variant.kernel.name
        stale = ["the file says so"] if row.stale else []
        stale += map(str, changed_kernels(self.policy, self.registry, row))
        stale += [f"{use} has changed since the journal's last line"] if use in self.changed and not stale else []
        return Serving(
            decision.variant.id,
            entry.span,
            row.source,
            decision.level,
            row.numerics,
            entry.us,
            entry.next,
            entry.runner_up,
            entry.margin,
            format_facts(entry.at),
            tuple(stale),
        )

    @staticmethod
    def run(run: str, results: Sequence[Result]) -> Run:
        dates = sorted(r.date for r in results)
        clocks = [int(r.conditions["sm_mhz"]) for r in results if r.conditions.get("sm_mhz")]
        throttle = _grouped((text for r in results for text in r.conditions.get("throttle", ())), str)
        versions = _grouped(((name, str(v)) for r in results for name, v in r.software.items()), lambda pair: pair[0])
        digests = _grouped(((r.use, r.digest) for r in results), lambda pair: pair[0])
        return Run(
            run,
            (dates[0], dates[-1]),
            {stage: len(part) for stage, part in _grouped(results, lambda r: r.stage).items()},
            {name: _unique(v for _, v in pairs) for name, pairs in versions.items()},
            {use: _unique(d for _, d in pairs) for use, pairs in sorted(digests.items())},
            _unique(r.command for r in results if r.command),
            f"{min(clocks)}-{max(clocks)} MHz" if clocks else "not recorded",
            {text: len(part) for text, part in throttle.items()},
            sum(bool(r.conditions.get("foreign")) for r in results),
        )


@dataclass(frozen=True)
class _Row:
    """One row key of a place, while its charts are put together."""

    place: _Place
    results: tuple[Result, ...]
    timings: Timings

    def report(self, anchor: str) -> RowReport:
        charts = _grouped(self.cells, lambda cell: facts_key(_where(next(iter(cell.values())))))
        wheres = [_where(next(iter(chart[0].values()))) for chart in charts.values()]
        common = {k: v for k, v in wheres[0].items() if all(k in w and w[k] == v for w in wheres)} if wheres else {}
        loads = [self.load(chart, common) for chart in charts.values()]
        timed = {v for cell in self.timings.times.values() for v in cell} - set(self.letters) - self.timings.failed
        return RowReport(
            anchor,
            self.results[0].row,
            common,
            self.servings,
            tuple(self.standing(variant, letter) for variant, letter in self.letters.items()),
            tuple(sorted(loads, key=lambda load: _natural(load.facts.values()))),
            self.price,
            len(timed),
            len(self.timings.failed),
            self.problem,
        )

    @property
    def order(self) -> tuple[object, ...]:
        return tuple(_natural(self.results[0].row.values()))

    @cached_property
    def cells(self) -> list[dict[str, Result]]:
        """Of each cell what is shown of it: the variants timed in full anywhere in the row, and whatever is fastest in a cell,
        though only screened. Everything where nothing was timed in full yet."""
        fair = [{v: r for v, r in cell.items() if v not in self.timings.failed} for cell in self.timings.times.values()]
        full = {v for cell in fair for v, r in cell.items() if r.stage == "full"}
        shown = full | {_fastest(cell).variant for cell in fair if cell} if full else {v for cell in fair for v in cell}
        found = filter(None, ({v: r for v, r in cell.items() if v in shown} for cell in fair))
        return sorted(found, key=lambda cell: next(iter(cell.values())).batch)

    @cached_property
    def letters(self) -> dict[str, str]:
        """Variants in the order of the legend: what the policy takes, then the fastest on average."""
        regrets = _grouped(((v, s) for cell in self.cells for v, s in _slowdowns(cell).items()), lambda pair: pair[0])
        means = {v: (-len(pairs), math.fsum(math.log(s) for _, s in pairs) / len(pairs), v) for v, pairs in regrets.items()}
        taken = {serving.variant for serving in self.servings}
        ordered = sorted(means, key=lambda v: (v not in taken, means[v]))
        return {variant: _letter(number) for number, variant in enumerate(ordered)}

    def standing(self, variant: str, letter: str) -> Standing:
        found = [(_slowdowns(cell)[variant], cell[variant]) for cell in self.cells if variant in cell]
        worst, at = max(found, key=lambda pair: pair[0])
        return Standing(
            letter,
            variant,
            self.classes.get(variant),
            tuple(s.span for s in self.servings if s.variant == variant),
            len(found),
            median(slowdown for slowdown, _ in found),
            worst,
            _cell_text(at),
        )

    @cached_property
    def classes(self) -> Mapping[str, str]:
        """The numerics class of each variant, where the policy records it."""
        rows = [] if self.problem else [decision.row for decision in self.decisions.values() if decision.row]
        taken = {serving.variant: serving.numerics for serving in self.servings if serving.numerics}
        return taken | {variant: name for row in rows for name, variants in row.classes.items() for variant in variants}

    # --- what the policy takes

    @cached_property
    def decisions(self) -> dict[tuple[str, int], Decision]:
        """By the facts and the batch of a cell, measured batches and the first batches of the file's intervals."""
        firsts = policies.batches(self.place.policy, self.place.op)
        found: dict[tuple[str, int], Decision] = {}
        for key, part in _grouped(self.results, lambda r: r.key).items():
            facts = {**part[0].row, **part[0].facts}
            found |= {(key, batch): self.place.decide(facts, batch) for batch in {*firsts, *(r.batch for r in part)} - {0}}
        return found

    @cached_property
    def problem(self) -> str:
        """Why the policy cannot be asked; empty if it can."""
        try:
            return "" if self.decisions else "nothing was measured"
        except (ContractError, PolicyError, UnknownError) as error:
            return str(error)

    @cached_property
    def servings(self) -> tuple[Serving, ...]:
        if self.problem:
            return ()
        ordered = sorted(self.decisions.items(), key=lambda item: item[0][1])
        return _unique(self.place.serving(decision) for _, decision in ordered)

    def taken(self, result: Result) -> str | None:
        """The variant that the policy takes in the cell of a result."""
        if self.problem:
            return None
        return self.decisions[result.key, result.batch].variant.id

    @cached_property
    def price(self) -> Prices:
        place, row = self.place, self.results[0].row_key
        held = None if self.problem else incumbents(place.policy, place.op, place.device.id).get(row)
        return prices_of(place.op, place.device.id, self.timings.table(), held)

    # --- one chart

    def load(self, cells: Sequence[Mapping[str, Result]], common: Mapping[str, FactValue]) -> Load:
        first, letters = next(iter(cells[0].values())), self.letters
        lines: dict[str, list[Point]] = {letter: [] for letter in letters.values()}
        chosen: dict[int, str] = {}
        limit: dict[int, float] = {}
        bandwidth = self.place.bandwidth
        for cell in cells:
            one = next(iter(cell.values()))
            for variant, slowdown in _slowdowns(cell).items():
                lines[letters[variant]].append(_point(cell[variant], slowdown))
            taken = self.taken(one)
            if taken is not None and taken in cell:
                chosen[one.batch] = letters[taken]
            if bandwidth and one.work:
                limit[one.batch] = one.work / bandwidth * 1e6
        return Load(
            {name: value for name, value in _where(first).items() if name not in common},
            {letter: tuple(points) for letter, points in lines.items() if points},
            chosen,
            limit,
            tuple(_crossovers(cells, letters)),
        )


def _point(result: Result, slowdown: float) -> Point:
    assert result.us is not None, result
    marks = [f"throttled: {reason}" for reason in result.conditions.get("throttle", ())]
    if foreign := result.conditions.get("foreign"):
        marks.append(f"beside {foreign} other process{'es' if foreign != 1 else ''} on the GPU")
    return Point(result.batch, result.us, slowdown, result.stage, tuple(marks))


def _crossovers(cells: Sequence[Mapping[str, Result]], letters: Mapping[str, str]) -> Iterator[Crossover]:
    """Where the lead changes by more than the noise on both sides; the batch by a straight line between the logarithms."""
    for low, high in pairwise(cells):
        a, b = _fastest(low).variant, _fastest(high).variant
        if a == b or b not in low or a not in high:
            continue
        early, late = math.log(low[b].median / low[a].median), math.log(high[a].median / high[b].median)
        if early > _noise(low[a], low[b]) and late > _noise(high[a], high[b]):
            x, y = low[a].batch, high[a].batch
            yield Crossover(x, y, x * (y / x) ** (early / (early + late)), letters[a], letters[b])


def _noise(*results: Result) -> float:
    """As a part: what two times must differ by to count."""
    return max(TIE - 1, *(result.spread for result in results))


def _fastest(cell: Mapping[str, Result]) -> Result:
    return min(cell.values(), key=lambda r: (r.median, r.variant))


def _slowdowns(cell: Mapping[str, Result]) -> dict[str, float]:
    best = _fastest(cell).median
    return {variant: result.median / best for variant, result in cell.items()}


def _failures(rows: Iterable[_Row]) -> Iterator[Failures]:
    """What is out in at least one row, grouped by kernel and reason."""
    lines = (r for row in rows for r in row.results if r.stage == "failed" and r.variant in row.timings.failed)
    for (use, step, reason), part in sorted(_grouped(lines, lambda r: (r.use, r.step, r.reason)).items()):
        keys = _unique(format_facts(r.row.items()) for r in part)
        yield Failures(use, step, reason, _unique(r.variant for r in part), keys)


def _where(result: Result) -> dict[str, FactValue]:
    """The cell but for its batch."""
    return {**result.facts, **result.load}


def _cell_text(result: Result) -> str:
    return format_facts([*result.facts.items(), ("batch", result.batch), *result.load.items()])


def _letter(number: int) -> str:
    return ascii_uppercase[number] if number < len(ascii_uppercase) else f"V{number + 1}"


def _natural(values: Iterable[object]) -> list[tuple[int, int, str]]:
    """Sorts 8 before 16, and "8/8" before "16/8"."""
    parts = [part for value in values for part in re.findall(r"\d+|\D+", str(value))]
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """In the order in which the keys appear."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _unique(items: Iterable[K]) -> tuple[K, ...]:
    return tuple(dict.fromkeys(items))
