"""The order of a tuning run: screen and time every candidate at the anchors, then the leaders of each row in all its cells, then
once more what decides closely or was disturbed.

What the journal holds of the same run is not done again, so a killed run goes on where it was. Between measurements the run
can stop; the cells are ordered so that what is there then covers the grid evenly.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from itertools import product
from typing import Any, Protocol, TypeAlias

from kernreg.contract import Kernel
from kernreg.device import Device
from kernreg.evidence import installed_source
from kernreg.numerics import facts_key
from kernreg.policy_file import Row
from kernreg.registry import Registry
from kernreg.tuning.cells import Cell, Grid
from kernreg.tuning.choose import KEPT_VARIANTS, TIE, Timings, leaders, matches, of_row
from kernreg.tuning.journal import TIMED, Journal, Result, printable
from kernreg.tuning.measure import EFFORT, Bench, Candidate, CellError, Effort, Outcome, Timing, Trial
from kernreg.tuning.screen import Failure

# How a budget is shared among the stages that are still to come, by timings; a timing of "full" is worth so many of "quick".
WORTH: Mapping[str, float] = {"quick": 1.0, "full": 3.0, "again": 4.0}
ROUNDS = 3  # of timing again; those after the first are for what is closer than this
CLOSE = 2 * (TIE - 1)

Place: TypeAlias = "tuple[str, str]"  # a row and a cell of it, as the journal spells them


class Show(Protocol):
    """Told of progress: (what is being done, how much of it is done, how much there is)."""

    def __call__(self, what: str, done: int, total: int) -> None: ...


def silent(what: str, done: int, total: int) -> None:
    return


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def reference_of(registry: Registry, grid: Grid) -> Kernel:
    """The kernel that candidates are held against: one that runs on any CPU, by preference one that is called reference.

    Raises:
        LookupError: there is none.
    """
    for kernel in sorted(registry.kernels(grid.op.name), key=lambda kernel: not kernel.name.endswith(".reference")):
        if kernel.why_not(grid.cells[0].facts, Device.cpu(), kernel.default) is None and not registry.missing(kernel):
            return kernel
    raise LookupError(f"{grid.op.name} has no kernel that runs on a CPU, to hold the others against")


@dataclass
class Tuner:
    """One tuning run of one op on one device.

    run: its name: when it began. keep: by row key, the row of the present policy; what it takes is timed everywhere too.
    stop: asked between measurements.
    budget: seconds to spend; timings are cut short to keep it, and what is left out at last is the timing again.

    Attributes:
        skipped: cells that could not be timed, and why.
        spent: seconds of each stage.
    """

    registry: Registry
    device: Device
    grid: Grid
    journal: Journal
    bench: Bench
    run: str
    software: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    keep: Mapping[str, Row] = field(default_factory=dict)
    stop: Callable[[], bool] = lambda: False
    show: Show = silent
    budget: float | None = None

    def __post_init__(self) -> None:
        self.reference = reference_of(self.registry, self.grid)
        offered = [k for k in self.registry.kernels(self.grid.op.name) if k.name != self.reference.name]
        self.kernels = [kernel for kernel in offered if not self.registry.missing(kernel)]
        self.digests = {k.name: installed_source(self.registry, k.op, k.name) for k in self.kernels}
        self.skipped: list[str] = []
        self.spent: dict[str, float] = {}
        self._known: Counter[tuple[str, str, str, str]] = Counter()
        self._failed: set[tuple[str, str]] = set()
        self._fingerprinted: set[tuple[str, str]] = set()
        self._screened: set[tuple[str, str]] = set()
        self._mine: dict[str, list[Result]] = defaultdict(list)
        self._began = time.monotonic()
        for result in self.journal.results:
            self._note(result)

    def tune(self) -> bool:
        """True when all is measured, False when it was stopped before."""
        self._began = time.monotonic()
        anchors = [cell for cell in self.grid.cells if cell.anchor]
        if not self._stage("quick", anchors, self.candidates):
            return False
        if not self._stage("full", self.grid.cells, self._leading()):
            return False
        return all(self._repeat(number) for number in range(1, ROUNDS + 1))

    def _repeat(self, number: int) -> bool:
        """One more round of what is close; the first one also of what was disturbed."""
        again, cells = self._again(number), {_place(cell): cell for cell in self.grid.cells}
        close = [cells[place] for place in again if place in cells]
        return self._stage("again", close, lambda c: [v for v in self.candidates(c) if v.id in again[_place(c)]], number)

    @property
    def disturbed(self) -> int:
        """How many of the run's timings in full were throttled or had company, and have no undisturbed one beside them."""
        clean: dict[tuple[str, str, str], bool] = {}
        for result in (r for part in self._mine.values() for r in part if r.stage in ("full", "again")):
            place = (result.row_key, result.cell_key, result.variant)
            clean[place] = clean.get(place, False) or not result.disturbed
        return sum(not found for found in clean.values())

    # --- who is timed where

    def candidates(self, cell: Cell) -> list[Candidate]:
        """Every variant that says it can serve the cell's key here, in a fixed order."""
        return [c for kernel in self.kernels for c in self._variants(kernel, cell)]

    def _variants(self, kernel: Kernel, cell: Cell) -> Iterator[Candidate]:
        for values in product(*kernel.config.values()):
            variant = kernel.variant(dict(zip(kernel.config, values, strict=True)))
            if kernel.why_not(cell.facts, self.device, dict(variant.config)) is None:
                yield Candidate.of(variant)

    def _leading(self) -> Callable[[Cell], list[Candidate]]:
        """The candidates that go on: leaders by the quick timings of their row, and what the policy takes now."""
        leading = {row: set(leaders(self._first(row))) for row in {facts_key(cell.row) for cell in self.grid.cells}}

        def goes_on(candidate: Candidate, row: str) -> bool:
            entries = self.keep[row].entries if row in self.keep else ()
            held = any(matches(entry.use, candidate.use, dict(candidate.config)) for entry in entries)
            return held or candidate.id in leading[row]

        return lambda cell: [c for c in self.candidates(cell) if goes_on(c, facts_key(cell.row))]

    def _first(self, row: str) -> list[Result]:
        """What a row's first stage found. What failed later is no part of it, so that a run that goes on has the same leaders."""
        anchors = [cell for cell in self.grid.cells if cell.anchor and facts_key(cell.row) == row]
        keys, cells = {_key(cell) for cell in anchors}, {facts_key(cell.where) for cell in anchors}
        timed = {(r.variant, r.cell_key) for r in self._mine[row] if r.stage == "quick"}

        def early(result: Result) -> bool:
            if result.stage != "failed":
                return result.stage in ("quick", "bits")
            screened = not result.batch and result.key in keys
            return screened or (result.cell_key in cells and (result.variant, result.cell_key) not in timed)

        return [result for result in self._mine[row] if early(result)]

    def _again(self, number: int) -> dict[Place, set[str]]:
        """The variants to time once more, by cell: where a choice is close, the closest first, then where something disturbed."""
        close: list[tuple[float, Place, frozenset[str]]] = []
        disturbed: list[tuple[Place, str]] = []
        for row, results in self._mine.items():
            timings = Timings()
            known, often = _before(number, results)
            timings.add(known)
            for one in timings.table().close(of_row(self.keep.get(row))):
                if number == 1 or one.gap <= CLOSE:
                    variants = frozenset(v for v in one.variants if often[one.cell, v] == number - 1)
                    close.append((one.gap, (row, one.cell), variants))
            disturbed += [((row, r.cell_key), r.variant) for r in results if r.stage == "full" and r.disturbed and number == 1]
        again: dict[Place, set[str]] = {}
        for _, place, variants in sorted(close, key=lambda found: found[:2]):
            again.setdefault(place, set()).update(variants)
        for place, variant in disturbed:
            again.setdefault(place, set()).add(variant)
        return again

    # --- one stage

    def _stage(self, stage: str, cells: Sequence[Cell], pick: Callable[[Cell], list[Candidate]], number: int = 1) -> bool:
        """number: how many timings of the stage a variant is to have in a cell."""
        wanted = [(cell, self._open(stage, cell, pick(cell), number)) for cell in cells]
        wanted = [(cell, candidates) for cell, candidates in wanted if candidates]
        with self._spending(f"{stage} screening"):
            if not self._screen(stage, wanted):
                return False
        with self._spending(f"{stage} timing"):
            return self._time_all(stage, wanted, number)

    @contextmanager
    def _spending(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.spent[what] = self.spent.get(what, 0.0) + time.monotonic() - began

    def _time_all(self, stage: str, wanted: Sequence[tuple[Cell, Sequence[Candidate]]], number: int) -> bool:
        timings = sum(len(candidates) for _, candidates in wanted)
        for done, (cell, candidates) in enumerate(wanted):
            if self.stop():
                return False
            self.show(f"{stage} timing", done, len(wanted))
            effort = self._effort(stage, timings)
            if effort is None:
                return True
            if left := self._open(stage, cell, candidates, number):  # without those that failed since
                self._time(cell, stage, left, effort, number)
            timings -= len(candidates)
        if wanted:
            self.show(f"{stage} timing", len(wanted), len(wanted))
        return True

    def _effort(self, stage: str, timings: int) -> Effort | None:
        """What a timing may cost when so many are left in this stage; None when the rest must be left out."""
        if self.budget is None:
            return EFFORT[stage]
        left = self._began + self.budget - time.monotonic()
        if stage == "again" and left <= 0:
            return None
        weight = sum(count * WORTH[name] for name, count in {**self._ahead(stage), stage: timings}.items())
        return EFFORT[stage].within(max(left, 0.0) * WORTH[stage] / weight)

    def _ahead(self, stage: str) -> dict[str, float]:
        """About how many timings the later stages have."""
        full, again = self._full_timings, self._full_timings / 4
        return {"quick": {"full": full, "again": again}, "full": {"again": again}, "again": {}}[stage]

    @cached_property
    def _full_timings(self) -> int:
        return sum(min(KEPT_VARIANTS, len(self.candidates(cell))) for cell in self.grid.cells)

    @cached_property
    def weight(self) -> float:
        """How much there is to do, for sharing time among ops: about how many timings, each with its worth."""
        quick = sum(len(self.candidates(cell)) for cell in self.grid.cells if cell.anchor)
        return sum(count * WORTH[stage] for stage, count in {"quick": float(quick), **self._ahead("quick")}.items())

    def _screen(self, stage: str, wanted: Sequence[tuple[Cell, Sequence[Candidate]]]) -> bool:
        """Screen what the journal does not know; the rest is only compiled, for the compile cache may be empty after a break."""
        pairs = {(c.id, _key(cell)): (c, cell) for cell, candidates in wanted for c in candidates}
        cells = {(c.id, facts_key(cell.facts)): cell for c, cell in pairs.values()}
        trials = [
            Trial(candidate, cell.facts, self.reference.name, compile_only=pair in self._fingerprinted)
            for pair, (candidate, cell) in pairs.items()
            if pair not in self._screened
        ]
        if not trials:
            return True
        with closing(self.bench.screen(trials)) as ended:
            for number, (trial, found) in enumerate(ended, 1):
                cell = cells[trial.candidate.id, facts_key(trial.facts)]
                self._screened.add((trial.candidate.id, _key(cell)))
                if isinstance(found, Failure):
                    self._append([self._result(cell, trial.candidate, "failed", batch=0, load={}, work=0, **_failed(found))])
                elif found:
                    self._append([self._result(cell, trial.candidate, "bits", batch=0, load={}, work=0, bits=found)])
                self.show(f"{stage} screening", number, len(trials))
                if self.stop():
                    return False
        return True

    def _open(self, stage: str, cell: Cell, candidates: Sequence[Candidate], number: int) -> list[Candidate]:
        """Those still to be timed here: not out of the row, and not timed so often, or better, in this run."""
        row, where = _place(cell)
        later = TIMED[TIMED.index(stage) :]

        def done(candidate: Candidate) -> bool:
            return sum(self._known[row, where, candidate.id, one] for one in later) >= number

        return [c for c in candidates if (row, c.id) not in self._failed and not done(c)]

    def _time(self, cell: Cell, stage: str, candidates: Sequence[Candidate], effort: Effort, number: int) -> None:
        try:
            outcomes = self.bench.time(cell, candidates, stage if number == 1 else f"{stage} {number}", effort)
        except CellError as error:
            self.skipped.append(str(error))
            return
        self._append([self._outcome(cell, candidate, stage, outcomes[candidate.id]) for candidate in candidates])

    def _outcome(self, cell: Cell, candidate: Candidate, stage: str, outcome: Outcome) -> Result:
        if isinstance(outcome, Timing):
            return self._result(cell, candidate, stage, **_timed(outcome))
        return self._result(cell, candidate, "failed", **_failed(outcome))

    # --- the journal

    def _append(self, results: Sequence[Result]) -> None:
        self.journal.append(results)
        for result in results:
            self._note(result)

    def _note(self, result: Result) -> None:
        """Remember a line, if it is of this run, op and device, and of the kernel's present source."""
        if (result.run, result.op, result.device.get("id")) != (self.run, self.grid.op.name, self.device.id):
            return
        if result.digest != self.digests.get(result.use):
            return
        self._mine[result.row_key].append(result)
        if result.stage == "failed":
            self._failed.add((result.row_key, result.variant))
        elif result.stage == "bits":
            self._fingerprinted.add((result.variant, result.key))
        else:
            self._known[result.row_key, result.cell_key, result.variant, result.stage] += 1

    def _result(self, cell: Cell, candidate: Candidate, stage: str, **more: Any) -> Result:
        fields: dict[str, Any] = {
            "run": self.run,
            "op": cell.op,
            "row": cell.row,
            "facts": cell.shown,
            "batch": cell.batch,
            "load": cell.load,
            "use": candidate.use,
            "config": dict(candidate.config),
            "digest": self.digests[candidate.use],
            "stage": stage,
            "work": cell.work,
            "reference": self.reference.name,
            "device": self.device.record,
            "software": self.software,
            "command": printable(self.command),
            "date": now(),
        }
        return Result(**{**fields, **more})


def _before(number: int, results: Sequence[Result]) -> tuple[list[Result], Counter[tuple[str, str]]]:
    """What was known before a round of timing again, and how often each variant had been in each cell. The first time that a
    variant is timed again is of the first round, and so on: nothing is in a round that was not in the one before."""
    known, often = [], Counter[tuple[str, str]]()
    for result in results:
        place = (result.cell_key, result.variant)
        if result.stage == "again" and often[place] == number - 1:
            continue
        often[place] += result.stage == "again"
        known.append(result)
    return known, often


def _place(cell: Cell) -> Place:
    return facts_key(cell.row), facts_key(cell.where)


def _key(cell: Cell) -> str:
    """The static key, as the journal names it."""
    return facts_key({**cell.row, **cell.shown})


def _timed(timing: Timing) -> dict[str, Any]:
    return {"us": timing.us, "samples": timing.samples, "copies": timing.copies, "conditions": timing.conditions}


def _failed(failure: Failure) -> dict[str, Any]:
    return {"step": failure.step, "reason": printable(failure.reason)}


def last_run(results: Sequence[Result], op: str, device: str, software: Mapping[str, str] | None = None) -> str | None:
    """The run that goes on; none if the last one was made with other software than is given."""
    mine = [r for r in results if (r.op, r.device.get("id")) == (op, device)]
    last = max((r.run for r in mine), default=None)
    same = software is None or all(dict(r.software) == dict(software) for r in mine if r.run == last)
    return last if same else None
