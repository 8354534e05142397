"""The policy file as data: devices, rows and pins, and the strict reader of their YAML.

A policy has sections of devices, rows for each op, and pins. Nothing in it is rounded to the nearest: a row's entries
say for which batches each variant stands. Names are plain strings here; `kernreg.policy_lint` knows which exist.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from kernreg.contract import Config, Facts, FactValue, Op, format_facts
from kernreg.device import PLATFORMS, Arch, parse_arch
from kernreg.yaml_subset import Node, Place, read

SCHEMA = 1
DEVICE_KEYS = ("device", "arch", "platform")
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Section:
    """One measured device: rows name it by `id`.

    measured: date, versions and the like as text.
    kernels: by op and kernel, the first 16 digits of the source digest that the device's rows were measured with. Older files
        have none.
    """

    id: str
    name: str
    arch: Arch
    sms: int
    measured: Mapping[str, str]
    place: Place
    kernels: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: NOTHING)


@dataclass(frozen=True, slots=True)
class Use:
    """A kernel's name, and the launch parameters that differ from its default."""

    kernel: str
    config: Config
    place: Place


@dataclass(frozen=True, slots=True)
class Entry:
    """What serves batches `low` to `high` (None: all larger ones), with the row's numbers at one measured cell.

    us, next: this variant's time and the runner-up's, in microseconds.
    at: the cell, in free words.
    """

    low: int
    high: int | None
    use: Use
    us: float | None = None
    next: float | None = None
    runner_up: str | None = None
    at: tuple[tuple[str, object], ...] = ()

    @property
    def margin(self) -> float | None:
        """How much slower the runner-up is: 0.15 is 15 %. Negative where an incumbent within the noise was kept."""
        return None if self.us is None or self.next is None else self.next / self.us - 1

    @property
    def span(self) -> str:
        """``batch 3-16``, ``batch 17 and more``, ``any batch``."""
        if self.high is None:
            return "any batch" if self.low == 1 else f"batch {self.low} and more"
        return f"batch {self.low}" if self.low == self.high else f"batch {self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Condition:
    """One key of a `when`: any of the values. `places` has where each value stands."""

    key: str
    values: tuple[FactValue, ...]
    named: Place
    places: tuple[Place, ...]


class Spot(NamedTuple):
    """What the conditions on the device see: the section that serves it (if any), its arch and its platform."""

    section: str | None
    arch: Arch | None
    platform: str


@dataclass(frozen=True, slots=True)
class Row:
    """One row. Its entries cover every batch; all of them are of one numerics class.

    kind: "row", "pin" or "otherwise".
    numerics: id of the class; every row with a list of batches has one.
    classes: by class id, the variants whose bits were measured to be equal, spelled as `contract.variant_id` does.
    measured: areas that the measurements cover: in each, all combinations of the listed facts and batches were timed. A fact
        that is in neither the area nor `when` was measured at its default.
    regret: worst time of this row's variant over that of the best, over the measured cells.
    """

    op: str
    kind: str
    when: tuple[Condition, ...]
    entries: tuple[Entry, ...]
    place: Place
    numerics: str | None = None
    measured: tuple[Mapping[str, tuple[FactValue, ...]], ...] = ()
    regret: float | None = None
    fallback: Use | None = None
    stale: bool = False
    reason: str = ""
    by: str = ""
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: NOTHING)

    @property
    def source(self) -> str:
        """``dispatch.yaml:12 (ops.gdn_ring_commit[0])``."""
        return f"{self.place.file}:{self.place.line} ({self.place.key})"

    @property
    def when_text(self) -> str:
        """``device=nvidia-h200 ring=16|32``; ``otherwise`` when everything matches."""
        return " ".join(values_text(c.key, c.values, "|") for c in self.when) or "otherwise"

    @property
    def devices(self) -> frozenset[object]:
        """The sections that the row names."""
        return frozenset(v for c in self.when if c.key == "device" for v in c.values)

    def fits(self, spot: Spot) -> bool:
        """Do the conditions on the device hold?"""
        return all(_on(c, spot) for c in self.when if c.key in DEVICE_KEYS)

    def matches(self, spot: Spot, facts: Facts) -> bool:
        return self.fits(spot) and all(among(facts[c.key], c.values) for c in self.when if c.key not in DEVICE_KEYS)

    def entry(self, batch: int) -> Entry:
        """The entry for a batch; an empty batch is looked up like one row."""
        return next(e for e in self.entries if e.high is None or batch <= e.high)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels that were measured for it: those of its entries."""
        return tuple(dict.fromkeys(entry.use.kernel for entry in self.entries))

    def outside(self, op: Op, facts: Facts, area: Mapping[str, tuple[FactValue, ...]]) -> Iterator[str]:
        """In words, which facts of a static key are not in one measured area."""
        named = {c.key: c.values for c in self.when}
        for name, value in facts.items():
            default = op.facts[name].default
            covered = area.get(name) or named.get(name) or (() if default is None else (default,))
            if not among(value, covered):
                known = values_text("", covered, ", ")[1:] or "not recorded"
                yield f"{values_text(name, [value], '')} (measured: {known})"


def _on(condition: Condition, spot: Spot) -> bool:
    if condition.key == "arch":
        return spot.arch in [parse_arch(str(value)) for value in condition.values]
    return (spot.section if condition.key == "device" else spot.platform) in condition.values


def among(value: FactValue, values: Iterable[FactValue]) -> bool:
    # bool is an int in Python: 1 must not pass for true
    return any(value == v and type(value) is type(v) for v in values)


def values_text(key: str, values: Iterable[FactValue], separator: str) -> str:
    return f"{key}={separator.join(format_facts([('', v)])[1:] for v in values)}"


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy file. `digest` is the SHA-256 of its bytes."""

    path: str
    digest: str
    devices: Mapping[str, Section]
    ops: Mapping[str, tuple[Row, ...]]
    pins: tuple[Row, ...]

    def tiers(self, op: str) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
        """An op's pins and its rows, each in the order in which they are tried."""
        return tuple(pin for pin in self.pins if pin.op == op), self.ops.get(op, ())


# --- reading a file


NUMBERS = ("us", "next", "runner_up", "at")
FACTS_ABOUT_ROW = ("classes", "measured", "regret", "fallback", "stale")


def parse(text: str | bytes, path: str | os.PathLike[str] = "dispatch.yaml") -> Policy:
    """The structure of a policy; names of ops, kernels, facts and devices are left to `lint`.

    Raises:
        PolicyError: with file, line, column, key and what was wanted.
    """
    root = read(text, os.fspath(path)).fields(("schema", "devices", "ops"), ("pins",))
    if root["schema"].integer(0) != SCHEMA:
        raise root["schema"].wrong(f"{SCHEMA}, the only schema that this version reads")
    devices = {name: _section(name, node) for name, node in root["devices"].mapping().items()}
    ops = {name: _rows(name, node) for name, node in root["ops"].mapping().items()}
    pins = tuple(_pin(node) for node in root["pins"].items()) if "pins" in root else ()
    digest = hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()
    return Policy(os.fspath(path), digest, MappingProxyType(devices), MappingProxyType(ops), pins)


def _section(name: str, node: Node) -> Section:
    fields = node.fields(("name", "arch", "sms"), ("measured", "kernels"))
    measured = fields["measured"].mapping() if "measured" in fields else {}
    texts = {key: child.text() for key, child in measured.items()}
    arch, sms = _arch(fields["arch"]), fields["sms"].integer(1)
    kernels = _kernels(fields["kernels"]) if "kernels" in fields else NOTHING
    return Section(name, fields["name"].text(), arch, sms, texts, node.named, kernels)


def _kernels(node: Node) -> Mapping[str, Mapping[str, str]]:
    found = {op: {kernel: _digest(child) for kernel, child in part.mapping().items()} for op, part in node.mapping().items()}
    return MappingProxyType({op: MappingProxyType(part) for op, part in found.items()})


def _digest(node: Node) -> str:
    if not (isinstance(node.value, str) and re.fullmatch("[0-9a-f]{16}", node.value)):
        raise node.wrong("the first 16 hexadecimal digits of a source digest, in quotes")
    return node.value


def _arch(node: Node) -> Arch:
    try:
        return parse_arch(node.text())
    except ValueError as error:
        raise node.wrong("an arch like sm_90 or sm_103") from error


def _rows(op: str, node: Node) -> tuple[Row, ...]:
    nodes = node.items()
    if not nodes:
        raise node.wrong("at least a catch-all row (otherwise)")
    for early in nodes[:-1]:
        if "otherwise" in early.mapping():
            raise early.mapping()["otherwise"].named.error("the catch-all must be the last row of its op")
    return tuple(_row(op, child) for child in nodes)


def _row(op: str, node: Node) -> Row:
    found = node.mapping()
    if "otherwise" in found:
        inner = node.fields(("otherwise",))["otherwise"].fields(("use",), ("config",))
        return Row(op, "otherwise", (), (Entry(1, None, _use(inner)),), node.place)
    if "batch" in found:
        fields = node.fields(("when", "class", "batch"), FACTS_ABOUT_ROW)
        entries = tuple(_entries(fields["batch"]))
    else:
        fields = node.fields(("when", "use"), ("config", "class", *NUMBERS, *FACTS_ABOUT_ROW))
        entries = (_entry(fields, 1, None),)
    when = _conditions(fields["when"])
    if not when:
        raise fields["when"].wrong("at least one condition; a row that matches everything is the last one, 'otherwise'")
    return Row(
        op,
        "row",
        when,
        entries,
        node.place,
        numerics=fields["class"].text() if "class" in fields else None,
        measured=_measured(fields["measured"]) if "measured" in fields else (),
        regret=fields["regret"].number(1) if "regret" in fields else None,
        fallback=_use(fields["fallback"].fields(("use",), ("config",))) if "fallback" in fields else None,
        stale=fields["stale"].flag() if "stale" in fields else False,
        classes=_classes(fields) if "classes" in fields else NOTHING,
    )


def _classes(fields: Mapping[str, Node]) -> Mapping[str, tuple[str, ...]]:
    """The variants of each class; none stands in two."""
    if "class" not in fields:
        raise fields["classes"].named.error("classes is given without class")
    found = fields["classes"].mapping()
    owner: dict[str, str] = {}
    for name, node in found.items():
        if not name.strip():
            raise node.named.error("wanted the id of a class as key")
        if not node.items():
            raise node.wrong("at least one variant")
        for child in node.items():
            if child.text() in owner:
                raise child.place.error(f"{child.value} stands in class {owner[child.text()]} already")
            owner[child.text()] = name
    return MappingProxyType({name: tuple(v for v, held in owner.items() if held == name) for name in found})


def _pin(node: Node) -> Row:
    fields = node.fields(("op", "use", "reason"), ("when", "config", "by"))
    return Row(
        fields["op"].text(),
        "pin",
        _conditions(fields["when"]) if "when" in fields else (),
        (_entry(fields, 1, None),),
        node.place,
        reason=fields["reason"].text(),
        by=fields["by"].text() if "by" in fields else "",
    )


def _entries(node: Node) -> Iterator[Entry]:
    low, nodes = 1, node.items()
    if not nodes:
        raise node.wrong("at least one entry, the last with upto: rest")
    for child in nodes:
        fields = child.fields(("upto", "use"), ("config", *NUMBERS))
        high = None if child is nodes[-1] else fields["upto"].integer(low)
        if high is None and fields["upto"].value != "rest":
            raise fields["upto"].wrong("rest: the last entry covers all larger batches")
        yield _entry(fields, low, high)
        low = (high or 0) + 1


def _entry(fields: Mapping[str, Node], low: int, high: int | None) -> Entry:
    if "next" in fields and "us" not in fields:
        raise fields["next"].named.error("next is given without us")
    return Entry(
        low,
        high,
        _use(fields),
        us=_time(fields, "us"),
        next=_time(fields, "next"),
        runner_up=fields["runner_up"].text() if "runner_up" in fields else None,
        at=tuple((key, _value(child)) for key, child in fields["at"].mapping().items()) if "at" in fields else (),
    )


def _time(fields: Mapping[str, Node], name: str) -> float | None:
    if name not in fields:
        return None
    if not (time := fields[name].number(0)):
        raise fields[name].wrong("a time in microseconds")
    return time


def _use(fields: Mapping[str, Node]) -> Use:
    config = fields["config"].mapping() if "config" in fields else {}
    return Use(
        fields["use"].text(),
        MappingProxyType({name: _value(child) for name, child in config.items()}),
        fields["use"].place,
    )


def _conditions(node: Node) -> tuple[Condition, ...]:
    return tuple(_condition(key, child) for key, child in node.mapping().items())


def _condition(key: str, node: Node) -> Condition:
    if key == "batch":
        raise node.named.error("the batch is no condition: list it under 'batch:', inside one numerics class")
    nodes = _several(node)
    for child in nodes:
        if key == "arch":
            _arch(child)
        if key == "platform" and child.value not in PLATFORMS:
            raise child.wrong(" or ".join(PLATFORMS))
    return Condition(key, tuple(map(_value, nodes)), node.named, tuple(child.place for child in nodes))


def _measured(node: Node) -> tuple[Mapping[str, tuple[FactValue, ...]], ...]:
    """One area or a list of them."""
    return tuple(map(_area, node.value if isinstance(node.value, tuple) else (node,)))


def _area(node: Node) -> Mapping[str, tuple[FactValue, ...]]:
    found = node.mapping()
    for child in _several(found["batch"]) if "batch" in found else ():
        child.integer(1)
    return MappingProxyType({key: tuple(map(_value, _several(child))) for key, child in found.items()})


def _several(node: Node) -> tuple[Node, ...]:
    """One value or a list of different ones."""
    nodes = node.value if isinstance(node.value, tuple) else (node,)
    if not nodes:
        raise node.wrong("at least one value")
    for index, child in enumerate(nodes):
        if among(_value(child), map(_value, nodes[:index])):
            raise child.place.error(f"{child.value} stands twice")
    return nodes


def _value(node: Node) -> FactValue:
    if not isinstance(node.value, str | int | bool):
        raise node.wrong("a string, a whole number, true or false")
    return node.value
