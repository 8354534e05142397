"""Triton kernel of `kernreg.ops.conv_window_commit`: copy each row's accepted window, all layers in one launch."""

from __future__ import annotations

import torch

from kernreg_triton._accepted import copy_accepted_step


def copy(
    conv_state: torch.Tensor,
    windows: torch.Tensor,
    conv_slots: torch.Tensor,
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
        conv_state.transpose(2, 3),
        windows.transpose(3, 4),
        conv_slots,
        window_rows,
        accept,
        track_slots,
        track_step,
        null_slot,
        BLOCK=BLOCK,
        num_warps=num_warps,
        layout=layout,
    )
