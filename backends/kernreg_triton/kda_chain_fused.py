"""`kernreg.ops.kda_chain_verify` in Gluon: one launch, a head's records in shared memory. Same arithmetic, same bits.

A program serves one row and value head, for all of V or a part of it: convolution and gates once, then the recurrence over its
V tiles. With `ahead`, the next tile of the state is on its way into shared memory meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kernreg_triton import kda_chain_verify
from kernreg_triton._common import jit
from kernreg_triton.kda_chain_verify import arguments_of, row_of, store_window, taps_of
from kernreg_triton.kda_shared import allocate, by_rows, copy_async, load_tile, pieces, row_layout, store_tile, tile_layout
from kernreg_triton.kda_step import convolve, decay, inverse_norm, log_decay, output, place, sigmoid, step, sums

VECTORS = tuple(name for name in kda_chain_verify.VECTORS if name != "p_records")


# --- convolution and gates --------------------------------------------------------------------------------------------


@gluon.jit
def _weights(p_weight, c_0, length, N: gl.constexpr, COLUMN: gl.constexpr):
    """Four columns [N] of the weights of channels c_0 .., zero from `length` on: as [N, 4] lies in memory, 4 channels a thread."""
    CELLS: gl.constexpr = gl.BlockedLayout([16], [32], [gl.num_warps()], [0])
    o = gl.arange(0, 4 * N, CELLS)
    b_w = gl.load(p_weight + c_0 * 4 + o, mask=o < 4 * length, other=0.0)
    even, odd = gl.split(gl.reshape(b_w, [N, 2, 2]))
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    return place(w0, COLUMN), place(w1, COLUMN), place(w2, COLUMN), place(w3, COLUMN)


@gluon.jit
def _bias(p_bias, o_c, m_c, BIAS: gl.constexpr):
    b_bias = None
    if BIAS:
        b_bias = gl.load(p_bias + o_c, mask=m_c, other=0.0).to(gl.float32)[None, :]
    return b_bias


@gluon.jit
def _prepare(
    records, x, past, weights, window, gates, rings, scale, lower_bound, i_h, i_hv, first, owner, v_0,
    T: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SAFE: gl.constexpr,
    RING: gl.constexpr, BIAS: gl.constexpr, BW: gl.constexpr, C: gl.constexpr, TC: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """Records of all steps into shared memory, TC steps at a time; windows and ring entries.

    Serves columns v_0 .. v_0 + BW of V. What several programs know is stored by one: g and beta by the first of a head, q, k
    and their windows by its owner.
    """
    ROWS: gl.constexpr = row_layout(K, gl.num_warps())
    STEPS: gl.constexpr = gl.SliceLayout(1, ROWS)
    COLUMN: gl.constexpr = gl.SliceLayout(0, ROWS)
    s_q, s_k, s_decay, s_v, s_beta, s_kq = records
    p_weight, p_bias = weights
    p_a, stride_a, p_b, stride_b, p_A_log, p_dt_bias = gates
    p_ring_k, p_ring_v, p_ring_g, p_ring_beta = rings
    o_k, o_v = gl.arange(0, K, COLUMN), v_0 + gl.arange(0, BW, COLUMN)
    m_k, m_v = o_k < K, o_v < V
    o_q_c, o_k_c, o_v_c = i_h * K + o_k, (H + i_h) * K + o_k, 2 * H * K + i_hv * V + o_v
    q_weights = _weights(p_weight, i_h * K, K, K, COLUMN)
    k_weights = _weights(p_weight, (H + i_h) * K, K, K, COLUMN)
    v_weights = _weights(p_weight, 2 * H * K + i_hv * V + v_0, V - v_0, BW, COLUMN)
    b_dt_bias = gl.load(p_dt_bias + i_hv * K + o_k)[None, :]
    A_log = gl.load(p_A_log + i_hv)
    for i_t in range(CHUNKS):
        o_t = i_t * TC + gl.arange(0, TC, STEPS).to(gl.int64)
        m_t = o_t < T
        q_taps = taps_of(x, past, (None, 0), o_t, m_t, o_q_c, m_k, False)
        k_taps = taps_of(x, past, (None, 0), o_t, m_t, o_k_c, m_k, False)
        v_taps = taps_of(x, past, (None, 0), o_t, m_t, o_v_c, m_v, False)
        b_a = gl.load(p_a + (o_t * stride_a)[:, None] + (i_hv * K + o_k)[None, :], mask=m_t[:, None], other=0.0)
        b_b = gl.load(p_b + o_t * stride_b + i_hv, mask=m_t, other=0.0)
        b_q = convolve(q_taps, q_weights, _bias(p_bias, o_q_c, m_k, BIAS))
        b_k = convolve(k_taps, k_weights, _bias(p_bias, o_k_c, m_k, BIAS))
        b_v = convolve(v_taps, v_weights, _bias(p_bias, o_v_c, m_v, BIAS))
        b_g = log_decay(b_a.to(gl.float32), b_dt_bias, A_log, lower_bound, SAFE)
        b_beta = sigmoid(b_b.to(gl.float32))

        store_window(window, q_taps, o_t, m_t & owner, o_q_c, m_k)
        store_window(window, k_taps, o_t, m_t & owner, o_k_c, m_k)
        store_window(window, v_taps, o_t, m_t, o_v_c, m_v)
        if RING:
            gl.store(p_ring_k + (o_t * K)[:, None] + o_k[None, :], b_k, mask=(m_t & owner)[:, None])
            gl.store(p_ring_v + (o_t * V)[:, None] + o_v[None, :], b_v, mask=m_t[:, None] & m_v[None, :])
            gl.store(p_ring_g + (o_t * K)[:, None] + o_k[None, :], b_g, mask=(m_t & first)[:, None])
            gl.store(p_ring_beta + o_t, b_beta, mask=m_t & first)

        b_q, b_k = b_q.to(gl.float32), b_k.to(gl.float32)
        b_q *= (inverse_norm(place(sums(b_q * b_q, TC, K, C), STEPS)) * scale)[:, None]
        b_k *= inverse_norm(place(sums(b_k * b_k, TC, K, C), STEPS))[:, None]
        s_q.index(i_t).store(b_q)
        s_k.index(i_t).store(b_k)
        s_decay.index(i_t).store(decay(b_g))
        s_v.index(i_t).store(b_v.to(gl.float32))
        s_beta.index(i_t).store(b_beta[:, None])
        s_kq.index(i_t).store(place(sums(b_q * b_k, TC, K, C), STEPS)[:, None])


# --- recurrence -------------------------------------------------------------------------------------------------------


@gluon.jit
def _recur(
    h, records, p_snapshot, stride_snapshot_t, p_o, i_v, o_v, o_c, T: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, RING: gl.constexpr, BV: gl.constexpr, TILES: gl.constexpr, C: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """The delta rule over a row's records for tile i_v of a program, columns o_v of the head; p_o [T, HV, V] gets o."""
    COLUMNS: gl.constexpr = gl.SliceLayout(1, TILE)
    s_q, s_k, s_decay, s_v, s_beta, s_kq = records
    for t in range(T):
        q, k, b_decay = pieces(s_q.index(t), K, C, TILE), pieces(s_k.index(t), K, C, TILE), pieces(s_decay.index(t), K, C, TILE)
        b_v = s_v.index(t * TILES + i_v).load(COLUMNS)
        beta, kq = s_beta.index(t).load(COLUMNS), s_kq.index(t).load(COLUMNS)
        h, decayed, b_u = step(h, b_decay, k, b_v, beta, BV, C, COLUMNS)
        if not RING:
            store_tile(p_snapshot + t * stride_snapshot_t, h, o_v, o_c, V, K, C)
        b_o = output(decayed, b_u, q, kq, BV, C, COLUMNS)
        gl.store(p_o + t * (HV * V) + o_v, b_o.to(p_o.dtype.element_ty), mask=o_v < V)


# --- kernel -----------------------------------------------------------------------------------------------------------


@jit(vectors=VECTORS, compiler=gluon.jit)
def _heads(
    p_qkv, p_weight, p_bias, p_past, p_windows, p_a, p_b, p_A_log, p_dt_bias, p_state, p_snapshots,
    p_ring_k, p_ring_v, p_ring_g, p_ring_beta, p_slots, p_conv_slots, p_window_rows, p_o,
    lower_bound, scale, S: tl.int64, CS: tl.int64, WR: tl.int64, L: tl.int64, null_slot: tl.int64,
    stride_qkv: tl.int64, stride_past_s: tl.int64, stride_past_c: tl.int64, stride_past_w: tl.int64,
    stride_window_r: tl.int64, stride_window_t: tl.int64, stride_window_c: tl.int64, stride_window_w: tl.int64,
    stride_a: tl.int64, stride_b: tl.int64, stride_state: tl.int64, stride_snapshot_r: tl.int64, stride_snapshot_t: tl.int64,
    stride_ring_k: tl.int64, stride_ring_v: tl.int64, stride_ring_g: tl.int64, stride_ring_beta: tl.int64,
    stride_slots: tl.int64, stride_conv_slots: tl.int64, stride_window_rows: tl.int64,
    T: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SAFE: gl.constexpr,
    RING: gl.constexpr, BIAS: gl.constexpr, ALIGNED: gl.constexpr, UNIT_ACT: gl.constexpr, UNIT_STATE: gl.constexpr,
    BV: gl.constexpr, TILES: gl.constexpr, AHEAD: gl.constexpr, LANES: gl.constexpr, C: gl.constexpr, TC: gl.constexpr,
    TP: gl.constexpr,
):  # fmt: skip
    """One program for each row, value head and TILES V tiles. AHEAD: the next tile of the state is on its way meanwhile."""
    TILE: gl.constexpr = tile_layout(BV, C, LANES, gl.num_warps())
    COLUMNS: gl.constexpr = gl.SliceLayout(1, TILE)
    BW: gl.constexpr = BV * TILES
    NV: gl.constexpr = (V + BW - 1) // BW
    i_p = gl.program_id(0)
    i_w, i_hv, i_b = i_p % NV, i_p // NV % HV, (i_p // (NV * HV)).to(gl.int64)
    i_h = i_hv // (HV // H)
    o_v = i_w * BW + gl.arange(0, BV, COLUMNS)
    o_c = gl.arange(0, C, gl.SliceLayout(0, TILE))

    live, slot, conv_slot, window_row = row_of(
        i_b, p_slots, p_conv_slots, p_window_rows, stride_slots, stride_conv_slots, stride_window_rows, S, CS, WR, null_slot
    )
    begin = i_b * T
    p_o += begin * (HV * V) + i_hv * V
    if not live:
        for i_v in range(TILES):
            for t in range(T):
                o_tile = o_v + i_v * BV
                gl.store(p_o + t * (HV * V) + o_tile, gl.zeros([BV], p_o.dtype.element_ty, COLUMNS), mask=o_tile < V)
        return

    p_head = p_state + slot * (stride_state * UNIT_STATE) + i_hv * V * K
    if AHEAD:
        # rows that neighbours read at the same time lie 16 floats apart in the banks
        SWIZZLE: gl.constexpr = gl.SwizzledSharedLayout(16, max(BV * LANES // (32 * gl.num_warps()), 1), 2, [1, 0])
        COPY: gl.constexpr = row_layout(K, gl.num_warps())
        s_state = gl.allocate_shared_memory(gl.float32, [BV, K], SWIZZLE)
        o_copy = i_w * BW + gl.arange(0, BV, gl.SliceLayout(1, COPY))
        p_copy = p_head + (o_copy * K)[:, None] + gl.arange(0, K, gl.SliceLayout(0, COPY))[None, :]
        copy_async(s_state, p_copy, mask=(o_copy < V)[:, None])
        async_copy.commit_group()
    elif TILES == 1:
        h = load_tile(p_head, o_v, o_c, V, K, C)  # early, for few programs; many hide each other's latency, with fewer registers

    x = (p_qkv + begin * (stride_qkv * UNIT_ACT), stride_qkv * UNIT_ACT)
    past = (p_past + conv_slot * (stride_past_s * UNIT_ACT), 1 if ALIGNED else stride_past_c, stride_past_w * UNIT_ACT)
    window = (
        p_windows + window_row * (stride_window_r * UNIT_ACT), stride_window_t * UNIT_ACT,
        1 if ALIGNED else stride_window_c, stride_window_w * UNIT_ACT,
    )  # fmt: skip
    gates = (
        p_a + begin * (stride_a * UNIT_ACT), stride_a * UNIT_ACT, p_b + begin * stride_b, stride_b, p_A_log, p_dt_bias
    )  # fmt: skip
    rings = (p_ring_k, p_ring_v, p_ring_g, p_ring_beta)
    if RING:
        rings = (
            p_ring_k + slot * (stride_ring_k * UNIT_ACT) + i_h * L * K,
            p_ring_v + slot * (stride_ring_v * UNIT_ACT) + i_hv * L * V,
            p_ring_g + slot * (stride_ring_g * UNIT_STATE) + i_hv * L * K,
            p_ring_beta + slot * stride_ring_beta + i_hv * L,
        )
    CHUNKS: gl.constexpr = TP // TC
    s_q, s_k, s_decay = allocate(TC, K, CHUNKS), allocate(TC, K, CHUNKS), allocate(TC, K, CHUNKS)
    s_v, s_beta, s_kq = allocate(TC, BW, CHUNKS), allocate(TC, 1, CHUNKS), allocate(TC, 1, CHUNKS)
    first = i_w == 0
    _prepare(
        (s_q, s_k, s_decay, s_v, s_beta, s_kq), x, past, (p_weight, p_bias), window, gates, rings, scale, lower_bound,
        i_h, i_hv, first, first & (i_hv % (HV // H) == 0), i_w * BW, T, H, HV, K, V, SAFE, RING, BIAS, BW, C, TC, CHUNKS,
    )  # fmt: skip
    tl.debug_barrier()  # here, or the compiler waits for the records in every step

    records = (
        by_rows(s_q, TP, K), by_rows(s_k, TP, K), by_rows(s_decay, TP, K),
        by_rows(s_v, TP * TILES, BV), by_rows(s_beta, TP, 1), by_rows(s_kq, TP, 1),
    )  # fmt: skip
    p_snapshot = p_snapshots
    if not RING:
        p_snapshot = p_snapshots + window_row * (stride_snapshot_r * UNIT_STATE) + i_hv * V * K
    for i_v in range(TILES):
        if AHEAD:
            async_copy.wait_group(0)
            h = ()
            for j in gl.static_range(K // C):
                h = h + (s_state.slice(j * C, C, dim=1).load(TILE),)
            tl.debug_barrier()  # all have read the tile that the next one takes the place of
            o_next = o_copy + (i_v + 1) * BV
            copy_async(s_state, p_copy + (i_v + 1) * BV * K, mask=(o_next < V)[:, None] & (i_v + 1 < TILES))
            async_copy.commit_group()
        elif TILES > 1:
            h = load_tile(p_head, o_v + i_v * BV, o_c, V, K, C)
        _recur(
            h, records, p_snapshot, stride_snapshot_t * UNIT_STATE, p_o, i_v, o_v + i_v * BV, o_c,
            T, HV, K, V, RING, BV, TILES, C, TILE,
        )  # fmt: skip


def fused(
    mixed_qkv: torch.Tensor, conv_weight: torch.Tensor, conv_state: torch.Tensor, windows: torch.Tensor,
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, state: torch.Tensor,
    slots: torch.Tensor, conv_slots: torch.Tensor, window_rows: torch.Tensor, *,
    conv_bias: torch.Tensor | None = None, snapshots: torch.Tensor | None = None,
    ring_k: torch.Tensor | None = None, ring_v: torch.Tensor | None = None,
    ring_g: torch.Tensor | None = None, ring_beta: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None, parents: torch.Tensor | None = None,
    lower_bound: float | None = None, scale: float | None = None, null_slot: int = -1,
    BV: int, tiles: int, ahead: bool, num_warps: int, registers: int, layout: str,
) -> torch.Tensor:  # fmt: skip
    """One launch, one program for each row, value head and `tiles` V tiles."""
    arguments = arguments_of(
        mixed_qkv, conv_weight, conv_state, windows, a, b, A_log, dt_bias, state, slots, conv_slots, window_rows, conv_bias,
        snapshots, ring_k, ring_v, ring_g, ring_beta, cu_seqlens, parents, lower_bound, scale, null_slot, layout,
    )  # fmt: skip
    HV, V, _ = state.shape[1:]
    BV = min(BV, triton.next_power_of_2(V))
    programs = slots.shape[0] * HV * triton.cdiv(V, BV * tiles)
    if programs:
        arguments = {name: value for name, value in arguments.items() if name not in CHAINS_HAVE_NO}
        _heads[layout][(programs,)](
            **arguments, BV=BV, TILES=tiles, AHEAD=ahead, LANES=8, TC=min(arguments["TP"], num_warps),
            num_warps=num_warps, maxnreg=registers,
        )  # fmt: skip
    return arguments["p_o"]


CHAINS_HAVE_NO = {
    "p_cu_seqlens", "p_parents", "N", "stride_cu", "stride_parents_b", "stride_parents_t", "RAGGED", "TREE",
}  # fmt: skip
