"""Reference of `kernreg.ops.kda_chain_verify`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernreg_torch import _shared


@torch.no_grad()
def kda_chain_verify(
    mixed_qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    windows: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    conv_slots: torch.Tensor,
    window_rows: torch.Tensor,
    *,
    conv_bias: torch.Tensor | None = None,
    snapshots: torch.Tensor | None = None,
    ring_k: torch.Tensor | None = None,
    ring_v: torch.Tensor | None = None,
    ring_g: torch.Tensor | None = None,
    ring_beta: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    null_slot: int = -1,
) -> torch.Tensor:
    value_heads, v_dim, k_dim = state.shape[1:]
    key_width = (mixed_qkv.shape[1] - value_heads * v_dim) // 2
    scale = k_dim**-0.5 if scale is None else scale
    o = mixed_qkv.new_zeros(mixed_qkv.shape[0], value_heads, v_dim)

    def live_rows() -> Iterator[tuple[int, int, int, int, list[int]]]:
        """(slot, conv slot, window row, first token, parent step of each step)."""
        draft = windows.shape[1]
        offsets = [i * draft for i in range(slots.shape[0] + 1)] if cu_seqlens is None else cu_seqlens.tolist()
        chain = list(range(-1, draft - 1))
        for i, (slot, conv_slot, window) in enumerate(
            zip(slots.tolist(), conv_slots.tolist(), window_rows.tolist(), strict=True)
        ):
            begin, length = offsets[i], offsets[i + 1] - offsets[i]
            tree = (chain if parents is None else parents[i].tolist())[: max(length, 0)]
            if (
                _shared.live(slot, state.shape[0], null_slot)
                and _shared.live(conv_slot, conv_state.shape[0], null_slot)
                and 0 <= window < windows.shape[0]
                and 0 <= begin <= begin + length <= o.shape[0]
                and length <= draft
                and all(-1 <= parent < step for step, parent in enumerate(tree))
            ):
                yield slot, conv_slot, window, begin, tree

    for slot, conv_slot, window, begin, tree in live_rows():
        inputs: list[torch.Tensor] = []  # after each step, the last 3 inputs of the convolution [dim, 3]
        states: list[torch.Tensor] = []  # after each step, h [HV, V, K]
        for t, parent in enumerate(tree):
            token = begin + t
            history = conv_state[conv_slot] if parent < 0 else inputs[parent]
            taps = torch.cat((history, mixed_qkv[token, :, None]), 1)  # [dim, 4]
            inputs.append(taps[:, 1:])
            windows[window, t] = taps[:, 1:]

            y = _convolved(taps, conv_weight, conv_bias)
            q, k, v = y.split((key_width, key_width, value_heads * v_dim))
            q, k, v = q.view(-1, k_dim), k.view(-1, k_dim), v.view(-1, v_dim)
            g, beta = _shared.kda_gates(a[token], b[token], A_log, dt_bias, lower_bound)
            h = _shared.kda_step(state[slot] if parent < 0 else states[parent], k, v, g, beta)
            states.append(h)
            q = scale * _shared.per_value_head(_shared.l2_normalised(q.to(h.dtype)), value_heads, 0)
            o[token] = (h * q[:, None, :]).sum(-1)

            if snapshots is not None:
                snapshots[window, t] = h
            for ring, record in ((ring_k, k), (ring_v, v), (ring_g, g)):
                if ring is not None:
                    ring[slot, :, t] = record
            if ring_beta is not None:
                ring_beta[slot, :, t] = beta
    return o


def _convolved(taps: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """SiLU(bias + sum_j weight[:, j] taps[:, j]): products and sums in fp32, rounded to the activation dtype."""
    dtype = _shared.compute_dtype(taps)
    y = torch.zeros_like(taps[:, 0], dtype=dtype) if bias is None else bias.to(dtype)
    for j in range(4):
        y = y + weight[:, j].to(dtype) * taps[:, j].to(dtype)
    return (y * torch.sigmoid(y)).to(taps.dtype)
