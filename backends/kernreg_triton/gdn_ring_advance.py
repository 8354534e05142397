"""Triton kernel of `kernreg.ops.gdn_ring_advance`: one small launch over the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernreg_triton._common import jit

BLOCK = 128


@jit()
def _rows(
    p_write_pos, p_fold, p_rows, p_slots, p_accept,
    B: tl.int64, R: tl.int64, ring: tl.int64, most: tl.int64, null_slot: tl.int64,
    stride_rows: tl.int64, stride_slots: tl.int64, stride_accept: tl.int64,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """n += accepted; a row folds when it then has more than `most` records."""
    i_b = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_b = i_b < B
    slot = tl.load(p_slots + i_b * stride_slots, mask=m_b, other=0).to(tl.int64)
    row = tl.load(p_rows + i_b * stride_rows, mask=m_b, other=0).to(tl.int64)
    accept = tl.load(p_accept + i_b * stride_accept, mask=m_b, other=0).to(tl.int64)
    live = m_b & (slot > null_slot) & (row >= 0) & (row < R)
    n = tl.load(p_write_pos + row, mask=live, other=0).to(tl.int64)
    # an accepted count near 2^63 must not wrap around
    live = live & (accept >= 0) & (accept <= ring) & (n >= 0) & (n + accept <= ring)
    n += accept
    tl.store(p_write_pos + row, n.to(tl.int32), mask=live)
    tl.store(p_fold + row, (n > most).to(tl.int8), mask=live)


def rows(
    write_pos: torch.Tensor,
    fold: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    accept: torch.Tensor,
    *,
    ring: int,
    margin: int | None = None,
    null_slot: int = -1,
) -> None:
    """`kernreg.ops.gdn_ring_advance`; both fold rules run in one binary."""
    batch = slots.shape[0]
    if batch == 0:
        return
    _rows["any"][(triton.cdiv(batch, BLOCK),)](
        *(write_pos, fold, rows, slots, accept),
        *(batch, write_pos.shape[0], ring, 0 if margin is None else ring - margin, null_slot),
        *(rows.stride(0), slots.stride(0), accept.stride(0)),
        BLOCK=BLOCK,
        num_warps=4,
    )
