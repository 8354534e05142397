"""Reference of `kernreg.ops.gdn_ring_commit`."""

from __future__ import annotations

import torch

from kernreg_torch import _shared


@torch.no_grad()
def gdn_ring_commit(
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
) -> None:
    del folding  # a fact for choosing kernels only
    ring_rows, length = ring_g.shape[1], ring_g.shape[3]
    dtype = _shared.compute_dtype(state, ring_u, ring_g)
    tracks = _shared.track_targets(slots.shape[0], track_slots, track_step, null_slot)
    accepted = [0] * slots.shape[0] if accept is None else accept.tolist()
    history, bases, folds = write_pos.tolist(), base.tolist(), fold.tolist()

    for i, slot, r in _shared.gdn_rows(slots, rows, state.shape[1], ring_rows, null_slot):
        n, track = history[r], tracks[i]
        counts_in_range = 0 <= n <= length and 0 <= accepted[i] <= n
        if not (counts_in_range and _shared.track_in_range(track, state.shape[1], accepted[i])):
            continue
        low = (None, None) if ring_u_low is None or ring_k_low is None else (ring_u_low[:, r], ring_k_low[:, r])
        ring = _shared.Ring(ring_u[:, r], ring_k[:, r], ring_g[:, r], *low, bases[r], dtype)
        before = state[:, slot].to(dtype, copy=True)  # [NL, HV, V, K]
        if track is not None:
            state[:, track[0]] = ring.fold(before, n - accepted[i] + track[1] + 1)
        if folds[r] and n > 0:
            state[:, slot] = ring.fold(before, n)
        if folds[r]:
            base[r], write_pos[r], fold[r] = (bases[r] + n) % length, 0, 0
