"""Reference of `kernreg.ops.kda_ring_commit`."""

from __future__ import annotations

import torch

from kernreg_torch import _shared


@torch.no_grad()
def kda_ring_commit(
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
) -> None:
    tracks = _shared.track_targets(slots.shape[0], track_slots, track_step, null_slot)
    for slot, count, track in zip(slots.tolist(), accept.tolist(), tracks, strict=True):
        in_range = 0 <= count <= ring_g.shape[3] and _shared.track_in_range(track, state.shape[1], count)
        if not (_shared.live(slot, state.shape[1], null_slot) and in_range):
            continue
        for layer in range(state.shape[0]):
            k, v, g, beta = ring_k[layer, slot], ring_v[layer, slot], ring_g[layer, slot], ring_beta[layer, slot]
            h = state[layer, slot]
            for t in range(count):
                h = _shared.kda_step(h, k[:, t], v[:, t], g[:, t], beta[:, t])
                if track is not None and t == track[1]:
                    state[layer, track[0]] = h
            if count > 0:
                state[layer, slot] = h
