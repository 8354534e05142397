"""Kernels of one op side by side on one case: real dims on a GPU, the op's first case on a CPU.

A kernel that disagrees with the reference gets no number. Times include the launch and waiting for the device; what a kernel
mutates is restored outside of them. `kernreg.tuning` measures as engines run: replayed graphs, cold caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernreg import registry
from kernreg.contract import Case, Kernel, Op
from kernreg.device import Device, current
from kernreg.dispatch import launcher

REGISTRY = registry.default()
GPU = torch.cuda.is_available()
HERE = current() if GPU else Device.cpu()
GDN = {"heads": "48/16"}
KDA = {"heads": "8/8"}

# op, what the case is called, facts, batch, options
GPU_CASES: tuple[tuple[str, str, dict[str, Any], int, dict[str, Any]], ...] = (
    ("gdn_ring_commit", "ring_16", {"ring": 16, **GDN}, 64, {"layers": 8, "history": 4, "fast": True}),
    ("gdn_ring_commit", "ring_64", {"ring": 64, **GDN}, 64, {"layers": 4, "history": 4, "fast": True}),
    ("gdn_ring_commit", "ring_128_full", {"ring": 128, **GDN}, 16, {"layers": 4, "history": "full", "fast": True}),
    ("gdn_ring_commit", "fp32_state", {"ring": 16, "state": "f32", **GDN}, 64, {"layers": 4, "history": 4, "fast": True}),
    ("gdn_ring_advance", "ring_16", {"ring": 16}, 64, {"history": 4}),
    ("gdn_ring_verify", "draft_8", {"draft": 8, "ring": 16, **GDN}, 32, {"lengths": "full", "history": 4, "fast": True}),
    ("kda_chain_verify", "ring_draft_4", {"draft": 4, **KDA}, 16, {"fast": True}),
    ("kda_chain_verify", "snapshot_draft_4", {"draft": 4, "mode": "snapshot", **KDA}, 16, {"fast": True}),
    ("kda_ring_commit", "ring_4", {"ring": 4, **KDA}, 64, {"layers": 20, "fast": True}),
    ("kda_snapshot_commit", "draft_4", {"draft": 4, "value_heads": 8}, 64, {"layers": 20, "fast": True}),
    ("conv_window_commit", "draft_4", {"draft": 4, "dim": 3072}, 64, {"layers": 20, "fast": True}),
)


def cases() -> list[tuple[Op, Case]]:
    """On a CPU one small case an op, on a GPU the real ones."""
    if not GPU:
        return [(op, op.samples.cases[0]) for op in REGISTRY.ops.values()]
    rows = ((REGISTRY.op(name), *rest) for name, *rest in GPU_CASES)
    return [(op, Case(name, op.complete(facts), batch, options)) for op, name, facts, batch, options in rows]


def rows() -> list[Any]:
    listed = [(op, case, kernel) for op, case in cases() for kernel in REGISTRY.kernels(op.name)]
    return [pytest.param(o, c, k, id=f"{o.name}-{c.id}-{k.name}") for o, c, k in listed]


def waiting(run: Callable[..., Any]) -> Callable[..., None]:
    """The call, until the device is done with it."""

    def call(**inputs: Any) -> None:
        run(**inputs)
        if GPU:
            torch.cuda.synchronize()

    return call


@pytest.mark.parametrize(("op", "case", "kernel"), rows())
def test_kernel(op: Op, case: Case, kernel: Kernel, benchmark: Any) -> None:
    if reason := REGISTRY.missing(kernel) or kernel.why_not(case.facts, HERE, kernel.default):
        pytest.skip(f"on {HERE}: {reason}")
    run = launcher(REGISTRY, kernel.variant(), case.facts)
    reference = launcher(REGISTRY, REGISTRY.kernel(op.name, "torch.reference").variant(), case.facts)
    inputs = op.samples.make_inputs(case, device="cuda" if GPU else "cpu")
    checks = op.samples.parity(run, reference, inputs)
    assert not [f"{check.name}: {check.worst:.3g} {check.detail}" for check in checks if not check.ok]

    kept = {name: inputs[name].clone() for name in op.mutates if inputs[name] is not None}

    def restore() -> tuple[tuple[()], dict[str, Any]]:
        for name, tensor in kept.items():
            inputs[name].copy_(tensor)
        if GPU:
            torch.cuda.synchronize()
        return (), inputs

    benchmark.group = f"{op.name} {case.id} on {HERE}"
    benchmark.extra_info["variant"] = kernel.variant().id
    benchmark.pedantic(waiting(run), setup=restore, rounds=50 if GPU else 5, warmup_rounds=2)
