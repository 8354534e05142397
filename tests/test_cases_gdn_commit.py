"""Faults seen in public (D01-D05, D09, D11), as small cases that every kernel of gdn_ring_commit must get right."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernreg import Kernel, ops, registry
from kernreg.check import facts_of
from kernreg.contract import Case
from kernreg.device import Device
from kernreg.dispatch import launcher
from kernreg.ops import _inputs, gdn_samples
from kernreg.ops._inputs import copy_inputs

Inputs = dict[str, Any]
OP = ops.gdn_ring_commit
REGISTRY = registry.default()


def commit_inputs(batch: int = 3, facts: dict[str, Any] | None = None, **options: Any) -> Inputs:
    base = {"ring": 16, "heads": "2/1", "k_dim": 64, "v_dim": 16, "state": "f32", "ring_dtype": "f16"}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return gdn_samples.make_commit(Case("test", base | (facts or {}), batch, options), device=device)


class Commit:
    """One kernel; calling it commits a copy of the inputs."""

    def __init__(self, kernel: Kernel, here: Device) -> None:
        self.kernel, self.here = kernel, here

    def in_place(self, inputs: Inputs) -> None:
        bound = OP.signature.bind(**inputs)
        bound.apply_defaults()
        facts = facts_of(OP, bound.arguments)
        variant = self.kernel.variant()
        if reason := self.kernel.why_not(facts, self.here, dict(variant.config)):
            pytest.skip(reason)
        launcher(REGISTRY, variant, facts)(**inputs)

    def __call__(self, inputs: Inputs) -> Inputs:
        after = copy_inputs(inputs)
        self.in_place(after)
        return after


@pytest.fixture(params=REGISTRY.kernels(OP.name), ids=lambda kernel: kernel.name)
def committed(request: pytest.FixtureRequest, here: Device) -> Commit:
    if reason := REGISTRY.missing(request.param):
        pytest.skip(reason)
    return Commit(request.param, here)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_inputs.bits(a), _inputs.bits(b))


def decoded(inputs: Inputs, row: int, count: int) -> torch.Tensor:
    """The row's state after its first `count` records, one step of the recurrence each, in float64: [NL, HV, V, K]."""
    slot, r = int(inputs["slots"][row]), int(inputs["rows"][row])
    group = inputs["state"].shape[2] // inputs["ring_k"].shape[2]
    s = inputs["state"][:, slot].double()
    for j in range(count):
        at = (int(inputs["base"][r]) + j) % inputs["ring_g"].shape[-1]
        u, k = (inputs[name][:, r, :, at].double() for name in ("ring_u", "ring_k"))
        if inputs["ring_u_low"] is not None:
            u, k = u + inputs["ring_u_low"][:, r, :, at].double(), k + inputs["ring_k_low"][:, r, :, at].double()
        decay = inputs["ring_g"][:, r, :, at].double().exp()
        s = decay[..., None, None] * s + torch.einsum("lhv,lhk->lhvk", u, k.repeat_interleave(group, 1))
    return s


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["ring_u", "ring_k", "ring_g", "ring_u_low", "ring_k_low"])
def test_d01_records_past_the_history_are_never_read(committed: Commit, name: str, poison: float) -> None:
    # sglang#42688: only the weight was masked, so that 0 * NaN reached the checkpoint
    inputs = commit_inputs(3, {"heads": "2/1", "v_dim": 80, "track": True}, history=4, base=(0, 13, 7), poison=None)
    dirty = copy_inputs(inputs)
    for row in range(3):
        r = int(inputs["rows"][row])
        for j in range(4, 16):
            dirty[name][:, r, :, (int(inputs["base"][r]) + j) % 16] = poison
    clean, got = committed(inputs), committed(dirty)
    assert got["state"].isfinite().all()
    assert equal(got["state"], clean["state"])


def test_d01_records_past_the_track_step_never_reach_a_snapshot(committed: Commit) -> None:
    inputs = commit_inputs(1, {"track": True}, history=4, accept=4, track=1, fold=0)
    inputs["track_step"].fill_(1)
    dirty = copy_inputs(inputs)
    r, base = int(inputs["rows"][0]), int(inputs["base"][int(inputs["rows"][0])])
    for name in ("ring_u", "ring_k", "ring_g", "ring_u_low", "ring_k_low"):
        for j in (2, 3):
            dirty[name][:, r, :, (base + j) % 16] = math.nan
    assert equal(committed(dirty)["state"], committed(inputs)["state"])


def test_d01_a_folded_row_without_history_keeps_its_bits(committed: Commit) -> None:
    inputs = commit_inputs(3, history=0, fold=1)
    assert inputs["ring_u"][:, inputs["rows"].long()].isnan().all()
    after = committed(inputs)
    assert equal(after["state"], inputs["state"])
    assert (after["fold"][inputs["rows"].long()] == 0).all()


def test_d02_nothing_accepted_takes_no_snapshot(committed: Commit) -> None:
    # vllm#48475: an accepted count of 0 became index -1
    inputs = commit_inputs(3, {"track": True}, accept=0, history=4, fold=0)
    assert inputs["track_step"].tolist() == [-1] * 3
    assert equal(committed(inputs)["state"], inputs["state"])


@pytest.mark.parametrize(("slots", "null", "live"), [([0, -1, 2], -1, {0, 2}), ([0, 0, 2], 0, {2})])
def test_d03_padding_never_touches_a_live_slot(committed: Commit, slots: list[int], null: int, live: set[int]) -> None:
    # sglang#36880, tokenspeed#700: padding mapped to a live slot
    inputs = commit_inputs(3, slots=4, history=4)
    inputs |= {"slots": torch.tensor(slots, device=inputs["slots"].device), "null_slot": null}
    for row, slot in enumerate(slots):
        if slot <= null:
            for name in ("ring_u", "ring_k"):
                inputs[name][:, int(inputs["rows"][row])] = 1e30 if inputs[name].dtype == torch.float32 else 6e4
    after = committed(inputs)
    moved = {s for s in range(4) if not equal(after["state"][:, s], inputs["state"][:, s])}
    assert moved == live
    for row, slot in enumerate(slots):
        r = int(inputs["rows"][row])
        assert int(after["write_pos"][r]) == (0 if slot in live else 4)


BAD_ROWS = (
    "slot",
    "row",
    "row_negative",
    "write_pos",
    "write_pos_negative",
    "accept",
    "accept_negative",
    "track_slot",
    "track_step",
)


@pytest.mark.parametrize("what", BAD_ROWS)
def test_d02_a_row_out_of_range_writes_nothing(committed: Commit, what: str) -> None:
    good = commit_inputs(2, {"track": True}, history=4)
    bad = commit_inputs(2, {"track": True}, history=4, bad={0: what})
    after = committed(bad)
    assert _inputs.bytes_check("", committed(good), good).worst > 0  # the same row in range does write
    only = {name: bad[name][1:] for name in ("slots", "rows", "accept", "track_slots", "track_step")}
    alone = copy_inputs(bad)
    committed.in_place({**alone, **only})
    assert _inputs.bytes_check("", after, alone).ok


@pytest.mark.parametrize("layout", ["aligned", "any"])
@pytest.mark.parametrize("pool", _inputs.POOLS)
def test_d05_commit_writes_through_every_pool(committed: Commit, pool: str, layout: str) -> None:
    # flashinfer#2509: the update went into a contiguous copy of the pool and was lost
    packed = commit_inputs(3, {"track": True}, layers=2)
    view = commit_inputs(3, {"track": True, "layout": layout}, layers=2, pool=pool, strided=True)
    before = copy_inputs(view)
    committed.in_place(view)
    assert equal(view["state"], committed(packed)["state"])
    cells = {"state": _inputs.touched(before["state"], view["state"], 3)}
    cursors = {name: view[name] for name in ("write_pos", "base", "fold")}
    assert _inputs.bytes_check("", view, {**before, **cursors}, cells).ok


@pytest.mark.parametrize("heads", [(1, 16), (2, 6), (3, 6)])
def test_d09_value_head_reads_its_own_key_head(committed: Commit, heads: tuple[int, int]) -> None:
    # sglang#36722: value heads paired with key heads by remainder instead of by group
    key_heads, value_heads = heads
    inputs = commit_inputs(1, {"heads": f"{value_heads}/{key_heads}", "low": False}, history=1)
    inputs["state"].zero_()
    for h in range(key_heads):
        inputs["ring_k"][:, :, h] = torch.eye(64)[h].half()
    state = committed(inputs)["state"][0, int(inputs["slots"][0])]  # [HV, V, K]
    columns = state.abs().sum(1).argmax(-1)
    assert columns.tolist() == [hv // (value_heads // key_heads) for hv in range(value_heads)]


def test_d11_a_reused_slot_ignores_old_records(committed: Commit) -> None:
    # sglang#37837: a reassigned slot kept the pending records of its former owner
    inputs = commit_inputs(1, history=3, fold=0)
    r = int(inputs["rows"][0])
    inputs["write_pos"][r] = 0
    inputs["fold"][r] = 1
    assert equal(committed(inputs)["state"], inputs["state"])


def test_d11_only_a_fold_materialises_pending_records(committed: Commit) -> None:
    inputs = commit_inputs(1, history=3, fold=0)
    slot, r = int(inputs["slots"][0]), int(inputs["rows"][0])
    full = decoded(inputs, 0, 3)
    copied = inputs["state"][:, slot].double()
    assert (copied - full).abs().max() > 0.1
    inputs["fold"][r] = 1
    torch.testing.assert_close(committed(inputs)["state"][:, slot].double(), full, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pitched", ["slot", "layer"])
def test_d04_pitches_past_2_to_the_31(committed: Commit, pitched: str) -> None:
    """Six slots (or layers) 2^29 + 16 elements apart: the last one starts past 2^31 elements."""
    if committed.kernel.backend != "torch" and not torch.cuda.is_available():
        pytest.skip("the interpreter copies whole storages")
    facts = {"heads": "1/1", "v_dim": 64, "state": "bf16", "low": False}
    inputs = commit_inputs(2, facts, history=4, slots=6 if pitched == "slot" else 2, layers=1 if pitched == "slot" else 6)
    inputs["slots"].copy_(torch.tensor([5, 1] if pitched == "slot" else [1, 0]))
    wide = copy_inputs(inputs)
    pitch = 2**29 + 16
    memory = torch.empty(5 * pitch + 2 * 64 * 64, dtype=torch.bfloat16, device=inputs["state"].device)  # touched where used
    strides = (1, pitch, 4096, 64, 1) if pitched == "slot" else (pitch, 4096, 4096, 64, 1)
    wide["state"] = memory.as_strided(inputs["state"].shape, strides).copy_(inputs["state"])
    committed.in_place(wide)
    compact = committed(inputs)
    for name in ("state", "write_pos", "base", "fold"):
        assert equal(wide[name].contiguous(), compact[name]), name
