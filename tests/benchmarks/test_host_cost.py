"""What a choice costs on the host: bound, unbound, the contract check and whole calls, beside a plain dictionary look-up.

The kernel behind them does nothing. The limits are held against the quickest round, and only where benchmarks are enabled
(``--benchmark-enable``), which wants a quiet core; otherwise only the results are checked.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kernreg import Backend, Case, Kernel, Op, Plan, Registry, dispatch, ops, policy, registry
from kernreg.check import argument_source, signature_source

NANOSECOND = 1e-9
CHOICE, LOOK_UP, CHECK = 150 * NANOSECOND, 1500 * NANOSECOND, 5000 * NANOSECOND
BATCH = 8

# The ops with the most arguments, and a key as engines have it.
KEYS: dict[str, dict[str, Any]] = {
    "gdn_ring_commit": {"ring": 16, "heads": "6/2"},
    "gdn_ring_verify": {"draft": 4, "ring": 16, "heads": "6/2"},
    "kda_chain_verify": {"draft": 4, "heads": "2/2"},
}


class Bench:
    """One op with a kernel that does nothing: its plan, its unbound function and the arguments of a call."""

    def __init__(self, op: Op, known: Registry, loaded: policy.Policy) -> None:
        self.op = op
        key = op.complete(KEYS[op.name])
        self.plan: Plan = dispatch.bind(op, device="cpu", policy=loaded, registry=known, **key).warmup()
        self.arguments = op.samples.make_inputs(Case("cost", key, BATCH))
        self.unbound = dispatch.unbound(op)

    def call(self, function: Callable[..., Any]) -> Callable[[], Any]:
        """`function` with the arguments, without the cost of unpacking a dictionary."""
        return eval(f"lambda: function({argument_source(self.op)})", {**self.arguments, "function": function})

    def look_up(self) -> Callable[[], Plan]:
        """What an unbound call does to find its plan."""
        hint = eval(f"lambda: ({dispatch._hint_source(self.op)})", scope := {**self.arguments, "forced": dispatch._forced.get})
        hints = {hint(): self.plan}
        return eval(f"lambda: hints.get(({dispatch._hint_source(self.op)}))", {**scope, "hints": hints})


def idle(op: Op) -> Callable[..., None]:
    """A kernel of the op's signature that does nothing."""
    scope: dict[str, Any] = {"__name__": "idle_kernels"}
    exec(f"def nothing({signature_source(op, {})}): pass", scope)
    function: Callable[..., None] = scope["nothing"]
    return function


@pytest.fixture(scope="module", params=KEYS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    op: Op = getattr(ops, request.param)
    module = types.ModuleType("idle_kernels")
    module.nothing = idle(op)  # type: ignore[attr-defined]
    known = Registry()
    known.add_op(op)
    known.add(Backend("idle", (Kernel(op.name, "idle.nothing", "idle_kernels:nothing"),)))
    rows = f"schema: 1\ndevices: {{}}\nops:\n  {op.name}:\n    - otherwise: {{use: idle.nothing}}\n"
    loaded = policy.parse(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "idle_kernels", module)
        patch.setattr(registry, "default", lambda: known)
        patch.setattr(dispatch, "default_policy", lambda: loaded)
        yield Bench(op, known, loaded)


@pytest.fixture
def timed(bench: Bench, benchmark: Any) -> Callable[..., Any]:
    """Time a call, hold it against a limit, give back its result."""

    def run(function: Callable[..., Any], *args: Any, limit: float | None = None) -> Any:
        benchmark.group = f"host cost, {bench.op.name}"
        # many short rounds, so that the quickest one was left in peace
        result = benchmark.pedantic(function, args, rounds=1000, iterations=100, warmup_rounds=5)
        if limit is not None and benchmark.enabled:
            benchmark.extra_info["limit_ns"] = limit / NANOSECOND
            assert benchmark.stats.stats.min <= limit
        return result

    return run


def test_dictionary_look_up(bench: Bench, timed: Callable[..., Any]) -> None:
    table = {batch: bench.plan.variant(batch) for batch in (1, 2, 4, BATCH)}
    assert timed(table.get, BATCH).id == "idle.nothing"


def test_choice_in_a_bound_plan(bench: Bench, timed: Callable[..., Any]) -> None:
    assert timed(bench.plan.variant, BATCH, limit=CHOICE).id == "idle.nothing"


def test_unbound_look_up(bench: Bench, timed: Callable[..., Any]) -> None:
    assert timed(bench.look_up(), limit=LOOK_UP) is bench.plan


def test_contract_check(bench: Bench, timed: Callable[..., Any]) -> None:
    # the limit is for a call of 11 tensors; the verify ops have half as many again
    limit = CHECK if bench.op is ops.gdn_ring_commit else None
    assert timed(bench.call(bench.plan.guard), limit=limit) is True


def test_bound_call(bench: Bench, timed: Callable[..., Any]) -> None:
    before = sum(line.calls for line in bench.plan.served())
    assert timed(bench.call(bench.plan)) is None
    assert sum(line.calls for line in bench.plan.served()) > before


def test_unbound_call(bench: Bench, timed: Callable[..., Any]) -> None:
    assert timed(bench.call(bench.unbound)) is None
    served = [line for line in dispatch.served() if line.op == bench.op.name and line.variant == "idle.nothing"]
    assert len(served) == 2, "the plan that was bound, and the one that the unbound calls share"
