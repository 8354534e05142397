"""Triton kernel of `kernreg.ops.kda_ring_commit`: replay ring records into the state, all layers in one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernreg_triton._accepted import accepted
from kernreg_triton._common import jit, stride_unit, strides
from kernreg_triton.kda_step import (
    decay,
    inverse_norm,
    load_row,
    load_state,
    piece_width,
    step,
    store_state,
    sums_of_pieces,
)


@triton.jit
def _record(p_k, p_v, p_g, p_beta, t, o_v, m_v, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr):
    """(decay, normalised k, v, beta) of ring position t."""
    k = load_row(p_k + t * K, C, K // C)
    g = load_row(p_g + t * K, C, K // C)
    b_v = tl.load(p_v + t * V + o_v, mask=m_v, other=0.0).to(tl.float32)
    beta = tl.load(p_beta + t)
    kk = ()
    for j in tl.static_range(K // C):
        kk = kk + (k[j] * k[j],)
    b_factor = inverse_norm(sums_of_pieces(kk, 1, C))[:, None]
    b_decay = ()
    normalised = ()
    for j in tl.static_range(K // C):
        b_decay = b_decay + (decay(g[j]),)
        normalised = normalised + (k[j] * b_factor,)
    return b_decay, normalised, b_v, beta


@jit(vectors=("p_state", "p_k", "p_v", "p_g"))
def _replay(
    p_state, p_k, p_v, p_g, p_beta, p_slots, p_accept, p_track_slots, p_track_step,
    B: tl.int32, S: tl.int64, null_slot: tl.int64,
    stride_state_l: tl.int64, stride_state_s: tl.int64, stride_k_l: tl.int64, stride_k_s: tl.int64,
    stride_v_l: tl.int64, stride_v_s: tl.int64, stride_g_l: tl.int64, stride_g_s: tl.int64,
    stride_beta_l: tl.int64, stride_beta_s: tl.int64,
    stride_slots: tl.int64, stride_accept: tl.int64, stride_track_slots: tl.int64, stride_track_step: tl.int64,
    L: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TRACK: tl.constexpr,
    UNIT_STATE: tl.constexpr, UNIT_ACT: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One program for each layer, row, value head and V tile."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_p = tl.program_id(0)
    i_v, i_hv = i_p % NV, i_p // NV % HV
    i_b, i_l = i_p // (NV * HV) % B, (i_p // (NV * HV) // B).to(tl.int64)
    i_h = i_hv // (HV // H)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < V

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
    h = load_state(p_head, o_v, m_v, K, C)
    for t in range(accept.to(tl.int32)):
        b_decay, k, b_v, beta = _record(p_k, p_v, p_g, p_beta, t, o_v, m_v, K, V, C)
        h, _, _ = step(h, b_decay, k, b_v, beta, BV, C)
        if TRACK:
            if t == track_step:
                store_state(p_layer + track_slot * (stride_state_s * UNIT_STATE), h, o_v, m_v, K, C)
    store_state(p_head, h, o_v, m_v, K, C)


def replay(
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
    launch(
        _replay[layout], state, ring_k, ring_v, ring_g, ring_beta, slots, accept, track_slots, track_step, null_slot,
        BV, num_warps, layout,
    )  # fmt: skip


def launch(
    kernel: Any, state: torch.Tensor, ring_k: torch.Tensor, ring_v: torch.Tensor, ring_g: torch.Tensor, ring_beta: torch.Tensor,
    slots: torch.Tensor, accept: torch.Tensor, track_slots: torch.Tensor | None, track_step: torch.Tensor | None,
    null_slot: int, BV: int, num_warps: int, layout: str, **constants: int,
) -> None:  # fmt: skip
    """A kernel with the arguments of `_replay`; `constants` are those that only it has."""
    NL, S, HV, V, K = state.shape
    programs = NL * slots.shape[0] * HV * triton.cdiv(V, BV)
    if not programs:
        return
    act, wide = stride_unit(layout, ring_k), stride_unit(layout, state)
    kernel[(programs,)](
        state, ring_k, ring_v, ring_g, ring_beta, slots, accept, track_slots, track_step,
        slots.shape[0], S, null_slot,
        *strides(state, 2, wide), *strides(ring_k, 2, act), *strides(ring_v, 2, act), *strides(ring_g, 2, wide),
        *strides(ring_beta, 2), slots.stride(0), accept.stride(0), *strides(track_slots, 1), *strides(track_step, 1),
        L=ring_g.shape[3], H=ring_k.shape[2], HV=HV, K=K, V=V, TRACK=track_slots is not None,
        UNIT_STATE=wide, UNIT_ACT=act, BV=BV, C=piece_width(K), num_warps=num_warps, enable_fp_fusion=False, **constants,
    )  # fmt: skip
