"""What the KDA commits share: how many steps of a row were accepted and what is to be written, and the copy of a step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernreg_triton._common import jit, load_index, stride_unit, strides


@triton.jit
def accepted(
    i_b, p_slots, p_accept, p_track_slots, p_track_step, stride_slots, stride_accept, stride_track_slots, stride_track_step,
    S, LIMIT, null_slot, TRACK: tl.constexpr,
):  # fmt: skip
    """(is there anything to write?, slot, accept, track slot, track step or -1) of batch row i_b."""
    slot = load_index(p_slots, i_b, stride_slots)
    accept = load_index(p_accept, i_b, stride_accept)
    live = (slot > null_slot) & (slot >= 0) & (slot < S) & (accept > 0) & (accept <= LIMIT)
    track_slot, track_step = slot, accept * 0 - 1
    if TRACK:
        track_slot = load_index(p_track_slots, i_b, stride_track_slots)
        track_step = load_index(p_track_step, i_b, stride_track_step)
        tracks = (track_step >= 0) & (track_slot > null_slot)
        live = live & (~tracks | ((track_slot >= 0) & (track_slot < S) & (track_step < accept)))
        track_step = tl.where(tracks, track_step, -1)
    return live, slot, accept, track_slot, track_step


@jit(vectors=("p_pool", "p_steps"))
def _copy(
    p_pool, p_steps, p_slots, p_rows, p_accept, p_track_slots, p_track_step,
    B: tl.int32, S: tl.int64, WR: tl.int64, null_slot: tl.int64,
    stride_pool_l: tl.int64, stride_pool_s: tl.int64, stride_pool_n: tl.int64, stride_pool_m: tl.int64,
    stride_steps_l: tl.int64, stride_steps_r: tl.int64, stride_steps_t: tl.int64, stride_steps_n: tl.int64,
    stride_steps_m: tl.int64, stride_slots: tl.int64, stride_rows: tl.int64, stride_accept: tl.int64,
    stride_track_slots: tl.int64, stride_track_step: tl.int64,
    T: tl.constexpr, N: tl.constexpr, M: tl.constexpr, TRACK: tl.constexpr,
    ALIGNED: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """pool[:, slot] = steps[:, row, accept - 1], each [N, M]; one program for each layer, row and BLOCK of M."""
    NM: tl.constexpr = (M + BLOCK - 1) // BLOCK
    i_p = tl.program_id(0)
    i_m, i_b, i_l = i_p % NM, i_p // NM % B, (i_p // NM // B).to(tl.int64)
    live, slot, accept, track_slot, track_step = accepted(
        i_b, p_slots, p_accept, p_track_slots, p_track_step,
        stride_slots, stride_accept, stride_track_slots, stride_track_step, S, T, null_slot, TRACK,
    )  # fmt: skip
    row = load_index(p_rows, i_b, stride_rows)
    if not (live & (row >= 0) & (row < WR)):
        return

    o_m = i_m * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    m_m = o_m < M
    if ALIGNED:
        o_from, o_to = o_m, o_m
    else:
        o_from, o_to = o_m * stride_steps_m, o_m * stride_pool_m
    p_from = p_steps + i_l * (stride_steps_l * UNIT) + row * (stride_steps_r * UNIT) + o_from
    p_to = p_pool + i_l * (stride_pool_l * UNIT) + o_to
    p_last = p_from + (accept - 1) * (stride_steps_t * UNIT)
    p_slot = p_to + slot * (stride_pool_s * UNIT)
    for i_n in tl.static_range(N):
        b_x = tl.load(p_last + i_n * (stride_steps_n * UNIT), mask=m_m)
        tl.store(p_slot + i_n * (stride_pool_n * UNIT), b_x, mask=m_m)
    if TRACK:
        if track_step >= 0:
            p_track = p_from + track_step * (stride_steps_t * UNIT)
            p_target = p_to + track_slot * (stride_pool_s * UNIT)
            for i_n in tl.static_range(N):
                b_x = tl.load(p_track + i_n * (stride_steps_n * UNIT), mask=m_m)
                tl.store(p_target + i_n * (stride_pool_n * UNIT), b_x, mask=m_m)


def copy_accepted_step(
    pool: torch.Tensor,
    steps: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    accept: torch.Tensor,
    track_slots: torch.Tensor | None,
    track_step: torch.Tensor | None,
    null_slot: int,
    *,
    BLOCK: int,
    num_warps: int,
    layout: str,
) -> None:
    """pool [NL, S, N, M], steps [NL, WR, T, N, M]; under layout=aligned, M is contiguous."""
    NL, S, N, M = pool.shape
    WR, T = steps.shape[1:3]
    programs = NL * slots.shape[0] * triton.cdiv(M, BLOCK)
    if not programs:
        return
    unit = stride_unit(layout, pool)
    _copy[layout][(programs,)](
        pool, steps, slots, rows, accept, track_slots, track_step, slots.shape[0], S, WR, null_slot,
        *strides(pool, 3, unit), pool.stride(3), *strides(steps, 4, unit), steps.stride(4),
        slots.stride(0), rows.stride(0), accept.stride(0), *strides(track_slots, 1), *strides(track_step, 1),
        T=T, N=N, M=M, TRACK=track_slots is not None, ALIGNED=layout == "aligned", UNIT=unit, BLOCK=BLOCK, num_warps=num_warps,
    )  # fmt: skip
