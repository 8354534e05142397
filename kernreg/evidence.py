"""What was measured, held against what is installed: stale kernels, and whether the batch may choose inside a row.

A row that names several variants rests on their class: equal bits, measured for some static keys with one compiler, one chip
and one source of each kernel. Where these are others the batch decides nothing (see `Evidence`).

Only `installed_triton` looks at the machine; the sources of the kernels come through the registry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kernreg.contract import Facts, Op
from kernreg.device import Device
from kernreg.policy_file import NOTHING, Policy, Row, Section

if TYPE_CHECKING:
    from kernreg.policy import Decision
    from kernreg.registry import Registry

DIGITS = 16  # of a source digest, as sections record it
NO_SOURCE = "no source"


# --- staleness


@dataclass(frozen=True, slots=True)
class Stale:
    """A kernel of a measured row whose installed source is not the measured one; both as 16 digits of their digests."""

    row: Row
    section: str
    kernel: str
    measured: str
    installed: str

    def __str__(self) -> str:
        return f"{self.kernel} was measured as {self.measured} (section {self.section}), installed is {self.installed}"


def stale_kernels(policy: Policy, registry: Registry) -> tuple[Stale, ...]:
    """The kernels that changed since they were measured, for each row with a device, in the order of the file.

    Comments and docstrings are no change. A kernel without a recorded digest is none of these (see `unrecorded`).
    """
    return tuple(stale for rows in policy.ops.values() for row in rows for stale in changed(policy, registry, row))


def changed(policy: Policy, registry: Registry, row: Row) -> tuple[Stale, ...]:
    """The stale kernels of one row; a row without a device has none."""
    return tuple(stale for section in _sections(policy, row) for stale in _stale(registry, row, section))


def unrecorded(policy: Policy, row: Row) -> tuple[tuple[Section, str], ...]:
    """The sections and kernels of a row whose measured source is not recorded, as in older files."""
    pairs = ((section, kernel) for section in _sections(policy, row) for kernel in row.kernels)
    return tuple((section, kernel) for section, kernel in pairs if _recorded(section, row.op, kernel) is None)


def _sections(policy: Policy, row: Row) -> list[Section]:
    return [section for section in policy.devices.values() if section.id in row.devices]


def _recorded(section: Section, op: str, kernel: str) -> str | None:
    return section.kernels.get(op, NOTHING).get(kernel)


def _stale(registry: Registry, row: Row, section: Section) -> Iterator[Stale]:
    for kernel in row.kernels:
        measured = _recorded(section, row.op, kernel)
        if measured is not None and (installed := installed_source(registry, row.op, kernel)) != measured:
            yield Stale(row, section.id, kernel, measured, installed)


def installed_source(registry: Registry, op: str, name: str) -> str:
    """Digest of an installed kernel's source, shortened as files record it."""
    known = {kernel.name: kernel for kernel in registry.kernels(op)} if op in registry.ops else {}
    if name not in known:
        return NO_SOURCE
    try:
        return registry.source_digest(known[name])[:DIGITS]
    except ModuleNotFoundError:
        return NO_SOURCE


# --- may the batch choose?


@dataclass(frozen=True, slots=True)
class Evidence:
    """How far the measurements behind a row hold for one static key on one device.

    variants: ids of the row's variants, in the order of its entries.
    stale: in words, what of the row's kernels changed since.
    doubts: in words, why the class of the variants was not measured here.
    bits, failed: what warm-up measured, by variant: its fingerprint, or why it has none. Both empty before.
    """

    variants: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    bits: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    failed: Mapping[str, str] = field(default_factory=lambda: NOTHING)

    @property
    def measured_here(self) -> bool:
        return bool(self.bits or self.failed)

    @property
    def collapsed(self) -> str | None:
        """Why the batch may not choose, so that one variant serves every batch; None where it may."""
        if len(self.variants) < 2 or not self.doubts:
            return None
        if not self.measured_here:
            return f"that its variants give equal bits was not measured here: {'; '.join(self.doubts)}"
        if not self.failed and len(set(self.bits.values())) == 1:
            return None
        return f"its variants do not give equal bits here: {self.measurement}"

    @property
    def measurement(self) -> str:
        """``triton.fused[BV=8] 5f1c..., triton.unfused[BV=8] racy: ...``; empty before warm-up measured."""
        return ", ".join(f"{v} {self.bits.get(v) or self.failed.get(v)}" for v in self.variants if self.measured_here)


def evidence_for(policy: Policy, registry: Registry, device: Device, op: Op, decision: Decision, triton: str | None) -> Evidence:
    """What speaks for the row behind a decision, and what against it.

    Args:
        triton: the installed version, empty if there is none; None if it is not known, for a device elsewhere.
    """
    row = decision.row
    if row is None or row.kind != "row":  # forced, pinned or the catch-all: one variant, and a person's word
        return Evidence()
    section = policy.devices[decision.section] if decision.section else None
    variants = tuple(dict.fromkeys(registry.kernel(op.name, e.use.kernel).variant(e.use.config).id for e in row.entries))
    stale = tuple(map(str, _stale(registry, row, section))) if section else ()
    said = ("it says so",) if row.stale and not stale and unrecorded(policy, row) else ()
    if len(variants) < 2:
        return Evidence(variants, stale or said)
    listed = row.classes.get(str(row.numerics), ())
    unlisted = [f"{variant} in class {row.numerics} (not listed there)" for variant in variants if variant not in listed]
    doubts = _doubts(row, section, device, op, dict(decision.facts), triton)
    return Evidence(variants, stale or said, (*unlisted, *doubts, *stale))


def _doubts(row: Row, section: Section | None, device: Device, op: Op, facts: Facts, triton: str | None) -> Iterator[str]:
    """What was not measured, but for variants that no class lists and kernels that changed."""
    if section is None:
        yield "the row names no device"
        return
    if len(row.devices) > 1:
        yield f"which of the row's {len(row.devices)} devices its class was measured on (not recorded)"
    if section.arch != device.arch:
        yield f"{device} (measured: {Device.declared(section.name, section.arch, section.sms)})"
    known = section.measured.get("triton")
    if known is None:
        yield "the Triton version (measured: not recorded)"
    elif triton not in (None, known):
        yield f"Triton {triton or 'not installed'} (measured: {known})"
    for kernel in row.kernels:
        if _recorded(section, op.name, kernel) is None:
            yield f"the source of {kernel} (measured: not recorded)"
    areas = [tuple(row.outside(op, facts, area)) for area in row.measured]
    yield from min(areas, key=len, default=("the static key (measured: not recorded)",))


def installed_triton() -> str:
    """Version of the installed Triton as measurements record it; empty without one."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return ""
