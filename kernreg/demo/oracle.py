"""The check of the demo: plain decoding, one token at a time in float64, from the recorded inputs of each layer.

It shares no code with the kernels. q, k and v enter as the kernel rounded them: one ulp of a rounded convolution moves the
state by 1e-3, so the convolution is checked by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import silu, softplus

from kernreg.demo.stack import GdnLayers, KdaLayers, Layers, Pass

ROUNDING = 2.0**-8  # largest relative error of rounding to bf16
# Of fp32 states, in parts of the largest element: gates within 1e-6 and sums in fp32, over the tokens a state remembers.
FP32_STATE = 1e-5
# The same where k and v come from another kernel than the state: one ulp in one of them.
OTHER_RECORDS = 2e-3
# GDN: a record keeps 16 bits of u and of k, and the sums that made u lose a little; in parts of |v| + |S k|.
RECORD = 2.0**-15


def delta_rule(
    S: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: S [HV, V, K], q and k [HV, K], v [HV, V], log decay g [HV, K] or [HV, 1], beta [HV] -> S and o [HV, V]."""
    S = S * g.exp()[:, None, :]
    u = beta[:, None] * (v - (S * k[:, None, :]).sum(-1))
    S = S + u[:, :, None] * k[:, None, :]
    return S, (S * q[:, None, :]).sum(-1)


def normalised(x: torch.Tensor, value_heads: int) -> torch.Tensor:
    """x [n, H, K] in float64 at length 1, repeated for the value heads: hv reads key head hv // (HV / H)."""
    x = x.double()
    x = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    return x.repeat_interleave(value_heads // x.shape[1], 1)


@dataclass(frozen=True)
class Worst:
    """Of many comparisons the one that came closest to what is allowed, or went furthest beyond."""

    layer: str
    what: str
    error: float
    allowed: float
    where: str
    compared: int

    @property
    def ratio(self) -> float:
        if self.error == 0:
            return 0.0
        return self.error / self.allowed if 0 < self.allowed < math.inf else math.inf  # NaN is not allowed either

    @property
    def ok(self) -> bool:
        return self.ratio <= 1

    @property
    def exact(self) -> bool:
        """Nothing may be wrong, and the error is how much is."""
        return self.allowed == 0


class Tally:
    """The worst comparison of each layer and kind. `where` says what is being compared."""

    def __init__(self) -> None:
        self.where = ""
        self.worst: dict[tuple[str, str], Worst] = {}

    def close(self, layer: str, what: str, got: torch.Tensor, wanted: torch.Tensor, allowed: torch.Tensor) -> None:
        """|got - wanted| <= allowed, elementwise; what is not finite is infinitely wrong."""
        error = (got.double() - wanted).abs()
        error = torch.where(error.isfinite(), error, math.inf)
        allowed = allowed.expand_as(error)
        worst = torch.where(error == 0, 0.0, error / allowed).argmax()
        self._note(layer, what, float(error.flatten()[worst]), float(allowed.flatten()[worst]))

    def same(self, layer: str, what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        """Equal bit for bit."""
        pair = (x.contiguous().view(torch.uint8) for x in (got, wanted))
        self.count(layer, what, int(torch.ne(*pair).sum()))

    def count(self, layer: str, what: str, wrong: int) -> None:
        """Nothing may be wrong."""
        self._note(layer, what, wrong, 0)

    def _note(self, layer: str, what: str, error: float, allowed: float) -> None:
        new = Worst(layer, what, error, allowed, self.where, 1)
        if old := self.worst.get((layer, what)):
            new = replace(new if new.ratio > old.ratio else old, compared=old.compared + 1)
        self.worst[layer, what] = new


class Oracle:
    """One request in one layer: takes the accepted tokens of a pass and compares outputs, later the committed state."""

    def __init__(self, name: str, layers: Layers, layer: int, tally: Tally) -> None:
        self.name, self.layers, self.layer, self.tally = name, layers, layer, tally
        self.dims, self.value_heads = layers.sizes.dims, layers.value_heads
        self.S = torch.zeros_like(layers.state[0, 0], dtype=torch.float64)

    def decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Step through the tokens; yields (t, o) while self.S is the state after token t."""
        for t in range(q.shape[0]):
            self.S, o = delta_rule(self.S, self.dims**-0.5 * q[t], k[t], v[t], g[t], beta[t])
            yield t, o

    def tokens(self, accepted: Pass, slot: int, batch: int) -> None:
        """Decode the accepted tokens of one request and compare their outputs."""
        raise NotImplementedError

    def state(self, slot: int) -> None:
        """Compare the committed state; nothing may be pending."""
        raise NotImplementedError


class KdaOracle(Oracle):
    layers: KdaLayers

    def __init__(self, name: str, layers: KdaLayers, layer: int, tally: Tally) -> None:
        super().__init__(name, layers, layer, tally)
        self.last = torch.zeros_like(layers.conv_state[0, 0].T)  # the last 3 inputs of the convolution [3, dim]
        self.tolerance = FP32_STATE

    def tokens(self, accepted: Pass, slot: int, batch: int) -> None:
        x, a, b = (accepted.inputs[name] for name in ("mixed_qkv", "a", "b"))
        q, *ours = self._convolve(x)
        k, v = self.layers.records(self.layer, slot, len(x))
        for record, rounded in zip((k, v), ours, strict=True):
            one_ulp = 2 * ROUNDING * rounded.double().abs() + 1e-6
            self.tally.close(self.name, "k, v", record, rounded.double(), one_ulp)
        if not self.layers.records_are_its_own(batch):
            self.tolerance = OTHER_RECORDS
        q = normalised(q, self.value_heads)
        steps = self.decode(q, normalised(k, self.value_heads), v.double(), self._decay(a), b.double().sigmoid())
        for t, o in steps:
            # one ulp of o, one in an element of q, whose rounding is ours, and what the state brings
            element = self.dims**-0.5 * (self.S * q[t, :, None, :]).abs().amax(-1)
            allowed = ROUNDING * o.abs() + 2 * ROUNDING * element + self.tolerance * self.S.abs().max()
            self.tally.close(self.name, "output", accepted.o[t], o, allowed)

    def _convolve(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q [n, H, K], k [n, H, K], v [n, HV, V]: products and sums in fp32, SiLU, rounded."""
        inputs = torch.cat((self.last, x))
        self.last = inputs[-3:]
        y = silu((inputs.float().unfold(0, 4, 1) * self.layers.conv_weight[self.layer].float()).sum(-1)).to(x.dtype)
        keys = self.layers.key_heads * self.dims
        return tuple(part.unflatten(1, (-1, self.dims)) for part in y.split((keys, keys, self.layers.width), 1))

    def _decay(self, a: torch.Tensor) -> torch.Tensor:
        """g [n, HV, K]: the safe gate, or the softplus gate."""
        rate = self.layers.A_log[self.layer].double().exp()[:, None]
        z = (a.double() + self.layers.dt_bias[self.layer].double()).unflatten(1, (self.value_heads, -1))
        bound = self.layers.lower_bound
        return -rate * softplus(z) if bound is None else bound * torch.sigmoid(rate * z)

    def state(self, slot: int) -> None:
        allowed = self.tolerance * self.S.abs().max()
        self.tally.close(self.name, "state", self.layers.state[self.layer, slot], self.S, allowed)
        self.tally.same(self.name, "conv state", self.layers.conv_state[self.layer, slot], self.last.T)


class GdnOracle(Oracle):
    """`slack` [HV, V] bounds the error of each row of S by its length: a step of the delta rule never makes it longer."""

    layers: GdnLayers

    def __init__(self, name: str, layers: GdnLayers, layer: int, tally: Tally) -> None:
        super().__init__(name, layers, layer, tally)
        self.slack = torch.zeros_like(self.S[..., 0])

    def tokens(self, accepted: Pass, slot: int, batch: int) -> None:
        q, k, v, a, b = (accepted.inputs[name] for name in ("q", "k", "v", "a", "b"))
        q, k, v = normalised(q, self.value_heads), normalised(k, self.value_heads), v.double()
        rate = self.layers.A_log[self.layer].double().exp()
        g = -rate * softplus(a.double() + self.layers.dt_bias[self.layer].double())  # [n, HV]
        length = self.S.norm(dim=-1)
        for t, o in self.decode(q, k, v, g[..., None], b.double().sigmoid()):
            self.slack = g[t].exp()[:, None] * (self.slack + RECORD * length) + RECORD * v[t].abs()
            allowed = ROUNDING * o.abs() + self.dims**-0.5 * self.slack
            self.tally.close(self.name, "output", accepted.o[t], o, allowed)
            length = self.S.norm(dim=-1)
        if self.layers.state.dtype == torch.bfloat16:  # the fold that follows rounds each element
            self.slack = self.slack + ROUNDING * length

    def state(self, slot: int) -> None:
        self.tally.close(self.name, "state", self.layers.state[self.layer, slot], self.S, self.slack[..., None])


def oracle(name: str, layers: Layers, layer: int, tally: Tally) -> Oracle:
    """The oracle of a layer's kind."""
    if isinstance(layers, KdaLayers):
        return KdaOracle(name, layers, layer, tally)
    assert isinstance(layers, GdnLayers)
    return GdnOracle(name, layers, layer, tally)
