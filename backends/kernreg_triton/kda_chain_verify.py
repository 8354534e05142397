"""Triton kernel of `kernreg.ops.kda_chain_verify`: convolution and gates of all steps at once, then the recurrence.

The first half, `_prepare`, does not depend on the recurrence. It leaves a *record* for each step and value head, fp32
[q | k | decay | v | beta, k . q] with q and k normalised, in a scratch tensor; the second half, `_recur`, reads nothing else
of a step. `unfused` launches the halves one after the other. `kda_chain_fused` has both in one launch, with the same arithmetic
and so the same bits, and takes from here all that needs no layouts.

No state is updated in place: all V tiles of a head read the same history, at times of their own.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernreg_triton._common import jit, load_index, stride_unit, strides
from kernreg_triton.kda_step import (
    convolve,
    decay,
    inverse_norm,
    load_row,
    load_state,
    log_decay,
    output,
    piece_width,
    sigmoid,
    step,
    store_state,
    sums,
)

VECTORS = (
    "p_qkv", "p_weight", "p_bias", "p_past", "p_windows", "p_a", "p_dt_bias", "p_state", "p_snapshots",
    "p_ring_k", "p_ring_v", "p_ring_g", "p_records", "p_o",
)  # fmt: skip
PREPARE_WARPS = 4


# --- convolution and gates --------------------------------------------------------------------------------------------


@triton.jit
def taps_of(x, past, parents, o_t, m_t, o_c, m_c, TREE: tl.constexpr):
    """Inputs [TC, C] of channels o_c at steps o_t, and 1, 2 and 3 tokens before; before the window, the past state's."""
    p_x, stride_x = x
    p_past, stride_past_c, stride_past_w = past
    p_parents, stride_parents = parents
    back = o_t  # the step so many tokens before; negative before the window
    short = o_t * 0  # how far before the window
    taps = ()
    for i in tl.static_range(4):
        p_inside = p_x + (back * stride_x)[:, None] + o_c[None, :]
        b_x = tl.load(p_inside, mask=(m_t & (back >= 0))[:, None] & m_c[None, :], other=0.0)
        if i > 0:
            p_before = p_past + ((3 - short) * stride_past_w)[:, None] + (o_c * stride_past_c)[None, :]
            b_before = tl.load(p_before, mask=(m_t & (back < 0))[:, None] & m_c[None, :], other=0.0)
            b_x = tl.where((back < 0)[:, None], b_before, b_x)
        taps = taps + (b_x,)
        if TREE:
            back = tl.load(p_parents + back * stride_parents, mask=m_t & (back >= 0), other=-1).to(tl.int64)
        else:
            back -= 1
        short = tl.where(back < 0, short + 1, 0)
    return taps


@triton.jit
def _convolve(taps, p_weight, p_bias, o_c, m_c, BIAS: tl.constexpr):
    weights = ()
    for j in tl.static_range(4):
        weights = weights + (tl.load(p_weight + o_c * 4 + j, mask=m_c, other=0.0),)
    b_bias = None
    if BIAS:
        b_bias = tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    return convolve(taps, weights, b_bias)


@triton.jit
def store_window(window, taps, o_t, m_t, o_c, m_c):
    """The last 3 inputs after each step, oldest first."""
    p_window, stride_t, stride_c, stride_w = window
    p_cells = p_window + (o_t * stride_t)[:, None] + (o_c * stride_c)[None, :]
    for i in tl.static_range(3):
        tl.store(p_cells + i * stride_w, taps[2 - i], mask=m_t[:, None] & m_c[None, :])


@triton.jit
def _prepare(
    x, past, parents, weights, window, gates, rings, p_record, scale, lower_bound, length, i_h, i_hv, o_v, m_v,
    length_k, T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SAFE: tl.constexpr,
    RING: tl.constexpr, TREE: tl.constexpr, BIAS: tl.constexpr,
    BW: tl.constexpr, C: tl.constexpr, TC: tl.constexpr,
):  # fmt: skip
    """Records of a row's steps for value head i_hv and columns o_v, their windows, and ring entries.

    What the value heads of a key head share, one stores: q, k and their windows, where length_k is not 0.
    """
    p_weight, p_bias = weights
    p_a, stride_a, p_b, stride_b, p_A_log, p_dt_bias = gates
    p_ring_k, p_ring_v, p_ring_g, p_ring_beta = rings
    RECORD: tl.constexpr = 3 * K + BW + 4
    o_k = tl.arange(0, K)
    m_k = o_k < K
    o_q_c, o_k_c = i_h * K + o_k, (H + i_h) * K + o_k
    o_v_c = 2 * H * K + i_hv * V + o_v
    for t_0 in range(0, T, TC):
        o_t = t_0 + tl.arange(0, TC).to(tl.int64)
        m_t, m_t_k = o_t < length, o_t < length_k
        # every load before the first store, which nothing may pass
        q_taps = taps_of(x, past, parents, o_t, m_t, o_q_c, m_k, TREE)
        k_taps = taps_of(x, past, parents, o_t, m_t, o_k_c, m_k, TREE)
        v_taps = taps_of(x, past, parents, o_t, m_t, o_v_c, m_v, TREE)
        b_a = tl.load(p_a + o_t[:, None] * stride_a + (i_hv * K + o_k)[None, :], mask=m_t[:, None], other=0.0)
        b_b = tl.load(p_b + o_t * stride_b + i_hv, mask=m_t, other=0.0)
        b_q = _convolve(q_taps, p_weight, p_bias, o_q_c, m_k, BIAS)
        b_k = _convolve(k_taps, p_weight, p_bias, o_k_c, m_k, BIAS)
        b_v = _convolve(v_taps, p_weight, p_bias, o_v_c, m_v, BIAS)
        b_dt_bias = tl.load(p_dt_bias + i_hv * K + o_k)[None, :]
        b_g = log_decay(b_a.to(tl.float32), b_dt_bias, tl.load(p_A_log + i_hv), lower_bound, SAFE)
        b_beta = sigmoid(b_b.to(tl.float32))

        store_window(window, q_taps, o_t, m_t_k, o_q_c, m_k)
        store_window(window, k_taps, o_t, m_t_k, o_k_c, m_k)
        store_window(window, v_taps, o_t, m_t, o_v_c, m_v)
        if RING:
            tl.store(p_ring_k + (o_t * K)[:, None] + o_k[None, :], b_k, mask=m_t_k[:, None])
            tl.store(p_ring_v + (o_t * V)[:, None] + o_v[None, :], b_v, mask=m_t[:, None] & m_v[None, :])
            tl.store(p_ring_g + (o_t * K)[:, None] + o_k[None, :], b_g, mask=m_t[:, None])
            tl.store(p_ring_beta + o_t, b_beta, mask=m_t)

        b_q, b_k = b_q.to(tl.float32), b_k.to(tl.float32)
        b_q *= (inverse_norm(sums(b_q * b_q, TC, K, C)) * scale)[:, None]
        b_k *= inverse_norm(sums(b_k * b_k, TC, K, C))[:, None]
        p_cells = p_record + (o_t * RECORD)[:, None] + o_k[None, :]
        tl.store(p_cells, b_q, mask=m_t[:, None])
        tl.store(p_cells + K, b_k, mask=m_t[:, None])
        tl.store(p_cells + 2 * K, decay(b_g), mask=m_t[:, None])
        p_cells = p_record + 3 * K + (o_t * RECORD)[:, None] + tl.arange(0, BW)[None, :]
        tl.store(p_cells, b_v.to(tl.float32), mask=m_t[:, None])
        p_cells = p_record + 3 * K + BW + o_t * RECORD
        tl.store(p_cells, b_beta, mask=m_t)
        tl.store(p_cells + 1, sums(b_q * b_k, TC, K, C), mask=m_t)


# --- recurrence -------------------------------------------------------------------------------------------------------


@triton.jit
def _recur(
    p_record, p_state, snapshot, parents, p_o, length, o_v, m_v,
    T: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RING: tl.constexpr, RAGGED: tl.constexpr,
    TREE: tl.constexpr, BV: tl.constexpr, BW: tl.constexpr, C: tl.constexpr, TP: tl.constexpr,
):  # fmt: skip
    """The delta rule over a row's records for columns o_v of a head; p_o [T, HV, V] gets o."""
    p_snapshot, stride_snapshot_t = snapshot
    p_parents, stride_parents = parents
    RECORD: tl.constexpr = 3 * K + BW + 4
    h = load_state(p_state, o_v, m_v, K, C)
    o_t = tl.arange(0, TP)
    b_o = tl.zeros([BV, TP], tl.float32)  # kept to the end: a store in the loop would hold back the loads of the next step
    for t in range(length.to(tl.int32) if RAGGED else T):
        p_t = p_record + t * RECORD
        q = load_row(p_t, C, K // C)
        k = load_row(p_t + K, C, K // C)
        b_decay = load_row(p_t + 2 * K, C, K // C)
        b_v = tl.load(p_t + 3 * K + o_v)
        beta, kq = tl.load(p_t + 3 * K + BW), tl.load(p_t + 3 * K + BW + 1)
        if TREE:
            h = _parent_state(p_state, p_snapshot, stride_snapshot_t, tl.load(p_parents + t * stride_parents), o_v, K, V, C)
        h, decayed, b_u = step(h, b_decay, k, b_v, beta, BV, C)
        if not RING:
            store_state(p_snapshot + t * stride_snapshot_t, h, o_v, m_v, K, C)
        if TREE:
            tl.debug_barrier()  # a later step may read this snapshot back
        b_o = tl.where((o_t == t)[None, :], output(decayed, b_u, q, kq, BV, C)[:, None], b_o)
    p_cells = p_o + (o_t.to(tl.int64) * (HV * V))[None, :] + o_v[:, None]
    tl.store(p_cells, b_o.to(p_o.dtype.element_ty), mask=m_v[:, None] & (o_t < length)[None, :])


@triton.jit
def _parent_state(p_state, p_snapshot, stride_t, parent, o_v, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr):
    """The state after step `parent` of the same row; before the first step for -1."""
    root = load_state(p_state, o_v, o_v < tl.where(parent < 0, V, 0), K, C)
    inner = load_state(p_snapshot + parent * stride_t, o_v, o_v < tl.where(parent < 0, 0, V), K, C)
    h = ()
    for j in tl.static_range(K // C):
        h = h + (tl.where(parent < 0, root[j], inner[j]),)
    return h


# --- kernel -----------------------------------------------------------------------------------------------------------


@triton.jit
def row_of(i_b, p_slots, p_conv_slots, p_window_rows, stride_slots, stride_conv_slots, stride_window_rows, S, CS, WR, null_slot):
    """(is it no padding?, state slot, conv slot, window row) of batch row i_b."""
    slot = load_index(p_slots, i_b, stride_slots)
    conv_slot = load_index(p_conv_slots, i_b, stride_conv_slots)
    window_row = load_index(p_window_rows, i_b, stride_window_rows)
    live = (slot > null_slot) & (slot >= 0) & (slot < S) & (conv_slot > null_slot) & (conv_slot >= 0) & (conv_slot < CS)
    return live & (window_row >= 0) & (window_row < WR), slot, conv_slot, window_row


@triton.jit
def _tree_in_range(parents, length, TP: tl.constexpr):
    """Is every step's parent -1 or an earlier step?"""
    p_parents, stride_parents = parents
    o_t = tl.arange(0, TP).to(tl.int64)
    b_parent = tl.load(p_parents + o_t * stride_parents, mask=o_t < length, other=-1).to(tl.int64)
    return tl.sum(((b_parent < -1) | (b_parent >= o_t)).to(tl.int32)) == 0


@jit(vectors=VECTORS)
def _chain(
    p_qkv, p_weight, p_bias, p_past, p_windows, p_a, p_b, p_A_log, p_dt_bias, p_state, p_snapshots,
    p_ring_k, p_ring_v, p_ring_g, p_ring_beta, p_slots, p_conv_slots, p_window_rows, p_cu_seqlens, p_parents, p_records, p_o,
    lower_bound, scale, N: tl.int64, S: tl.int64, CS: tl.int64, WR: tl.int64, L: tl.int64, null_slot: tl.int64,
    stride_qkv: tl.int64, stride_past_s: tl.int64, stride_past_c: tl.int64, stride_past_w: tl.int64,
    stride_window_r: tl.int64, stride_window_t: tl.int64, stride_window_c: tl.int64, stride_window_w: tl.int64,
    stride_a: tl.int64, stride_b: tl.int64, stride_state: tl.int64, stride_snapshot_r: tl.int64, stride_snapshot_t: tl.int64,
    stride_ring_k: tl.int64, stride_ring_v: tl.int64, stride_ring_g: tl.int64, stride_ring_beta: tl.int64,
    stride_slots: tl.int64, stride_conv_slots: tl.int64, stride_window_rows: tl.int64,
    stride_cu: tl.int64, stride_parents_b: tl.int64, stride_parents_t: tl.int64,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SAFE: tl.constexpr,
    RING: tl.constexpr, RAGGED: tl.constexpr, TREE: tl.constexpr, BIAS: tl.constexpr, ALIGNED: tl.constexpr,
    UNIT_ACT: tl.constexpr, UNIT_STATE: tl.constexpr, PREPARE: tl.constexpr,
    BV: tl.constexpr, BW: tl.constexpr, C: tl.constexpr, TC: tl.constexpr, TP: tl.constexpr,
):  # fmt: skip
    """One program for each row, value head and V tile; BW columns in a record."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_p = tl.program_id(0)
    i_v, i_hv, i_b = i_p % NV, i_p // NV % HV, (i_p // (NV * HV)).to(tl.int64)
    i_h = i_hv // (HV // H)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < V

    live, slot, conv_slot, window_row = row_of(
        i_b, p_slots, p_conv_slots, p_window_rows, stride_slots, stride_conv_slots, stride_window_rows, S, CS, WR, null_slot
    )
    begin = i_b * T
    length = T
    if RAGGED:
        begin = load_index(p_cu_seqlens, i_b, stride_cu)
        end = load_index(p_cu_seqlens, i_b + 1, stride_cu)
        length = end - begin
        live = live & (begin >= 0) & (length >= 0) & (length <= T) & (end <= N)
    parents = (p_parents, stride_parents_t)
    if TREE:
        parents = (p_parents + i_b * stride_parents_b, stride_parents_t)
        live = live & _tree_in_range(parents, length, TP)
    p_o += begin * (HV * V) + i_hv * V
    if not live:
        if not PREPARE and not RAGGED:  # a ragged output starts as zeros: it may have tokens that no row covers
            o_t = tl.arange(0, TP)
            p_cells = p_o + (o_t.to(tl.int64) * (HV * V))[None, :] + o_v[:, None]
            tl.store(p_cells, tl.zeros([BV, TP], p_o.dtype.element_ty), mask=m_v[:, None] & (o_t < T)[None, :])
        return

    p_record = p_records + (i_b * HV + i_hv) * (T * (3 * K + BW + 4))
    if PREPARE:
        x = (p_qkv + begin * (stride_qkv * UNIT_ACT), stride_qkv * UNIT_ACT)
        past = (
            p_past + conv_slot * (stride_past_s * UNIT_ACT), 1 if ALIGNED else stride_past_c, stride_past_w * UNIT_ACT
        )  # fmt: skip
        window = (
            p_windows + window_row * (stride_window_r * UNIT_ACT),
            stride_window_t * UNIT_ACT,
            1 if ALIGNED else stride_window_c,
            stride_window_w * UNIT_ACT,
        )
        gates = (p_a + begin * (stride_a * UNIT_ACT), stride_a * UNIT_ACT, p_b + begin * stride_b, stride_b, p_A_log, p_dt_bias)
        rings = (p_ring_k, p_ring_v, p_ring_g, p_ring_beta)
        if RING:
            rings = (
                p_ring_k + slot * (stride_ring_k * UNIT_ACT) + i_h * L * K,
                p_ring_v + slot * (stride_ring_v * UNIT_ACT) + i_hv * L * V,
                p_ring_g + slot * (stride_ring_g * UNIT_STATE) + i_hv * L * K,
                p_ring_beta + slot * stride_ring_beta + i_hv * L,
            )
        length_k = tl.where(i_hv % (HV // H) == 0, length, 0)
        _prepare(
            x, past, parents, (p_weight, p_bias), window, gates, rings, p_record, scale, lower_bound, length, i_h, i_hv,
            o_v, m_v, length_k, T, H, HV, K, V, SAFE, RING, TREE, BIAS, BW, C, TC,
        )  # fmt: skip
    else:
        snapshot = (p_snapshots, stride_snapshot_t * UNIT_STATE)
        if not RING:
            p_snapshot = p_snapshots + window_row * (stride_snapshot_r * UNIT_STATE) + i_hv * V * K
            snapshot = (p_snapshot, stride_snapshot_t * UNIT_STATE)
        p_head = p_state + slot * (stride_state * UNIT_STATE) + i_hv * V * K
        _recur(
            p_record, p_head, snapshot, parents, p_o, length, o_v, m_v,
            T, HV, K, V, RING, RAGGED, TREE, BV, BW, C, TP,
        )  # fmt: skip


# --- launchers --------------------------------------------------------------------------------------------------------


def unfused(
    mixed_qkv: torch.Tensor, conv_weight: torch.Tensor, conv_state: torch.Tensor, windows: torch.Tensor,
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, state: torch.Tensor,
    slots: torch.Tensor, conv_slots: torch.Tensor, window_rows: torch.Tensor, *,
    conv_bias: torch.Tensor | None = None, snapshots: torch.Tensor | None = None,
    ring_k: torch.Tensor | None = None, ring_v: torch.Tensor | None = None,
    ring_g: torch.Tensor | None = None, ring_beta: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None, parents: torch.Tensor | None = None,
    lower_bound: float | None = None, scale: float | None = None, null_slot: int = -1,
    BV: int, num_warps: int, layout: str,
) -> torch.Tensor:  # fmt: skip
    """Two launches: all records, one program for each row and value head; then the recurrence, one for each V tile."""
    arguments = arguments_of(
        mixed_qkv, conv_weight, conv_state, windows, a, b, A_log, dt_bias, state, slots, conv_slots, window_rows, conv_bias,
        snapshots, ring_k, ring_v, ring_g, ring_beta, cu_seqlens, parents, lower_bound, scale, null_slot, layout,
    )  # fmt: skip
    HV, V, K = state.shape[1:]
    heads, BW = slots.shape[0] * HV, triton.next_power_of_2(V)
    BV = min(BV, BW)
    if heads:
        arguments["p_records"] = state.new_empty(heads * windows.shape[1] * (3 * K + BW + 4), dtype=torch.float32)
        chain = _chain[layout]
        TC = _steps_at_once(windows.shape[1], K, PREPARE_WARPS)
        chain[(heads,)](**arguments, PREPARE=True, BV=BW, BW=BW, TC=TC, num_warps=PREPARE_WARPS)
        tiles = triton.cdiv(V, BV)
        chain[(heads * tiles,)](**arguments, PREPARE=False, BV=BV, BW=BW, TC=1, num_warps=num_warps)
    return arguments["p_o"]


def _steps_at_once(T: int, K: int, num_warps: int) -> int:
    """Rows of the tiles [TC, K] of `_prepare`: 16 channels a thread, more would spill."""
    return max(1, min(triton.next_power_of_2(T), 16 * 32 * num_warps // K, 8))


def arguments_of(
    mixed_qkv: torch.Tensor, conv_weight: torch.Tensor, conv_state: torch.Tensor, windows: torch.Tensor,
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, state: torch.Tensor,
    slots: torch.Tensor, conv_slots: torch.Tensor, window_rows: torch.Tensor,
    conv_bias: torch.Tensor | None, snapshots: torch.Tensor | None, ring_k: torch.Tensor | None, ring_v: torch.Tensor | None,
    ring_g: torch.Tensor | None, ring_beta: torch.Tensor | None, cu_seqlens: torch.Tensor | None, parents: torch.Tensor | None,
    lower_bound: float | None, scale: float | None, null_slot: int, layout: str,
) -> dict[str, Any]:  # fmt: skip
    """What all launches of a call share, the output included."""
    HV, V, K = state.shape[1:]
    T = windows.shape[1]
    act, wide = stride_unit(layout, mixed_qkv), stride_unit(layout, state)
    past_s, _, past_w = strides(conv_state, 3, act)
    window_r, window_t, _, window_w = strides(windows, 4, act)
    snapshot_r, snapshot_t = strides(snapshots, 2, wide)
    parents_b, parents_t = strides(parents, 2)
    new_output = mixed_qkv.new_empty if cu_seqlens is None else mixed_qkv.new_zeros
    tensors = {
        "p_qkv": mixed_qkv, "p_weight": conv_weight, "p_bias": conv_bias, "p_past": conv_state, "p_windows": windows,
        "p_a": a, "p_b": b, "p_A_log": A_log, "p_dt_bias": dt_bias, "p_state": state, "p_snapshots": snapshots,
        "p_ring_k": ring_k, "p_ring_v": ring_v, "p_ring_g": ring_g, "p_ring_beta": ring_beta, "p_slots": slots,
        "p_conv_slots": conv_slots, "p_window_rows": window_rows, "p_cu_seqlens": cu_seqlens, "p_parents": parents,
        "p_o": new_output((mixed_qkv.shape[0], HV, V)),
    }  # fmt: skip
    sizes = {
        "lower_bound": float(lower_bound or 0), "scale": float(K**-0.5 if scale is None else scale), "null_slot": null_slot,
        "N": mixed_qkv.shape[0], "S": state.shape[0], "CS": conv_state.shape[0], "WR": windows.shape[0],
        "L": 0 if ring_g is None else ring_g.shape[2],
    }  # fmt: skip
    steps = {
        "stride_qkv": mixed_qkv.stride(0) // act, "stride_a": a.stride(0) // act, "stride_b": b.stride(0),
        "stride_past_s": past_s, "stride_past_c": conv_state.stride(1), "stride_past_w": past_w,
        "stride_window_r": window_r, "stride_window_t": window_t, "stride_window_c": windows.stride(2),
        "stride_window_w": window_w, "stride_state": state.stride(0) // wide,
        "stride_snapshot_r": snapshot_r, "stride_snapshot_t": snapshot_t,
        "stride_ring_k": strides(ring_k, 1, act)[0], "stride_ring_v": strides(ring_v, 1, act)[0],
        "stride_ring_g": strides(ring_g, 1, wide)[0], "stride_ring_beta": strides(ring_beta, 1)[0],
        "stride_slots": slots.stride(0), "stride_conv_slots": conv_slots.stride(0),
        "stride_window_rows": window_rows.stride(0), "stride_cu": strides(cu_seqlens, 1)[0],
        "stride_parents_b": parents_b, "stride_parents_t": parents_t,
    }  # fmt: skip
    flags = {
        "T": T, "H": (mixed_qkv.shape[1] - HV * V) // (2 * K), "HV": HV, "K": K, "V": V, "SAFE": lower_bound is not None,
        "RING": ring_k is not None, "RAGGED": cu_seqlens is not None, "TREE": parents is not None,
        "BIAS": conv_bias is not None, "ALIGNED": layout == "aligned", "UNIT_ACT": act, "UNIT_STATE": wide,
        "C": piece_width(K), "TP": triton.next_power_of_2(T),
        "enable_fp_fusion": False,
    }  # fmt: skip
    return tensors | sizes | steps | flags
