"""Reference of `kernreg.ops.gdn_ring_advance`."""

from __future__ import annotations

import torch


@torch.no_grad()
def gdn_ring_advance(
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
    accepted, history = accept.tolist(), write_pos.tolist()
    for i, (slot, r) in enumerate(zip(slots.tolist(), rows.tolist(), strict=True)):
        if slot <= null_slot or not 0 <= r < len(history):
            continue
        n = history[r] + accepted[i]
        if accepted[i] < 0 or history[r] < 0 or n > ring:
            continue
        write_pos[r] = n
        fold[r] = n > 0 if margin is None else n + margin > ring
