"""Reference of `kernreg.ops.conv_window_commit`."""

from __future__ import annotations

import torch

from kernreg_torch import _shared


@torch.no_grad()
def conv_window_commit(
    conv_state: torch.Tensor,
    windows: torch.Tensor,
    conv_slots: torch.Tensor,
    window_rows: torch.Tensor,
    accept: torch.Tensor,
    *,
    track_slots: torch.Tensor | None = None,
    track_step: torch.Tensor | None = None,
    null_slot: int = -1,
) -> None:
    _shared.copy_accepted_step(conv_state, windows, conv_slots, window_rows, accept, track_slots, track_step, null_slot)
