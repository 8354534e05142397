"""The order of a tuning run: screen and time every candidate at the anchors, then the leaders of each row in all its cells.

What the journal holds of the same run is not done again, so a killed run goes on where it was. Between measurements the run
can stop; the cells are ordered so that what is there then covers the grid evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from typing import Any, Protocol

from kernreg.contract import Kernel
from kernreg.device import Device
from kernreg.policy_file import Use
from kernreg.registry import Registry
from kernreg.tuning.build import leaders, matches
from kernreg.tuning.cells import Cell, Grid
from kernreg.tuning.journal import Journal, Result, canonical
from kernreg.tuning.measure import Bench, Candidate, CellError, Outcome, Timing, Trial
from kernreg.tuning.screen import Failure


class Show(Protocol):
    """Told of progress: (what is being done, how much of it is done, how much there is)."""

    def __call__(self, what: str, done: int, total: int) -> None: ...


def silent(what: str, done: int, total: int) -> None:
    return


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def reference_of(registry: Registry, grid: Grid) -> Kernel:
    """The kernel that candidates are held against: the one that runs on any CPU.

    Raises:
        LookupError: there is none.
    """
    for kernel in registry.kernels(grid.op.name):
        if kernel.why_not(grid.cells[0].facts, Device.cpu(), kernel.default) is None and not registry.missing(kernel):
            return kernel
    raise LookupError(f"{grid.op.name} has no kernel that runs on a CPU, to hold the others against")


@dataclass
class Tuner:
    """One tuning run of one op on one device.

    run: its name: when it began. keep: by row key, what the present policy takes; it is timed everywhere too.
    stop: asked between measurements.
    """

    registry: Registry
    device: Device
    grid: Grid
    journal: Journal
    bench: Bench
    run: str
    software: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    keep: Mapping[str, Use] = field(default_factory=dict)
    stop: Callable[[], bool] = lambda: False
    show: Show = silent

    def __post_init__(self) -> None:
        self.reference = reference_of(self.registry, self.grid)
        offered = [k for k in self.registry.kernels(self.grid.op.name) if k.name != self.reference.name]
        self.kernels = [kernel for kernel in offered if not self.registry.missing(kernel)]
        self.digests = {kernel.name: self.registry.source_digest(kernel)[:16] for kernel in self.kernels}
        self._known: dict[tuple[str, str, str], str] = {}
        self._failed: set[tuple[str, str]] = set()
        self._screened: set[tuple[str, str]] = set()
        self._mine: list[Result] = []
        self.skipped: list[str] = []
        for result in self.journal.results:
            self._note(result)

    def tune(self) -> bool:
        """True when all is measured, False when it was stopped before."""
        try:
            anchors = [cell for cell in self.grid.cells if cell.anchor]
            if not self._stage("quick", anchors, self.candidates):
                return False
            return self._stage("full", self.grid.cells, self._leading())
        finally:
            self.bench.close()

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
        rows = {canonical(cell.row) for cell in self.grid.cells}
        leading = {row: leaders(r for r in self._mine if r.row_key == row and r.stage != "full") for row in rows}

        def goes_on(candidate: Candidate, row: str) -> bool:
            held = self.keep.get(row)
            return candidate.id in leading[row] or (held is not None and matches(held, candidate.use, dict(candidate.config)))

        return lambda cell: [c for c in self.candidates(cell) if goes_on(c, canonical(cell.row))]

    def _stage(self, stage: str, cells: Sequence[Cell], pick: Callable[[Cell], list[Candidate]]) -> bool:
        wanted = [(cell, self._open(stage, cell, pick(cell))) for cell in cells]
        wanted = [(cell, candidates) for cell, candidates in wanted if candidates]
        if not self._screen(stage, wanted):
            return False
        for number, (cell, candidates) in enumerate(wanted):
            if self.stop():
                return False
            self.show(f"{stage} timing", number, len(wanted))
            if left := self._open(stage, cell, candidates):  # without those that failed since
                self._time(cell, stage, left)
        if wanted:
            self.show(f"{stage} timing", len(wanted), len(wanted))
        return True

    def _screen(self, stage: str, wanted: Sequence[tuple[Cell, Sequence[Candidate]]]) -> bool:
        """Screen what was not screened by this process: it also fills the compile cache, which may be empty after a break."""
        pairs = {(c.id, canonical(cell.facts)): (c, cell) for cell, candidates in wanted for c in candidates}
        trials = [Trial(c, cell.facts) for pair, (c, cell) in pairs.items() if pair not in self._screened]
        if not trials:
            return True
        with closing(self.bench.screen(trials)) as ended:
            for number, (trial, failure) in enumerate(ended, 1):
                pair = (trial.candidate.id, canonical(trial.facts))
                self._screened.add(pair)
                if failure is not None:
                    cell = pairs[pair][1]
                    self._append([self._result(cell, trial.candidate, "failed", batch=0, load={}, **_failed(failure))])
                self.show(f"{stage} screening", number, len(trials))
                if self.stop():
                    return False
        return True

    def _open(self, stage: str, cell: Cell, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those still to be timed here: not out of the row, and not timed in this run."""
        row, where = canonical(cell.row), canonical(cell.where)
        done = ("full",) if stage == "full" else ("quick", "full")
        return [c for c in candidates if (row, c.id) not in self._failed and self._known.get((row, where, c.id), "") not in done]

    def _time(self, cell: Cell, stage: str, candidates: Sequence[Candidate]) -> None:
        try:
            outcomes = self.bench.time(cell, candidates, stage)
        except CellError as error:
            self.skipped.append(str(error))
            return
        self._append([self._outcome(cell, candidate, stage, outcomes[candidate.id]) for candidate in candidates])

    def _outcome(self, cell: Cell, candidate: Candidate, stage: str, outcome: Outcome) -> Result:
        if isinstance(outcome, Timing):
            return self._result(cell, candidate, stage, **_timed(outcome))
        return self._result(cell, candidate, "failed", **_failed(outcome))

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
        self._mine.append(result)
        if result.stage == "failed":
            self._failed.add((result.row_key, result.variant))
            return
        place = (result.row_key, result.cell_key, result.variant)
        if self._known.get(place) != "full":
            self._known[place] = result.stage

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
            "device": {
                "id": self.device.id,
                "name": self.device.name,
                "arch": self.device.arch_name,
                "sms": self.device.sms,
            },
            "software": self.software,
            "command": self.command,
            "date": now(),
        }
        return Result(**{**fields, **more})


def _timed(timing: Timing) -> dict[str, Any]:
    return {"us": timing.us, "samples": timing.samples, "copies": timing.copies, "conditions": timing.conditions}


def _failed(failure: Failure) -> dict[str, Any]:
    return {"step": failure.step, "reason": failure.reason}


def last_run(results: Sequence[Result], op: str, device: str) -> str | None:
    """The run that goes on."""
    return max((r.run for r in results if (r.op, r.device.get("id")) == (op, device)), default=None)
