"""From measurements to a policy file: a pure function, the same bytes for the same journals, pins and previous file.

A row takes the variant whose worst regret over the row's cells is least; ties by the geometric mean of the regrets, then by
name. A cell's regret is the variant's time over the fastest one's, both with `FLOOR_US` added. Tuning runs are replayed in
order: what a run finds in place stays unless the gain exceeds 3 % and the measured noise. Of the previous file only the rows of
the measured ops and devices are rewritten.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kernreg.contract import FactValue
from kernreg.policy_file import SCHEMA, Policy, Row, Use, parse
from kernreg.tuning.journal import Result, canonical, current, sync_folder
from kernreg.yaml_subset import CONSTANTS, SWITCHES, WORD, Node, PolicyError, read

LEAST_GAIN = 0.03  # an incumbent stays for less
TIE = 1.01  # regrets closer than this are equal
# What a step spends around any call. Without it, 6 us lost at batch 1 would outweigh 1.5 ms lost at batch 128.
FLOOR_US = 10.0
KEPT_VARIANTS = 8
PREVIOUS = "the previous file"

HEADER = """\
# Which variant of a kernel serves which call.
#
# An op's pins and then its rows are tried in the order of this file. The first row whose `when` matches the static key and the
# device decides; a key that `when` leaves out matches any value; the last row of an op is a catch-all.
# A GPU is served by the section of its own product, else of its arch and SM count, else of its arch; where there is none, by rows
# without a device.
#
# Rows with a device are written by tools/tune.py from tools/measurements/: edits to them do not last, decisions of people
# go under `pins` with a reason. `us` is the variant's time in microseconds at the cell `at`, `next` the runner-up's there;
# `regret` is the largest slowdown against the fastest variant over all measured cells, `measured` what they covered.
"""


# --- choosing


@dataclass(frozen=True)
class Standing:
    """A variant's regrets: the worst, where that is, and the geometric mean; `slowest` is the worst without the floor."""

    variant: str
    worst: float
    where: str
    mean: float
    slowest: float
    order: tuple[str, str]


@dataclass(frozen=True)
class Choice:
    """What a row takes, and the next best; results at the row's largest cell."""

    standing: Standing
    at: Result
    runner_up: Standing | None
    next: Result | None
    cells: tuple[Result, ...]


class Evidence:
    """What is known of one row: for each cell and variant the newest full timing, else the newest quick one."""

    def __init__(self) -> None:
        self.times: dict[str, dict[str, Result]] = {}
        self.failed: set[str] = set()

    def add(self, results: Sequence[Result]) -> None:
        """The results of one run. A variant that failed is out until a run in which it does not."""
        self.failed -= {result.variant for result in results}
        self.failed |= {result.variant for result in results if result.stage == "failed"}
        for result in results:
            if result.stage != "failed":
                cell = self.times.setdefault(result.cell_key, {})
                if result.stage == "full" or result.variant not in cell or cell[result.variant].stage == "quick":
                    cell[result.variant] = result

    def standings(self) -> list[Standing]:
        """Of the variants that were timed in every cell, or, in an unfinished run, in the most cells."""
        fair = {key: {v: r for v, r in cell.items() if v not in self.failed} for key, cell in self.times.items()}
        fair = {key: cell for key, cell in fair.items() if cell}
        variants = {v: r for cell in fair.values() for v, r in cell.items()}
        covered = {v: frozenset(key for key, cell in fair.items() if v in cell) for v in variants}
        widest = max(map(len, covered.values()), default=0)
        wide = [v for v in variants if len(covered[v]) == widest]
        shared = sorted(frozenset.intersection(*(covered[v] for v in wide))) if wide else []
        return [self._standing(variants[v], {key: fair[key] for key in shared}) for v in wide] if shared else []

    def _standing(self, one: Result, cells: Mapping[str, Mapping[str, Result]]) -> Standing:
        times = {key: (cell[one.variant].median, min(r.median for r in cell.values())) for key, cell in cells.items()}
        regrets = {key: (mine + FLOOR_US) / (least + FLOOR_US) for key, (mine, least) in times.items()}
        where = max(regrets, key=regrets.__getitem__)
        mean = math.exp(math.fsum(map(math.log, regrets.values())) / len(regrets))
        slowest = max(mine / least for mine, least in times.values())
        return Standing(one.variant, regrets[where], where, mean, slowest, (one.use, canonical(one.config)))

    def noise(self, *standings: Standing) -> float:
        """The largest spread of these variants at the cells that decide between them."""
        cells = [self.times[standing.where] for standing in standings]
        return max(cell[s.variant].spread for cell in cells for s in standings)

    def choose(self, incumbent: str | None) -> Standing | None:
        """The best variant, or the incumbent where the gain is within the threshold."""
        standings = self.standings()
        if not standings:
            return None
        challenger = best(standings)
        for held in standings:
            if held.variant == incumbent:
                gain = held.worst / challenger.worst - 1
                return challenger if gain > max(LEAST_GAIN, self.noise(held, challenger)) else held
        return challenger

    def choice(self, standing: Standing) -> Choice:
        others = [other for other in self.standings() if other.variant != standing.variant]
        runner_up = best(others) if others else None
        cells = [cell for cell in self.times.values() if standing.variant in cell]
        largest = max(cells, key=lambda cell: (cell[standing.variant].work, cell[standing.variant].cell_key))
        mine = tuple(cell[standing.variant] for cell in cells)
        return Choice(standing, largest[standing.variant], runner_up, largest.get(runner_up.variant) if runner_up else None, mine)


def best(standings: Sequence[Standing]) -> Standing:
    """Least worst regret, then least mean regret, then the first by name; what differs by less than `TIE` is equal."""
    bound = min(s.worst for s in standings) * TIE
    near = [s for s in standings if s.worst <= bound]
    bound = min(s.mean for s in near) * TIE
    return min((s for s in near if s.mean <= bound), key=lambda s: s.order)


def leaders(results: Iterable[Result], count: int = KEPT_VARIANTS) -> list[str]:
    """The variants of one row worth timing everywhere: the best overall, the best of each cell, then the next overall."""
    evidence = Evidence()
    evidence.add(list(results))
    overall = [s.variant for s in sorted(evidence.standings(), key=lambda s: (s.worst, s.mean, s.order))]
    winners = []
    for key in sorted(evidence.times):
        fair = [r for v, r in evidence.times[key].items() if v in overall]
        winners += [min(fair, key=lambda r: (r.median, r.variant)).variant] if fair else []
    return list(dict.fromkeys([*overall[: count // 2], *winners, *overall]))[:count]


def replay(results: Iterable[Result], incumbent: Callable[[Evidence], str | None]) -> Choice | None:
    """What a row takes after all runs, in their order."""
    evidence, standing = Evidence(), None
    by_run: dict[str, list[Result]] = {}
    for result in results:
        by_run.setdefault(result.run, []).append(result)
    for run in sorted(by_run):
        evidence.add(by_run[run])
        standing = evidence.choose(standing.variant if standing else incumbent(evidence))
    return evidence.choice(standing) if standing else None


# --- incumbents of the previous file


def incumbents(policy: Policy | None, op: str, device: str) -> dict[str, Use]:
    """By row key, what the file's rows for this op and device take."""
    rows = policy.ops.get(op, ()) if policy else ()
    return {_row_key(row): row.entries[0].use for row in rows if row.devices == {device}}


def _row_key(row: Row) -> str:
    return canonical({c.key: c.values[0] for c in row.when if c.key != "device"})


def matches(use: Use, kernel: str, config: Mapping[str, FactValue]) -> bool:
    """Is this the variant that the file names? A file may leave out parameters that stand at their default."""
    return kernel == use.kernel and all(config.get(name) == value for name, value in use.config.items())


def _unreplayed(policy: Policy | None, op: str, device: str, runs: Collection[str]) -> list[str]:
    """Runs that the file's rows come from; none if the journals hold all of them, for then they decide alone."""
    section = policy.devices.get(device) if policy else None
    recorded = section.measured.get(op, "").split() if section else []
    return [] if set(recorded) <= set(runs) else recorded


def _held(use: Use | None) -> Callable[[Evidence], str | None]:
    def find(evidence: Evidence) -> str | None:
        timed = [r for cell in evidence.times.values() for r in cell.values()]
        return min((r.variant for r in timed if use is not None and matches(use, r.use, r.config)), default=None)

    return find


# --- writing


def build(results: Iterable[Result], pins: Sequence[Mapping[str, object]] | None = None, previous: str | None = None) -> str:
    """The text of the policy file.

    Args:
        results: the lines of all journals.
        pins: people's decisions, as the file has them; None keeps those of `previous`.
        previous: text of the present file. Its rows for measured ops and devices are incumbents, unless the run that they came
            from is among `results` and is replayed anyway; everything else in it is kept as it is.

    Raises:
        PolicyError: `previous` is damaged, or has rows in flow style.
    """
    kept = Kept.of(previous)
    old = parse(previous, PREVIOUS) if previous is not None else None
    by_place: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        by_place.setdefault((result.op, str(result.device["id"])), []).append(result)
    fresh = {place: "".join(_rows(part, *place, old)) for place, part in by_place.items()}
    sections = {**kept.devices, **{device: _section(by_place, device, old) for _, device in by_place}}
    text = "".join(_document(kept, by_place, sections, fresh, pins))
    _check(text, previous, by_place.keys(), pinned=pins is not None)
    return text


def _rows(results: Sequence[Result], op: str, device: str, old: Policy | None) -> Iterator[str]:
    uses: Mapping[str, Use] = {}
    if _unreplayed(old, op, device, {result.run for result in results}):
        uses = incumbents(old, op, device)
    by_row: dict[str, list[Result]] = {}
    for result in current(results):
        by_row.setdefault(result.row_key, []).append(result)
    for key, part in sorted(by_row.items(), key=lambda item: _natural(item[1][0].row)):
        if choice := replay(part, _held(uses.get(key))):
            yield _row(device, choice)


def _natural(value: object) -> list[tuple[int, str]]:
    """Sorts 8 before 16, and "8/8" before "16/8"."""
    text = " ".join(map(str, value.values())) if isinstance(value, Mapping) else str(value)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text) if part]


def _row(device: str, choice: Choice) -> str:
    at = choice.at
    fields: dict[str, str] = {
        "when": flow({"device": device, **at.row}),
        "use": scalar(at.use),
        "config": flow(at.config),
        "us": _us(at),
    }
    if choice.runner_up and choice.next:
        fields |= {"next": _us(choice.next), "runner_up": scalar(choice.runner_up.variant)}
    fields |= {
        "at": flow(at.cell),
        "regret": f"{choice.standing.slowest:.3f}",
        "measured": _listed([flow(area) for area in _areas(choice.cells)]),
    }
    lines = [f"{name}: {value}".replace(": \n", ":\n") for name, value in fields.items() if value != "{}"]
    return "    - " + "\n      ".join(lines) + "\n"


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else "".join(f"\n        - {item}" for item in items)


def _us(result: Result) -> str:
    return f"{result.median:.{1 if result.median >= 10 else 2}f}"


def _areas(cells: Sequence[Result]) -> list[dict[str, object]]:
    """What was measured, as few areas as one pass of joining gives; in each, every combination of the values was timed."""
    areas = [{name: [value] for name, value in key} for key in dict.fromkeys(_combination(cell) for cell in cells)]
    for name in reversed(list(areas[0])):
        areas = _join(areas, name)
    return [{n: found[0] if len(found) == 1 else found for n, found in area.items()} for area in areas]


def _combination(cell: Result) -> tuple[tuple[str, FactValue], ...]:
    return (*sorted(cell.facts.items()), ("batch", cell.batch))


def _join(areas: Sequence[dict[str, list[FactValue]]], name: str) -> list[dict[str, list[FactValue]]]:
    """Areas that differ in `name` alone become one."""
    joined: dict[str, dict[str, list[FactValue]]] = {}
    for area in areas:
        others = repr([(key, values) for key, values in area.items() if key != name])
        held = joined.setdefault(others, {**area, name: []})
        held[name] = sorted({*held[name], *area[name]}, key=_natural)
    return list(joined.values())


def _section(by_place: Mapping[tuple[str, str], Sequence[Result]], device: str, old: Policy | None) -> str:
    """A device's line: what it is, the newest software, and for each op the runs that its rows come from."""
    mine = {op: part for (op, d), part in by_place.items() if d == device}
    newest = max((r for part in mine.values() for r in part), key=lambda r: (r.run, r.date))
    before = old.devices[device].measured if old and device in old.devices else {}
    runs = {op: text for op, text in before.items() if old and op in old.ops}
    for op, part in mine.items():
        own = {result.run for result in part}
        runs[op] = " ".join(sorted(own | set(_unreplayed(old, op, device, own))))
    fields = {name: newest.device[name] for name in ("name", "arch", "sms")}
    return f"  {scalar(device)}: {flow({**fields, 'measured': {**newest.software, **dict(sorted(runs.items()))}})}\n"


def flow(value: Mapping[str, object] | Sequence[object]) -> str:
    """A mapping or list on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{scalar(k)}: {_inner(v)}" for k, v in value.items()) + "}"
    return "[" + ", ".join(map(_inner, value)) + "]"


def _inner(value: object) -> str:
    return flow(value) if isinstance(value, Mapping | list | tuple) else scalar(value)


def scalar(value: object) -> str:
    """A scalar that the strict reader reads back as the same value; in quotes unless it is a plain word."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return str(value)
    plain = WORD.fullmatch(value) and value == value.strip() and value.lower() not in SWITCHES | CONSTANTS.keys()
    return value if plain else json.dumps(value, ensure_ascii=False)


# --- what stays


@dataclass(frozen=True)
class KeptRow:
    """A row of the previous file, as text. device: the one section that it names, if it names one."""

    text: str
    device: str | None
    otherwise: bool


@dataclass(frozen=True)
class Kept:
    """The previous file in pieces of text, each with the comments above it: devices, heads and rows of ops, other keys."""

    devices: Mapping[str, str]
    heads: Mapping[str, str]
    rows: Mapping[str, tuple[KeptRow, ...]]
    top: Mapping[str, str]

    @staticmethod
    def of(text: str | None) -> Kept:
        if text is None:
            return Kept({}, {}, {}, {})
        root = read(text, PREVIOUS).mapping()
        devices, ops = root["devices"].mapping(), root["ops"].mapping()
        rows = {(op, number): row for op, node in ops.items() for number, row in enumerate(node.items())}
        pieces = _pieces(text, [*root.values(), *devices.values(), *ops.values(), *rows.values()])
        return Kept(
            {name: pieces[id(node)] for name, node in devices.items()},
            {name: pieces[id(node)] for name, node in ops.items()},
            {op: tuple(_kept_row(row, pieces[id(row)]) for row in node.items()) for op, node in ops.items()},
            {name: pieces[id(node)] for name, node in root.items()},
        )

    def comments(self, key: str) -> str:
        """The comments above a top-level key, but for the first key: above that stands the header."""
        lines = self.top.get(key, "").splitlines(keepends=True)
        return "".join(line for line in lines if line.startswith("#")) if key != next(iter(self.top), key) else ""


def _kept_row(node: Node, text: str) -> KeptRow:
    found = node.mapping()
    device = found["when"].mapping().get("device") if "when" in found else None
    return KeptRow(text, device.value if device and isinstance(device.value, str) else None, "otherwise" in found)


def _pieces(text: str, nodes: Sequence[Node]) -> dict[int, str]:
    """The text from each node's first line, comments above it included, to the next node's; by the node's id()."""
    lines = text.splitlines()
    ordered = sorted(nodes, key=lambda node: node.named.line)
    for before, after in pairwise(ordered):
        if before.named.line == after.named.line:
            raise after.named.error("begin a line here (block style): what tools/tune.py does not write is kept as it is")
    starts = [_first_line(lines, node.named.line - 1) for node in ordered]
    cuts = zip(ordered, starts, [*starts[1:], len(lines)], strict=True)
    return {id(node): "\n".join(lines[begin:end]).strip("\n") + "\n" for node, begin, end in cuts}


def _first_line(lines: Sequence[str], line: int) -> int:
    while line and (not lines[line - 1].strip() or lines[line - 1].lstrip().startswith("#")):
        line -= 1
    return line


# --- the document


def _document(
    kept: Kept,
    results: Mapping[tuple[str, str], Sequence[Result]],
    sections: Mapping[str, str],
    fresh: Mapping[tuple[str, str], str],
    pins: Sequence[Mapping[str, object]] | None,
) -> Iterator[str]:
    yield f"{HEADER}\nschema: {SCHEMA}\n\n"
    yield kept.comments("devices") + ("devices:\n" if sections else "devices: {}\n")
    yield from (sections[device] for device in sorted(sections))
    ops = [*kept.rows, *sorted({op for op, _ in fresh} - set(kept.rows))]
    yield "\n" + kept.comments("ops") + ("ops:\n" if ops else "ops: {}\n")
    for op in ops:
        yield kept.heads.get(op, f"  {scalar(op)}:\n")
        yield from _op_rows(kept.rows.get(op, ()), {d: text for (o, d), text in fresh.items() if o == op})
        if not any(row.otherwise for row in kept.rows.get(op, ())):
            yield f"    - otherwise: {flow({'use': _reference(results, op)})}\n"
    yield "\n" + (kept.top.get("pins", "pins: []\n") if pins is None else _pins(pins))


def _op_rows(rows: Sequence[KeptRow], fresh: Mapping[str, str]) -> Iterator[str]:
    """By device, then what names none; the catch-all is last as it was."""
    by_device = dict(fresh)
    for row in rows:
        if row.device and row.device not in fresh:
            by_device[row.device] = by_device.get(row.device, "") + row.text
    yield from (by_device[device] for device in sorted(by_device))
    yield from (row.text for row in rows if not row.device)


def _reference(results: Mapping[tuple[str, str], Sequence[Result]], op: str) -> str:
    """The kernel that candidates were held against runs anywhere."""
    return max(result.reference for (o, _), part in results.items() if o == op for result in part)


def _pins(pins: Sequence[Mapping[str, object]]) -> str:
    return "pins:\n" + "".join(f"  - {flow(pin)}\n" for pin in pins) if pins else "pins: []\n"


def _check(text: str, previous: str | None, rewritten: Collection[tuple[str, str]], pinned: bool) -> None:
    """The text reads back, and what was to stay reads as before."""
    parse(text, "the new file")
    if previous is None:
        return
    before, after = _plain(read(previous, PREVIOUS)), _plain(read(text, "the new file"))
    measured = {device for _, device in rewritten}
    lost = [f"section {name}" for name, s in before["devices"].items() if name not in measured and after["devices"][name] != s]
    for op, rows in before["ops"].items():
        stays = [row for row in rows if (op, str(row.get("when", {}).get("device"))) not in rewritten]
        lost += [f"a row of {op}" for row in stays if row not in after["ops"][op]]
    if not pinned and before.get("pins", []) != after["pins"]:
        lost.append("pins")
    if lost:
        raise PolicyError(f"cannot rewrite the file without changing {', '.join(lost)}")


def _plain(node: Node) -> Any:
    if isinstance(node.value, dict):
        return {name: _plain(child) for name, child in node.value.items()}
    return [_plain(child) for child in node.value] if isinstance(node.value, tuple) else node.value


def write(path: str | os.PathLike[str], text: str) -> None:
    """Replace a file at once: whoever reads it, whatever happens meanwhile, finds the old or the new one whole."""
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path)
