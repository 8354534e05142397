"""Triton kernel of `kernreg.ops.kda_snapshot_commit`: copy each row's accepted snapshot, all layers in one launch."""

from __future__ import annotations

import torch

from kernreg_triton._accepted import copy_accepted_step


def copy(
    state: torch.Tensor,
    snapshots: torch.Tensor,
    slots: torch.Tensor,
    window_rows: torch.Tensor,
    accept: torch.Tensor,
    *,
    track_slots: torch.Tensor | None = None,
    track_step: torch.Tensor | None = None,
    null_slot: int = -1,
    BLOCK: int,
    num_warps: int,
    layout: str,
) -> None:
    copy_accepted_step(
        state.flatten(2)[:, :, None],  # heads, rows and columns are packed: one contiguous run
        snapshots.flatten(3)[:, :, :, None],
        slots,
        window_rows,
        accept,
        track_slots,
        track_step,
        null_slot,
        BLOCK=BLOCK,
        num_warps=num_warps,
        layout=layout,
    )
