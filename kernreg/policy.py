"""The choice: (policy, registry, device, static key, batch, overrides) -> `Decision`; and `load`, which reads a file.

A query tries the op's pins and then its rows, in the file's order; the first row whose `when` matches and whose kernels
can all serve decides, and the last row is a catch-all. A device is served by the section of its own product, else of
its arch and SM count, else of its arch, else by rows that name no device.

Only `load` reads a file. Nothing here measures, reads the environment or keeps state.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kernreg.contract import ContractError, Facts, FactValue, Kernel, Op, Variant, format_facts
from kernreg.device import Device
from kernreg.evidence import Evidence
from kernreg.policy_file import Condition, Entry, Policy, Row, Section, Spot, Use, parse
from kernreg.policy_lint import Problem, lint, staleness
from kernreg.yaml_subset import Place, PolicyError

if TYPE_CHECKING:
    from kernreg.registry import Registry

__all__ = [
    "ANY_DEVICE",
    "FORCED",
    "LEVELS",
    "PINNED_SECTION",
    "Condition",
    "Decision",
    "Entry",
    "NoKernel",
    "Override",
    "Place",
    "Policy",
    "PolicyError",
    "Problem",
    "Row",
    "Section",
    "Use",
    "batches",
    "choose",
    "collapse",
    "lint",
    "load",
    "parse",
    "resolve",
    "section_for",
    "staleness",
]

LEVELS = ("exact product", "same arch and SM count", "same arch")
PINNED_SECTION = "pinned section"
ANY_DEVICE = "any device"
FORCED = "forced"


class NoKernel(PolicyError):
    """No kernel can serve; the message has every kernel's reason."""


@dataclass(frozen=True, slots=True)
class Override:
    """What a person forces: a kernel (``triton.per_head``) or a backend (``torch``), for one op or (None) for all."""

    op: str | None
    name: str

    def __str__(self) -> str:
        return f"{self.op}={self.name}" if self.op else self.name


def load(path: str | os.PathLike[str], registry: Registry) -> Policy:
    """Read and check a file.

    Raises:
        PolicyError: it is damaged, or `lint` finds errors; the message lists all of these.
    """
    policy = parse(Path(path).read_bytes(), path)
    errors = [problem for problem in lint(policy, registry) if problem.severity == "error"]
    if errors:
        raise PolicyError("\n".join(map(str, errors)))
    return policy


@dataclass(frozen=True, slots=True)
class Decision:
    """Which variant serves, and why.

    batch: the batch asked for; 0 is decided like 1, and launches nothing.
    row, entry: what decided; None when forced.
    section, level: which section of the file stands for this device, and how it fits (`LEVELS`, `PINNED_SECTION`); None
        and `ANY_DEVICE` where the row names no device.
    fallback: what the row takes when the variant cannot be compiled here; None if the row names none that can serve.
    extrapolated: in words, what about this query was not measured.
    passed_over: in words, the pins and rows that matched first but could not serve, with the reason.
    considered: every kernel of the op with why it serves or not.
    evidence: whether the row's measurements hold here. `choose` does not ask; a plan and `kernreg explain` fill it in.
    """

    op: str
    facts: tuple[tuple[str, FactValue], ...]
    batch: int
    variant: Variant
    considered: tuple[tuple[str, str], ...]
    level: str = ANY_DEVICE
    section: str | None = None
    row: Row | None = None
    entry: Entry | None = None
    fallback: Variant | None = None
    extrapolated: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    override: Override | None = None
    evidence: Evidence = field(default_factory=Evidence)

    @property
    def launches(self) -> bool:
        return self.batch > 0

    @property
    def forced(self) -> bool:
        return self.override is not None

    @property
    def source(self) -> str:
        """``dispatch.yaml:12 (ops.gdn_ring_commit[0])``, or what was forced."""
        return self.row.source if self.row else f"forced: {self.override}"

    @property
    def interval(self) -> tuple[int, int | None]:
        """First and last batch that the same variant serves; None is no end."""
        return (self.entry.low, self.entry.high) if self.entry and not self.evidence.collapsed else (1, None)

    @property
    def us(self) -> float | None:
        return self.entry.us if self.entry else None

    @property
    def next(self) -> float | None:
        return self.entry.next if self.entry else None

    @property
    def runner_up(self) -> str | None:
        return self.entry.runner_up if self.entry else None

    @property
    def margin(self) -> float | None:
        return self.entry.margin if self.entry else None

    @property
    def regret(self) -> float | None:
        return self.row.regret if self.row else None


def collapse(decision: Decision, last: Decision, evidence: Evidence) -> Decision:
    """What serves instead of `decision` where the batch may not choose: the choice of the row's last entry, decided in `last`.

    The last, since it is the one without an upper end: what a slow variant costs grows with the batch. Where warm-up found that
    its variant fails, races or depends on the batch, the last entry before it whose variant does not.
    """
    row = last.row
    assert row is not None
    notes = {entry.use.kernel: f"{row.source} names it for {entry.span}, but the batch may not choose" for entry in row.entries}
    notes[last.variant.kernel.name] = f"chosen: {row.source}, {row.when_text}, every batch, for the batch may not choose"
    considered = tuple((name, notes.get(name, why)) for name, why in last.considered)
    return replace(last, batch=decision.batch, considered=considered, extrapolated=decision.extrapolated, evidence=evidence)


def batches(policy: Policy, op: str) -> tuple[int, ...]:
    """One batch for every interval of the op's rows: what they decide is decided for all batches."""
    return tuple(sorted({entry.low for rows in policy.tiers(op) for row in rows for entry in row.entries} | {1}))


def resolve(sections: Iterable[Section], device: Device) -> tuple[Section, str] | None:
    """The section that stands for a device, and at which of `LEVELS`; among equals the first of the file."""
    fits = [(section, level) for section in sections if (level := _fit(section, device))]
    return min(fits, key=lambda fit: LEVELS.index(fit[1]), default=None)


def section_for(policy: Policy, rows: Iterable[Row], device: Device) -> tuple[Section, str] | None:
    """`resolve` among the sections that these rows name."""
    named = frozenset[object]().union(*(row.devices for row in rows))
    return resolve((section for section in policy.devices.values() if section.id in named), device)


def _fit(section: Section, device: Device) -> str | None:
    if device.platform != "cuda" or section.arch != device.arch:
        return None
    if section.name == device.name:
        return LEVELS[0]
    return LEVELS[1] if section.sms == device.sms else LEVELS[2]


def choose(
    policy: Policy,
    registry: Registry,
    device: Device,
    op: Op | str,
    facts: Facts,
    batch: int,
    overrides: Iterable[Override] = (),
    *,
    section: str | None = None,
) -> Decision:
    """Which variant serves. Pure; the batch decides only inside one row.

    Args:
        facts: the whole static key.
        overrides: the first that speaks of this op wins over pins and rows.
        section: take this section of the file, whatever the device is.

    Raises:
        NoKernel: nothing can serve, or a forced kernel cannot; the message has every kernel's reason.
        PolicyError: an override or the section names nothing.
    """
    contract = registry.op(op) if isinstance(op, str) else op
    if missing := [name for name in contract.facts if name not in facts]:
        raise ContractError(f"{contract.name}: the static key lacks {', '.join(missing)}")
    if batch < 0:
        raise ContractError(f"{contract.name}: batch is {batch}, wanted 0 or more")
    query = _Query(policy, registry, device, contract, facts, batch, section)
    for override in overrides:
        if meant := query.meant(override):
            return query.force(override, meant)
    return query.follow()


@dataclass(frozen=True, slots=True)
class _Query:
    policy: Policy
    registry: Registry
    device: Device
    op: Op
    facts: Facts
    batch: int
    pinned: str | None

    def refusal(self, variant: Variant) -> str | None:
        """Why a variant cannot serve here, or None."""
        missing = self.registry.missing(variant.kernel)
        return missing or variant.kernel.why_not(self.facts, self.device, dict(variant.config))

    def variant(self, use: Use) -> Variant:
        return self.registry.kernel(self.op.name, use.kernel).variant(use.config)

    def meant(self, override: Override) -> tuple[Kernel, ...]:
        """The op's kernels that an override names; none if it speaks of other ops."""
        if override.op not in (None, self.op.name):
            return ()
        kernels = self.registry.kernels(self.op.name)
        found = tuple(kernel for kernel in kernels if override.name in (kernel.name, kernel.backend))
        every = {name for op in self.registry.ops for k in self.registry.kernels(op) for name in (k.name, k.backend)}
        if not found and (override.op is not None or override.name not in every):
            names = ", ".join(kernel.name for kernel in kernels) or "none"
            raise PolicyError(f"forced: {override}: {self.op.name} has no such kernel or backend; it has {names}")
        return found

    def force(self, override: Override, meant: tuple[Kernel, ...]) -> Decision:
        """The first of the kernels that can serve, with its default config."""
        reasons = {kernel.name: self.refusal(kernel.variant()) for kernel in meant}
        chosen = next((kernel for kernel in meant if reasons[kernel.name] is None), None)
        if chosen is None:
            raise self.nothing(f"forced: {override}, which cannot serve", {n: f"{r}" for n, r in reasons.items()})
        notes = {name: reason or f"forced away: {chosen.name} comes first" for name, reason in reasons.items()}
        notes = {kernel.name: f"forced away: {override}" for kernel in self.kernels} | notes
        notes[chosen.name] = f"chosen: forced: {override}"
        return Decision(
            self.op.name,
            tuple(self.facts.items()),
            self.batch,
            chosen.variant(),
            self.considered(notes),
            level=FORCED,
            override=override,
        )

    def follow(self) -> Decision:
        """What the file says."""
        notes: dict[str, str] = {}
        passed: list[str] = []
        for rows in self.policy.tiers(self.op.name):
            fit = self.fit(rows)
            spot = Spot(fit[0].id if fit else None, self.device.arch, self.device.platform)
            for row in rows:
                if row.matches(spot, self.facts):
                    refused = self.refused(row)
                    if not refused:
                        decision = self.serve(row, fit if row.devices else None, notes)
                        return replace(decision, passed_over=tuple(passed))
                    passed += [f"passed over {name}: {reason}" for name, reason in refused.items()]
                    notes = refused | notes
        raise self.nothing(f"no row of {self.policy.path} can serve", notes)

    def fit(self, rows: tuple[Row, ...]) -> tuple[Section, str] | None:
        """The section for this device among those that the rows name, or the pinned one."""
        sections = self.policy.devices
        if self.pinned is None:
            return section_for(self.policy, rows, self.device)
        if self.pinned not in sections:
            names = ", ".join(sections) or "none"
            raise PolicyError(f"{self.policy.path} has no section {self.pinned!r}; it has {names}")
        return sections[self.pinned], _fit(sections[self.pinned], self.device) or PINNED_SECTION

    def refused(self, row: Row) -> dict[str, str]:
        """Notes on the row's kernels if one of them cannot serve: then none does, lest the batch decide the class."""
        reasons = [(entry.use.kernel, self.refusal(self.variant(entry.use))) for entry in row.entries]
        bad = {name: reason for name, reason in reversed(reasons) if reason}
        together = f"only together with {', '.join(bad)}, which cannot serve"
        return {name: f"{row.source} names it, but {bad.get(name, together)}" for name, _ in reasons if bad}

    def serve(self, row: Row, fit: tuple[Section, str] | None, notes: dict[str, str]) -> Decision:
        entry = row.entry(self.batch)
        fallback, fallback_note = self.fallback(row)
        others = {e.use.kernel: f"{row.source} names it for {e.span}" for e in row.entries}
        empty = "; an empty batch launches nothing" if self.batch == 0 else ""
        chosen = {entry.use.kernel: f"chosen: {row.source}, {row.when_text}, {entry.span}{empty}"}
        return Decision(
            self.op.name,
            tuple(self.facts.items()),
            self.batch,
            self.variant(entry.use),
            self.considered(fallback_note | others | notes | chosen),
            level=fit[1] if fit else ANY_DEVICE,
            section=fit[0].id if fit else None,
            row=row,
            entry=entry,
            fallback=fallback,
            extrapolated=tuple(self.extrapolated(row, fit)),
        )

    def fallback(self, row: Row) -> tuple[Variant | None, dict[str, str]]:
        if row.fallback is None:
            return None, {}
        variant = self.variant(row.fallback)
        reason = self.refusal(variant)
        note = f"but {reason}" if reason else "taken if the row's choice cannot be compiled"
        return None if reason else variant, {variant.kernel.name: f"fallback of {row.source}, {note}"}

    def extrapolated(self, row: Row, fit: tuple[Section, str] | None) -> Iterator[str]:
        """What is said here is said once for a plan, so it names no single batch."""
        if row.kind == "pin":
            yield f"a pin ({row.reason})"
            return
        if row.kind == "otherwise":
            if self.device.platform == "cuda":
                yield f"the catch-all on {self.device}"
            return
        if fit and fit[1] != LEVELS[0]:
            yield f"{self.device}, served by section {fit[0].id} ({fit[0].name}): {fit[1]}"
        elif fit and fit[0].sms != self.device.sms:
            yield f"{self.device.sms} SMs (measured: {fit[0].sms})"
        if not row.measured:
            yield "the row, which records no measurement"
            return
        # the area that comes nearest; one that covers the key says only what it knows of the batch
        yield from min((tuple(self.outside(row, area)) for area in row.measured), key=len)

    def outside(self, row: Row, area: Mapping[str, tuple[FactValue, ...]]) -> Iterator[str]:
        """What about the query is not in one measured area."""
        yield from row.outside(self.op, self.facts, area)
        measured = [int(value) for value in area.get("batch", ())]
        if not measured:
            yield "any batch (measured: not recorded)"
        elif self.batch > max(measured):
            yield f"batches above {max(measured)}"
        elif 0 < self.batch < min(measured):
            yield f"batches below {min(measured)}"

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return self.registry.kernels(self.op.name)

    def considered(self, notes: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        """Each kernel with its note; one without is not named by the row that serves, and perhaps could not serve."""
        default = "not named by the matching row"
        return tuple((k.name, notes.get(k.name) or self.refusal(k.variant()) or default) for k in self.kernels)

    def nothing(self, what: str, notes: Mapping[str, str]) -> NoKernel:
        lines = [f"{self.op.name}: {what}: {format_facts(self.facts.items())} on {self.device}"]
        lines += [f"  {name}: {reason}" for name, reason in self.considered(notes)]
        return NoKernel("\n".join(lines))
