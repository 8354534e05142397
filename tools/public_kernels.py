"""SGLang's public kernels under the signatures of kernreg's ops, to time and check them on the same tensors.

They are imported from an installed SGLang (0.5.23 was measured) or from its `sglang/kernels` folder on the path. Each function
ignores what the public kernel has no argument for; `variants` gives the settings that a fair comparison must try.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

Public = Callable[..., Any]
LINEAR = "sglang.kernels.ops.attention.linear"
FUSED_TILES = ((4, 4), (8, 4), (16, 4), (32, 1), (32, 4), (64, 2), (64, 4), (64, 8))  # (V tile, warps)


@cache
def _module(name: str) -> Any:
    return importlib.import_module(name)


def available() -> str | None:
    """Why the public kernels cannot be used here, or None."""
    try:
        _module(f"{LINEAR}.gdn_replayssm_spec_decode")
    except ImportError as error:
        return f"SGLang's kernels are not on the path: {error}"
    return None


def gdn_ring_commit(**x: Any) -> None:
    x["accept"] = x["write_pos"] if x["accept"] is None else x["accept"]
    _module(f"{LINEAR}.gdn_replayssm_spec_decode").commit_gdn_replayssm_circular(
        checkpoint_state=x["state"],
        d_cache=x["ring_u"],
        k_cache=x["ring_k"],
        g_cache=x["ring_g"],
        d_residual_cache=x["ring_u_low"],
        k_residual_cache=x["ring_k_low"],
        state_batch_indices=x["slots"],
        replay_indices=x["rows"],
        write_pos=x["write_pos"],
        cache_base=x["base"],
        is_flush=x["fold"],
        accept_lens=x["accept"],
        mamba_track_indices=x["track_slots"],
        mamba_steps_to_track=x["track_step"],
        null_block_id=x["null_slot"],
    )


def gdn_ring_verify(**x: Any) -> Any:
    import torch

    out = torch.empty_like(x["v"])
    _module(f"{LINEAR}.gdn_replayssm_spec_decode").gdn_replayssm_spec_decode(
        *(x[name] for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state", "ring_u", "ring_k", "ring_g")),
        rawv_cache=x["ring_u_low"],
        rawk_cache=x["ring_k_low"],
        beta_cache=None,
        out=out,
        query_start_loc=x["cu_seqlens"],
        ssm_state_indices=x["slots"],
        replay_indices=x["rows"],
        write_pos=x["write_pos"],
        cache_base=x["base"],
        is_flush=_no_flags(x["write_pos"].device, x["write_pos"].numel()),
        max_cache_len=x["ring_u"].shape[2],
        max_spec_len=x["draft"],
        scale=x["scale"],
        null_block_id=x["null_slot"],
        launch_mode="verify",
    )
    return out


@cache
def _no_flags(device: Any, count: int) -> Any:
    import torch

    return torch.zeros(count, dtype=torch.int8, device=device)


def gdn_ring_advance(base: Any = None, **x: Any) -> None:
    """base: the rings' cursors, which the public kernel asks for and the op does not."""
    import torch

    _module(f"{LINEAR}.gdn_replayssm_spec_decode").commit_gdn_replayssm_spec(
        x["write_pos"],
        torch.zeros_like(x["write_pos"]) if base is None else base,
        x["fold"],
        x["accept"],
        x["rows"],
        max_cache_len=x["ring"],
        max_spec_len=x["margin"] or 1,
        fold_every_commit=x["margin"] is None,
        null_block_id=x["null_slot"],
    )


def _kda_dims(x: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """T, H, HV, K, V."""
    _, value_heads, v_dim, k_dim = x["state"].shape
    key_heads = (x["mixed_qkv"].shape[1] - value_heads * v_dim) // (2 * k_dim)
    return x["windows"].shape[1], key_heads, value_heads, k_dim, v_dim


def _kda_ring(x: Mapping[str, Any]) -> dict[str, Any]:
    rings = {"rawv": "ring_v", "rawk": "ring_k", "g": "ring_g", "beta": "ring_beta"}
    return {"cache_ring": True, **{f"replayssm_{theirs}": x[ours] for theirs, ours in rings.items()}}


def kda_chain_verify_fused(*, block_v: int = 4, warps: int = 4, **x: Any) -> Any:
    draft, key_heads, value_heads, k_dim, v_dim = _kda_dims(x)
    module = _module(f"{LINEAR}.fused_kda_conv_recurrent_verify")
    module.KDA_VERIFY_BLOCK_V = block_v  # their own setting; read at each launch
    out = module.fused_kda_conv_gating_verify(
        *(x["mixed_qkv"], x["conv_weight"], x["conv_bias"], x["conv_state"], x["conv_slots"], x["windows"], x["window_rows"]),
        *(x["a"], x["b"], x["A_log"], x["dt_bias"], x["state"], x["slots"], x["snapshots"]),
        k_dim**-0.5 if x["scale"] is None else x["scale"],
        *(draft, key_heads, value_heads, k_dim, v_dim),
        lower_bound=x["lower_bound"],
        num_warps=warps,
        **(_kda_ring(x) if x["snapshots"] is None else {}),
    )
    return out.view(-1, value_heads, v_dim)


def kda_chain_verify_unfused(**x: Any) -> Any:
    """Convolution, then recurrence. Unlike the op it moves conv_state on by the whole draft."""
    draft, key_heads, value_heads, k_dim, v_dim = _kda_dims(x)
    tokens, dim = x["mixed_qkv"].shape
    y = _module("sglang.kernels.ops.mamba.causal_conv1d_triton").causal_conv1d_update(
        x["mixed_qkv"].view(-1, draft, dim).transpose(1, 2),
        x["conv_state"],
        x["conv_weight"],
        x["conv_bias"],
        activation="silu",
        conv_state_indices=x["conv_slots"],
        intermediate_conv_window=x["windows"],
        intermediate_state_indices=x["window_rows"],
    )
    widths = (key_heads * k_dim, key_heads * k_dim, value_heads * v_dim)
    q, k, v = y.transpose(1, 2).reshape(tokens, dim).split(widths, -1)
    left = _kda_ring(x) if x["snapshots"] is None else {"intermediate_states_buffer": x["snapshots"]}
    out = _module(f"{LINEAR}.fused_sigmoid_gating_recurrent").fused_sigmoid_gating_delta_rule_update(
        A_log=x["A_log"],
        dt_bias=x["dt_bias"],
        q=q.unflatten(-1, (key_heads, k_dim)).unsqueeze(0),
        k=k.unflatten(-1, (key_heads, k_dim)).unsqueeze(0),
        v=v.unflatten(-1, (value_heads, v_dim)).unsqueeze(0),
        a=x["a"],
        b=x["b"],
        scale=x["scale"],
        initial_state_source=x["state"],
        initial_state_indices=x["slots"],
        cu_seqlens=_offsets(x["mixed_qkv"].device, tokens, draft),
        use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        is_kda=True,
        disable_state_update=True,
        intermediate_state_indices=x["window_rows"],
        cache_steps=draft,
        lower_bound=x["lower_bound"],
        **left,
    )
    return out.view(-1, value_heads, v_dim)


@cache
def _offsets(device: Any, tokens: int, draft: int) -> Any:
    import torch

    return torch.arange(0, tokens + 1, draft, dtype=torch.int32, device=device)


def kda_ring_commit(**x: Any) -> None:
    _module(f"{LINEAR}.kda_replayssm_spec_decode").commit_kda_replayssm_spec_all_layers(
        checkpoint_state=x["state"],
        rawv_cache=x["ring_v"],
        rawk_cache=x["ring_k"],
        gk_cache=x["ring_g"],
        beta_cache=x["ring_beta"],
        ssm_state_indices=x["slots"],
        accept_lens=x["accept"],
        max_cache_len=x["ring_g"].shape[3],
        num_k_heads=x["ring_k"].shape[2],
        mamba_track_indices=x["track_slots"],
        mamba_steps_to_track=x["track_step"],
        null_block_id=x["null_slot"],
    )


def variants(op: str) -> dict[str, Public]:
    """The public variants of an op by name; none where nothing public does the same work."""
    if op == "kda_chain_verify":
        fused = {
            f"fused {tile}/{warps}": partial(kda_chain_verify_fused, block_v=tile, warps=warps) for tile, warps in FUSED_TILES
        }
        return {"unfused": kda_chain_verify_unfused, **fused}
    one: dict[str, Public] = {
        "gdn_ring_commit": gdn_ring_commit,
        "gdn_ring_verify": gdn_ring_verify,
        "gdn_ring_advance": gdn_ring_advance,
        "kda_ring_commit": kda_ring_commit,
    }
    return {"public": one[op]} if op in one else {}
