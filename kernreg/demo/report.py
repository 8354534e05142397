"""What the demo says at the end: what served and why, accepted tokens, errors, memory, the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from kernreg import render
from kernreg.contract import format_facts
from kernreg.demo.oracle import Worst
from kernreg.demo.stack import Stack
from kernreg.dispatch import Plan


@dataclass(frozen=True)
class ServedLine:
    """Which variant served an op's static key, how often, at which batches, and why it and no other."""

    op: str
    key: str
    variant: str
    calls: int
    batches: tuple[int, ...]
    why: tuple[str, ...]


@dataclass(frozen=True)
class MemoryLine:
    """Bytes that a layer keeps for one request between verify and commit, as a ring and as snapshots."""

    layers: str
    count: int
    ring: int
    snapshots: int

    @property
    def ratio(self) -> float:
        return self.snapshots / self.ring


@dataclass(frozen=True)
class Report:
    """What the demo found. `renderables()` shows it, `as_dict()` is plain data.

    windows: how many windows had 0, 1, .. T tokens accepted.
    """

    device: str
    rounds: int
    requests: int
    reused_slots: int
    windows: tuple[int, ...]
    served: tuple[ServedLine, ...]
    checks: tuple[Worst, ...]
    memory: tuple[MemoryLine, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def accepted(self) -> int:
        return sum(n * count for n, count in enumerate(self.windows))

    @property
    def drafted(self) -> int:
        return (len(self.windows) - 1) * sum(self.windows)

    @property
    def mean_accepted(self) -> float:
        return self.accepted / sum(self.windows)

    @property
    def total(self) -> MemoryLine:
        """One request in all layers."""
        lines = self.memory
        ring, snapshots = sum(m.count * m.ring for m in lines), sum(m.count * m.snapshots for m in lines)
        return MemoryLine("all layers", sum(m.count for m in lines), ring, snapshots)

    @property
    def verdict(self) -> str:
        """The last line."""
        wrong = [check for check in self.checks if not check.ok]
        if not wrong:
            return f"OK: {self.accepted} accepted tokens of {self.requests} requests agree with plain decoding in every layer"
        first = f"{wrong[0].layer}, {wrong[0].what}: {_error(wrong[0])} ({wrong[0].where})"
        return f"FAILED: {len(wrong)} of {len(self.checks)} checks; {first}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as ``kernreg demo --json`` prints it."""
        derived = {name: getattr(self, name) for name in ("ok", "verdict", "accepted", "drafted", "mean_accepted")}
        checks = [{**asdict(check), "ok": check.ok} for check in self.checks]
        memory = [{**asdict(line), "ratio": line.ratio} for line in (*self.memory, self.total)]
        return {**asdict(self), **derived, "checks": checks, "memory": memory}

    def renderables(self) -> list[RenderableType]:
        """Tables and lines for a rich console, the verdict last."""
        return [_head(self), "", _served_table(self), "", _check_table(self), "", _memory_table(self), "", self.verdict]


def served_lines(stack: Stack, batches: Sequence[int]) -> tuple[ServedLine, ...]:
    """One line for each op, static key and variant; layers with one key are counted together."""
    lines: dict[tuple[str, str, str], ServedLine] = {}
    for group in stack.groups:
        for plan in (*group.plans, *group.probes):
            for served in plan.served():
                name = (served.op, _key(plan), served.variant)
                at = tuple(batch for batch in batches if plan.variant(batch).id == served.variant)
                why = (*_why(plan, at, served.variant), *(["called by the check only"] if plan in group.probes else []))
                calls = served.calls + (lines[name].calls if name in lines else 0)
                lines[name] = ServedLine(*name, calls, at, why)
    return tuple(lines[name] for name in sorted(lines))


def memory_lines(stack: Stack) -> tuple[MemoryLine, ...]:
    """One line for each group of layers."""
    return tuple(MemoryLine(group.name, group.count, *group.memory()) for group in stack.groups)


def _key(plan: Plan) -> str:
    """The static key without the facts that have their default."""
    return format_facts((name, value) for name, value in plan.facts.items() if value != plan.op.facts[name].default)


def _why(plan: Plan, batches: Sequence[int], variant: str) -> Iterator[str]:
    """The row, what of it was not measured, and why no other kernel served."""
    decisions = [plan.explain(batch) for batch in batches]
    first = decisions[0]
    source = f"{Path(first.row.place.file).name}:{first.row.place.line}, {first.row.when_text}" if first.row else first.source
    yield source if first.variant.id == variant else f"fallback of {source}"
    yield from dict.fromkeys(f"not measured: {text}" for decision in decisions for text in decision.extrapolated)
    others: dict[str, list[str]] = {}
    for name, reason in first.considered:
        if name != variant.partition("[")[0]:
            others.setdefault(reason, []).append(name)
    yield from (f"{', '.join(names)}: {reason}" for reason, names in others.items())


def _head(report: Report) -> RenderableType:
    windows = ", ".join(f"{count} of {n}" for n, count in enumerate(report.windows))
    tokens = f"{report.accepted} of {report.drafted} draft tokens, {report.mean_accepted:.2f} a window ({windows})"
    slots = f"{report.requests} in {report.rounds} rounds; {report.reused_slots} slots were used again"
    return render.fields(
        [
            ("device", report.device),
            ("layers", ", ".join(f"{line.count} {line.layers}" for line in report.memory)),
            ("requests", slots),
            ("accepted", tokens),
            ("time", f"{report.seconds:.1f} s, checks included"),
        ]
    )


def _served_table(report: Report) -> RenderableType:
    drawn = render.table("op", "static key", "served by", "calls", "why")
    for line in report.served:
        drawn.add_row(line.op, line.key, line.variant, str(line.calls), "\n".join(line.why))
    return drawn


def _check_table(report: Report) -> RenderableType:
    close = tuple(dict.fromkeys(check.what for check in report.checks if not check.exact))
    drawn = render.table("worst error", *close, "exact")
    for layer in dict.fromkeys(check.layer for check in report.checks):
        found = {check.what: check for check in report.checks if check.layer == layer}
        exact = ", ".join(what if check.ok else f"{what} WRONG" for what, check in found.items() if check.exact)
        drawn.add_row(layer, *(_cell(found.get(what)) for what in close), exact)
    return drawn


def _cell(check: Worst | None) -> str:
    return "" if check is None else _error(check) + ("" if check.ok else " WRONG")


def _error(check: Worst) -> str:
    return f"{check.error:.0f} wrong" if check.exact else f"{check.error:.1e} of {check.allowed:.1e}"


def _memory_table(report: Report) -> RenderableType:
    drawn = render.table("kept for a request from verify to commit", "layers", "ring, KiB", "snapshots, KiB", "ratio")
    for line in (*report.memory, report.total):
        kib = (f"{size / 1024:.1f}" for size in (line.ring, line.snapshots))
        drawn.add_row(line.layers, str(line.count), *kib, f"{line.ratio:.1f}")
    return drawn
