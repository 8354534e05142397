"""The KDA references mean what the contract says, and the KDA parity checks can tell right from wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernreg.contract import Case, Check
from kernreg.ops import _inputs, kda_samples
from kernreg.ops._inputs import copy_inputs
from kernreg_torch.conv_window_commit import conv_window_commit
from kernreg_torch.kda_chain_verify import kda_chain_verify
from kernreg_torch.kda_ring_commit import kda_ring_commit
from kernreg_torch.kda_snapshot_commit import kda_snapshot_commit

Inputs = dict[str, Any]
RING = ("ring_k", "ring_v", "ring_g", "ring_beta")


def verify_inputs(batch: int = 2, facts: dict[str, Any] | None = None, **options: Any) -> Inputs:
    base = {"draft": 4, "heads": "6/2", "k_dim": 64, "v_dim": 16, "act": "bf16", "weight": "bf16"}
    return kda_samples.make_verify(Case("test", base | (facts or {}), batch, options))


def commit_inputs(batch: int = 3, facts: dict[str, Any] | None = None, **options: Any) -> Inputs:
    base = {"ring": 4, "heads": "2/1", "k_dim": 64, "v_dim": 16, "act": "bf16"}
    return kda_samples.make_ring_commit(Case("test", base | (facts or {}), batch, options))


def both_modes(batch: int = 2, facts: dict[str, Any] | None = None, **options: Any) -> tuple[Inputs, Inputs]:
    """The same call with a ring and with snapshots: streams of numbers are named, so the rest is equal."""
    ring, snapshot = (verify_inputs(batch, {**(facts or {}), "mode": mode}, **options) for mode in ("ring", "snapshot"))
    assert torch.equal(ring["mixed_qkv"], snapshot["mixed_qkv"])
    assert torch.equal(ring["state"], snapshot["state"])
    return ring, snapshot


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_inputs.bits(a), _inputs.bits(b))


def ring_args(inputs: Inputs, accept: list[int]) -> Inputs:
    """Arguments of a ring commit of one layer on verify's own tensors."""
    return {name: inputs[name][None] for name in ("state", *RING)} | {
        "slots": inputs["slots"],
        "accept": torch.tensor(accept),
        "null_slot": inputs["null_slot"],
    }


def conv_args(inputs: Inputs, accept: list[int]) -> Inputs:
    return {name: inputs[name][None] for name in ("conv_state", "windows")} | {
        "conv_slots": inputs["conv_slots"],
        "window_rows": inputs["window_rows"],
        "accept": torch.tensor(accept),
        "null_slot": inputs["null_slot"],
    }


# --- verify and commit are one recurrence ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"gate": "softplus", "bias": True},
        {"act": "f16", "weight": "f32", "heads": "2/2"},
        {"act": "f32", "weight": "f32", "k_dim": 128, "v_dim": 80},
        {"act": "f64", "weight": "f64", "heads": "16/1"},
    ],
    ids=str,
)
def test_committed_ring_is_the_snapshot_bit_for_bit(facts: dict[str, Any]) -> None:
    ring, snapshot = both_modes(2, facts, ring=7)
    assert equal(kda_chain_verify(**ring), kda_chain_verify(**snapshot))
    for count in range(5):
        after = copy_inputs(ring)
        kda_ring_commit(**ring_args(after, [count, 4 - count]))
        copied = snapshot["state"].clone()
        kda_snapshot_commit(
            copied[None], snapshot["snapshots"][None], ring["slots"], ring["window_rows"], torch.tensor([count, 4 - count])
        )
        assert equal(after["state"], copied)
        if count:
            wanted = snapshot["snapshots"][int(ring["window_rows"][0]), count - 1]
            assert equal(after["state"][int(ring["slots"][0])], wanted)


def test_tracked_ring_is_the_snapshot_bit_for_bit() -> None:
    ring, snapshot = both_modes(1)
    kda_chain_verify(**ring)
    kda_chain_verify(**snapshot)
    free = (int(ring["slots"][0]) + 1) % ring["state"].shape[0]
    kda_ring_commit(**ring_args(ring, [3]), track_slots=torch.tensor([free]), track_step=torch.tensor([1]))
    row = int(ring["window_rows"][0])
    assert equal(ring["state"][free], snapshot["snapshots"][row, 1])
    assert equal(ring["state"][int(ring["slots"][0])], snapshot["snapshots"][row, 2])


@pytest.mark.parametrize("facts", [{}, {"act": "f64", "weight": "f64", "gate": "softplus"}], ids=str)
def test_a_window_is_as_many_decode_steps(facts: dict[str, Any]) -> None:
    window = verify_inputs(2, facts)
    steps = copy_inputs(window)
    o = kda_chain_verify(**window)
    assert equal(window["state"], steps["state"])  # verify only reads them
    assert equal(window["conv_state"], steps["conv_state"])
    kda_ring_commit(**ring_args(window, [4, 4]))
    conv_window_commit(**conv_args(window, [4, 4]))
    for t in range(4):
        tokens = torch.tensor([t, 4 + t])
        call = {**steps, **{name: steps[name][tokens] for name in ("mixed_qkv", "a", "b")}, "windows": steps["windows"][:, :1]}
        assert equal(kda_chain_verify(**call), o[tokens])
        kda_ring_commit(**ring_args(call, [1, 1]))
        conv_window_commit(**conv_args(call, [1, 1]))
    assert equal(window["state"], steps["state"])
    assert equal(window["conv_state"], steps["conv_state"])


def test_ragged_windows_are_prefixes_of_whole_ones() -> None:
    whole = verify_inputs(3, {"window": "ragged"}, lengths=4)
    o = kda_chain_verify(**whole)
    lengths, offsets = [4, 1, 2], [0, 4, 5, 7]
    tokens = [4 * row + t for row, length in enumerate(lengths) for t in range(length)]
    ragged = verify_inputs(3, {"window": "ragged"}, lengths=4)
    ragged |= {name: ragged[name][tokens] for name in ("mixed_qkv", "a", "b")}
    ragged["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32)
    assert equal(kda_chain_verify(**ragged), o[tokens])
    for row, length in enumerate(lengths):
        slot, window = int(ragged["slots"][row]), int(ragged["window_rows"][row])
        for name in RING:
            assert equal(ragged[name][slot][:, :length], whole[name][slot][:, :length])
            assert ragged[name][slot][:, length:].isnan().all()
        assert ragged["windows"][window, length:].isnan().all()


def test_every_way_through_a_tree_is_a_chain() -> None:
    parents = (-1, 0, 0, 2, -1, 4)
    tree = verify_inputs(2, {"draft": 6, "mode": "snapshot", "window": "tree"}, tree=parents)
    start = copy_inputs(tree)
    o = kda_chain_verify(**tree)
    for leaf in (1, 3, 5):
        way = [leaf]
        while parents[way[0]] >= 0:
            way.insert(0, parents[way[0]])
        tokens = [6 * row + t for row in range(2) for t in way]
        chain = copy_inputs(start) | {"parents": None, "cu_seqlens": torch.tensor([0, len(way), 2 * len(way)])}
        chain |= {name: start[name][tokens] for name in ("mixed_qkv", "a", "b")}
        assert equal(kda_chain_verify(**chain), o[tokens])
        rows = tree["window_rows"].long()
        for name in ("snapshots", "windows"):
            assert equal(chain[name][rows][:, : len(way)], tree[name][rows][:, way])


def test_a_tree_that_points_forward_writes_nothing() -> None:
    inputs = verify_inputs(2, {"mode": "snapshot", "window": "tree"}, bad={0: "parent"})
    after = copy_inputs(inputs)
    o = kda_chain_verify(**after)
    row = int(inputs["window_rows"][0])
    assert after["snapshots"][row].isnan().all()
    assert after["windows"][row].isnan().all()
    assert not o[:4].any()
    assert o[4:].any()


# --- values ---------------------------------------------------------------------------------------------------------


def one_token(**facts: Any) -> Inputs:
    """One token, one head, K = 64, V = 16, everything zero, and a convolution that passes the token through SiLU."""
    inputs = verify_inputs(1, {"draft": 1, "heads": "1/1", **facts})
    for name in ("mixed_qkv", "conv_weight", "conv_state", "state", "a", "b", "A_log", "dt_bias"):
        inputs[name].zero_()
    inputs["conv_weight"][:, 3] = 1
    return inputs


@pytest.mark.parametrize("act", ["bf16", "f16", "f32"])
def test_beta_is_never_rounded_to_16_bits(act: str) -> None:
    # sglang#38975: sigmoid(b) went through bf16, 0.62109375 for b = 0.5
    inputs = one_token(act=act)
    inputs["b"].fill_(0.5)
    kda_chain_verify(**inputs)
    slot = int(inputs["slots"][0])
    assert float(inputs["ring_beta"][slot, 0, 0]) == pytest.approx(0.62245935, abs=1e-7)


def test_beta_reaches_the_state_in_fp32() -> None:
    inputs = one_token(mode="snapshot", act="bf16")
    inputs["b"].fill_(0.5)
    inputs["mixed_qkv"][0, 64] = 20.0  # k = e_0 after the norm
    inputs["mixed_qkv"][0, 128] = 20.0  # v = 20 e_0: SiLU is the identity there
    kda_chain_verify(**inputs)
    h = inputs["snapshots"][int(inputs["window_rows"][0]), 0, 0]
    assert float(h[0, 0]) / 20 == pytest.approx(0.62245935, abs=1e-6)
    assert not h[1:].any()
    assert not h[:, 1:].any()


@pytest.mark.parametrize(("gate", "wanted"), [("safe", -5 / (1 + math.exp(-3))), ("softplus", -math.log1p(math.exp(3)))])
def test_each_gate_takes_its_own_branch(gate: str, wanted: float) -> None:
    # tokenspeed#847: the safe gate was replaced by a clamped softplus
    inputs = one_token(gate=gate)
    inputs["a"].fill_(3.0)
    inputs["state"].fill_(1.0)
    kda_chain_verify(**inputs)
    slot = int(inputs["slots"][0])
    torch.testing.assert_close(inputs["ring_g"][slot, 0, 0], torch.full((64,), wanted), rtol=0, atol=1e-6)
    kda_ring_commit(**ring_args(inputs, [1]))
    torch.testing.assert_close(inputs["state"][slot], torch.full((1, 16, 64), math.exp(wanted)), rtol=1e-5, atol=0)


def test_the_softplus_is_linear_above_20() -> None:
    inputs = one_token(gate="softplus", act="f32")
    inputs["a"][0, :3] = torch.tensor([19.0, 21.0, 1e4])
    kda_chain_verify(**inputs)
    g = inputs["ring_g"][int(inputs["slots"][0]), 0, 0]
    assert g[:3].tolist() == pytest.approx([-math.log1p(math.exp(19)), -21.0, -1e4], rel=1e-7)


@pytest.mark.parametrize("heads", [(1, 16), (2, 6), (3, 6)])
def test_value_head_reads_its_own_key_head(heads: tuple[int, int]) -> None:
    # sglang#36722: value heads paired with key heads by remainder instead of by group
    key_heads, value_heads = heads
    inputs = one_token(heads=f"{value_heads}/{key_heads}")
    k = inputs["mixed_qkv"][0, 64 * key_heads : 128 * key_heads].view(key_heads, 64)
    for h in range(key_heads):
        k[h, h] = 10.0
    inputs["mixed_qkv"][0, 128 * key_heads :] = 1.0
    kda_chain_verify(**inputs)
    kda_ring_commit(**ring_args(inputs, [1]))
    state = inputs["state"][int(inputs["slots"][0])]  # [HV, V, K]
    assert state.abs().sum(1).argmax(-1).tolist() == [hv // (value_heads // key_heads) for hv in range(value_heads)]
    assert (state.count_nonzero(-1) == 1).all()


def test_float64_in_float64_out() -> None:
    inputs = verify_inputs(2, {"act": "f64", "weight": "f64", "mode": "snapshot"})
    start = copy_inputs(inputs)
    o = kda_chain_verify(**inputs)
    assert (o.dtype, inputs["snapshots"].dtype) == (torch.float64, torch.float64)
    for row in kda_samples.live_rows(start):
        qkv = {token: convolved(start, row, step) for step, token in enumerate(row.tokens)}
        for step, exact in enumerate(kda_samples.oracle(start, row, qkv)):
            torch.testing.assert_close(inputs["snapshots"][row.window_row, step], exact.h, rtol=0, atol=1e-13)
            torch.testing.assert_close(o[row.tokens[step]], exact.o, rtol=0, atol=1e-13)


def convolved(inputs: Inputs, row: kda_samples.Row, step: int) -> tuple[torch.Tensor, ...]:
    """q, k, v of one token in float64, from all inputs of its row side by side."""
    _, value_heads, v_dim, k_dim = inputs["state"].shape
    x = torch.cat((inputs["conv_state"][row.conv_slot], inputs["mixed_qkv"][row.tokens].T), 1)
    y = torch.nn.functional.silu((x[:, step : step + 4] * inputs["conv_weight"]).sum(1))
    width = (y.shape[0] - value_heads * v_dim) // 2
    q, k, v = y.split((width, width, value_heads * v_dim))
    return q.view(-1, k_dim), k.view(-1, k_dim), v.view(-1, v_dim)


# --- padding, memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ring", "snapshot"])
@pytest.mark.parametrize(("slots", "null", "live"), [([0, -1, 2], -1, [0, 2]), ([0, 0, 2], 0, [2])])
def test_padding_never_touches_a_live_slot(mode: str, slots: list[int], null: int, live: list[int]) -> None:
    # sglang#36880, tokenspeed#700: padding mapped to a live slot
    inputs = verify_inputs(3, {"mode": mode}, slots=4)
    inputs |= {"slots": torch.tensor(slots), "null_slot": null, "conv_slots": torch.tensor([1, 2, 3])}
    for row, slot in enumerate(slots):
        if slot <= null:
            for name in ("mixed_qkv", "a", "b"):
                inputs[name][4 * row : 4 * row + 4] = 1e30
    after = copy_inputs(inputs)
    o = kda_chain_verify(**after)
    assert o.isfinite().all()
    for row, slot in enumerate(slots):
        window = int(inputs["window_rows"][row])
        assert bool(o[4 * row : 4 * row + 4].any()) == (slot in live and slot > null)
        assert after["windows"][window].isnan().all() == (slot <= null)
    if mode == "ring":
        written = [slot for slot in range(4) if not after["ring_k"][slot].isnan().all()]
        assert written == live


WRITES = ("windows", "snapshots", *RING)


@pytest.mark.parametrize("facts", [{}, {"mode": "snapshot"}], ids=str)
@pytest.mark.parametrize("what", ["slot", "conv_slot", "window_row", "window"])
def test_a_row_out_of_range_writes_nothing(what: str, facts: dict[str, Any]) -> None:
    window = {"window": "ragged"} if what == "window" else {}
    inputs = verify_inputs(2, {**facts, **window}, bad={0: what}, lengths="full")
    after = copy_inputs(inputs)
    o = kda_chain_verify(**after)
    live = list(kda_samples.live_rows(inputs))
    assert len(live) == 1
    kept = [t for t in range(o.shape[0]) if t not in live[0].tokens]
    assert kept
    assert not o[kept].any()
    for name in WRITES:
        if inputs[name] is not None:
            owner = live[0].slot if name in RING else live[0].window_row
            written = [i for i in range(after[name].shape[0]) if not equal(after[name][i], inputs[name][i])]
            assert written == [owner]


def test_an_overlong_or_negative_accept_touches_nothing() -> None:
    # vllm#48475: a count past the window read the neighbour's data, a count of 0 became index -1
    inputs = commit_inputs(4, accept=(0, 2, 4, 1), slots=8)
    inputs["accept"] = torch.tensor([0, 2, 5, -1])
    live = int(inputs["slots"][1])
    for name in RING:
        for slot in range(8):
            if slot != live:
                inputs[name][:, slot] = 1e30
    after = copy_inputs(inputs)
    kda_ring_commit(**after)
    moved = [s for s in range(8) if not equal(after["state"][:, s], inputs["state"][:, s])]
    assert moved == [live]
    assert after["state"].isfinite().all()


@pytest.mark.parametrize("what", ["slot", "accept", "accept_negative", "track_slot", "track_step"])
def test_a_commit_row_out_of_range_writes_nothing(what: str) -> None:
    inputs = commit_inputs(2, {"track": True}, accept=2, bad={0: what})
    after, alone = copy_inputs(inputs), copy_inputs(inputs)
    kda_ring_commit(**after)
    kda_ring_commit(**{**alone, **{n: inputs[n][1:] for n in ("slots", "accept", "track_slots", "track_step")}})
    assert _inputs.bytes_check("", after, alone).ok
    assert _inputs.bytes_check("", after, inputs).worst > 0


def test_nothing_accepted_leaves_state_and_window() -> None:
    inputs = verify_inputs(2)
    kda_chain_verify(**inputs)
    before = copy_inputs(inputs)
    kda_ring_commit(**ring_args(inputs, [0, 0]))
    conv_window_commit(**conv_args(inputs, [0, 0]))
    assert _inputs.bytes_check("", inputs, before).ok


@pytest.mark.parametrize("layout", ["aligned", "any"])
@pytest.mark.parametrize("pool", _inputs.POOLS)
def test_commit_writes_through_every_pool(pool: str, layout: str) -> None:
    # flashinfer#2509: the update went into a contiguous copy of the pool and was lost
    packed = commit_inputs(3, {"track": True}, layers=2)
    view = commit_inputs(3, {"track": True, "layout": layout}, layers=2, pool=pool, strided=True)
    before = copy_inputs(view)
    kda_ring_commit(**packed)
    kda_ring_commit(**view)
    assert equal(view["state"], packed["state"])
    assert _inputs.bytes_check("", view, before, {"state": _inputs.touched(before["state"], view["state"], 3)}).ok


@pytest.mark.parametrize("mode", ["ring", "snapshot"])
@pytest.mark.parametrize("conv", ["padded", "overlap", "width"])
def test_verify_is_the_same_in_every_memory(conv: str, mode: str) -> None:
    # flashinfer#4081: strided gate inputs were read with dense strides
    layout = "any" if conv == "width" else "aligned"
    plain = verify_inputs(3, {"mode": mode})
    view = verify_inputs(3, {"mode": mode, "layout": layout}, conv=conv, pool="alternate", packed_gates=True, strided=True)
    before = copy_inputs(view)
    assert equal(kda_chain_verify(**view), kda_chain_verify(**plain))
    for name in WRITES[1:]:
        assert plain[name] is None or equal(view[name], plain[name])
    for row in kda_samples.live_rows(before):
        assert equal(view["windows"][row.window_row], plain["windows"][row.window_row])
    reads = {name: before[name] for name in before if name not in WRITES}
    assert _inputs.bytes_check("", view, reads).ok


# --- the parity checks can fail ---------------------------------------------------------------------------------------


def names_of_failed(checks: list[Check]) -> set[str]:
    return {c.name if c.name == "o of padding" else c.name.partition(" of ")[0] for c in checks if not c.ok}


def wrong_verify(fault: str) -> Callable[..., torch.Tensor]:
    def run(**inputs: Any) -> torch.Tensor:
        if fault == "scale":
            inputs["scale"] = 1.01 * inputs["state"].shape[-1] ** -0.5
        if fault == "gate":
            inputs["A_log"] = inputs["A_log"] + 1e-4
        if fault == "beta":
            inputs["b"] = torch.logit(torch.sigmoid(inputs["b"].float()).to(inputs["b"].dtype).float())
        o = kda_chain_verify(**inputs)
        slot, row = int(inputs["slots"][0]), int(inputs["window_rows"][0])
        if fault == "rolls conv_state":
            inputs["conv_state"][int(inputs["conv_slots"][0])] = inputs["windows"][row, 0]
        if fault == "window off":
            inputs["windows"][row, 1, 3, 0] *= 2
        if fault == "k off" and inputs["ring_k"] is not None:
            inputs["ring_k"][slot, 0, 0, 3] *= 1.02
        if fault == "v off" and inputs["ring_v"] is not None:
            inputs["ring_v"][slot, 1, 2] *= 1.02
        if fault == "snapshot off" and inputs["snapshots"] is not None:
            inputs["snapshots"][row, 3, 1] *= 1.0001
        if fault == "writes state":
            inputs["state"][slot, 0, 0, 0] += 1
        if fault == "fills padding":
            o[-1, 0, 0] = math.nan
        return o

    return run


@pytest.mark.parametrize(
    ("fault", "mode", "check"),
    [
        ("scale", "ring", "o"),
        ("scale", "snapshot", "o"),
        ("gate", "ring", "ring_g"),
        ("gate", "snapshot", "snapshot"),
        ("beta", "ring", "ring_beta"),
        ("beta", "snapshot", "snapshot"),
        ("k off", "ring", "ring_k"),
        ("v off", "ring", "ring_v"),
        ("snapshot off", "snapshot", "snapshot"),
        ("rolls conv_state", "ring", "windows and all else exact"),
        ("window off", "ring", "windows and all else exact"),
        ("writes state", "ring", "windows and all else exact"),
        ("fills padding", "ring", "o of padding"),
    ],
)
def test_verify_parity_finds(fault: str, mode: str, check: str) -> None:
    inputs = verify_inputs(3, {"mode": mode}, padding=(2,))
    original = copy_inputs(inputs)
    assert check in names_of_failed(kda_samples.check_verify(wrong_verify(fault), kda_chain_verify, inputs))
    assert _inputs.bytes_check("", inputs, original).ok  # parity works on copies


def test_verify_parity_finds_a_wrong_branch_of_a_tree() -> None:
    inputs = verify_inputs(2, {"mode": "snapshot", "window": "tree"}, tree=(-1, 0, 0, 1))

    def run(**call: Any) -> torch.Tensor:
        if call["parents"] is not None:
            call["parents"] = torch.tensor([[-1, 0, 1, 1]] * 2)
        return kda_chain_verify(**call)

    assert {"snapshot", "o"} <= names_of_failed(kda_samples.check_verify(run, kda_chain_verify, inputs))


def test_ring_commit_parity_finds_one_record_too_many() -> None:
    inputs = commit_inputs(3, accept=(2, 1, 3), poison=None)

    def run(**call: Any) -> None:
        kda_ring_commit(**{**call, "accept": call["accept"] + 1})

    assert names_of_failed(kda_samples.check_ring_commit(run, kda_ring_commit, inputs)) == {"state"}


def test_copy_parity_finds_a_wrong_step() -> None:
    facts = {"draft": 3, "dim": 64, "act": "f16"}
    inputs = kda_samples.make_conv_commit(Case("test", facts, 2, {"accept": 2}))

    def run(**call: Any) -> None:
        conv_window_commit(**{**call, "accept": call["accept"] + 1})

    assert names_of_failed(kda_samples.check_copy(run, conv_window_commit, inputs)) == {"all exact"}
