"""The references against somebody else's: the naive recurrences of fla (MIT), which share no code with ours."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from kernreg.contract import Case
from kernreg.ops import gdn_samples, kda_samples
from kernreg_torch.gdn_ring_commit import gdn_ring_commit
from kernreg_torch.gdn_ring_verify import gdn_ring_verify
from kernreg_torch.kda_chain_verify import kda_chain_verify
from kernreg_torch.kda_ring_commit import kda_ring_commit

TOLERANCE = 2e-6  # both sum 64 products in fp32, of values around 1
HEADS = ["2/2", "6/2", "16/1"]


def naive(folder: str) -> ModuleType:
    """fla's naive.py of one op, loaded by file: importing the package needs a GPU."""
    pytest.importorskip("einops")
    try:
        files = importlib.metadata.files("fla-core") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fla-core is not installed")
    path = next(Path(f.locate()) for f in files if f.as_posix() == f"fla/ops/{folder}/naive.py")
    spec = importlib.util.spec_from_file_location(f"fla_naive_{folder}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def normalised(x: torch.Tensor) -> torch.Tensor:
    """As fla's l2norm does it: one over the root of the sum of squares and an epsilon."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("heads", HEADS)
def test_gdn_is_fla_s_gated_delta_rule(heads: str) -> None:
    fla = naive("gated_delta_rule").naive_recurrent_gated_delta_rule
    facts = {"draft": 8, "ring": 16, "heads": heads, "k_dim": 64, "v_dim": 16, "state": "f32", "act": "f32"}
    facts |= {"ring_dtype": "f32", "low": False}
    inputs = gdn_samples.make_verify(Case("fla", facts, 2, {"history": 0, "lengths": 8, "base": 13}))
    slots, rows = inputs["slots"].long(), inputs["rows"].long()
    group = inputs["v"].shape[1] // inputs["k"].shape[1]

    def by_row(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (2, 8))

    q, k = (by_row(normalised(inputs[name])).repeat_interleave(group, 2) for name in ("q", "k"))
    g = -inputs["A_log"].exp() * functional.softplus(by_row(inputs["a"]) + inputs["dt_bias"])
    start = inputs["state"][slots].transpose(-1, -2)
    wanted, final = fla(q, k, by_row(inputs["v"]), by_row(inputs["b"]).sigmoid(), g, None, start, True)

    o = gdn_ring_verify(**inputs)
    torch.testing.assert_close(by_row(o), wanted, rtol=0, atol=TOLERANCE)

    inputs["write_pos"][rows] = 8
    ring = {name: inputs[name][None] for name in ("state", "ring_u", "ring_k", "ring_g")}
    fold = torch.ones_like(inputs["write_pos"], dtype=torch.int8)
    gdn_ring_commit(**ring, **{name: inputs[name] for name in ("write_pos", "base", "slots", "rows")}, fold=fold)
    torch.testing.assert_close(inputs["state"][slots], final.transpose(-1, -2), rtol=0, atol=10 * TOLERANCE)


@pytest.mark.parametrize("gate", ["safe", "softplus"])
@pytest.mark.parametrize("heads", HEADS)
def test_kda_is_fla_s_kimi_delta_attention(heads: str, gate: str) -> None:
    fla = naive("kda").naive_recurrent_kda
    facts = {"draft": 6, "heads": heads, "k_dim": 64, "v_dim": 16, "act": "f32", "weight": "f32", "bias": True, "gate": gate}
    inputs = kda_samples.make_verify(Case("fla", facts, 2))
    slots = inputs["slots"].long()
    value_heads, v_dim, k_dim = inputs["state"].shape[1:]

    q, k, v = _convolved(inputs, 6, k_dim, v_dim, value_heads)
    x = inputs["a"] + inputs["dt_bias"]
    x = x.view(2, 6, value_heads, k_dim)
    rate = inputs["A_log"].exp()[:, None]
    g = -5.0 * torch.sigmoid(rate * x) if gate == "safe" else -rate * functional.softplus(x)
    beta = inputs["b"].view(2, 6, value_heads).sigmoid()
    start = inputs["state"][slots].transpose(-1, -2)
    wanted, final = fla(normalised(q), normalised(k), v, g, beta, None, start, True)

    o = kda_chain_verify(**inputs)
    torch.testing.assert_close(o.unflatten(0, (2, 6)), wanted, rtol=0, atol=TOLERANCE)

    ring = {name: inputs[name][None] for name in ("state", "ring_k", "ring_v", "ring_g", "ring_beta")}
    kda_ring_commit(**ring, slots=slots, accept=torch.tensor([6, 6]))
    torch.testing.assert_close(inputs["state"][slots], final.transpose(-1, -2), rtol=0, atol=10 * TOLERANCE)


def _convolved(inputs: dict[str, Any], draft: int, k_dim: int, v_dim: int, value_heads: int) -> tuple[torch.Tensor, ...]:
    """q, k, v [B, T, heads, dim] by torch's own grouped convolution."""
    x = inputs["mixed_qkv"].unflatten(0, (-1, draft)).transpose(1, 2)  # [B, dim, T]
    x = torch.cat((inputs["conv_state"][inputs["conv_slots"].long()], x), -1)
    y = functional.conv1d(x, inputs["conv_weight"][:, None], inputs["conv_bias"], groups=x.shape[1])
    y = functional.silu(y).transpose(1, 2)
    width = (y.shape[-1] - value_heads * v_dim) // 2
    q, k, v = y.split((width, width, value_heads * v_dim), -1)
    return q.unflatten(-1, (-1, k_dim)), k.unflatten(-1, (-1, k_dim)), v.unflatten(-1, (value_heads, v_dim))
