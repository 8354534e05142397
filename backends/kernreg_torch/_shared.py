"""What the references share: which rows are live, the fold of a GDN ring, the delta rule's steps, the gates."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """float64 if any tensor is, else fp32."""
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def live(slot: int, slots: int, null_slot: int) -> bool:
    return max(null_slot, -1) < slot < slots


def track_targets(
    batch: int,
    track_slots: torch.Tensor | None,
    track_step: torch.Tensor | None,
    null_slot: int,
) -> list[tuple[int, int] | None]:
    """Of each row the slot and step of its track snapshot, or None where it takes none."""
    if track_slots is None or track_step is None:
        return [None] * batch
    pairs = zip(track_slots.tolist(), track_step.tolist(), strict=True)
    return [(slot, step) if step >= 0 and slot > null_slot else None for slot, step in pairs]


def track_in_range(target: tuple[int, int] | None, slots: int, accepted: int) -> bool:
    return target is None or (0 <= target[0] < slots and target[1] < accepted)


def copy_accepted_step(
    pool: torch.Tensor,
    steps: torch.Tensor,
    slots: torch.Tensor,
    window_rows: torch.Tensor,
    accept: torch.Tensor,
    track_slots: torch.Tensor | None,
    track_step: torch.Tensor | None,
    null_slot: int,
) -> None:
    """pool[:, slot] = steps[:, window_row, accept - 1], and the track step's into the track slot; pool and steps lead with NL."""
    tracks = track_targets(slots.shape[0], track_slots, track_step, null_slot)
    rows = zip(slots.tolist(), window_rows.tolist(), accept.tolist(), tracks, strict=True)
    for slot, window, count, track in rows:
        in_range = 0 <= window < steps.shape[1] and 0 <= count <= steps.shape[2]
        in_range = in_range and track_in_range(track, pool.shape[1], count)
        if not (live(slot, pool.shape[1], null_slot) and in_range):
            continue
        if count > 0:
            pool[:, slot] = steps[:, window, count - 1]
        if track is not None:
            pool[:, track[0]] = steps[:, window, track[1]]


def per_value_head(x: torch.Tensor, value_heads: int, dim: int) -> torch.Tensor:
    """Repeat key heads along `dim`: value head hv reads key head hv // (HV / H)."""
    return x.repeat_interleave(value_heads // x.shape[dim], dim)


def l2_normalised(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), linear above 20."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))


class Ring:
    """One ring row of a GDN ring, all its leading dims: u [.., HV, L, V], k [.., H, L, K], g [.., HV, L], and low parts."""

    def __init__(
        self,
        u: torch.Tensor,
        k: torch.Tensor,
        g: torch.Tensor,
        u_low: torch.Tensor | None,
        k_low: torch.Tensor | None,
        base: int,
        dtype: torch.dtype,
    ) -> None:
        self.u, self.k, self.g, self.u_low, self.k_low = u, k, g, u_low, k_low
        self.base, self.dtype = base, dtype

    def position(self, record: int) -> int:
        return (self.base + record) % self.g.shape[-1]

    def _load(self, high: torch.Tensor, low: torch.Tensor | None, at: int) -> torch.Tensor:
        value = high[..., at, :].to(self.dtype)
        return value if low is None else value + low[..., at, :].to(self.dtype)

    def load(self, record: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """u [.., HV, V], k [.., HV, K] and g [.., HV] of one logical record."""
        at = self.position(record)
        k = per_value_head(self._load(self.k, self.k_low, at), self.u.shape[-3], -2)
        return self._load(self.u, self.u_low, at), k, self.g[..., at].to(self.dtype)

    def store(self, record: int, u: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> None:
        """u [HV, V], k [H, K], g [HV], split into high and low parts where there are low parts."""
        at = self.position(record)
        for value, high, low in ((u, self.u, self.u_low), (k, self.k, self.k_low)):
            high[..., at, :] = value
            if low is not None:
                low[..., at, :] = value - high[..., at, :].to(self.dtype)
        self.g[..., at] = g

    def fold(self, state: torch.Tensor, count: int) -> torch.Tensor:
        """state [.., HV, V, K] after the first `count` records: S exp(P_n) + sum_j exp(P_n - P_j) u_j k_j^T."""
        total = torch.zeros_like(state)
        decay = state.new_zeros(self.g.shape[:-1])  # P_n - P_j, summed from the newest record back
        for record in reversed(range(count)):
            u, k, g = self.load(record)
            total += (decay.exp()[..., None] * u)[..., :, None] * k[..., None, :]
            decay += g
        return state * decay.exp()[..., None, None] + total


def gdn_rows(
    slots: torch.Tensor, rows: torch.Tensor, state_slots: int, ring_rows: int, null_slot: int
) -> Iterator[tuple[int, int, int]]:
    """(batch row, slot, ring row) of the rows whose slot and ring row are in range."""
    for i, (slot, r) in enumerate(zip(slots.tolist(), rows.tolist(), strict=True)):
        if live(slot, state_slots, null_slot) and 0 <= r < ring_rows:
            yield i, slot, r


def kda_gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """g [HV, K] and beta [HV] of one token, in the dtype of A_log: beta is never rounded to 16 bits."""
    rate = A_log.exp()[:, None]
    x = a.to(A_log.dtype).view(A_log.shape[0], -1) + dt_bias.view(A_log.shape[0], -1)
    g = -rate * softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)
    return g, torch.sigmoid(b.to(A_log.dtype))


def kda_step(h: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """One step of the delta rule: h [HV, V, K], raw k [H, K], raw v [HV, V], g [HV, K], beta [HV] -> h.

    Verify and commit both call it on one row and layer at a time, so that equal records give equal bits.
    """
    k = per_value_head(l2_normalised(k.to(h.dtype)), h.shape[0], 0)[:, None, :]  # [HV, 1, K]
    h = h * g.exp()[:, None, :]
    u = beta[:, None] * (v.to(h.dtype) - (h * k).sum(-1))
    return h + u[:, :, None] * k
