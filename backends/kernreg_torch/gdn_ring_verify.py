"""Reference of `kernreg.ops.gdn_ring_verify`: the token loop, from the folded state."""

from __future__ import annotations

import torch

from kernreg_torch import _shared


@torch.no_grad()
def gdn_ring_verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    ring_u: torch.Tensor,
    ring_k: torch.Tensor,
    ring_g: torch.Tensor,
    write_pos: torch.Tensor,
    base: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    draft: int,
    ring_u_low: torch.Tensor | None = None,
    ring_k_low: torch.Tensor | None = None,
    scale: float | None = None,
    null_slot: int = -1,
) -> torch.Tensor:
    value_heads, length = ring_g.shape[1:]
    dtype = _shared.compute_dtype(q, state, ring_u, ring_g, A_log)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    history, bases, offsets = write_pos.tolist(), base.tolist(), cu_seqlens.tolist()
    o = q.new_zeros(v.shape)

    for i, slot, r in _shared.gdn_rows(slots, rows, state.shape[0], ring_g.shape[0], null_slot):
        begin, end, n = offsets[i], offsets[i + 1], history[r]
        in_range = 0 <= begin <= end <= q.shape[0] and end - begin <= draft and 0 <= n <= length - (end - begin)
        if not in_range:
            continue
        low = (None, None) if ring_u_low is None or ring_k_low is None else (ring_u_low[r], ring_k_low[r])
        ring = _shared.Ring(ring_u[r], ring_k[r], ring_g[r], *low, bases[r], dtype)
        h = ring.fold(state[slot].to(dtype), n)  # [HV, V, K]
        for t in range(begin, end):
            key = _shared.l2_normalised(k[t].to(dtype))  # [H, K]
            k_t = _shared.per_value_head(key, value_heads, 0)[:, None, :]
            q_t = _shared.per_value_head(_shared.l2_normalised(q[t].to(dtype)), value_heads, 0)[:, None, :]
            g = -A_log.to(dtype).exp() * _shared.softplus(a[t].to(dtype) + dt_bias.to(dtype))  # [HV]
            beta = torch.sigmoid(b[t].to(dtype))

            h = h * g.exp()[:, None, None]
            u = beta[:, None] * (v[t].to(dtype) - (h * k_t).sum(-1))  # [HV, V]
            h = h + u[:, :, None] * k_t
            o[t] = scale * (h * q_t).sum(-1)
            ring.store(n + t - begin, u, key, g)
    return o
