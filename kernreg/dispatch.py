"""From a policy to a call: bind an op to a static key, warm it up, call it, and say what served.

`bind` fixes the static key and gives a `Plan`. Calling the plan checks the contract, looks the batch up in a table and
launches; nothing on that path reads files, logs, compiles or waits for the device. The first use of a variant loads and
compiles it on small made-up inputs; in a CUDA-graph capture that raises `NotWarm` instead. Where the policy lets the batch
choose among variants whose equal bits were not measured here, one of them serves every batch until warm-up measured them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from kernreg import device as devices
from kernreg import policy as policies
from kernreg import registry as registries
from kernreg.check import argument_source, check_fact, check_facts, declared_values, facts_of, signature_source
from kernreg.contract import Case, ContractError, FactValue, Op, Variant, format_facts
from kernreg.device import Device
from kernreg.evidence import Evidence, evidence_for, installed_triton
from kernreg.guard import STEP_DIMS, guard
from kernreg.policy import Decision, Override, Policy, PolicyError
from kernreg.registry import Registry, UnknownError, no_backends

if TYPE_CHECKING:
    import torch

    from kernreg.numerics import Fingerprint

log = logging.getLogger("kernreg")
FORCE_VARIABLE = "KERNREG_FORCE"
CHECK_VARIABLE = "KERNREG_CHECK"
Fingerprinter: TypeAlias = "Callable[[Registry, Variant, Mapping[str, FactValue], str], Fingerprint]"
T = TypeVar("T")
LARGEST_BATCH = 2**31 - 1  # stands for every batch above the measured ones


class NotWarm(RuntimeError):
    """A variant would have to be compiled while a CUDA graph is being captured."""


class NotCapturable(RuntimeError):
    """The kernel that serves reads values back to the host, and a CUDA graph is being captured."""


class WarmupError(RuntimeError):
    """The variant that a policy row names cannot be compiled or run here, and the row names no fallback that can."""


# --- overrides: one switch for bisection


_forced: ContextVar[tuple[Override, ...]] = ContextVar("kernreg_forced", default=())


def parse_force(text: str) -> tuple[Override, ...]:
    """``"torch"`` or ``"gdn_ring_commit=triton.per_head,kda_chain_verify=torch"`` -> overrides.

    Raises:
        ValueError: an empty name.
    """
    overrides = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        op, equals, name = (word.strip() for word in part.rpartition("="))
        if not name or (equals and not op):
            raise ValueError(f"cannot read the override {part!r}: wanted NAME or OP=NAME, as in gdn_ring_commit=triton.per_head")
        overrides.append(Override(op or None, name))
    return tuple(overrides)


@lru_cache(maxsize=1)
def _environment_overrides() -> tuple[Override, ...]:
    try:
        forced = parse_force(os.environ.get(FORCE_VARIABLE, ""))
        for override in forced:
            if override.op is not None:
                registries.default().op(override.op)
    except (ValueError, registries.UnknownError) as error:
        raise PolicyError(f"{FORCE_VARIABLE}: {error}") from None
    return forced


def overrides() -> tuple[Override, ...]:
    """What is forced here and now, the innermost `force` first, the variable KERNREG_FORCE last."""
    return _forced.get() + _environment_overrides()


@contextmanager
def force(name: str | None = None, **ops: str) -> Iterator[None]:
    """Within the block, bind and unbound calls use this backend or kernel: ``force("torch")``,
    ``force(gdn_ring_commit="triton.per_head")``. Plans that are bound already keep their choice. It holds in this thread and
    task; one that is started inside begins without it, unless it runs in a copy of the context. KERNREG_FORCE holds everywhere.
    """
    added = tuple(Override(op, kernel) for op, kernel in ops.items())
    added += (Override(None, name),) if name else ()
    for override in added:
        if override.op is not None:
            registries.default().op(override.op)
    token = _forced.set(added + _forced.get())
    try:
        yield
    finally:
        _forced.reset(token)


# --- plans


@dataclass(slots=True)
class _Entry:
    """One variant of a plan: what to launch, and how often it was."""

    decision: Decision
    variant: Variant
    launch: Callable[..., Any]
    intervals: list[tuple[int, int | None]] = field(default_factory=list)
    ready: bool = False
    calls: int = 0


@dataclass(frozen=True)
class Served:
    """How often a variant served an op. note: why it serves batches for which the policy names another; mostly empty."""

    op: str
    key: str
    variant: str
    calls: int
    note: str = ""


@dataclass(frozen=True)
class Binding:
    """Everything that a choice is a function of, besides the batch. What serves depends on its `Evidence` too."""

    op: Op
    facts: Mapping[str, FactValue]
    device: Device
    policy: Policy
    registry: Registry
    overrides: tuple[Override, ...] = ()
    section: str | None = None

    def choose(self, batch: int) -> Decision:
        """The decision for a batch: pure, see `kernreg.policy.choose`."""
        return policies.choose(
            self.policy, self.registry, self.device, self.op, self.facts, batch, self.overrides, section=self.section
        )

    def evidence(self, triton: str | None) -> Evidence:
        """Whether the measurements behind the choice hold here; pure but for the kernels' sources, see `evidence_for`."""
        return evidence_for(self.policy, self.registry, self.device, self.op, self.choose(1), triton)

    def serves(self, batch: int, evidence: Evidence) -> Decision:
        """`choose`, but where the evidence does not let the batch choose, one decision for all batches. Pure."""
        decision = self.choose(batch)
        if evidence.collapsed and decision.row is not None:
            entries = map(self.choose, (entry.low for entry in reversed(decision.row.entries)))
            last = next((one for one in entries if one.variant.id not in evidence.failed), self.choose(LARGEST_BATCH))
            return policies.collapse(decision, last, evidence)
        return replace(decision, evidence=evidence)

    @property
    def digest(self) -> str:
        """SHA-256 of what all ranks must share: policy bytes, registry rows, overrides, a pinned section. Not the key."""
        shared = (self.policy.digest, self.registry.digest, [(o.op, o.name) for o in self.overrides], self.section)
        return hashlib.sha256(repr(shared).encode()).hexdigest()


_plans: weakref.WeakSet[Plan] = weakref.WeakSet()


class Plan:
    """A bound op: the static key is fixed, each batch has one variant. Call it as the op is called.

    Attributes:
        op, facts, device: what was bound.
        evidence: whether the policy's measurements hold here; with the binding it decides what each batch launches.
        run: the same as calling the plan, one Python call cheaper.
        go: `run` without the contract check, for a caller that has just made it.
    """

    def __init__(self, binding: Binding, ordinal: int | None, *, debug: bool = False) -> None:
        self.binding = binding
        self.op = binding.op
        self.facts = binding.facts
        self.device = binding.device
        self.ordinal = ordinal
        self.table: dict[int, _Entry] = {}
        self.evidence = binding.evidence(installed_triton())
        self._preparing = threading.RLock()  # threads that make the first call at once compile and fall back once
        self._entries: list[_Entry] = []
        self._decide()  # an unservable key fails here, not in the first step
        self._failed: tuple[Variant, str] | None = None
        self._dropped: list[_Entry] = []
        self.guard = guard(self.op, self.facts, -1 if binding.device.platform != "cuda" else ordinal)
        self.run = _on_its_device(_compile_run(self, debug, checked=True), ordinal)
        self.go = _on_its_device(_compile_run(self, debug, checked=False), ordinal)
        self._say()
        _plans.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self  # a copied model shares what is compiled, and the counts

    def __reduce__(self) -> str:
        raise TypeError(
            f"{self.op.name}: a plan belongs to its process and cannot be pickled; bind {self.key} in the other process"
        )

    @property
    def key(self) -> str:
        """The static key in words."""
        return format_facts(self.facts.items())

    @property
    def digest(self) -> str:
        """See `Binding.digest`."""
        return self.binding.digest

    def variant(self, batch: int) -> Variant:
        """The variant for a batch."""
        entry = self.table.get(batch)
        return (entry or self._miss(batch)).variant

    def explain(self, batch: int = 1) -> Decision:
        """Why this variant, and why none of the others."""
        decision = self.binding.serves(batch, self.evidence)
        if self._failed is None:
            return decision
        fallback = self._entries[0].variant
        failed, why = self._failed
        reasons = dict(decision.considered) | {e.variant.kernel.name: f"dropped with {failed.id}" for e in self._dropped}
        reasons[failed.kernel.name] = f"{decision.source} names it, but {failed.id} {why}"
        reasons[fallback.kernel.name] = f"chosen: the fallback of {decision.source}"
        return replace(decision, variant=fallback, entry=None, considered=tuple(reasons.items()))

    def served(self) -> tuple[Served, ...]:
        """The variants that served calls, with counts."""
        note = self.evidence.collapsed or ""
        return tuple(Served(self.op.name, self.key, e.variant.id, e.calls, note) for e in self._entries if e.calls)

    def resolved(self) -> tuple[tuple[int, int | None, str], ...]:
        """What the plan launches as plain data: first batch, last batch (None: no end) and variant id, in order."""
        spans: list[tuple[int, int | None, str]] = []
        ours = {(low, high, entry.variant.id) for entry in self._entries for low, high in entry.intervals}
        for low, high, variant in sorted(ours, key=lambda span: span[0]):
            joined = spans.pop()[0] if spans and spans[-1][2] == variant else low
            spans.append((joined, high, variant))
        return tuple(spans)

    def warmup(self, *, fingerprint: Fingerprinter | None = None) -> Plan:
        """Load and compile every variant that some batch can reach, on small made-up inputs. Call it before a capture.

        Where the row's class was not measured here (see `Plan.evidence`), its variants are fingerprinted first, on CUDA: if
        their bits are equal the batch chooses among them again, else one that has bits here serves every batch. That takes some
        seconds and up to a few gigabytes, so call it before the pools fill the memory.

        Args:
            fingerprint: measures a variant's bits, on any device; None for `kernreg.numerics.fingerprint`, on CUDA only.

        Raises:
            WarmupError: a variant cannot be compiled or run here and its row names no fallback that can; or the plan was
                bound for a GPU and this machine has none.
            NotWarm: there is something to measure and a CUDA graph is being captured.
        """
        if self.device.platform == "cuda" and fingerprint is None:
            self._need_cuda()
        with self._preparing:
            if self.evidence.collapsed and not self.evidence.measured_here and (fingerprint or self.device.platform == "cuda"):
                self._measure(fingerprint or _default_fingerprint())
            self._prepare_all()
        return self

    def _need_cuda(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise WarmupError(
                f"{self.op.name}: the plan was bound for {self.device}, and this machine has no CUDA device to warm it up on; "
                "plan.explain(batch) needs none"
            )

    def _prepare_all(self) -> None:
        self._prepare([entry for entry in self._entries if not entry.ready])

    def _measure(self, fingerprint: Fingerprinter) -> None:
        """Let the bits of the row's variants decide whether the batch may choose among them."""
        if self.device.platform == "cuda" and _capturing():
            raise NotWarm(f"{self.op.name}: {self.key} is to be measured and a CUDA graph is being captured; warm up before it")
        bits: dict[str, str] = {}
        failed: dict[str, str] = {}
        for variant in self._row_variants():
            self.binding.registry.load(variant.kernel)  # a mistake in a backend is raised, not taken for other bits
            found = _attempt(fingerprint, self.binding.registry, variant, self.facts, self.torch_device)
            if isinstance(found, Exception):
                failed[variant.id] = _line(found)
            elif found.bits:
                bits[variant.id] = found.bits
            else:
                failed[variant.id] = str(found)
        self.evidence = replace(self.evidence, bits=bits, failed=failed)
        self._decide()
        self._say_what_chooses()

    @property
    def fell_back(self) -> str | None:
        """Why the row's fallback serves every batch; None where it does not."""
        return None if self._failed is None else f"{self._failed[0].id} {self._failed[1]}"

    @property
    def fallback(self) -> Variant | None:
        """What the row takes where its variants cannot run."""
        return self._entries[0].decision.fallback

    def fall_back(self, reason: str) -> None:
        """Let the row's fallback serve every batch, though the row's variants may run here: because of another rank, say.

        Raises:
            WarmupError: the row names no fallback, or it cannot run here either.
        """
        with self._preparing:
            if self._failed is None:
                self._fall_back(self._entries[0], f"gives way: {reason}")

    def variants(self) -> tuple[Variant, ...]:
        """All that some batch launches."""
        return tuple(entry.variant for entry in self._entries)

    def _row_variants(self) -> list[Variant]:
        """All that the row names."""
        decisions = map(self.binding.choose, policies.batches(self.binding.policy, self.op.name))
        return list({decision.variant.id: decision.variant for decision in decisions}.values())

    def _decide(self) -> None:
        """One entry for each variant; the static key picks one row, so its intervals hold every batch."""
        decisions: dict[str, list[Decision]] = {}
        for batch in policies.batches(self.binding.policy, self.op.name):
            decision = self.binding.serves(batch, self.evidence)
            decisions.setdefault(decision.variant.id, []).append(decision)
        held = {entry.variant.id: entry for entry in self._entries}  # compiled and counted already
        self._entries = [self._entry(found, held.get(variant)) for variant, found in decisions.items()]
        self.table.clear()

    def _entry(self, decisions: list[Decision], entry: _Entry | None) -> _Entry:
        if entry is None:
            entry = _Entry(decisions[0], decisions[0].variant, _unloaded)
            entry.launch = self._first(entry)
        entry.decision, entry.intervals = decisions[0], [decision.interval for decision in decisions]
        return entry

    def _miss(self, batch: int) -> _Entry:
        for entry in self._entries:
            if any(low <= max(batch, 1) and (high is None or batch <= high) for low, high in entry.intervals):
                return self.table.setdefault(batch, entry)
        raise AssertionError(f"no interval holds batch {batch}")

    def _say(self) -> None:
        """Once for a plan: what serves, what was passed over, and what was not measured."""
        for entry in self._entries:
            log.info("%s %s: %s serves (%s)", self.op.name, self.key, entry.variant.id, entry.decision.source)
        decisions = [entry.decision for entry in self._entries]
        for text in dict.fromkeys(text for decision in decisions for text in decision.passed_over):
            log.warning("%s %s: %s", self.op.name, self.key, text)
        texts = dict.fromkeys(text for decision in decisions for text in decision.extrapolated)
        for text in texts:
            log.warning("%s %s: not measured: %s", self.op.name, self.key, text)
        for text in self.binding.choose(LARGEST_BATCH).extrapolated:
            if text not in texts:  # every row has a largest measured batch: no cause for alarm
                log.info("%s %s: not measured: %s", self.op.name, self.key, text)
        if self.evidence.stale:
            _warn_once(f"{decisions[0].source} is stale: {'; '.join(self.evidence.stale)}")
        self._say_what_chooses()

    def _say_what_chooses(self) -> None:
        """Where the row's class was not measured by the policy: does the batch choose?"""
        where = f"{self.op.name} {self.key}: {self._entries[0].decision.source}"
        if why := self.evidence.collapsed:
            log.warning("%s: %s; %s serves every batch", where, why, self._entries[0].variant.id)
        elif self.evidence.measured_here:
            log.warning("%s: its variants give equal bits here, the batch chooses: %s", where, self.evidence.measurement)

    def _first(self, entry: _Entry) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            if self.device.platform == "cuda" and _capturing():
                raise NotWarm(
                    f"{self.op.name}: {entry.variant.id} for {self.key} is not compiled and a CUDA graph is being "
                    "captured; call plan.warmup() before the capture"
                )
            with self._preparing:
                if self._failed is not None or entry.ready:
                    pass  # another thread was first
                elif entry.decision.fallback:
                    self._prepare_all()  # a fallback replaces every variant of the row, so all are tried before one serves
                else:
                    self._prepare([entry])
            if self._failed is None:
                return entry.launch(*args, **kwargs)
            result = self._entries[0].launch(*args, **kwargs)
            self._entries[0].calls += 1
            return result

        return launch

    def _prepare(self, entries: list[_Entry]) -> None:
        """Compile variants by running them on made-up inputs: no caller's state is at risk.

        If one cannot run, all batches go to the row's fallback, since another class for some of them would let a batch
        change bits.
        """
        launches = [launcher(self.binding.registry, entry.variant, self.facts) for entry in entries]
        for entry, launch in zip(entries, launches, strict=True):
            if error := self._try(entry.variant, launch):
                self._fall_back(entry, f"cannot run here: {_line(error)}", error)
                return
        for entry, launch in zip(entries, launches, strict=True):
            entry.launch, entry.ready = self._capturable(entry.variant, launch), True

    def _fall_back(self, failed: _Entry, why: str, cause: Exception | None = None) -> None:
        """why: what is said after the variant's name."""
        fallback = failed.decision.fallback
        where = f"{self.op.name}: {failed.variant.id} of {failed.decision.source} for {self.key}"
        if fallback is None:
            raise WarmupError(f"{where} {why}; the row names no fallback") from cause
        launch = launcher(self.binding.registry, fallback, self.facts)
        if second := self._try(fallback, launch):
            raise WarmupError(f"{where} {why}; its fallback {fallback.id} cannot run here: {_line(second)}") from second
        log.warning("%s %s; its fallback %s serves", where, why, fallback.id)
        self._dropped, self._failed = self._entries, (failed.variant, why)
        self.evidence = replace(self.evidence, doubts=())  # what serves is one variant now
        self._entries = [_Entry(failed.decision, fallback, self._capturable(fallback, launch), [(1, None)], ready=True)]
        self.table.clear()

    def _capturable(self, variant: Variant, launch: Callable[..., Any]) -> Callable[..., Any]:
        """`launch`, or for a kernel that reads values back a word instead of the driver's error during a capture."""
        if variant.kernel.capturable or self.device.platform != "cuda":
            return launch

        def outside_captures(*args: Any, **kwargs: Any) -> Any:
            if _capturing():
                raise NotCapturable(
                    f"{self.op.name}: {variant.id} for {self.key} reads values back to the host, which a CUDA graph cannot "
                    "capture; a row of the policy must name another kernel"
                )
            return launch(*args, **kwargs)

        return outside_captures

    @property
    def torch_device(self) -> str:
        """The plan's device as torch names it."""
        return f"cuda:{self.ordinal or 0}" if self.device.platform == "cuda" else "cpu"

    def _try(self, variant: Variant, launch: Callable[..., Any]) -> Exception | None:
        """Run it once on made-up inputs; what the launch raises. A mistake in the inputs themselves is raised."""
        import torch

        with torch.device("cpu"):  # whatever the engine's default device is
            inputs = self.op.samples.make_inputs(Case("warmup", self.facts, 1), device=self.torch_device)

        def once() -> None:
            launch(**inputs)
            if self.device.platform == "cuda":
                torch.cuda.synchronize(self.torch_device)

        return _attempt(once)

    def _mismatch(self, args: Mapping[str, Any]) -> None:
        """Called when the guard says no: raise what is wrong, or return when the key is the plan's after all."""
        facts = facts_of(self.op, args)
        for name, value in facts.items():
            if value != self.facts[name] and not (name == "layout" and self.facts[name] == "any"):
                raise ContractError(
                    f"{self.op.name}: this call has {name}={value}, the plan was bound with {name}={self.facts[name]}"
                )
        self._check_device(args)

    def _check_device(self, args: Mapping[str, Any]) -> None:
        name = next(iter(self.op.tensors))
        device = args[name].device
        wanted = "cuda" if self.device.platform == "cuda" else "cpu"
        if device.type != wanted or (self.ordinal is not None and wanted == "cuda" and device.index != self.ordinal):
            number = f":{self.ordinal}" if self.ordinal is not None and wanted == "cuda" else ""
            raise ContractError(f"{self.op.name}: {name} is on {device}, the plan was bound for {wanted}{number}")


def _default_fingerprint() -> Fingerprinter:
    from kernreg.numerics import fingerprint

    return fingerprint


def _capturing() -> bool:
    import torch

    return torch.cuda.is_available() and bool(torch.cuda.is_current_stream_capturing())


def _unloaded(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("launch before it was prepared")


def _attempt(step: Callable[..., T], *args: Any) -> T | Exception:
    """The step's result, or the error that it raises; a full memory is raised: it says nothing about a kernel."""
    import torch

    try:
        return step(*args)
    except torch.cuda.OutOfMemoryError as error:
        error.add_note("kernreg: while a plan was warmed up; warm plans up before pools and graphs fill the memory")
        raise
    except Exception as error:
        return error


@cache
def _warn_once(message: str) -> None:
    """Once in a process, however many plans say it."""
    log.warning("%s", message)


def _line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"


def launcher(registry: Registry, variant: Variant, facts: Mapping[str, FactValue]) -> Callable[..., Any]:
    """The variant as a callable with the op's signature: its target with config and the facts that it asks for filled in."""
    import inspect
    from functools import partial

    target = registry.load(variant.kernel)
    op = registry.op(variant.kernel.op)
    extra = [name for name in inspect.signature(target).parameters if name not in op.signature.parameters]
    config = dict(variant.config)
    filled = {name: config[name] if name in config else facts[name] for name in extra}
    return partial(target, **filled) if filled else target


def _compile_run(plan: Plan, debug: bool, *, checked: bool) -> Callable[..., Any]:
    """The hot path as one generated function: guard, table, launch."""
    op = plan.op
    arguments, everything = argument_source(op), _dict_source(op)
    lines = [f"def run({signature_source(op, declared_values(op, plan.facts))}):"]
    lines += [f"if not guard({arguments}): mismatch({everything})"] if checked else []
    lines += [f"validate({everything})"] if debug and op.validate else []
    lines += [
        f"batch = {op.batch}.shape[0]",
        "entry = table.get(batch)",
        "if entry is None: entry = miss(batch)",
        f"result = entry.launch({arguments})",
        "entry.calls += entry.ready",  # not ready: a fallback took the call, and counts it
        "return result",
    ]
    scope = {"guard": plan.guard, "mismatch": plan._mismatch, "miss": plan._miss, "table": plan.table, "validate": op.validate}
    return _function("run", "\n    ".join(lines), scope)


def _function(name: str, source: str, scope: dict[str, Any]) -> Callable[..., Any]:
    exec(compile(source, f"<{name}>", "exec"), scope)
    function: Callable[..., Any] = scope[name]
    return function


def _dict_source(op: Op) -> str:
    return f"dict({', '.join(f'{name}={name}' for name in op.signature.parameters)})"


def _on_its_device(run: Callable[..., Any], ordinal: int | None) -> Callable[..., Any]:
    """Launch on the plan's device, whatever the current one is; with one GPU in the machine there is nothing to do."""
    if ordinal is None:
        return run
    import torch

    if torch.cuda.device_count() < 2:
        return run

    def on_device(*args: Any, **kwargs: Any) -> Any:
        if torch.cuda.current_device() == ordinal:
            return run(*args, **kwargs)
        with torch.cuda.device(ordinal):
            return run(*args, **kwargs)

    return on_device


# --- binding


def shipped_policy() -> Path:
    """Where the dispatch.yaml that came with kernreg is: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).parent
    inside = package / "dispatch.yaml"
    beside = package.parent / "dispatch.yaml"
    return beside if not inside.exists() and (package.parent / "pyproject.toml").exists() else inside


@lru_cache(maxsize=1)
def default_policy() -> Policy:
    """The dispatch.yaml that came with kernreg, read once."""
    registry = registries.default()
    if not registry.backends:
        raise UnknownError(no_backends())
    path = shipped_policy()
    if not path.exists():
        raise PolicyError(f"{path}: no such file: this installation of kernreg is incomplete")
    return policies.load(path, registry)


def bind(
    op: str | Op,
    *,
    device: Device | torch.device | str | int | None = None,
    policy: Policy | str | os.PathLike[str] | None = None,
    registry: Registry | None = None,
    section: str | None = None,
    **facts: FactValue | tuple[int, int],
) -> Plan:
    """Fix an op's static key and device, and choose.

    Args:
        op: the op or its name.
        device: a `Device`; or "cuda", "cuda:1", 1, "cpu" for a device of this machine; None for the current one.
        policy: a loaded policy or a path; None for the shipped dispatch.yaml.
        registry: None for the installed backends.
        section: take this section of the file's devices, whatever this machine is (one choice for a mixed group).
        facts: the static key, e.g. ``ring=16, heads="48/16"``; facts with a default may be left out.

    Raises:
        ContractError: an unknown, missing or impossible fact.
        PolicyError: the policy is damaged or no kernel can serve.
    """
    registry = registries.default() if registry is None else registry
    if not isinstance(op, str | Op):
        raise ContractError(f"op is {op!r}, wanted an op or its name")
    op = registry.op(op if isinstance(op, str) else op.name)
    if not isinstance(policy, Policy):
        policy = default_policy() if policy is None else policies.load(policy, registry)
    return _bind(op, complete(op, facts), _device(device), policy, registry, section)


def _bind(
    op: Op,
    facts: Mapping[str, FactValue],
    where: tuple[Device, int | None],
    policy: Policy,
    registry: Registry,
    section: str | None,
) -> Plan:
    check_facts(op, facts)
    binding = Binding(op, facts, where[0], policy, registry, overrides(), section)
    return Plan(binding, where[1], debug=os.environ.get(CHECK_VARIABLE, "") not in ("", "0"))


def complete(op: Op, facts: Mapping[str, Any]) -> dict[str, FactValue]:
    """The whole static key with every value checked; ContractError as in `Op.complete` and `check_fact`."""
    return {name: check_fact(op, name, value) for name, value in op.complete(facts).items()}


def _device(device: object) -> tuple[Device, int | None]:
    """A device as `bind` takes it -> who it is, and its CUDA ordinal if it is one of this machine."""
    if isinstance(device, Device):
        return device, None
    if type(device).__name__ == "device" and hasattr(device, "type"):  # torch.device, without importing torch
        device = str(device)
    if device in ("cpu", "interpreter"):
        return (Device.cpu() if device == "cpu" else Device.interpreter()), None
    number = re.fullmatch(r"cuda(?::([0-9]+))?", device) if isinstance(device, str) else None
    if not (device is None or type(device) is int or number):
        raise ContractError(
            f"device is {device!r}, wanted 'cpu', 'cuda', 'cuda:N', N, a torch.device or a Device; "
            "for another machine's GPU, Device.declared(name, arch, sms)"
        )
    asked = device if type(device) is int else None
    if number and number[1]:
        asked = int(number[1])
    found = devices.current(_current_ordinal() if asked is None else asked)
    if device is not None and found.platform != "cuda":
        raise ContractError(f"device is {device!r}, but this machine has no such CUDA device")
    return found, (_current_ordinal() if asked is None else asked) if found.platform == "cuda" else None


def _current_ordinal() -> int:
    import sys

    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else 0


# --- calls without a plan


@dataclass
class _Unbound:
    """Plans made by calls of one op without a plan: by full key, and by a quick hint at it."""

    op: Op
    plans: dict[Any, Plan] = field(default_factory=dict)
    hints: dict[Any, Plan] = field(default_factory=dict)

    def find(self, hint: Any, args: Mapping[str, Any]) -> Plan:
        facts = facts_of(self.op, args)
        device = next(args[n] for n in self.op.tensors).device
        forced = overrides()
        key = (device, forced, *facts.values())
        if key not in self.plans:
            if device.type not in ("cuda", "cpu"):
                raise ContractError(f"{self.op.name}: {next(iter(self.op.tensors))} is on {device}, wanted cuda or cpu")
            if device.type == "cuda" and _capturing():
                raise NotWarm(
                    f"{self.op.name}: a CUDA graph is being captured and no plan is bound for {format_facts(facts.items())}; "
                    "bind one and warm it up before the capture, or call the op once"
                )
            where = _device(device.index if device.type == "cuda" else "cpu")
            self.plans[key] = _bind(self.op, facts, where, default_policy(), registries.default(), None)
        self.hints[hint] = self.plans[key]
        return self.plans[key]


def unbound(op: Op) -> Callable[..., Any]:
    """A function with the op's signature that finds the plan by its arguments. Raises what `bind` and the plan raise."""
    state = _Unbound(op)
    arguments = argument_source(op)
    source = f"""def {op.name}({signature_source(op, {})}):
    try:
        hint = ({_hint_source(op)})
        plan = hints.get(hint)
    except (AttributeError, TypeError):  # an argument is no tensor: the contract check says which
        plan = hint = None
    if plan is None or not plan.guard({arguments}):
        plan = find(hint, {_dict_source(op)})
    return plan.go({arguments})
"""
    return _function(op.name, source, {"hints": state.hints, "find": state.find, "forced": _forced.get})


def _hint_source(op: Op) -> str:
    """A cheap tuple that nearly always differs where the static key does; the guard catches the rest."""
    parts = ["forced()"]
    wanted = {w for f in op.facts.values() for w in f.source.split()[1:] if f.source.startswith(("dim ", "heads "))}
    first = next(iter(op.tensors))
    by_calm = sorted(op.tensors.items(), key=lambda item: bool(STEP_DIMS & set(item[1].dims)))
    for name, spec in by_calm:
        if name not in op.optional and wanted & set(spec.dims):
            wanted -= set(spec.dims)
            parts += [f"{name}.shape", f"{name}.dtype"]
    parts += [f"{first}.get_device()", f"{op.batch}.dtype"]
    for fact in op.facts.values():
        kind, *words = fact.source.split()
        optional = words if kind == "has" else [name for names in fact.choices.values() for name in names]
        parts += [f"{name} is None" for name in optional]
        parts += words if kind == "arg" else []
    return ", ".join(parts) + ","


def served() -> tuple[Served, ...]:
    """What served, over all plans alive in this process."""
    return tuple(line for plan in list(_plans) for line in plan.served())
