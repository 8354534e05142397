"""Triton kernels of `kernreg.ops.gdn_ring_commit`: fold each row's ring history into its checkpoint, all layers at once.

Four ways through one sum, S' = S exp(P_n) + sum_j exp(P_n - P_j) u_j k_j^T, then a small kernel for the cursors:

- `per_head`: one program per value head and V tile, the whole ring in one product;
- `head_group`: a program serves the value heads of one key head, 16 records a product;
- `sequential`: rank-1 updates in fp32, only over the records that are there;
- `products`: few records in one product, up to 16 in the next, more in products of 32; what a row takes depends on its own
  history only. The state never leaves the layout in which tensor cores leave their results.

The weight of a record is exp of the sum of g *behind* it, never a difference of prefix sums: recent records keep full
precision however strongly older ones have decayed. Products run on bf16 high and low parts with fp32 accumulation. Records
that are not there are masked where they are loaded, so what they hold never enters arithmetic.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from kernreg_triton._common import DOT, jit, load_index, load_parts, load_wide, split, stride_unit, strides

VECTORS = ("p_state", "p_u", "p_k", "p_u_low", "p_k_low")


# --- what a row is asked to do; i_b may be one row or a block of rows


@triton.jit
def _locate(i_b, p_slots, p_rows, stride_slots, stride_rows, S, R, null_slot):
    """State slot and ring row of batch row i_b, and whether both are in range."""
    slot = load_index(p_slots, i_b, stride_slots)
    row = load_index(p_rows, i_b, stride_rows)
    return slot, row, (slot > null_slot) & (slot >= 0) & (slot < S) & (row >= 0) & (row < R)


@triton.jit
def _tasks(
    i_b, row, m_row, S, null_slot,
    p_write_pos, p_base, p_fold, p_accept, p_track_slots, p_track_step, stride_accept, stride_track_slots, stride_track_step,
    L: tl.constexpr, HAS_TRACK: tl.constexpr,
):  # fmt: skip
    """(history n, base, fold?, snapshot's n_t or 0, snapshot's slot); a padding row has neither fold nor snapshot."""
    n = tl.load(p_write_pos + row, mask=m_row, other=0)
    base = tl.load(p_base + row, mask=m_row, other=0) & (L - 1)
    m_row = m_row & (n >= 0) & (n <= L)
    fold = tl.load(p_fold + row, mask=m_row, other=0) != 0
    n_t, target = n * 0, row * 0
    if HAS_TRACK:
        accept = load_index(p_accept, i_b, stride_accept)
        target = load_index(p_track_slots, i_b, stride_track_slots)
        step = load_index(p_track_step, i_b, stride_track_step)
        track = (step >= 0) & (target > null_slot)
        m_row = m_row & (accept >= 0) & (accept <= n)
        m_row = m_row & ((target >= 0) & (target < S) & (step < accept) | ~track)
        n_t = tl.where(m_row & track, n - (accept - step).to(tl.int32) + 1, 0)
    return n, base, m_row & fold, n_t, target


@jit()
def _finish(
    p_write_pos, p_base, p_fold, p_slots, p_rows, p_accept, p_track_slots, p_track_step,
    B: tl.int64, S: tl.int64, R: tl.int64, null_slot: tl.int64,
    stride_slots: tl.int64, stride_rows: tl.int64,
    stride_accept: tl.int64, stride_track_slots: tl.int64, stride_track_step: tl.int64,
    L: tl.constexpr, HAS_TRACK: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Cursors of folded rows: base moves on by n, n and the flag become 0. A launch of its own: all programs above read them.

    EARLY: it starts while the fold still runs, and waits for its end before the first store.
    """
    o_b = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i_b = tl.minimum(o_b, B - 1)
    _, row, m_row = _locate(i_b, p_slots, p_rows, stride_slots, stride_rows, S, R, null_slot)
    n, base, fold, _, _ = _tasks(
        i_b, row, m_row & (o_b < B), S, null_slot, p_write_pos, p_base, p_fold, p_accept, p_track_slots, p_track_step,
        stride_accept, stride_track_slots, stride_track_step, L, HAS_TRACK,
    )  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
    tl.store(p_base + row, (base + n) & (L - 1), mask=fold)
    tl.store(p_write_pos + row, 0, mask=fold)
    tl.store(p_fold + row, 0, mask=fold)


@triton.jit
def _prefetch(p, elements):
    """Bring `elements` contiguous elements from scalar p on into L2: whole vectors of 16 bytes, asked for by one thread."""
    size = elements * (p.dtype.element_ty.primitive_bitwidth // 8)
    asm: tl.constexpr = """{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.b32 $0, 0;
    }"""
    tl.inline_asm_elementwise(asm, "=r,l,r", [p.to(tl.int64), size.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _prefetch_ahead(
    AHEAD: tl.constexpr, i_l, i_b, B, p_state, p_slots, p_rows, p_write_pos, p_fold, stride_slots, stride_rows,
    S, R, null_slot, NL, stride_state_l, stride_state_s, elements, UNIT: tl.constexpr,
):  # fmt: skip
    """Ask for the tile that this head's program AHEAD rows later (row by row, layer by layer) will fold.

    p_state: this program's tile in slot 0 of layer 0; elements: how many the tile has.
    """
    i_r = i_l * B + i_b + AHEAD
    i_layer, i_row = i_r // B, (i_r % B).to(tl.int32)
    slot, row, m_row = _locate(i_row, p_slots, p_rows, stride_slots, stride_rows, S, R, null_slot)
    n = tl.load(p_write_pos + row, mask=m_row, other=0)
    fold = tl.load(p_fold + row, mask=m_row, other=0) != 0
    if m_row & fold & (n > 0) & (i_layer < NL):
        _prefetch(p_state + (i_layer * stride_state_l + slot * stride_state_s) * UNIT, elements)


@triton.jit
def _ring(p, p_low, i_l, row, stride_l, stride_r, stride_low_l, stride_low_r, o, UNIT: tl.constexpr, LOW: tl.constexpr):
    """Where a ring tensor and its low parts begin for one layer, ring row and head (o elements into the row)."""
    p += (i_l * stride_l + row * stride_r) * UNIT + o
    if LOW:
        p_low += (i_l * stride_low_l + row * stride_low_r) * UNIT + o
    else:
        p_low = p  # never read; a function cannot return None
    return p, p_low


# --- products of bf16 parts


@triton.jit
def _weights(p_g, base, o_j, n, L: tl.constexpr):
    """exp(P_n - P_j) for a block of records that reaches to the newest, and exp of its whole sum."""
    m_behind = o_j + 1 < n
    b_behind = tl.load(p_g + ((base + o_j + 1) & (L - 1)), mask=m_behind, other=0.0)
    b_g = tl.load(p_g + ((base + o_j) & (L - 1)), mask=o_j < n, other=0.0)
    return tl.exp(tl.cumsum(b_behind, 0, reverse=True)), tl.exp(tl.sum(b_g, 0))


@triton.jit
def _add_products(
    b_s, b_u, p_k, p_k_low, o, m, LOW: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """b_s [BV, K] + b_u^T k over a block of records: b_u [records, BV] in fp32, k [records, K] at offsets o, zero outside m.

    Keys that are stored as DOT parts are loaded one part at a time, which halves the registers that they need.
    """
    b_u_high, b_u_low = split(b_u, DOT)
    b_u_high, b_u_low = tl.trans(b_u_high), tl.trans(b_u_low)
    if p_k.dtype.element_ty == DOT:
        b_k = tl.load(p_k + o, mask=m, other=0.0)
        b_s = tl.dot(b_u_low, b_k, b_s)
        b_s = tl.dot(b_u_high, b_k, b_s)
        if LOW:
            b_k = tl.load(p_k_low + o, mask=m, other=0.0)
            b_s = tl.dot(b_u_low, b_k, b_s)
            b_s = tl.dot(b_u_high, b_k, b_s)
    else:
        b_k, b_k_low = split(load_wide(p_k, p_k_low, o, m, LOW), DOT)
        b_s = tl.dot(b_u_low, b_k, b_s)
        b_s = tl.dot(b_u_high, b_k, b_s)
        b_s = tl.dot(b_u_low, b_k_low, b_s)
        b_s = tl.dot(b_u_high, b_k_low, b_s)
    return b_s


# --- per_head


@triton.jit
def _fold_ring(
    b_s, n, base, p_u, p_u_low, p_k, p_k_low, p_g, o_v, m_v, o_k,
    L: tl.constexpr, K: tl.constexpr, V: tl.constexpr, LOW: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """b_s [BV, K] fp32 folded with records 0 .. n-1; positions past them are not read."""
    o_j = tl.arange(0, L)
    m_j = (o_j < n)[:, None]
    o_r = ((base + o_j) & (L - 1))[:, None]
    b_w, total = _weights(p_g, base, o_j, n, L)
    b_u = load_wide(p_u, p_u_low, o_r * V + o_v[None, :], m_j & m_v[None, :], LOW) * b_w[:, None]  # [L, BV]
    return _add_products(b_s * total, b_u, p_k, p_k_low, o_r * K + o_k[None, :], m_j & (o_k < K)[None, :], LOW, DOT)


@jit(vectors=VECTORS)
def _per_head(
    p_state, p_u, p_k, p_g, p_u_low, p_k_low, p_write_pos, p_base, p_fold, p_slots, p_rows, p_accept, p_track_slots, p_track_step,
    NL: tl.int64, S: tl.int64, R: tl.int64, null_slot: tl.int64,
    stride_state_l: tl.int64, stride_state_s: tl.int64, stride_u_l: tl.int64, stride_u_r: tl.int64,
    stride_k_l: tl.int64, stride_k_r: tl.int64, stride_g_l: tl.int64, stride_g_r: tl.int64,
    stride_u_low_l: tl.int64, stride_u_low_r: tl.int64, stride_k_low_l: tl.int64, stride_k_low_r: tl.int64,
    stride_slots: tl.int64, stride_rows: tl.int64,
    stride_accept: tl.int64, stride_track_slots: tl.int64, stride_track_step: tl.int64,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    LOW: tl.constexpr, HAS_TRACK: tl.constexpr, UNIT_STATE: tl.constexpr, UNIT_RING: tl.constexpr,
    BV: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A program folds one [BV, K] tile; grid (B * HV * V tiles, NL)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_hv, i_b = tl.program_id(0) % NV, tl.program_id(0) // NV % HV, tl.program_id(0) // (NV * HV)
    i_h, i_l = i_hv // (HV // H), tl.program_id(1).to(tl.int64)

    slot, row, m_row = _locate(i_b, p_slots, p_rows, stride_slots, stride_rows, S, R, null_slot)
    n, base, fold, n_t, target = _tasks(
        i_b, row, m_row, S, null_slot, p_write_pos, p_base, p_fold, p_accept, p_track_slots, p_track_step,
        stride_accept, stride_track_slots, stride_track_step, L, HAS_TRACK,
    )  # fmt: skip
    fold = fold & (n > 0)
    if not (fold | (n_t > 0)):
        return

    o_v, o_k = i_v * BV + tl.arange(0, BV), tl.arange(0, K)
    m_v = o_v < V
    o_s = (i_hv * V + o_v)[:, None] * K + o_k[None, :]  # [BV, K]
    m_s = m_v[:, None] & (o_k < K)[None, :]
    p_u, p_u_low = _ring(
        p_u, p_u_low, i_l, row, stride_u_l, stride_u_r, stride_u_low_l, stride_u_low_r, i_hv * (L * V), UNIT_RING, LOW
    )  # fmt: skip
    p_k, p_k_low = _ring(
        p_k, p_k_low, i_l, row, stride_k_l, stride_k_r, stride_k_low_l, stride_k_low_r, i_h * (L * K), UNIT_RING, LOW
    )  # fmt: skip
    p_g += i_l * stride_g_l + row * stride_g_r + i_hv * L
    p_s = p_state + (i_l * stride_state_l + slot * stride_state_s) * UNIT_STATE
    b_s = tl.load(p_s + o_s, mask=m_s, other=0.0).to(tl.float32)
    if HAS_TRACK:
        if n_t > 0:
            b_t = _fold_ring(
                b_s, n_t, base, p_u, p_u_low, p_k, p_k_low, p_g, o_v, m_v, o_k, L, K, V, LOW, DOT
            )  # fmt: skip
            p_t = p_state + (i_l * stride_state_l + target * stride_state_s) * UNIT_STATE
            tl.store(p_t + o_s, b_t.to(p_state.dtype.element_ty), mask=m_s)
    if fold:
        b_s = _fold_ring(b_s, n, base, p_u, p_u_low, p_k, p_k_low, p_g, o_v, m_v, o_k, L, K, V, LOW, DOT)
        tl.store(p_s + o_s, b_s.to(p_state.dtype.element_ty), mask=m_s)


# --- head_group


@triton.jit
def _stack(b_x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """[ROWS, COLUMNS, ...] with PARTS parts in the trailing dims -> [ROWS * PARTS, COLUMNS]."""
    if PARTS == 4:
        return tl.reshape(tl.permute(b_x, (0, 2, 3, 1)), [ROWS * 4, COLUMNS])
    else:
        return tl.reshape(tl.permute(b_x, (0, 2, 1)), [ROWS * 2, COLUMNS])


@triton.jit
def _load_keys(
    p_k, p_k_low, base, o_j, n, o_k,
    L: tl.constexpr, K: tl.constexpr, LOW: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Keys of a chunk, each high and low part twice over [16 * PARTS, K]: they meet the high and the low part of u."""
    o_r = ((base + o_j) & (L - 1))[:, None] * K + o_k[None, :]
    b_high, b_low = load_parts(p_k, p_k_low, o_r, (o_j < n)[:, None] & (o_k < K)[None, :], LOW, DOT)
    if PARTS == 4:
        b_both = tl.join(b_high, b_low)
        return _stack(tl.join(b_both, b_both), 16, K, PARTS)
    else:
        return _stack(tl.join(b_high, b_high), 16, K, PARTS)


@triton.jit
def _add_chunk(
    b_s, behind, b_keys, o_j, n, base, p_u, p_u_low, p_g, o_v, m_v,
    L: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, LOW: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """b_s [BV, K] plus a chunk of 16 records in one product, and the sum of g behind the chunk before this one."""
    b_g = tl.load(p_g + ((base + o_j + 1) & (L - 1)), mask=o_j + 1 < n, other=0.0)
    b_w = tl.exp(tl.cumsum(b_g, 0, reverse=True) + behind)
    o_r = ((base + o_j) & (L - 1))[:, None] * V + o_v[None, :]
    b_u = load_wide(p_u, p_u_low, o_r, (o_j < n)[:, None] & m_v[None, :], LOW) * b_w[:, None]  # [16, BV]
    b_high, b_low = split(b_u, DOT)
    if PARTS == 4:
        b_parts = tl.join(tl.join(b_high, b_high), tl.join(b_low, b_low))
    else:
        b_parts = tl.join(b_high, b_low)
    b_s = tl.dot(tl.trans(_stack(b_parts, 16, BV, PARTS)), b_keys, b_s)
    return b_s, behind + tl.sum(b_g, 0)


@triton.jit
def _fold_chunks(
    b_s, b_keys, n, base, p_u, p_u_low, p_k, p_k_low, p_g, o_v, m_v, o_k,
    L: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    LOW: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """b_s [BV, K] fp32 folded with records 0 .. n-1, newest chunk first. b_keys: the keys, where one chunk is the ring."""
    b_sum = tl.zeros([BV, K], tl.float32)
    behind = 0.0
    if L == 16:
        o_j = tl.arange(0, 16)
        b_sum, behind = _add_chunk(
            b_sum, behind, b_keys, o_j, n, base, p_u, p_u_low, p_g, o_v, m_v, L, V, BV, LOW, PARTS, DOT
        )  # fmt: skip
    else:
        chunks = (n + 15) // 16
        for i in range(chunks):
            o_j = (chunks - 1 - i) * 16 + tl.arange(0, 16)
            b_chunk = _load_keys(p_k, p_k_low, base, o_j, n, o_k, L, K, LOW, PARTS, DOT)
            b_sum, behind = _add_chunk(
                b_sum, behind, b_chunk, o_j, n, base, p_u, p_u_low, p_g, o_v, m_v, L, V, BV, LOW, PARTS, DOT
            )  # fmt: skip
    behind += tl.load(p_g + base, mask=n > 0, other=0.0)
    return b_s * tl.exp(behind) + b_sum


@jit(vectors=VECTORS)
def _head_group(
    p_state, p_u, p_k, p_g, p_u_low, p_k_low, p_write_pos, p_base, p_fold, p_slots, p_rows, p_accept, p_track_slots, p_track_step,
    NL: tl.int64, S: tl.int64, R: tl.int64, null_slot: tl.int64,
    stride_state_l: tl.int64, stride_state_s: tl.int64, stride_u_l: tl.int64, stride_u_r: tl.int64,
    stride_k_l: tl.int64, stride_k_r: tl.int64, stride_g_l: tl.int64, stride_g_r: tl.int64,
    stride_u_low_l: tl.int64, stride_u_low_r: tl.int64, stride_k_low_l: tl.int64, stride_k_low_r: tl.int64,
    stride_slots: tl.int64, stride_rows: tl.int64,
    stride_accept: tl.int64, stride_track_slots: tl.int64, stride_track_step: tl.int64,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    LOW: tl.constexpr, HAS_TRACK: tl.constexpr, UNIT_STATE: tl.constexpr, UNIT_RING: tl.constexpr,
    BV: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program folds the HV / H value heads of a key head, one [BV, K] tile after the other; grid (B * H, NL).

    Fold and snapshot are computed for every row and masked at the store.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    GROUP: tl.constexpr = HV // H
    PARTS: tl.constexpr = 4 if LOW or p_k.dtype.element_ty != DOT else 2
    i_h, i_b, i_l = tl.program_id(0) % H, tl.program_id(0) // H, tl.program_id(1).to(tl.int64)

    slot, row, m_row = _locate(i_b, p_slots, p_rows, stride_slots, stride_rows, S, R, null_slot)
    n, base, fold, n_t, target = _tasks(
        i_b, row, m_row, S, null_slot, p_write_pos, p_base, p_fold, p_accept, p_track_slots, p_track_step,
        stride_accept, stride_track_slots, stride_track_step, L, HAS_TRACK,
    )  # fmt: skip
    fold = fold & (n > 0)
    if not (fold | (n_t > 0)):
        return

    o_k = tl.arange(0, K)
    p_k, p_k_low = _ring(
        p_k, p_k_low, i_l, row, stride_k_l, stride_k_r, stride_k_low_l, stride_k_low_r, i_h * (L * K), UNIT_RING, LOW
    )  # fmt: skip
    p_s = p_state + (i_l * stride_state_l + slot * stride_state_s) * UNIT_STATE
    p_t = p_state + (i_l * stride_state_l + target * stride_state_s) * UNIT_STATE
    b_keys, b_keys_t = 0, 0
    if L == 16:
        b_keys = _load_keys(p_k, p_k_low, base, tl.arange(0, 16), n, o_k, L, K, LOW, PARTS, DOT)
        if HAS_TRACK:
            b_keys_t = _load_keys(p_k, p_k_low, base, tl.arange(0, 16), n_t, o_k, L, K, LOW, PARTS, DOT)

    for i in tl.range(GROUP * NV, num_stages=STAGES):
        i_hv = i_h * GROUP + i // NV
        o_v = i % NV * BV + tl.arange(0, BV)
        m_v = o_v < V
        o_s = (i_hv * V + o_v)[:, None] * K + o_k[None, :]  # [BV, K]
        m_s = m_v[:, None] & (o_k < K)[None, :]
        p_u_h, p_u_low_h = _ring(
            p_u, p_u_low, i_l, row, stride_u_l, stride_u_r, stride_u_low_l, stride_u_low_r, i_hv * (L * V), UNIT_RING, LOW
        )  # fmt: skip
        p_g_h = p_g + i_l * stride_g_l + row * stride_g_r + i_hv * L
        b_s = tl.load(p_s + o_s, mask=m_s, other=0.0).to(tl.float32)
        b_new = _fold_chunks(
            b_s, b_keys, n, base, p_u_h, p_u_low_h, p_k, p_k_low, p_g_h, o_v, m_v, o_k, L, K, V, BV, LOW, PARTS, DOT
        )  # fmt: skip
        if HAS_TRACK:
            b_t = _fold_chunks(
                b_s, b_keys_t, n_t, base, p_u_h, p_u_low_h, p_k, p_k_low, p_g_h, o_v, m_v, o_k, L, K, V, BV, LOW, PARTS, DOT
            )  # fmt: skip
            tl.store(p_t + o_s, b_t.to(p_state.dtype.element_ty), mask=m_s & (o_v < tl.where(n_t > 0, V, 0))[:, None])
        tl.store(p_s + o_s, b_new.to(p_state.dtype.element_ty), mask=m_s & (o_v < tl.where(fold, V, 0))[:, None])


# --- sequential


@triton.jit
def _load_four(p, p_low, o, m, base, j, n, L: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr):
    """Elements o of records j .. j+3 as one fp32 block [..., 2, 2], zero at and past n."""
    o_j = j + tl.arange(0, 2)[:, None] * 2 + tl.arange(0, 2)[None, :]  # [2, 2]
    o_r = ((base + o_j) & (L - 1)) * WIDTH
    if len(o.shape) == 2:
        o_x, m_x = o[:, :, None, None] + o_r[None, None, :, :], m[:, :, None, None] & (o_j < n)[None, None, :, :]
    else:
        o_x, m_x = o[:, None, None] + o_r[None, :, :], m[:, None, None] & (o_j < n)[None, :, :]
    return load_wide(p, p_low, o_x, m_x, LOW)


@triton.jit
def _take_apart(b_x):
    """[..., 2, 2] as four blocks."""
    b_even, b_odd = tl.split(b_x)
    b_0, b_2 = tl.split(b_even)
    b_1, b_3 = tl.split(b_odd)
    return b_0, b_1, b_2, b_3


@triton.jit
def _add_record(b_s, b_u, b_k, weight, BV: tl.constexpr):
    """b_s [BV, K] + weight * u k^T for u dealt [DEAL, BV / DEAL] and k [K]."""
    return tl.fma(tl.reshape(tl.trans(b_u * weight), [BV])[:, None], b_k[None, :], b_s)


@triton.jit
def _fold_four(
    b_s, j, n, base, p_u, p_u_low, p_k, p_k_low, p_g, o_u, o_k, channels,
    L: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """b_s [BV, K] folded with records j .. j+3 as far as they are below n.

    All loads come first, so that they are under way together. A block of four records is loaded whole and then taken apart:
    so its high and low parts are added once, and not by every thread that needs the sum.
    """
    b_k = _load_four(p_k, p_k_low, o_k, o_k < K, base, j, n, L, K, LOW)  # [K, 2, 2]
    b_u = _load_four(p_u, p_u_low, o_u, o_u < channels, base, j, n, L, V, LOW)  # [DEAL, BV / DEAL, 2, 2]
    g_0 = tl.load(p_g + ((base + j) & (L - 1)), mask=j < n, other=0.0)
    g_1 = tl.load(p_g + ((base + j + 1) & (L - 1)), mask=j + 1 < n, other=0.0)
    g_2 = tl.load(p_g + ((base + j + 2) & (L - 1)), mask=j + 2 < n, other=0.0)
    g_3 = tl.load(p_g + ((base + j + 3) & (L - 1)), mask=j + 3 < n, other=0.0)
    k_0, k_1, k_2, k_3 = _take_apart(b_k)
    u_0, u_1, u_2, u_3 = _take_apart(b_u)
    behind_1 = g_3 + g_2
    behind_0 = behind_1 + g_1
    b_s *= tl.exp(behind_0 + g_0)
    b_s = _add_record(b_s, u_0, k_0, tl.exp(behind_0), BV)
    b_s = _add_record(b_s, u_1, k_1, tl.exp(behind_1), BV)
    b_s = _add_record(b_s, u_2, k_2, tl.exp(g_3), BV)
    return _add_record(b_s, u_3, k_3, 1.0, BV)


@triton.jit
def _fold_from(
    b_s, j, n, base, p_u, p_u_low, p_k, p_k_low, p_g, o_u, o_k, channels,
    L: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """b_s [BV, K] folded with records j .. n-1, four at a time."""
    for i in range(j, n, 4):
        b_s = _fold_four(b_s, i, n, base, p_u, p_u_low, p_k, p_k_low, p_g, o_u, o_k, channels, L, K, V, BV, LOW)
    return b_s


@triton.jit
def _load_tile(p, o, m, MASKED: tl.constexpr):
    """A state tile. Without a mask the compiler keeps one address for all its vectors."""
    if MASKED:
        return tl.load(p + o, mask=m, other=0.0)
    else:
        return tl.load(p + o)


@triton.jit
def _store_tile(p, o, m, b_s, MASKED: tl.constexpr):
    if MASKED:
        tl.store(p + o, b_s.to(p.dtype.element_ty), mask=m)
    else:
        tl.store(p + o, b_s.to(p.dtype.element_ty))


@triton.jit
def _fold_short(
    b_s, n, base, p_u, p_u_low, p_k, p_k_low, p_g, o_u, o_k, channels,
    L: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """b_s [BV, K] folded with records 0 .. n-1; the first four are not in a loop, so their loads go out with the state's."""
    b_s = _fold_four(b_s, 0, n, base, p_u, p_u_low, p_k, p_k_low, p_g, o_u, o_k, channels, L, K, V, BV, LOW)
    if n > 4:
        b_s = _fold_from(b_s, 4, n, base, p_u, p_u_low, p_k, p_k_low, p_g, o_u, o_k, channels, L, K, V, BV, LOW)
    return b_s


@jit(vectors=VECTORS)
def _sequential(
    p_state, p_u, p_k, p_g, p_u_low, p_k_low, p_write_pos, p_base, p_fold, p_slots, p_rows, p_accept, p_track_slots, p_track_step,
    NL: tl.int64, S: tl.int64, R: tl.int64, null_slot: tl.int64,
    stride_state_l: tl.int64, stride_state_s: tl.int64, stride_u_l: tl.int64, stride_u_r: tl.int64,
    stride_k_l: tl.int64, stride_k_r: tl.int64, stride_g_l: tl.int64, stride_g_r: tl.int64,
    stride_u_low_l: tl.int64, stride_u_low_r: tl.int64, stride_k_low_l: tl.int64, stride_k_low_r: tl.int64,
    stride_slots: tl.int64, stride_rows: tl.int64,
    stride_accept: tl.int64, stride_track_slots: tl.int64, stride_track_step: tl.int64,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    LOW: tl.constexpr, HAS_TRACK: tl.constexpr, UNIT_STATE: tl.constexpr, UNIT_RING: tl.constexpr,
    BV: tl.constexpr, DEAL: tl.constexpr, AHEAD: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """A program folds a [BV, K] tile; grid (B * HV * V tiles, NL).

    Tile row r is channel r % DEAL * (BV / DEAL) + r // DEAL: so dealt, the rows that one thread holds are consecutive
    channels, and it takes a record's u in vectors.
    """
    if HOPPER:
        tl.extra.cuda.gdc_launch_dependents()
    NV: tl.constexpr = (V + BV - 1) // BV
    RUN: tl.constexpr = BV // DEAL
    MASKED: tl.constexpr = V % BV != 0
    i_v, i_hv, i_b = tl.program_id(0) % NV, tl.program_id(0) // NV % HV, tl.program_id(0) // (NV * HV)
    i_h, i_l = i_hv // (HV // H), tl.program_id(1).to(tl.int64)

    # offsets within a tile hold no run-time scalars, so that they fold into the addresses of one pointer
    o_r, o_k = tl.arange(0, BV), tl.arange(0, K)
    o_v = o_r % DEAL * RUN + o_r // DEAL  # [BV]
    o_u = tl.arange(0, DEAL)[:, None] * RUN + tl.arange(0, RUN)[None, :]  # [DEAL, RUN], transposed: o_v
    o_s = o_v[:, None] * K + o_k[None, :]  # [BV, K]
    channels = V - i_v * BV
    m_s = (o_v < channels)[:, None] & (o_k < K)[None, :]

    slot, row, m_row = _locate(i_b, p_slots, p_rows, stride_slots, stride_rows, S, R, null_slot)
    p_state += (i_hv * V + i_v * BV) * K
    p_s = p_state + (i_l * stride_state_l + slot * stride_state_s) * UNIT_STATE
    n, base, fold, n_t, target = _tasks(
        i_b, row, m_row, S, null_slot, p_write_pos, p_base, p_fold, p_accept, p_track_slots, p_track_step,
        stride_accept, stride_track_slots, stride_track_step, L, HAS_TRACK,
    )  # fmt: skip
    if HOPPER and UNIT_STATE > 1 and AHEAD > 0:
        _prefetch_ahead(
            AHEAD, i_l, i_b, tl.num_programs(0) // (NV * HV), p_state, p_slots, p_rows, p_write_pos, p_fold,
            stride_slots, stride_rows, S, R, null_slot, NL, stride_state_l, stride_state_s,
            tl.minimum(channels, BV) * K, UNIT_STATE,
        )  # fmt: skip
    fold = fold & (n > 0)
    if not (fold | (n_t > 0)):
        return

    p_t = p_state + (i_l * stride_state_l + target * stride_state_s) * UNIT_STATE
    o_head = i_hv * (L * V) + i_v * BV
    p_u, p_u_low = _ring(
        p_u, p_u_low, i_l, row, stride_u_l, stride_u_r, stride_u_low_l, stride_u_low_r, o_head, UNIT_RING, LOW
    )  # fmt: skip
    p_k, p_k_low = _ring(
        p_k, p_k_low, i_l, row, stride_k_l, stride_k_r, stride_k_low_l, stride_k_low_r, i_h * (L * K), UNIT_RING, LOW
    )  # fmt: skip
    p_g += i_l * stride_g_l + row * stride_g_r + i_hv * L
    n_first = n
    if HAS_TRACK:
        n_first = tl.where(n_t > 0, n_t, n)
    b_s = _load_tile(p_s, o_s, m_s, MASKED).to(tl.float32)
    b_s = _fold_short(b_s, n_first, base, p_u, p_u_low, p_k, p_k_low, p_g, o_u, o_k, channels, L, K, V, BV, LOW)
    if HAS_TRACK:
        if n_t > 0:  # b_s is the state after n_t records; the others follow it
            _store_tile(p_t, o_s, m_s, b_s, MASKED)
            if fold:
                b_s = _fold_from(
                    b_s, n_t, n, base, p_u, p_u_low, p_k, p_k_low, p_g, o_u, o_k, channels, L, K, V, BV, LOW
                )  # fmt: skip
    if fold:
        _store_tile(p_s, o_s, m_s, b_s, MASKED)


# --- products


@triton.jit
def _keys(p_k, p_k_low, o, m, part, LOW: tl.constexpr, DOT: tl.constexpr):
    """Keys at offsets o [N, K] as operands, zero where masked: the high part, or the low one where part (or part [N, 1]) is 1."""
    if p_k.dtype.element_ty == DOT:
        if LOW:
            p = tl.where(part == 1, p_k_low, p_k) + o
        else:
            p = p_k + o
        return tl.load(p, mask=m, other=0.0)
    else:
        b_high, b_low = split(load_wide(p_k, p_k_low, o, m, LOW), DOT)
        return tl.where(part == 1, b_low, b_high)


@triton.jit
def _dealt_keys(b_k, N: tl.constexpr, K: tl.constexpr, VEC: tl.constexpr):
    """Keys [N, K] with their columns in the order of a dealt tile."""
    return tl.reshape(tl.permute(tl.reshape(b_k, [N, K // (4 * VEC), 4, VEC // 2, 2]), (0, 1, 3, 2, 4)), [N, K])


@triton.jit
def _dealt_updates(
    p_u, p_u_low, o_r, m_j, b_w, channels,
    N: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, WARPS: tl.constexpr,
    LOW: tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """High and low parts of w u [N, BV] at ring positions o_r [N, 1], columns in the order of a dealt tile's rows."""
    o_v = tl.arange(0, BV)[None, :]
    m_u = m_j & (o_v < channels) if MASKED else m_j
    b_u = load_wide(p_u, p_u_low, o_r * V + o_v, m_u, LOW) * b_w[:, None]
    b_u = tl.permute(tl.reshape(b_u, [N, BV // (16 * WARPS), 2, WARPS, 8]), (0, 1, 3, 2, 4))
    return split(tl.reshape(b_u, [N, BV]), DOT)


@triton.jit
def _sum_few(
    n, base, p_u, p_u_low, p_k, p_k_low, p_g, channels,
    L: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, WARPS: tl.constexpr, VEC: tl.constexpr,
    LOW: tl.constexpr, PARTS: tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """exp(P_n), and the sum over up to 16 / PARTS records as one product: row i holds record i // PARTS in a pair of parts."""
    FEW: tl.constexpr = 16 // PARTS
    o_i, o_f = tl.arange(0, 16), tl.arange(0, FEW)
    o_j, o_part = o_i // PARTS, o_i % PARTS
    b_g = tl.load(p_g + ((base + o_f) & (L - 1)), mask=o_f < n, other=0.0)
    b_w = tl.exp(tl.sum(tl.where(o_f[None, :] > o_j[:, None], b_g[None, :], 0.0), 1))
    m_j = (o_j < n)[:, None]
    o_r = ((base + o_j) & (L - 1))[:, None]
    part = (o_part & 1)[:, None] if PARTS == 4 else 0
    b_k = _dealt_keys(_keys(p_k, p_k_low, o_r * K + tl.arange(0, K)[None, :], m_j, part, LOW, DOT), 16, K, VEC)
    b_high, b_low = _dealt_updates(p_u, p_u_low, o_r, m_j, b_w, channels, 16, V, BV, WARPS, LOW, MASKED, DOT)
    b_u = tl.where((o_part * 2 >= PARTS)[:, None], b_low, b_high)
    return tl.exp(tl.sum(b_g, 0)), tl.dot(tl.trans(b_u), b_k, tl.zeros([BV, K], tl.float32))


@triton.jit
def _load_both(p, p_low, o_r, o_c, m_r, m_c, WIDTH: tl.constexpr, LOW: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows [N, COLUMNS] at positions o_r of a ring tensor; with low parts these follow as N more rows of the same load."""
    N: tl.constexpr = o_r.shape[0]
    o = o_r[:, None] * WIDTH + o_c[None, :]
    m = m_r[:, None] & m_c[None, :]
    if LOW:
        low = tl.arange(0, 2)[:, None, None] == 1
        b_x = tl.load(tl.where(low, p_low, p) + o[None, :, :], mask=m[None, :, :], other=0.0)
        b_x = tl.reshape(b_x, [2 * N, COLUMNS])
    else:
        b_x = tl.load(p + o, mask=m, other=0.0)
    return b_x


@triton.jit
def _load_block(
    i, n, base, p_u, p_u_low, p_k, p_k_low, p_g, channels, N: tl.constexpr,
    L: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """(g behind, k, u) of the N records before the newest i, newest first, as they are stored: high parts, then low ones."""
    o_j = n - 1 - i - tl.arange(0, N)
    m_j = o_j >= 0
    o_r = (base + o_j) & (L - 1)
    o_k, o_v = tl.arange(0, K), tl.arange(0, BV)
    b_g = tl.load(p_g + ((base + o_j + 1) & (L - 1)), mask=m_j & (o_j + 1 < n), other=0.0)
    b_k = _load_both(p_k, p_k_low, o_r, o_k, m_j, o_k < K, K, LOW, K)
    b_u = _load_both(p_u, p_u_low, o_r, o_v, m_j, o_v < channels, V, LOW, BV)
    return b_g, b_k, b_u


@triton.jit
def _wide(b_x, N: tl.constexpr, COLUMNS: tl.constexpr, LOW: tl.constexpr):
    """[2 N, COLUMNS] high and low parts -> their sum [N, COLUMNS] in fp32; without low parts the values themselves."""
    if LOW:
        b_high, b_low = tl.split(tl.permute(tl.reshape(b_x, [2, N, COLUMNS]), (1, 2, 0)))
        return b_high.to(tl.float32) + b_low.to(tl.float32)
    else:
        return b_x.to(tl.float32)


@triton.jit
def _left(b_x, N: tl.constexpr, BV: tl.constexpr, TWICE: tl.constexpr):
    """[N, BV] -> left operand [BV, N], or [BV, 2 N] that holds it twice."""
    if TWICE:
        b_x = tl.reshape(tl.permute(tl.join(b_x, b_x), (2, 0, 1)), [2 * N, BV])
    return tl.trans(b_x)


@triton.jit
def _add_block(
    b_sum, behind, block, N: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, WARPS: tl.constexpr, VEC: tl.constexpr,
    LOW: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """b_sum [BV, K] plus the products of a block of records; `behind`: the sum of g of newer ones, also returned anew."""
    b_g, b_k, b_u = block
    b_w = tl.exp(tl.cumsum(b_g, 0) + behind)
    b_u = _wide(b_u, N, BV, LOW) * b_w[:, None]
    b_u = tl.permute(tl.reshape(b_u, [N, BV // (16 * WARPS), 2, WARPS, 8]), (0, 1, 3, 2, 4))
    b_high, b_low = split(tl.reshape(b_u, [N, BV]), DOT)
    if b_k.dtype == DOT:
        b_k = _dealt_keys(b_k, 2 * N if LOW else N, K, VEC)
        b_sum = tl.dot(_left(b_low, N, BV, LOW), b_k, b_sum)
        b_sum = tl.dot(_left(b_high, N, BV, LOW), b_k, b_sum)
    else:
        b_k_high, b_k_low = split(_wide(b_k, N, K, LOW), DOT)
        b_k_high, b_k_low = _dealt_keys(b_k_high, N, K, VEC), _dealt_keys(b_k_low, N, K, VEC)
        b_high, b_low = tl.trans(b_high), tl.trans(b_low)
        b_sum = tl.dot(b_low, b_k_low, b_sum)
        b_sum = tl.dot(b_high, b_k_low, b_sum)
        b_sum = tl.dot(b_low, b_k_high, b_sum)
        b_sum = tl.dot(b_high, b_k_high, b_sum)
    return b_sum, behind + tl.sum(b_g, 0)


@triton.jit
def _sum_block(
    n, base, p_u, p_u_low, p_k, p_k_low, p_g, channels,
    L: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, WARPS: tl.constexpr, VEC: tl.constexpr,
    LOW: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """exp(P_n), and the sum over up to 16 records."""
    block = _load_block(0, n, base, p_u, p_u_low, p_k, p_k_low, p_g, channels, 16, L, K, V, BV, LOW)
    b_sum, behind = tl.zeros([BV, K], tl.float32), tl.zeros([], tl.float32)
    b_sum, behind = _add_block(b_sum, behind, block, 16, K, BV, WARPS, VEC, LOW, DOT)
    return _decay(n, base, behind, p_g, L), b_sum


@triton.jit
def _sum_blocks(
    n, base, p_u, p_u_low, p_k, p_k_low, p_g, channels,
    L: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, WARPS: tl.constexpr, VEC: tl.constexpr,
    LOW: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """exp(P_n), and the sum over all records in products of 32, newest first."""
    b_sum, behind = tl.zeros([BV, K], tl.float32), tl.zeros([], tl.float32)
    for i in range(0, n, 32):
        block = _load_block(i, n, base, p_u, p_u_low, p_k, p_k_low, p_g, channels, 32, L, K, V, BV, LOW)
        b_sum, behind = _add_block(b_sum, behind, block, 32, K, BV, WARPS, VEC, LOW, DOT)
    return _decay(n, base, behind, p_g, L), b_sum


@triton.jit
def _decay(n, base, behind, p_g, L: tl.constexpr):
    """exp(P_n) from the sum of g behind record 0."""
    return tl.exp(behind + tl.load(p_g + (base & (L - 1)), mask=n > 0, other=0.0))


@triton.jit
def _dealt(b_raw, K: tl.constexpr, BV: tl.constexpr, WARPS: tl.constexpr, VEC: tl.constexpr):
    """A tile as it is loaded [BV, K / (4 VEC), 4 VEC] -> [BV, K] fp32, rows and columns dealt as products leave them."""
    b_s = tl.reshape(b_raw, [BV // (16 * WARPS), 2, WARPS, 8, K // (4 * VEC), 4, VEC // 2, 2])
    return tl.reshape(tl.permute(b_s, (0, 2, 1, 3, 4, 6, 5, 7)), [BV, K]).to(tl.float32)


@triton.jit
def _store_dealt(
    p, o_s, m_s, b_s, K: tl.constexpr, BV: tl.constexpr, WARPS: tl.constexpr, VEC: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """The way back."""
    b_s = tl.reshape(b_s.to(p.dtype.element_ty), [BV // (16 * WARPS), WARPS, 2, 8, K // (4 * VEC), VEC // 2, 4, 2])
    b_s = tl.reshape(tl.permute(b_s, (0, 2, 1, 3, 4, 6, 5, 7)), [BV, K // (4 * VEC), 4 * VEC])
    _store_tile(p, o_s, m_s, b_s, MASKED)


@triton.jit
def _folded(
    n, base, p_u, p_u_low, p_k, p_k_low, p_g, channels, p_s, o_s, m_s,
    L: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, WARPS: tl.constexpr, VEC: tl.constexpr,
    LOW: tl.constexpr, PARTS: tl.constexpr, LATE: tl.constexpr, ASYNC: tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The dealt tile at p_s folded with records 0 .. n-1; the way depends on n alone.

    LATE: the tile is asked for first and loaded after the products, so that its registers are free until then.
    """
    if LATE and ASYNC:
        _prefetch(p_s, tl.minimum(channels, BV) * K)
    if (L == 16) or (n <= 16):
        if not LATE:
            b_raw = _load_tile(p_s, o_s, m_s, MASKED)
        if n * PARTS <= 16:
            total, b_sum = _sum_few(
                n, base, p_u, p_u_low, p_k, p_k_low, p_g, channels, L, K, V, BV, WARPS, VEC, LOW, PARTS, MASKED, DOT
            )  # fmt: skip
        else:
            total, b_sum = _sum_block(
                n, base, p_u, p_u_low, p_k, p_k_low, p_g, channels, L, K, V, BV, WARPS, VEC, LOW, DOT
            )  # fmt: skip
        if LATE:
            b_raw = _load_tile(p_s, o_s, m_s, MASKED)
        b_new = tl.fma(_dealt(b_raw, K, BV, WARPS, VEC), total, b_sum)
    else:
        if ASYNC and not LATE:
            _prefetch(p_s, tl.minimum(channels, BV) * K)
        total, b_sum = _sum_blocks(n, base, p_u, p_u_low, p_k, p_k_low, p_g, channels, L, K, V, BV, WARPS, VEC, LOW, DOT)
        b_new = tl.fma(_dealt(_load_tile(p_s, o_s, m_s, MASKED), K, BV, WARPS, VEC), total, b_sum)
    return b_new


@jit(vectors=VECTORS)
def _products(
    p_state, p_u, p_k, p_g, p_u_low, p_k_low, p_write_pos, p_base, p_fold, p_slots, p_rows, p_accept, p_track_slots, p_track_step,
    NL: tl.int64, S: tl.int64, R: tl.int64, null_slot: tl.int64,
    stride_state_l: tl.int64, stride_state_s: tl.int64, stride_u_l: tl.int64, stride_u_r: tl.int64,
    stride_k_l: tl.int64, stride_k_r: tl.int64, stride_g_l: tl.int64, stride_g_r: tl.int64,
    stride_u_low_l: tl.int64, stride_u_low_r: tl.int64, stride_k_low_l: tl.int64, stride_k_low_r: tl.int64,
    stride_slots: tl.int64, stride_rows: tl.int64,
    stride_accept: tl.int64, stride_track_slots: tl.int64, stride_track_step: tl.int64,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    LOW: tl.constexpr, HAS_TRACK: tl.constexpr, UNIT_STATE: tl.constexpr, UNIT_RING: tl.constexpr,
    BV: tl.constexpr, WARPS: tl.constexpr, VEC: tl.constexpr, AHEAD: tl.constexpr, HOPPER: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A program folds a [BV, K] tile; grid (B * HV * V tiles, NL).

    The tile's rows and columns are dealt: each vector that a thread loads or stores is what it holds of a product's result,
    in which every warp has 16 rows and 4 threads share a row. WARPS: how many warps there are; VEC: elements in a vector.
    """
    if HOPPER:
        tl.extra.cuda.gdc_launch_dependents()
    NV: tl.constexpr = (V + BV - 1) // BV
    MASKED: tl.constexpr = V % BV != 0
    PARTS: tl.constexpr = 4 if LOW or p_k.dtype.element_ty != DOT else 2
    J: tl.constexpr = K // (4 * VEC)
    ASYNC: tl.constexpr = HOPPER and UNIT_STATE > 1  # whole tiles are asked for by one instruction, on 16 bytes
    i_v, i_hv, i_b = tl.program_id(0) % NV, tl.program_id(0) // NV % HV, tl.program_id(0) // (NV * HV)
    i_h, i_l = i_hv // (HV // H), tl.program_id(1).to(tl.int64)

    slot, row, m_row = _locate(i_b, p_slots, p_rows, stride_slots, stride_rows, S, R, null_slot)
    p_state += (i_hv * V + i_v * BV) * K
    n, base, fold, n_t, target = _tasks(
        i_b, row, m_row, S, null_slot, p_write_pos, p_base, p_fold, p_accept, p_track_slots, p_track_step,
        stride_accept, stride_track_slots, stride_track_step, L, HAS_TRACK,
    )  # fmt: skip
    channels = V - i_v * BV
    if ASYNC and AHEAD > 0:
        _prefetch_ahead(
            AHEAD, i_l, i_b, tl.num_programs(0) // (NV * HV), p_state, p_slots, p_rows, p_write_pos, p_fold,
            stride_slots, stride_rows, S, R, null_slot, NL, stride_state_l, stride_state_s,
            tl.minimum(channels, BV) * K, UNIT_STATE,
        )  # fmt: skip
    fold = fold & (n > 0)
    if not (fold | (n_t > 0)):
        return

    p_u, p_u_low = _ring(
        p_u, p_u_low, i_l, row, stride_u_l, stride_u_r, stride_u_low_l, stride_u_low_r,
        i_hv * (L * V) + i_v * BV, UNIT_RING, LOW,
    )  # fmt: skip
    p_k, p_k_low = _ring(
        p_k, p_k_low, i_l, row, stride_k_l, stride_k_r, stride_k_low_l, stride_k_low_r, i_h * (L * K), UNIT_RING, LOW
    )  # fmt: skip
    p_g += i_l * stride_g_l + row * stride_g_r + i_hv * L
    o_s = tl.arange(0, BV)[:, None, None] * K + tl.arange(0, J)[None, :, None] * (4 * VEC)
    o_s += tl.arange(0, 4 * VEC)[None, None, :]  # [BV, J, 4 VEC]
    m_s = o_s < channels * K
    p_s = p_state + (i_l * stride_state_l + slot * stride_state_s) * UNIT_STATE
    p_t = p_state + (i_l * stride_state_l + target * stride_state_s) * UNIT_STATE
    n_first = n
    if HAS_TRACK:
        n_first = tl.where(n_t > 0, n_t, n)
    b_new = _folded(
        n_first, base, p_u, p_u_low, p_k, p_k_low, p_g, channels, p_s, o_s, m_s,
        L, K, V, BV, WARPS, VEC, LOW, PARTS, AHEAD == 0, ASYNC, MASKED, DOT,
    )  # fmt: skip
    if HAS_TRACK:
        if n_t > 0:
            _store_dealt(p_t, o_s, m_s, b_new, K, BV, WARPS, VEC, MASKED)
            if fold & (n_t != n):
                b_new = _folded(
                    n, base, p_u, p_u_low, p_k, p_k_low, p_g, channels, p_s, o_s, m_s,
                    L, K, V, BV, WARPS, VEC, LOW, PARTS, AHEAD == 0, ASYNC, MASKED, DOT,
                )  # fmt: skip
    if fold:
        _store_dealt(p_s, o_s, m_s, b_new, K, BV, WARPS, VEC, MASKED)


# --- launchers


def _arguments(
    state: torch.Tensor,
    u: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    u_low: torch.Tensor | None,
    k_low: torch.Tensor | None,
    cursors: tuple[torch.Tensor | None, ...],
    null_slot: int,
    layout: str,
) -> tuple[Any, ...]:
    """What the fold kernels share, in the order of their signatures; cursors are write_pos .. track_step."""
    unit_state, unit_ring = stride_unit(layout, state), stride_unit(layout, u)
    return (
        *(state, u, k, g, u_low, k_low, *cursors),
        *(state.shape[0], state.shape[1], g.shape[1], null_slot),
        *strides(state, 2, unit_state),
        *(*strides(u, 2, unit_ring), *strides(k, 2, unit_ring), *strides(g, 2)),
        *(*strides(u_low, 2, unit_ring), *strides(k_low, 2, unit_ring)),
        *_index_strides(cursors),
        *(k.shape[2], u.shape[2], k.shape[4], u.shape[4], g.shape[3]),
        *(u_low is not None, cursors[-1] is not None, unit_state, unit_ring),
    )


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)


def _hopper(tensor: torch.Tensor) -> bool:
    """Is this an sm_90 or newer, outside the interpreter? Then there are bulk prefetches and launches that start early."""
    return DOT == tl.bfloat16 and tensor.is_cuda and _is_hopper(tensor.device)


def _index_strides(cursors: tuple[torch.Tensor | None, ...]) -> tuple[int, ...]:
    return tuple(0 if index is None else index.stride(0) for index in cursors[3:])


def _move_cursors(
    cursors: tuple[torch.Tensor | None, ...], state: torch.Tensor, g: torch.Tensor, null_slot: int, early: bool = False
) -> None:
    batch, block = cursors[3].shape[0], 128
    _finish["any"][(triton.cdiv(batch, block),)](
        *cursors,
        *(batch, state.shape[1], g.shape[1], null_slot),
        *_index_strides(cursors),
        *(g.shape[3], cursors[-1] is not None, block, early),
        **({"launch_pdl": True} if early else {}),
        num_warps=4,
        enable_fp_fusion=False,
    )


def _tile(state: torch.Tensor, BV: int) -> int:
    """BV, or the whole V where that is less; a product needs 16."""
    return min(BV, max(16, triton.next_power_of_2(state.shape[3])))


def per_head(
    state: torch.Tensor,
    ring_u: torch.Tensor,
    ring_k: torch.Tensor,
    ring_g: torch.Tensor,
    write_pos: torch.Tensor,
    base: torch.Tensor,
    fold: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    *,
    ring_u_low: torch.Tensor | None = None,
    ring_k_low: torch.Tensor | None = None,
    accept: torch.Tensor | None = None,
    track_slots: torch.Tensor | None = None,
    track_step: torch.Tensor | None = None,
    null_slot: int = -1,
    folding: str = "every",
    BV: int,
    num_warps: int,
    layout: str,
) -> None:
    """`kernreg.ops.gdn_ring_commit`, one program per row, layer, value head and V tile."""
    cursors = (write_pos, base, fold, slots, rows, accept, track_slots, track_step)
    layers, _, heads, channels, _ = state.shape
    tile = _tile(state, BV)
    _per_head[layout][(slots.shape[0] * heads * triton.cdiv(channels, tile), layers)](
        *_arguments(state, ring_u, ring_k, ring_g, ring_u_low, ring_k_low, cursors, null_slot, layout),
        BV=tile,
        DOT=DOT,
        num_warps=num_warps,
        num_stages=1,
        enable_fp_fusion=False,
    )
    _move_cursors(cursors, state, ring_g, null_slot)


def head_group(
    state: torch.Tensor,
    ring_u: torch.Tensor,
    ring_k: torch.Tensor,
    ring_g: torch.Tensor,
    write_pos: torch.Tensor,
    base: torch.Tensor,
    fold: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    *,
    ring_u_low: torch.Tensor | None = None,
    ring_k_low: torch.Tensor | None = None,
    accept: torch.Tensor | None = None,
    track_slots: torch.Tensor | None = None,
    track_step: torch.Tensor | None = None,
    null_slot: int = -1,
    folding: str = "every",
    BV: int,
    num_warps: int,
    stages: int,
    layout: str,
) -> None:
    """`kernreg.ops.gdn_ring_commit`, one program per row, layer and key head; `stages` of its tiles are in flight."""
    cursors = (write_pos, base, fold, slots, rows, accept, track_slots, track_step)
    _head_group[layout][(slots.shape[0] * ring_k.shape[2], state.shape[0])](
        *_arguments(state, ring_u, ring_k, ring_g, ring_u_low, ring_k_low, cursors, null_slot, layout),
        BV=_tile(state, BV),
        DOT=DOT,
        STAGES=stages,
        num_warps=num_warps,
        num_stages=stages,
        enable_fp_fusion=False,
    )
    _move_cursors(cursors, state, ring_g, null_slot)


def sequential(
    state: torch.Tensor,
    ring_u: torch.Tensor,
    ring_k: torch.Tensor,
    ring_g: torch.Tensor,
    write_pos: torch.Tensor,
    base: torch.Tensor,
    fold: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    *,
    ring_u_low: torch.Tensor | None = None,
    ring_k_low: torch.Tensor | None = None,
    accept: torch.Tensor | None = None,
    track_slots: torch.Tensor | None = None,
    track_step: torch.Tensor | None = None,
    null_slot: int = -1,
    folding: str = "every",
    BV: int,
    num_warps: int,
    ahead: int,
    layout: str,
) -> None:
    """`kernreg.ops.gdn_ring_commit`, one program per row, layer, value head and V tile; time follows the history.

    ahead: a program asks for the state that is folded so many rows later; 0 for none.
    """
    cursors = (write_pos, base, fold, slots, rows, accept, track_slots, track_step)
    depth, _, heads, channels, _ = state.shape
    tile, modern = _tile(state, BV), _hopper(state)
    _sequential[layout][(slots.shape[0] * heads * triton.cdiv(channels, tile), depth)](
        *_arguments(state, ring_u, ring_k, ring_g, ring_u_low, ring_k_low, cursors, null_slot, layout),
        BV=tile,
        DEAL=_deal(state, tile, num_warps, layout),
        AHEAD=ahead,
        HOPPER=modern,
        num_warps=num_warps,
        num_stages=1,
        maxnreg=_registers(state, tile, num_warps),
        enable_fp_fusion=False,
    )
    _move_cursors(cursors, state, ring_g, null_slot, modern)


def products(
    state: torch.Tensor,
    ring_u: torch.Tensor,
    ring_k: torch.Tensor,
    ring_g: torch.Tensor,
    write_pos: torch.Tensor,
    base: torch.Tensor,
    fold: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    *,
    ring_u_low: torch.Tensor | None = None,
    ring_k_low: torch.Tensor | None = None,
    accept: torch.Tensor | None = None,
    track_slots: torch.Tensor | None = None,
    track_step: torch.Tensor | None = None,
    null_slot: int = -1,
    folding: str = "every",
    BV: int,
    ahead: int,
    layout: str,
) -> None:
    """`kernreg.ops.gdn_ring_commit`, one program per row, layer, value head and V tile, 16 rows of it a warp.

    ahead: a program asks for the state that is folded so many rows later and loads its own before the records' products;
    0: it asks for its own and loads it after them.
    """
    cursors = (write_pos, base, fold, slots, rows, accept, track_slots, track_step)
    depth, _, heads, channels, keys = state.shape
    tile, modern = _tile(state, BV), _hopper(state)
    _products[layout][(slots.shape[0] * heads * triton.cdiv(channels, tile), depth)](
        *_arguments(state, ring_u, ring_k, ring_g, ring_u_low, ring_k_low, cursors, null_slot, layout),
        BV=tile,
        WARPS=tile // 16,
        VEC=min(16 // state.element_size(), keys // 4),
        AHEAD=ahead,
        HOPPER=modern,
        DOT=DOT,
        num_warps=tile // 16,
        num_stages=1,
        maxnreg=_registers_of_products(state, ring_g.shape[3], tile, late=ahead == 0),
        enable_fp_fusion=False,
    )
    _move_cursors(cursors, state, ring_g, null_slot, modern)


def _deal(state: torch.Tensor, tile: int, num_warps: int, layout: str) -> int:
    """Rows of a tile that the threads hold at once, when each loads one vector of a row."""
    return min(tile, num_warps * max(1, 32 * stride_unit(layout, state) // state.shape[4]))


def _registers(state: torch.Tensor, tile: int, num_warps: int) -> int | None:
    """A cap that makes room for more programs without spilling, by a thread's elements of the tile; None: no cap."""
    elements = tile * state.shape[4] // (32 * num_warps)
    if elements > 64:
        return None
    return 96 if elements <= 32 and num_warps <= 4 else 128 if num_warps > 4 else 168


def _registers_of_products(state: torch.Tensor, ring: int, tile: int, late: bool) -> int | None:
    """A cap that makes room for more programs; a thread holds K / 2 sums, and as many elements of a tile that is loaded early."""
    if state.shape[4] > 128 or tile < 64:
        return None
    if late:
        return 96 if ring == 16 and tile <= 64 else 128
    return 128 if state.element_size() == 2 else 168
