"""What a policy costs, and what two policies or two journals differ in: pure functions of results and policies."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kernreg.contract import FactValue, format_facts, variant_id
from kernreg.policy_file import Entry, Policy, Row
from kernreg.tuning.build import incumbents
from kernreg.tuning.choose import Table, Timings, of_row
from kernreg.tuning.journal import Result, current


@dataclass(frozen=True)
class Price:
    """One cell: what the policy takes there and what is fastest whatever its bits, in microseconds."""

    op: str
    device: str
    row: Mapping[str, FactValue]
    cell: Mapping[str, FactValue]
    taken: str
    us: float
    best: str
    best_us: float

    @property
    def regret(self) -> float:
        return self.us / self.best_us

    def __str__(self) -> str:
        where = format_facts([*self.row.items(), *self.cell.items()])
        return f"{where}: {self.taken} against {self.best}"


@dataclass(frozen=True)
class Prices:
    """The cells that could be priced, and how many there are in all: a policy may take what a cell was not timed with."""

    priced: tuple[Price, ...]
    cells: int

    @staticmethod
    def joined(parts: Iterable[Prices]) -> Prices:
        parts = list(parts)
        return Prices(tuple(price for part in parts for price in part.priced), sum(part.cells for part in parts))

    @property
    def median(self) -> float | None:
        """Of the regrets; None if nothing was priced."""
        return statistics.median(price.regret for price in self.priced) if self.priced else None

    @property
    def worst(self) -> Price | None:
        return max(self.priced, key=lambda price: price.regret, default=None)


def prices(results: Iterable[Result], policy: Policy) -> Prices:
    """The price of one choice for each row: every measured cell's time against the fastest variant's there.

    Args:
        results: of journals; of each kernel's newest source only, and of each variant the newest timing in full.
        policy: its rows for the devices that the results are of. Cells of other rows are counted and not priced.
    """
    parts = []
    for (op, device, row), table in tables(results).items():
        parts.append(prices_of(op, device, table, incumbents(policy, op, device).get(row)))
    return Prices.joined(parts)


def prices_of(op: str, device: str, table: Table, row: Row | None) -> Prices:
    """The same of one row: what is known of it, and the policy's row."""
    priced = []
    taken = of_row(row)(table)
    for cell in table.cells.values():
        one = min(cell.values(), key=lambda result: (result.median, result.variant))
        mine = cell.get(taken.get(one.batch, ""))
        if mine:
            priced.append(Price(op, device, one.row, one.cell, mine.variant, mine.median, one.variant, one.median))
    return Prices(tuple(priced), len(table.cells))


def tables(results: Iterable[Result]) -> dict[tuple[str, str, str], Table]:
    """By op, device and row, what is known after all runs."""
    by_row: dict[tuple[str, str, str], dict[str, list[Result]]] = {}
    for result in current(results):
        place = (result.op, str(result.device.get("id")), result.row_key)
        by_row.setdefault(place, {}).setdefault(result.run, []).append(result)
    return {place: _table([runs[run] for run in sorted(runs)]) for place, runs in sorted(by_row.items())}


def _table(runs: Iterable[Sequence[Result]]) -> Table:
    timings = Timings()
    for run in runs:
        timings.add(run)
    return timings.table()


@dataclass(frozen=True)
class Difference:
    """A row that two policies fill differently, or that only one has.

    cost: by how much the worst regret of the one choice is above that of the other. most: the largest difference of their times
    in one cell. Both as parts, and None where the measurements do not tell.
    """

    op: str
    device: str
    row: str
    before: str
    after: str
    cost: float | None = None
    most: float | None = None


def differences(before: Policy, after: Policy, results: Iterable[Result]) -> list[Difference]:
    """The rows with a device that differ, and what that costs by these results: runs count together, as one."""
    known = tables(replace(result, run="") for result in results)
    found = []
    for op, device in sorted(_places(before) | _places(after)):
        one, other = incumbents(before, op, device), incumbents(after, op, device)
        for row in sorted({*one, *other}):
            old, new = one.get(row), other.get(row)
            if _spelled(old) != _spelled(new):
                cost, most = _cost(known.get((op, device, row)), old, new)
                found.append(Difference(op, device, row, _spelled(old), _spelled(new), cost, most))
    return found


def _places(policy: Policy) -> set[tuple[str, str]]:
    return {(op, str(device)) for op, rows in policy.ops.items() for row in rows for device in row.devices}


def rows(policy: Policy) -> int:
    """How many rows name one device."""
    return sum(len(incumbents(policy, op, device)) for op, device in _places(policy))


def _spelled(row: Row | None) -> str:
    """What a row takes, in words."""
    return ", ".join(map(_entry, row.entries)) if row else "no row"


def _entry(entry: Entry) -> str:
    return f"{entry.span}: {variant_id(entry.use.kernel, entry.use.config)}"


def _cost(table: Table | None, *rows: Row | None) -> tuple[float | None, float | None]:
    taken = [of_row(row)(table) for row in rows] if table else []
    if not table or any(set(choice) != set(table.batches) for choice in taken):
        return None, None
    if not all(v in cell for choice in taken for batch, v in choice.items() for cell in _cells(table, batch)):
        return None, None
    regrets = [table.standing(choice).worst for choice in taken]
    ratios = [
        cell[taken[0][batch]].median / cell[taken[1][batch]].median for batch in table.batches for cell in _cells(table, batch)
    ]
    return max(regrets) / min(regrets) - 1, max(max(ratio, 1 / ratio) for ratio in ratios) - 1


def _cells(table: Table, batch: int) -> Iterator[Mapping[str, Result]]:
    return (table.cells[key] for key in table.batches[batch])


@dataclass(frozen=True)
class Flips:
    """In how many of the cells that two journals share the fastest variant is another one."""

    flipped: int
    cells: int


def flips(one: Iterable[Result], other: Iterable[Result]) -> Flips:
    """What would become of a choice by plain arg-min, cell by cell, without timing again."""
    first, second = winners(one), winners(other)
    shared = first.keys() & second.keys()
    return Flips(sum(first[key] != second[key] for key in shared), len(shared))


def winners(results: Iterable[Result]) -> dict[tuple[str, ...], str]:
    """By op, device, row and cell, the fastest variant of those timed in full."""
    found: dict[tuple[str, ...], str] = {}
    for place, table in tables(r for r in results if r.stage != "again").items():
        for cell in table.cells.values():
            full = [r for r in cell.values() if r.stage == "full"] or list(cell.values())
            fastest = min(full, key=lambda result: (result.median, result.variant))
            found[(*place, fastest.cell_key)] = fastest.variant
    return found
