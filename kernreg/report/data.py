"""What the report says, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernreg.contract import FactValue, format_facts
from kernreg.device import Device
from kernreg.policy import LEVELS, Policy
from kernreg.tuning.prices import Prices


@dataclass(frozen=True)
class Point:
    """A variant at one batch. us: 20th, 50th and 80th percentile of a call in microseconds. slowdown: over the fastest there.

    marks: what disturbed the measurement, in words.
    """

    batch: int
    us: tuple[float, float, float]
    slowdown: float
    stage: str = "full"
    marks: tuple[str, ...] = ()

    @property
    def fastest(self) -> float:
        """The best variant's time at this batch."""
        return self.us[1] / self.slowdown


@dataclass(frozen=True)
class Crossover:
    """Between two measured batches the fastest variant changes from one letter to another, about at `batch`."""

    low: int
    high: int
    batch: float
    before: str
    after: str


@dataclass(frozen=True)
class Load:
    """One chart: the facts and the load that all its points share.

    facts: those in which the row's charts differ.
    lines: by the variant's letter, its points over the batch. chosen: by batch, the letter of what the policy takes.
    limit: by batch, microseconds in which the bytes that must move can be copied; empty where the bandwidth is not known.
    """

    facts: Mapping[str, FactValue]
    lines: Mapping[str, tuple[Point, ...]]
    chosen: Mapping[int, str]
    limit: Mapping[int, float]
    crossovers: tuple[Crossover, ...]

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(sorted({point.batch for line in self.lines.values() for point in line}))

    def at(self, letter: str, batch: int) -> Point | None:
        return next((point for point in self.lines.get(letter, ()) if point.batch == batch), None)

    def reached(self, batch: int) -> float:
        """The limit as a part of the time of what the policy takes."""
        taken = self.at(self.chosen[batch], batch)
        return self.limit[batch] / taken.us[1] if taken else 0.0

    @property
    def trace(self) -> tuple[Point, ...]:
        """The points of what the policy takes."""
        return tuple(point for batch, letter in sorted(self.chosen.items()) if (point := self.at(letter, batch)))


@dataclass(frozen=True)
class Standing:
    """A variant of a row: its letter, numerics class and the batches it serves; slowdowns over the cells it was timed in."""

    letter: str
    variant: str
    numerics: str | None
    serves: tuple[str, ...]
    cells: int
    median: float
    worst: float
    where: str


@dataclass(frozen=True)
class Serving:
    """What the policy takes for some batches of a row, with the numbers of the file.

    source: where the file says so. level: how far what it says is meant for this device (see `kernreg.policy.Decision`).
    stale: why its measurements may no longer hold.
    """

    variant: str
    span: str
    source: str
    level: str
    numerics: str | None = None
    us: float | None = None
    next: float | None = None
    runner_up: str | None = None
    margin: float | None = None
    at: str = ""
    stale: tuple[str, ...] = ()

    @property
    def local(self) -> bool:
        """Was the row measured on this very product?"""
        return self.level == LEVELS[0]


@dataclass(frozen=True)
class RowReport:
    """One row key of an op on a device.

    common: facts and load that all charts share. servings: what the policy takes, by batch. problem: why it cannot be asked.
    price: of what the policy's own row for this key and device takes, whatever is pinned (see `kernreg.tuning.prices`).
    screened: variants that were timed quickly and left.
    """

    anchor: str
    key: Mapping[str, FactValue]
    common: Mapping[str, FactValue]
    servings: tuple[Serving, ...]
    standings: tuple[Standing, ...]
    loads: tuple[Load, ...]
    price: Prices
    screened: int
    failed: int
    problem: str = ""

    @property
    def title(self) -> str:
        return format_facts(self.key.items())


@dataclass(frozen=True)
class Failures:
    """Variants of one kernel that are out, for one reason."""

    use: str
    step: str
    reason: str
    variants: tuple[str, ...]
    rows: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """Where a run's results come from; what changed within the run is listed."""

    run: str
    dates: tuple[str, str]
    counts: Mapping[str, int]
    software: Mapping[str, tuple[str, ...]]
    digests: Mapping[str, tuple[str, ...]]
    commands: tuple[str, ...]
    clocks: str
    throttled: Mapping[str, int]
    foreign: int


@dataclass(frozen=True)
class Place:
    """An op on a device."""

    anchor: str
    op: str
    device: Device
    bandwidth: float | None
    rows: tuple[RowReport, ...]
    price: Prices
    failures: tuple[Failures, ...]
    runs: tuple[Run, ...]
    changed: Mapping[str, str]


@dataclass(frozen=True)
class Report:
    """The whole page. results: lines of the journals; outdated: those of sources that a newer measured one replaced."""

    policy: Policy
    places: tuple[Place, ...]
    results: int
    outdated: int
    sources: tuple[str, ...] = ()

    @property
    def price(self) -> Prices:
        return Prices.joined(place.price for place in self.places)

    def as_dict(self) -> dict[str, Any]:
        """What the command line says of it. compared: cells where the chosen variant was timed."""
        return {
            "policy": self.policy.path,
            "results": self.results,
            "outdated": self.outdated,
            "places": [
                {
                    "op": place.op,
                    "device": place.device.id,
                    "keys": len(place.rows),
                    "cells": place.price.cells,
                    "compared": len(place.price.priced),
                    "median": place.price.median,
                    "worst": place.price.worst and place.price.worst.regret,
                    "failed": sum(len(failure.variants) for failure in place.failures),
                    "changed": sorted(place.changed),
                }
                for place in self.places
            ],
        }
