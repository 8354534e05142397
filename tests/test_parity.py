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


def served(kernel: Kernel, device: Device = HERE) -> list[Case]:
    """The cases that a kernel serves on a device with its default config."""
    config = dict(kernel.variant().config)
    return [c for c in REGISTRY.op(kernel.op).samples.cases if kernel.why_not(c.facts, device, config) is None]


def settings() -> list[tuple[Kernel, str, object]]:
    every = (kernel for op in REGISTRY.ops for kernel in REGISTRY.kernels(op))
    return [(kernel, name, value) for kernel in every for name, values in kernel.config.items() for value in values]


@pytest.mark.parametrize("kernel", [k for op in REGISTRY.ops for k in REGISTRY.kernels(op)], ids=lambda k: f"{k.op}-{k.name}")
def test_a_kernel_does_not_pass_by_serving_nothing(kernel: Kernel) -> None:
    if reason := REGISTRY.missing(kernel):
        pytest.skip(reason)
    found = served(kernel) or served(kernel, Device.declared("NVIDIA H200", "sm_90", 132))  # some need a GPU
    assert len(found) >= len(REGISTRY.op(kernel.op).samples.cases) // 2


@pytest.mark.parametrize(
    ("kernel", "name", "value"), [pytest.param(*s, id=f"{s[0].op}-{s[0].name}-{s[1]}{s[2]}") for s in settings()]
)
def test_every_config_value_agrees_with_the_reference(kernel: Kernel, name: str, value: object) -> None:
    if reason := REGISTRY.missing(kernel):
        pytest.skip(reason)
    op = REGISTRY.op(kernel.op)
    variant = kernel.variant({name: value})
    cases = [c for c in served(kernel) if kernel.why_not(c.facts, HERE, dict(variant.config)) is None]
    if not cases:
        pytest.skip(f"no case of the op is served with {name}={value} alone changed")
    run = launcher(REGISTRY, variant, cases[0].facts)
    reference = launcher(REGISTRY, REGISTRY.kernel(op.name, "torch.reference").variant(), cases[0].facts)
    checks = op.samples.parity(run, reference, op.samples.make_inputs(cases[0], device=DEVICE))
    assert not [f"{c.name}: {c.worst:.3g} of what is allowed {c.detail}" for c in checks if not c.ok]
