"""Every kernel that is listed, on every case of its op, against the reference. A new kernel is covered when it is listed."""

from __future__ import annotations

import pytest
import torch

from kernreg import registry
from kernreg.contract import Case, Kernel
from kernreg.device import Device, current
from kernreg.dispatch import launcher

REGISTRY = registry.default()
HERE = current() if torch.cuda.is_available() else Device.interpreter()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rows() -> list[tuple[Kernel, Case]]:
    return [(kernel, case) for op in REGISTRY.ops for kernel in REGISTRY.kernels(op) for case in REGISTRY.op(op).samples.cases]


@pytest.mark.parametrize(("kernel", "case"), [pytest.param(k, c, id=f"{k.op}-{k.name}-{c.id}") for k, c in rows()])
def test_kernel_agrees_with_the_reference(kernel: Kernel, case: Case) -> None:
    op = REGISTRY.op(kernel.op)
    variant = kernel.variant()
    if reason := REGISTRY.missing(kernel) or kernel.why_not(case.facts, HERE, dict(variant.config)):
        pytest.skip(reason)
    run = launcher(REGISTRY, variant, case.facts)
    reference = launcher(REGISTRY, REGISTRY.kernel(op.name, "torch.reference").variant(), case.facts)
    checks = op.samples.parity(run, reference, op.samples.make_inputs(case, device=DEVICE))
    assert checks, "a parity check that checks nothing"
    assert not [f"{c.name}: {c.worst:.3g} of what is allowed {c.detail}" for c in checks if not c.ok]


@pytest.mark.parametrize("op", sorted(REGISTRY.ops))
def test_every_op_has_a_reference_that_runs_anywhere(op: str) -> None:
    reference = REGISTRY.kernel(op, "torch.reference")
    for case in REGISTRY.op(op).samples.cases:
        assert reference.why_not(case.facts, Device.cpu(), {}) is None


@pytest.mark.parametrize("op", sorted(REGISTRY.ops))
def test_cases_have_unique_names_and_whole_keys(op: str) -> None:
    cases = REGISTRY.op(op).samples.cases
    assert len({case.id for case in cases}) == len(cases)
    for case in cases:
        assert set(case.facts) == set(REGISTRY.op(op).facts)
