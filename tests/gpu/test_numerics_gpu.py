"""Fingerprints on a GPU: the promised classes, races, a busy GPU, and inputs of the same bytes everywhere."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kernreg import doctor, ops, registry
from kernreg.contract import Case
from kernreg.device import current
from kernreg.numerics import RACY, Fingerprint, battery, classes, facts_key, fingerprint, fingerprint_of
from kernreg.ops._inputs import bits
from kernreg.tuning.fingerprints import Task, fingerprints

pytestmark = pytest.mark.gpu
REGISTRY = registry.default()
KDA = {"draft": 4, "heads": "8/8", "mode": "ring"}
GDN = {"ring": 16, "heads": "12/4"}


def classes_of(op: str, facts: Mapping[str, Any], *kernels: str) -> dict[str, tuple[str, ...]]:
    """Classes of every variant of these kernels that serves the key here; all of them have fingerprints."""
    tasks = []
    for kernel in (REGISTRY.kernel(op, name) for name in kernels):
        for values in itertools.product(*kernel.config.values()):
            variant = kernel.variant(dict(zip(kernel.config, values, strict=True)))
            if kernel.why_not(REGISTRY.op(op).complete(facts), current(), dict(variant.config)) is None:
                tasks.append(Task.of(variant, facts, "cuda"))
    found = {task.variant: value for task, value in fingerprints(tasks)}
    for variant, value in found.items():
        assert isinstance(value, Fingerprint) and value.ok and value.busy, (variant, value)
        assert value.elements >= 1_000_000, (variant, value)
    return classes({variant: {facts_key(facts): value.bits} for variant, value in found.items()})


def test_all_variants_of_kda_verify_are_one_class() -> None:
    found = classes_of("kda_chain_verify", KDA, "triton.fused", "triton.unfused")
    print(found)
    assert len(found) == 1 and len(next(iter(found.values()))) >= 8


def test_all_variants_of_kda_commit_are_one_class() -> None:
    assert len(classes_of("kda_ring_commit", {"ring": 4, "heads": "8/8"}, "triton.replay", "triton.shared")) == 1


def test_per_head_and_head_group_are_apart() -> None:
    found = classes_of("gdn_ring_commit", GDN, "triton.per_head", "triton.head_group")
    print(found)
    assert all(len({variant.partition("[")[0] for variant in members}) == 1 for members in found.values())


def test_a_battery_costs_little_once_it_is_compiled() -> None:
    facts = {"ring": 16, "heads": "48/16", "state": "f32", "track": True}
    variant = REGISTRY.kernel("gdn_ring_commit", "triton.sequential").variant()
    first = fingerprint(REGISTRY, variant, facts, "cuda")
    began = time.monotonic()
    again = fingerprint(REGISTRY, variant, facts, "cuda:0")
    assert again.ok and again == first, (first, again)
    assert time.monotonic() - began < 3.0


@pytest.mark.parametrize("op", sorted(REGISTRY.ops))
def test_inputs_are_the_same_bytes_on_the_gpu(op: str) -> None:
    contract = REGISTRY.op(op)
    given = {"ring": 16, "draft": 3, "heads": "2/1", "value_heads": 2, "dim": 48, "k_dim": 16, "v_dim": 16}
    facts = contract.complete({name: value for name, value in given.items() if name in contract.facts})
    for probe in battery(contract, facts):
        case = Case(probe.name, facts, probe.rows, probe.options)
        here, there = (contract.samples.make_inputs(case, device=device, seed=1) for device in ("cpu", "cuda"))
        for name, value in here.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                nan = value.isnan()
                assert torch.equal(nan, there[name].isnan().cpu()), name
                assert torch.equal(bits(value)[~nan], bits(there[name].cpu())[~nan]), name
            elif isinstance(value, torch.Tensor):
                assert torch.equal(value, there[name].cpu()), name


@triton.jit
def add_up(p_x, p_sum, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(p_sum, tl.sum(tl.load(p_x + o, mask=o < n, other=0.0)))


def test_sums_by_atomics_race() -> None:
    run = REGISTRY.load(REGISTRY.kernel("gdn_ring_commit", "torch.reference"))
    noise = torch.randn(1 << 20, device="cuda")

    def races(**arguments: Any) -> None:
        run(**arguments)
        total = torch.zeros(1, device="cuda")
        add_up[(1 << 14,)](noise, total, noise.numel(), BLOCK=64)
        arguments["state"][0, int(arguments["slots"][0]), 0, 0, 0] = total[0]

    found = fingerprint_of(ops.gdn_ring_commit, races, {"ring": 16, "heads": "2/1", "state": "f32"}, "cuda")
    assert found.verdict == RACY and "row 0: state[0, " in found.reason


def test_the_shipped_policy_holds_here() -> None:
    data = doctor.numerics()
    if data["nothing"]:
        pytest.skip(data["nothing"])
    assert data["moved"] == 0, [row for row in data["rows"] if row["state"] == "moved"]
