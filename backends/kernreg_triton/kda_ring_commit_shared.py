"""`kernreg.ops.kda_ring_commit` in Gluon: keys and decays once for each program, in shared memory. Same arithmetic, same bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernreg_triton._accepted import accepted
from kernreg_triton._common import jit
from kernreg_triton.kda_ring_commit import launch
from kernreg_triton.kda_shared import allocate, by_rows, load_tile, pieces, row_layout, store_tile, tile_layout
from kernreg_triton.kda_step import decay, inverse_norm, place, step, sums


@jit(vectors=("p_state", "p_k", "p_v", "p_g"), compiler=gluon.jit)
def _replay(
    p_state, p_k, p_v, p_g, p_beta, p_slots, p_accept, p_track_slots, p_track_step,
    B: tl.int32, S: tl.int64, null_slot: tl.int64,
    stride_state_l: tl.int64, stride_state_s: tl.int64, stride_k_l: tl.int64, stride_k_s: tl.int64,
    stride_v_l: tl.int64, stride_v_s: tl.int64, stride_g_l: tl.int64, stride_g_s: tl.int64,
    stride_beta_l: tl.int64, stride_beta_s: tl.int64,
    stride_slots: tl.int64, stride_accept: tl.int64, stride_track_slots: tl.int64, stride_track_step: tl.int64,
    L: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, TRACK: gl.constexpr,
    UNIT_STATE: gl.constexpr, UNIT_ACT: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, LANES: gl.constexpr, TC: gl.constexpr,
):  # fmt: skip
    """One program for each layer, row, value head and V tile; TC records at a time."""
    TILE: gl.constexpr = tile_layout(BV, C, LANES, gl.num_warps())
    COLUMNS: gl.constexpr = gl.SliceLayout(1, TILE)
    ROWS: gl.constexpr = row_layout(K, gl.num_warps())
    STEPS: gl.constexpr = gl.SliceLayout(1, ROWS)
    NV: gl.constexpr = (V + BV - 1) // BV
    i_p = gl.program_id(0)
    i_v, i_hv = i_p % NV, i_p // NV % HV
    i_b, i_l = i_p // (NV * HV) % B, (i_p // (NV * HV) // B).to(gl.int64)
    i_h = i_hv // (HV // H)

    live, slot, accept, track_slot, track_step = accepted(
        i_b, p_slots, p_accept, p_track_slots, p_track_step,
        stride_slots, stride_accept, stride_track_slots, stride_track_step, S, L, null_slot, TRACK,
    )  # fmt: skip
    if not live:
        return

    p_layer = p_state + i_l * (stride_state_l * UNIT_STATE) + i_hv * V * K
    p_head = p_layer + slot * (stride_state_s * UNIT_STATE)
    p_k += i_l * (stride_k_l * UNIT_ACT) + slot * (stride_k_s * UNIT_ACT) + i_h * L * K
    p_v += i_l * (stride_v_l * UNIT_ACT) + slot * (stride_v_s * UNIT_ACT) + i_hv * L * V
    p_g += i_l * (stride_g_l * UNIT_STATE) + slot * (stride_g_s * UNIT_STATE) + i_hv * L * K
    p_beta += i_l * stride_beta_l + slot * stride_beta_s + i_hv * L
    o_v, o_c = i_v * BV + gl.arange(0, BV, COLUMNS), gl.arange(0, C, gl.SliceLayout(0, TILE))
    h = load_tile(p_head, o_v, o_c, V, K, C)
    s_k, s_decay, s_v, s_beta = allocate(TC, K, 1), allocate(TC, K, 1), allocate(TC, BV, 1), allocate(TC, 1, 1)
    k_rows, decay_rows, v_rows, betas = by_rows(s_k, TC, K), by_rows(s_decay, TC, K), by_rows(s_v, TC, BV), by_rows(s_beta, TC, 1)
    o_k = gl.arange(0, K, gl.SliceLayout(0, ROWS))
    o_w = i_v * BV + gl.arange(0, BV, gl.SliceLayout(0, ROWS))
    steps = accept.to(gl.int32)
    for t_0 in range(0, steps, TC):
        o_t = t_0 + gl.arange(0, TC, STEPS)
        m_t = o_t < steps
        b_k = gl.load(p_k + (o_t * K)[:, None] + o_k[None, :], mask=m_t[:, None], other=0.0).to(gl.float32)
        b_g = gl.load(p_g + (o_t * K)[:, None] + o_k[None, :], mask=m_t[:, None], other=0.0)
        b_v = gl.load(p_v + (o_t * V)[:, None] + o_w[None, :], mask=m_t[:, None] & (o_w < V)[None, :], other=0.0)
        b_beta = gl.load(p_beta + o_t, mask=m_t, other=0.0)
        b_k *= inverse_norm(place(sums(b_k * b_k, TC, K, C), STEPS))[:, None]
        s_k.index(0).store(b_k)
        s_decay.index(0).store(decay(b_g))
        s_v.index(0).store(b_v.to(gl.float32))
        s_beta.index(0).store(b_beta[:, None])
        tl.debug_barrier()  # here, or the compiler waits for the records in every step
        for t in range(min(TC, steps - t_0)):
            k, b_decay = pieces(k_rows.index(t), K, C, TILE), pieces(decay_rows.index(t), K, C, TILE)
            h, _, _ = step(h, b_decay, k, v_rows.index(t).load(COLUMNS), betas.index(t).load(COLUMNS), BV, C, COLUMNS)
            if TRACK:
                if t_0 + t == track_step:
                    store_tile(p_layer + track_slot * (stride_state_s * UNIT_STATE), h, o_v, o_c, V, K, C)
    store_tile(p_head, h, o_v, o_c, V, K, C)


def shared(
    state: torch.Tensor,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    ring_g: torch.Tensor,
    ring_beta: torch.Tensor,
    slots: torch.Tensor,
    accept: torch.Tensor,
    *,
    track_slots: torch.Tensor | None = None,
    track_step: torch.Tensor | None = None,
    null_slot: int = -1,
    BV: int,
    num_warps: int,
    layout: str,
) -> None:
    BV = min(BV, triton.next_power_of_2(state.shape[3]))
    TC = min(triton.next_power_of_2(ring_g.shape[3]), num_warps)
    launch(
        _replay[layout], state, ring_k, ring_v, ring_g, ring_beta, slots, accept, track_slots, track_step, null_slot,
        BV, num_warps, layout, LANES=4, TC=TC,
    )  # fmt: skip
