"""From measurements to a policy file: a pure function, the same bytes for the same journals, pins and previous file.

What a row takes is said in `choose`. Tuning runs are replayed in order: what a run finds in place stays unless the gain exceeds
3 % and the measured noise. Of the previous file only the rows of the measured ops and devices are rewritten.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from kernreg.contract import FactValue
from kernreg.numerics import facts_key
from kernreg.policy_file import SCHEMA, Policy, Row, parse
from kernreg.tuning.choose import Choice, Span, Table, of_row, replay
from kernreg.tuning.journal import Result, current, naming, sync_folder
from kernreg.yaml_subset import CONSTANTS, SWITCHES, WORD, Node, PolicyError, read

PREVIOUS = "the previous file"
WIDTH = 120  # of a line that lists what could also stand on lines of their own
REST = "rest"
BETWEEN = ", "  # of several versions

Digests: TypeAlias = "Mapping[str, Mapping[str, str]]"  # by op and kernel, 16 digits

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
#
# A row follows the batch only inside one numerics class: variants whose bits were measured to be equal for all keys of the row.
# `classes` lists what was measured in full, `class` is the one taken; the runner-up is of that class if it has another variant.
# `upto` is the last measured batch that takes the entry, so a batch between two measured ones takes what the larger takes.
# `kernels` are digests of the sources that a device's rows were measured with; a row whose kernel changed since says `stale`.
"""


# --- incumbents of the previous file


def incumbents(policy: Policy | None, op: str, device: str) -> dict[str, Row]:
    """By row key, the file's rows for this op and device alone: what they take stays for small gains."""
    rows = policy.ops.get(op, ()) if policy else ()
    return {_row_key(row): row for row in rows if row.devices == {device}}


def _row_key(row: Row) -> str:
    return facts_key({c.key: c.values[0] for c in row.when if c.key != "device"})


def _unreplayed(policy: Policy | None, op: str, device: str, runs: Collection[str]) -> list[str]:
    """Runs that the file's rows come from; none if the journals hold all of them, for then they decide alone."""
    section = policy.devices.get(device) if policy else None
    recorded = section.measured.get(op, "").split() if section else []
    return [] if set(recorded) <= set(runs) else recorded


# --- writing


def build(
    results: Iterable[Result],
    pins: Sequence[Mapping[str, object]] | None = None,
    previous: str | None = None,
    installed: Digests | None = None,
) -> str:
    """The text of the policy file.

    Args:
        results: the lines of all journals.
        pins: people's decisions, as the file has them; None keeps those of `previous`.
        previous: text of the present file. Its rows for measured ops and devices are incumbents, unless the run that they came
            from is among `results` and is replayed anyway; everything else in it is kept as it is.
        installed: digests of the present sources; rows of kernels that were measured with others say that they are stale.

    Raises:
        PolicyError: `previous` is damaged, or has rows in flow style.
    """
    kept = Kept.of(previous)
    old = parse(previous, PREVIOUS) if previous is not None else None
    by_place: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        by_place.setdefault((result.op, str(result.device["id"])), []).append(result)
    chosen = {place: list(_chosen(part, *place, old)) for place, part in by_place.items()}
    fresh = {
        (op, device): "".join(_row(device, *row, _is_stale(row, (installed or {}).get(op, {}))) for row in rows)
        for (op, device), rows in chosen.items()
    }
    sections = {**kept.devices, **{device: _section(by_place, chosen, device, old) for _, device in by_place}}
    text = "".join(_document(kept, by_place, sections, fresh, pins))
    _check(text, previous, by_place.keys(), pinned=pins is not None)
    return text


Chosen: TypeAlias = "tuple[Table, Choice]"


def _chosen(results: Sequence[Result], op: str, device: str, old: Policy | None) -> Iterator[Chosen]:
    """The rows of an op on a device, in the order of the file."""
    held: Mapping[str, Row] = {}
    if _unreplayed(old, op, device, {result.run for result in results}):
        held = incumbents(old, op, device)
    by_row: dict[str, list[Result]] = {}
    for result in current(results):
        by_row.setdefault(result.row_key, []).append(result)
    for key, part in sorted(by_row.items(), key=lambda item: _natural(item[1][0].row)):
        if found := replay(part, of_row(held.get(key))):
            yield found


def _natural(value: object) -> list[tuple[int, str]]:
    """Sorts 8 before 16, and "8/8" before "16/8"."""
    text = " ".join(map(str, value.values())) if isinstance(value, Mapping) else str(value)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text) if part]


def _digests(chosen: Iterable[Chosen]) -> dict[str, str]:
    """Of the kernels that these rows take."""
    used = [table.variants[span.variant] for table, choice in chosen for span in choice.spans]
    return dict(sorted((result.use, result.digest) for result in used))


def _is_stale(chosen: Chosen, installed: Mapping[str, str]) -> bool:
    return any(installed.get(kernel, digest) != digest for kernel, digest in _digests([chosen]).items())


# --- a row


def _row(device: str, table: Table, choice: Choice, stale: bool) -> str:
    row = table.variants[choice.spans[0].variant].row
    entries = [_entry(table, choice, span) for span in choice.spans]
    fields: dict[str, str] = {"when": flow({"device": device, **row})}
    if stale:
        fields["stale"] = "true"
    classes = {group.numerics: group.members for group in table.groups if group.numerics}
    if choice.group.numerics:
        fields["class"] = scalar(choice.group.numerics)
    if len(entries) == 1:
        fields |= entries[0]
    else:
        ends = [*(str(span.batches[-1]) for span in choice.spans[:-1]), REST]
        fields["batch"] = "".join(_batch_entry({"upto": end, **entry}) for end, entry in zip(ends, entries, strict=True))
    if choice.group.numerics:
        fields["classes"] = "".join(f"\n        {scalar(name)}: {_variants(classes[name])}" for name in sorted(classes))
    fields |= {
        "regret": f"{choice.standing.slowest:.3f}",
        "measured": _listed([flow(area) for area in _areas(table)]),
    }
    lines = [f"{name}: {value}".replace(": \n", ":\n") for name, value in fields.items()]
    return "    - " + "\n      ".join(lines) + "\n"


def _entry(table: Table, choice: Choice, span: Span) -> dict[str, str]:
    """A variant with its numbers at its largest cell."""
    key = table.largest(span)
    at, other = table.cells[key][span.variant], table.runner_up(choice, span)
    fields = {"use": scalar(at.use), "config": flow(at.config), "us": _us(at)}
    if other:
        fields |= {"next": _us(table.cells[key][other]), "runner_up": scalar(other)}
    return {name: value for name, value in {**fields, "at": flow(at.cell)}.items() if value != "{}"}


def _batch_entry(fields: Mapping[str, str]) -> str:
    return "\n        - {" + ", ".join(f"{name}: {value}" for name, value in fields.items()) + "}"


def _variants(names: Sequence[str]) -> str:
    """On one line if it is short."""
    line = flow(names)
    return line if len(line) <= WIDTH else "".join(f"\n          - {scalar(name)}" for name in names)


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else "".join(f"\n        - {item}" for item in items)


def _us(result: Result) -> str:
    return f"{result.median:.{1 if result.median >= 10 else 2}f}"


def _areas(table: Table) -> list[dict[str, object]]:
    """What was measured, the largest area first; in each, every combination of the values was timed."""
    cells = (next(iter(cell.values())) for cell in table.cells.values())
    areas = [{name: [value] for name, value in key} for key in dict.fromkeys(map(_combination, cells))]
    for name in reversed(list(areas[0])):
        areas = _join(areas, name)
    areas.sort(key=lambda area: (-math.prod(map(len, area.values())), repr(area)))
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


def _section(
    by_place: Mapping[tuple[str, str], Sequence[Result]],
    chosen: Mapping[tuple[str, str], Sequence[Chosen]],
    device: str,
    old: Policy | None,
) -> str:
    """What a device is, the software and for each op the runs that its rows come from, and the kernels that they use."""
    mine = {op: part for (op, d), part in by_place.items() if d == device}
    newest = {op: max(part, key=lambda r: (r.run, r.date)) for op, part in mine.items()}
    held = old.devices.get(device) if old else None
    staying = [op for op in (old.ops if old else ()) if op not in mine and held and op in held.measured]
    versions = [dict(newest[op].software) for op in sorted(newest)]
    if held and staying:
        versions.append({name: text for name, text in held.measured.items() if old and name not in old.ops})
    runs = {op: held.measured[op] for op in staying} if held else {}
    for op, part in mine.items():
        own = {result.run for result in part}
        runs[op] = " ".join(sorted(own | set(_unreplayed(old, op, device, own))))
    kernels = {op: _digests(chosen[op, device]) for op in mine}
    kernels |= {op: dict(held.kernels[op]) for op in staying if op in held.kernels} if held else {}
    one = max(newest.values(), key=lambda r: (r.run, r.date)).device
    fields = [f"{name}: {scalar(one[name])}" for name in ("name", "arch", "sms")]
    measured = {**_versions(versions), **dict(sorted(runs.items()))}
    fields += ["measured:", *(f"  {scalar(name)}: {scalar(text)}" for name, text in measured.items())]
    listed = [f"  {scalar(op)}: {flow(kernels[op])}" for op in sorted(kernels) if kernels[op]]
    fields += ["kernels:", *listed] if listed else []
    return f"  {scalar(device)}:\n" + "".join(f"    {field}\n" for field in fields)


def _versions(versions: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Of the software; where ops were measured with different ones, all of them: no single one stands for the whole section."""
    found: dict[str, list[str]] = {}
    for part in versions:
        for name, text in part.items():
            found[name] = sorted({*found.get(name, []), *text.split(BETWEEN)})
    return {name: BETWEEN.join(texts) for name, texts in found.items()}


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
        with naming(path), os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path)
