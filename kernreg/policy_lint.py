"""A policy held against a registry: unknown names, wrong types, class by batch, rows that nothing reaches, stale rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kernreg.check import check_fact
from kernreg.contract import ContractError, FactValue, Op
from kernreg.device import PLATFORMS, Arch, Device, parse_arch
from kernreg.evidence import changed, stale_kernels, unrecorded
from kernreg.policy_file import DEVICE_KEYS, Condition, Policy, Row, Spot, Use, among
from kernreg.yaml_subset import Place

if TYPE_CHECKING:
    from kernreg.registry import Registry


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding: severity "error" (`load` refuses the file), "warning", or of `staleness` "stale" or "note"."""

    severity: str
    message: str
    place: Place

    def __str__(self) -> str:
        return f"{self.place}: {'' if self.severity == 'error' else f'{self.severity}: '}{self.message}"


def lint(policy: Policy, registry: Registry) -> list[Problem]:
    """Everything that is wrong with a policy, in the order of the file."""
    found = [*_section_problems(policy)]
    for op in dict.fromkeys([*policy.ops, *(pin.op for pin in policy.pins)]):
        if op in registry.ops:
            found += _op_problems(policy, registry, op)
        else:
            rows = policy.tiers(op)[0] or policy.tiers(op)[1]
            found.append(Problem("error", f"no op {op!r}; there are {', '.join(registry.ops)}", rows[0].place))
    top = Place(policy.path, 1, 1, "ops")
    found += [Problem("warning", f"no rows for {op}", top) for op in registry.ops if op not in policy.ops]
    return _in_order(found)


def _in_order(problems: Iterable[Problem]) -> list[Problem]:
    """As they stand in the file."""
    return sorted(problems, key=lambda problem: (problem.place.line, problem.place.column))


def staleness(policy: Policy, registry: Registry) -> list[Problem]:
    """What changed since it was measured: "stale" where the row does not say so, else a "note"; no reason not to load.

    Where a section records no source of a kernel, as older files do, a note says that nothing can be told.
    """
    found = [
        Problem("note", f"{stale}; the row says so", stale.row.place)
        if stale.row.stale
        else Problem("stale", f"{stale}; measure it again, or say 'stale: true' in the row", stale.row.place)
        for stale in stale_kernels(policy, registry)
    ]
    for op, rows in policy.ops.items():
        pairs = dict.fromkeys((section.id, kernel) for row in rows for section, kernel in unrecorded(policy, row))
        for device in dict.fromkeys(device for device, _ in pairs):
            kernels = ", ".join(kernel for held, kernel in pairs if held == device)
            text = f"which source of {kernels} was measured for {op} is not recorded: whether its rows are stale is not known"
            found.append(Problem("note", text, policy.devices[device].place))
    return _in_order(found)


def _section_problems(policy: Policy) -> Iterator[Problem]:
    first: dict[tuple[str, Arch], str] = {}
    for section in policy.devices.values():
        other = first.setdefault((section.name, section.arch), section.id)
        if other != section.id:
            yield Problem("error", f"{section.name!r} is the product of section {other} already", section.place)


def _op_problems(policy: Policy, registry: Registry, op: str) -> Iterator[Problem]:
    for rows in policy.tiers(op):
        found = [problem for row in rows for problem in _row_problems(policy, registry, row)]
        yield from found
        if all(problem.severity != "error" for problem in found):
            yield from _hidden(policy, registry.ops[op], [row for row in rows if row.kind != "otherwise"])
    rows = policy.ops.get(op, ())
    if rows and rows[-1].kind != "otherwise":
        yield Problem("error", f"the last row of {op} must be a catch-all: otherwise: {{use: ...}}", rows[-1].place)


def _row_problems(policy: Policy, registry: Registry, row: Row) -> Iterator[Problem]:
    op = registry.ops[row.op]
    for use in (*(entry.use for entry in row.entries), *([row.fallback] if row.fallback else [])):
        if error := _use_error(registry, row.op, use):
            yield Problem("error", error, use.place)
    yield from _class_problems(registry, row)
    if row.stale and not (unrecorded(policy, row) or changed(policy, registry, row)):
        yield Problem("warning", "the row says stale: true, but none of its kernels changed since it was measured", row.place)
    if row.fallback and (error := _idle_fallback(registry, row, row.fallback)):
        yield Problem("error", error, row.fallback.place)
    for condition in row.when:
        yield from _condition_problems(policy, op, condition)
    for name, values in (item for area in row.measured for item in area.items()):
        for value in values if name != "batch" else ():
            if error := _fact_error(op, name, value):
                yield Problem("error", f"measured: {error}", row.place)
    if row.kind == "otherwise" and (error := _not_everywhere(registry, row)):
        yield Problem("error", error, row.entries[0].use.place)


def _class_problems(registry: Registry, row: Row) -> Iterator[Problem]:
    """Entries whose variant was not measured to be of the row's class. A fallback replaces the row whole and needs none."""
    measured = {variant: name for name, variants in row.classes.items() for variant in variants}
    why = ": only inside one class may the batch choose" if len(row.entries) > 1 else ""
    for use in (entry.use for entry in row.entries if row.numerics and not _use_error(registry, row.op, entry.use)):
        variant = registry.kernel(row.op, use.kernel).variant(use.config).id
        found = measured.get(variant)
        if found != row.numerics:
            was = f"was measured in class {found}" if found else "was not measured (no class lists it)"
            yield Problem("error", f"{variant} {was}, the row's class is {row.numerics}{why}", use.place)


def _use_error(registry: Registry, op: str, use: Use) -> str | None:
    kernels = {kernel.name: kernel for kernel in registry.kernels(op)}
    if use.kernel not in kernels:
        return f"{op} has no kernel {use.kernel!r}; it has {', '.join(kernels) or 'none'}"
    return kernels[use.kernel].config_error(use.config)


def _idle_fallback(registry: Registry, row: Row, fallback: Use) -> str | None:
    uses = [use for use in (fallback, *(entry.use for entry in row.entries)) if not _use_error(registry, row.op, use)]
    ids = [registry.kernel(row.op, use.kernel).variant(use.config).id for use in uses]
    return f"the fallback is {ids[0]} again" if fallback in uses and ids[0] in ids[1:] else None


def _condition_problems(policy: Policy, op: Op, condition: Condition) -> Iterator[Problem]:
    if condition.key == "device":
        for value, place in zip(condition.values, condition.places, strict=True):
            if value not in policy.devices:
                yield Problem("error", f"no section {value!r}; there are {', '.join(policy.devices) or 'none'}", place)
    elif condition.key not in DEVICE_KEYS:
        for value, place in zip(condition.values, condition.places, strict=True):
            if error := _fact_error(op, condition.key, value):
                yield Problem("error", error, place)


def _fact_error(op: Op, name: str, value: FactValue) -> str | None:
    if name not in op.facts:
        return f"{op.name} has no fact {name!r}; there are {', '.join((*DEVICE_KEYS, *op.facts))}"
    try:
        check_fact(op, name, value)
    except ContractError as error:
        return str(error)
    allowed = _all_values(op, name)
    if allowed and not among(value, allowed):
        return f"{op.name}: {name} is {value!r}, wanted {' or '.join(map(str, allowed))}"
    if op.facts[name].source == "index" and not re.fullmatch(r"i(32|64)(\+i(32|64))*", str(value)):
        return f"{op.name}: {name} is {value!r}, wanted i32, i64, or each index tensor's as in i32+i64"
    return None


def _all_values(op: Op, name: str) -> tuple[FactValue, ...]:
    """Every value that a fact may have, or none if there is no end of them."""
    fact = op.facts[name]
    kind, *words = fact.source.split()
    if fact.values:
        return fact.values
    if kind == "dtype":
        return op.dtypes.get(words[0], ())
    return (False, True) if kind == "has" else ()


def _not_everywhere(registry: Registry, row: Row) -> str | None:
    """Why the catch-all's kernel cannot run on a plain CPU, or None."""
    use = row.entries[0].use
    if _use_error(registry, row.op, use):
        return None
    variant = registry.kernel(row.op, use.kernel).variant(use.config)
    facts = {name: _some_value(registry.ops[row.op], name) for name in registry.ops[row.op].facts}
    reason = variant.kernel.why_not(facts, Device.cpu(), dict(variant.config))
    return reason and f"the catch-all must run anywhere, but on a CPU {variant.id} cannot: {reason}"


def _some_value(op: Op, name: str) -> FactValue:
    fact = op.facts[name]
    if fact.default is not None:
        return fact.default
    others: Mapping[str, FactValue] = {"heads": "2/1", "index": "i32"}
    return next(iter(_all_values(op, name)), others.get(fact.source.split()[0], 16))


# A box is a set of queries: the values that each axis ("device" or a fact) may have. An axis that is not there is free.
Box: TypeAlias = "Mapping[str, frozenset[object]]"
OTHER = "any value that no row names"  # one stand-in is enough: no row tells such values apart


def _hidden(policy: Policy, op: Op, rows: list[Row]) -> Iterator[Problem]:
    """Rows that no query reaches, because earlier ones together match all of theirs."""
    spots = _spots(policy, rows)
    everything = {"device": frozenset[object](spots), **_domains(op, rows)}
    earlier: list[tuple[Row, Box]] = []
    for row in rows:
        own = {c.key: frozenset[object](c.values) for c in row.when if c.key not in DEVICE_KEYS}
        box = {"device": frozenset[object](spot for spot in spots if row.fits(spot)), **own}
        if not box["device"]:
            yield Problem("error", "no device meets all conditions of this row", row.place)
        elif reach({**everything, **box}, [other for _, other in earlier]) is None:
            lines = [str(r.place.line) for r, other in earlier if all(box.get(a, v) & v for a, v in other.items())]
            text = f"no query reaches this row: all that it matches goes to the row on line {', '.join(lines)}"
            yield Problem("error", text, row.place)
        earlier.append((row, box))


def reach(region: Box, earlier: list[Box]) -> Box | None:
    """A part of `region` that none of the earlier boxes touches, or None. `region` names every axis."""
    if not all(region.values()):
        return None
    for index, box in enumerate(earlier):
        if not all(region[axis] & values for axis, values in box.items()):
            continue
        for axis, values in box.items():
            outside = {**region, axis: region[axis] - values}
            if found := reach(outside, earlier[index + 1 :]):
                return found
            region = {**region, axis: region[axis] & values}
        return None
    return region


def _domains(op: Op, rows: list[Row]) -> dict[str, frozenset[object]]:
    """The values of each fact that the rows tell apart."""
    named: dict[str, set[object]] = {}
    for condition in (c for row in rows for c in row.when if c.key not in DEVICE_KEYS):
        named.setdefault(condition.key, set()).update(condition.values)
    return {key: frozenset(_all_values(op, key) or {*values, OTHER}) for key, values in named.items()}


def _spots(policy: Policy, rows: list[Row]) -> list[Spot]:
    """The kinds of device that the rows tell apart: one for each section, the other archs, and what is no GPU."""
    named = frozenset[object]().union(*(row.devices for row in rows))
    sections = [section for section in policy.devices.values() if section.id in named]
    served = [Spot(section.id, section.arch, "cuda") for section in sections]
    archs = {parse_arch(str(v)) for row in rows for c in row.when if c.key == "arch" for v in c.values}
    # any GPU of a section's arch is served by a section
    open_archs = sorted(archs - {section.arch for section in sections})
    unserved = [Spot(None, arch, "cuda") for arch in (*open_archs, None)]
    return [*served, *unserved, *(Spot(None, None, platform) for platform in PLATFORMS if platform != "cuda")]
