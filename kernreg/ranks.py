"""Agreement of ranks on what serves, before the first capture: all make the same choices, or none starts.

Each rank publishes a report through the group's store and waits, with a timeout, for those of the others and then for their
verdicts. So a rank that is missing, late or of another mind is named on every rank. Comparing is a pure function of the reports.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kernreg import device as devices
from kernreg.contract import FactValue, format_facts
from kernreg.dispatch import Plan
from kernreg.evidence import installed_source, installed_triton

if TYPE_CHECKING:
    import torch.distributed as dist

PER_RANK = ("heads", "value_heads", "dim")  # facts that ranks of one group may have their own values of
YES = "agreed"


class RanksDisagree(RuntimeError):
    """The ranks of a group would not make the same choices; raised on every rank, with what differs and who holds what."""


@dataclass(frozen=True)
class Bound:
    """One plan as its rank reports it.

    shared: the static key without the facts that are a rank's own. key: the whole key.
    table: first batch, last batch (None: no end) and variant. sources: digests of the kernels in it and of the row's fallback.
    fell_back: why the row's fallback serves, or None. bits: fingerprints by variant, if they were asked for.
    """

    op: str
    shared: str
    key: str
    table: list[list[Any]]
    sources: Mapping[str, str]
    fell_back: str | None = None
    bits: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What one rank is and would do. section: the pinned section of the policy, if every plan has the same."""

    rank: int
    policy: str
    registry: str
    overrides: str
    section: str | None
    device: str
    torch: str
    triton: str
    driver: str
    plans: Sequence[Bound]

    @staticmethod
    def of_json(text: str) -> Report:
        found = json.loads(text)
        return Report(**{**found, "plans": [Bound(**plan) for plan in found["plans"]]})


@dataclass(frozen=True)
class Agreement:
    """What the ranks agreed on. drivers: the ranks by driver version; they need not be equal."""

    ranks: int
    plans: int
    drivers: Mapping[str, list[int]]
    fallbacks: tuple[str, ...]


# --- comparing


def differences(reports: Sequence[Report]) -> list[str]:
    """What ranks must share and do not: one line each, naming the values and the ranks that hold them. Pure."""
    found = [_differing(name, reports, attrgetter(name)) for name in ("policy", "registry", "overrides")]
    sections = {report.section for report in reports}
    if len(sections) > 1:
        found.append(_differing("pinned section", reports, lambda r: r.section))
    if sections == {None}:
        found.append(_differing("device", reports, lambda r: r.device))
    found += [_differing(name, reports, attrgetter(name)) for name in ("torch", "triton")]
    found.append(_differing("bound keys", reports, lambda r: sorted(f"{p.op} {p.shared}" for p in r.plans)))
    return [text for text in (*found, *_plan_differences(reports)) if text]


def _plan_differences(reports: Sequence[Report]) -> Iterator[str | None]:
    """Plans of one whole key must have one table, and kernels of one name one source."""
    sources = sorted({(plan.op, kernel) for report in reports for plan in report.plans for kernel in plan.sources})
    for op, kernel in sources:
        held = [(r, {p.sources[kernel] for p in r.plans if p.op == op and kernel in p.sources}) for r in reports]
        yield _differing(f"source of {op} {kernel}", [r for r, found in held if found], _by_rank(held))
    for op, key in sorted({(plan.op, plan.key) for report in reports for plan in report.plans}):
        plans = [(r, [p for p in r.plans if (p.op, p.key) == (op, key)]) for r in reports]
        plans = [(r, found) for r, found in plans if found]
        fell = [bool(p.fell_back) for _, found in plans for p in found]
        if any(fell) and not all(fell):
            continue  # compared again when the others have given way
        yield _differing(f"table of {op} {key}", [r for r, _ in plans], _by_rank([(r, [p.table for p in f]) for r, f in plans]))
        yield _differing(f"bits of {op} {key}", [r for r, _ in plans], _by_rank([(r, [p.bits for p in f]) for r, f in plans]))


def _by_rank(held: Sequence[tuple[Report, Any]]) -> Callable[[Report], Any]:
    values = {report.rank: value for report, value in held}
    return lambda report: sorted(map(str, values[report.rank]))


def _differing(what: str, reports: Sequence[Report], value: Callable[[Report], Any]) -> str | None:
    ranks: dict[str, list[int]] = {}
    for report in reports:
        shown = value(report)
        ranks.setdefault(", ".join(shown) if isinstance(shown, list) else str(shown), []).append(report.rank)
    if len(ranks) < 2:
        return None
    return f"{what}: " + "; ".join(f"{_ranks(held)}: {text or 'none'}" for text, held in ranks.items())


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def fallbacks(reports: Sequence[Report]) -> dict[tuple[str, str], str]:
    """By op and shared key: why some rank's plan fell back. Pure."""
    found: dict[tuple[str, str], str] = {}
    for report in reports:
        for plan in report.plans:
            if plan.fell_back:
                found.setdefault((plan.op, plan.shared), f"rank {report.rank} fell back: {plan.fell_back}")
    return found


# --- reporting


def report_of(rank: int, plans: Sequence[Plan], *, fingerprints: bool = False) -> Report:
    """This rank's report."""
    import torch

    sections = {plan.binding.section for plan in plans}
    return Report(
        rank,
        policy=_same(plan.binding.policy.digest for plan in plans),
        registry=_same(plan.binding.registry.digest for plan in plans),
        overrides=_same(" ".join(map(str, plan.binding.overrides)) for plan in plans),
        section=sections.pop() if len(sections) == 1 else None,
        device=_same(map(str, (plan.device for plan in plans))),
        torch=str(torch.__version__),
        triton=installed_triton(),
        driver=devices.driver_version(devices.import_nvml()) or "",
        plans=[_bound(plan, fingerprints) for plan in plans],
    )


def _same(values: Iterable[str]) -> str:
    return " and ".join(sorted(set(values)))


def _bound(plan: Plan, fingerprints: bool) -> Bound:
    shared = {name: value for name, value in plan.facts.items() if name not in PER_RANK}
    kernels = {variant.kernel.name for variant in (*plan.variants(), plan.fallback) if variant}
    return Bound(
        plan.op.name,
        format_facts(shared.items()),
        format_facts(plan.facts.items()),
        [list(span) for span in plan.resolved()],
        {name: installed_source(plan.binding.registry, plan.op.name, name) for name in sorted(kernels)},
        plan.fell_back,
        _bits(plan) if fingerprints else {},
    )


def _bits(plan: Plan) -> dict[str, str]:
    from kernreg.numerics import fingerprint

    facts: Mapping[str, FactValue] = plan.facts
    found = {v.id: fingerprint(plan.binding.registry, v, facts, plan.torch_device) for v in plan.variants()}
    return {variant: print_.bits or str(print_) for variant, print_ in found.items()}


# --- exchanging


@dataclass
class _Exchange:
    """Texts of all ranks through a store, under names that no earlier agreement used."""

    store: dist.Store
    prefix: str
    ranks: Sequence[int]
    rank: int
    deadline: float

    @staticmethod
    def begin(group: dist.ProcessGroup | None, timeout: float) -> _Exchange:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store  # no public way to the group's own store

        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised: call init_process_group first")
        rank, members = dist.get_rank(), dist.get_process_group_ranks(group or dist.group.WORLD)
        if rank not in members:
            raise RuntimeError(f"rank {rank} is no member of the group of {_ranks(members)}")
        store = _get_default_store()
        name = f"kernreg/{'.'.join(map(str, members))}"
        number = store.add(f"{name}/{rank}/calls", 1)
        return _Exchange(store, f"{name}/{number}", members, rank, time.monotonic() + timeout)

    def publish(self, name: str, text: str) -> None:
        self.store.set(f"{self.prefix}/{name}/{self.rank}", text)

    def collect(self, name: str) -> dict[int, str]:
        """The texts of all ranks; RanksDisagree names those that did not publish in time."""
        keys = {rank: f"{self.prefix}/{name}/{rank}" for rank in self.ranks}
        try:
            left = timedelta(seconds=max(self.deadline - time.monotonic(), 0.001))
            self.store.wait(list(keys.values()), left)
        except RuntimeError:  # DistStoreError is one
            missing = [rank for rank, key in keys.items() if not self.store.check([key])]
            if missing:
                raise RanksDisagree(f"no {name} from {_ranks(missing)} in time") from None
        return {rank: self.store.get(key).decode() for rank, key in keys.items()}

    def outcome(self) -> str:
        """`YES`, or who is against it; what the first rank to know has found, so that ranks whose time ends part-way hold the
        same."""
        try:
            against = [f"rank {rank}: {text}" for rank, text in self.collect("verdict").items() if text != YES]
            found = "; ".join(against) or YES
        except RanksDisagree as late:
            found = str(late)
        first: bytes = self.store.compare_set(f"{self.prefix}/outcome", "", found)
        return first.decode()


def agree(
    plans: Sequence[Plan], group: dist.ProcessGroup | None = None, *, timeout: float = 120.0, fingerprints: bool = False
) -> Agreement:
    """Warm the plans up and make sure that all ranks of a group make the same choices. Call it on every rank before the capture.

    Compared are the digests of policy, registry and kernel sources, overrides, the variant for each batch, product and
    architecture (unless one section of the policy is pinned on all ranks), and the versions of torch and Triton. Ranks may hold
    different heads: then what these decide may differ. Where a rank's plan took its row's fallback, the others take it too, and
    what they then serve is compared once more.

    Args:
        plans: the plans of this rank; all ranks bind the same ops and keys, heads aside.
        group: of torch.distributed; None for all ranks. Any backend will do: only the store is used.
        timeout: seconds to wait for the slowest rank, its warm-up included.
        fingerprints: also compare the bits of every variant that the plans can reach; takes seconds.

    Raises:
        RanksDisagree: on every rank, with what differs; also where a rank is missing, has no plans or cannot warm up.
    """
    exchange = _Exchange.begin(group, timeout)
    try:
        return _settle(exchange, plans, fingerprints)
    except Exception as error:
        with suppress(RuntimeError):  # the store's process may be gone
            exchange.publish("verdict", str(error))  # those that still wait are told
        if isinstance(error, RanksDisagree):
            raise
        raise RanksDisagree(f"rank {exchange.rank} cannot start: {error}") from error


def _settle(exchange: _Exchange, plans: Sequence[Plan], fingerprints: bool) -> Agreement:
    def warm() -> Report:
        if not plans:
            raise ValueError("no plans; bind the ops first")
        for plan in plans:
            plan.warmup()
        return report_of(exchange.rank, plans, fingerprints=fingerprints)

    def give_way() -> Report:
        for plan, bound in zip(plans, own.plans, strict=True):
            if reason := fallen.get((bound.op, bound.shared)):
                plan.fall_back(reason)
        return report_of(exchange.rank, plans, fingerprints=fingerprints)

    reports = _compare(exchange, "report", warm)
    own = next(report for report in reports if report.rank == exchange.rank)
    if fallen := fallbacks(reports):
        reports = _compare(exchange, "report after falling back", give_way)
    exchange.publish("verdict", YES)
    if (outcome := exchange.outcome()) != YES:
        raise RanksDisagree(outcome)
    drivers: dict[str, list[int]] = {}
    for report in reports:
        drivers.setdefault(report.driver, []).append(report.rank)
    return Agreement(len(reports), len(plans), drivers, tuple(fallen.values()))


def _compare(exchange: _Exchange, name: str, report: Callable[[], Report]) -> list[Report]:
    """The reports of all ranks, this one's made by `report`; RanksDisagree where one could not be made or they differ."""
    try:
        exchange.publish(name, json.dumps(asdict(report())))
    except Exception as error:
        exchange.publish(name, f"!{error}")
        raise
    texts = exchange.collect(name)
    if broken := {rank: text[1:] for rank, text in texts.items() if text.startswith("!")}:
        raise RanksDisagree("; ".join(f"rank {rank} cannot start: {text}" for rank, text in broken.items()))
    reports = [Report.of_json(text) for text in texts.values()]
    if found := differences(reports):
        raise RanksDisagree("the ranks would not make the same choices\n  " + "\n  ".join(found))
    return reports
