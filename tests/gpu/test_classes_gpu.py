"""Warm-up on a GPU, for a row that was measured with another Triton: equal bits let the batch choose again, others do not."""

from __future__ import annotations

import pytest
import torch

import kernreg
from kernreg import Plan, device, doctor, ops, policy, registry

pytestmark = pytest.mark.gpu

# the row's two variants, and whether their bits are equal: copies are, products in another order are not
PAIRS = {
    "copies": ("kda_snapshot_commit", "triton.copy, config: {BLOCK: 1024}", "triton.copy, config: {BLOCK: 4096}", True),
    "products": ("gdn_ring_commit", "triton.per_head", "triton.head_group", False),
}


def bind(pair: str) -> Plan:
    name, small, large, _ = PAIRS[pair]
    here, op, known = device.current(), getattr(ops, name), registry.default()
    kernels = {use.partition(",")[0] for use in (small, large)}
    digests = {kernel: known.source_digest(known.kernel(name, kernel))[:16] for kernel in kernels}
    text = f"""
schema: 1
devices:
  here:
    name: "{here.name}"
    arch: {here.arch_name}
    sms: {here.sms}
    measured: {{triton: "0.0.1"}}
    kernels: {{{name}: {{{", ".join(f'{kernel}: "{digest}"' for kernel, digest in digests.items())}}}}}
ops:
  {name}:
    - when: {{device: here}}
      class: k1
      batch: [{{upto: 4, use: {small}}}, {{upto: rest, use: {large}}}]
      measured: {{batch: [1, 8]}}
    - otherwise: {{use: torch.reference}}
"""
    return kernreg.bind(name, device="cuda", policy=policy.parse(text), **doctor.typical_key(op))


@pytest.mark.parametrize("pair", PAIRS)
def test_the_bits_of_this_gpu_decide(pair: str) -> None:
    equal = PAIRS[pair][-1]
    plan = bind(pair)
    assert [span[:2] for span in plan.resolved()] == [(1, None)]
    plan.warmup()
    assert not plan.evidence.failed and len(plan.evidence.bits) == 2
    assert len(set(plan.evidence.bits.values())) == (1 if equal else 2)
    assert [span[:2] for span in plan.resolved()] == ([(1, 4), (5, None)] if equal else [(1, None)])


def test_a_capture_measures_nothing() -> None:
    plan, other = bind("copies"), torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        other += 1
        with pytest.raises(kernreg.NotWarm, match="is to be measured and a CUDA graph is being captured"):
            plan.warmup()
    assert not plan.evidence.measured_here
