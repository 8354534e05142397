"""A small engine for the KDA tests: requests come, draft, are accepted in part, are committed and leave; all is checked.

What it expects it computes itself, in float64, one accepted token after the other: nothing of a kernel enters but the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from kernreg import ops, registry
from kernreg.check import facts_of
from kernreg.contract import Op
from kernreg.device import Device, current
from kernreg.dispatch import launcher

HERE = current() if torch.cuda.is_available() else Device.interpreter()
REGISTRY = registry.default()
RING = ("ring_k", "ring_v", "ring_g", "ring_beta")
STATE_ERROR = 1e-5  # of the largest |h|, from the kernel's own k and v


# --- kernels by name --------------------------------------------------------------------------------------------------


def call(op: Op, kernel: str, config: dict[str, Any] | None = None, **args: Any) -> Any:
    """Check the contract, then launch the named kernel as a plan would; skips the test if it does not serve this key."""
    bound = op.signature.bind(**args)
    bound.apply_defaults()
    facts = facts_of(op, bound.arguments)
    chosen = REGISTRY.kernel(op.name, kernel)
    variant = chosen.variant({k: v for k, v in (config or {}).items() if k in chosen.config})
    if reason := REGISTRY.missing(chosen) or chosen.why_not(facts, HERE, dict(variant.config)):
        pytest.skip(reason)
    return launcher(REGISTRY, variant, facts)(**args)


class Kernels(NamedTuple):
    verify: Callable[..., torch.Tensor]
    ring_commit: Callable[..., None]
    snapshot_commit: Callable[..., None]
    conv_commit: Callable[..., None]


def kernels(name: str, **config: Any) -> Kernels:
    """``"reference"``, ``"fused"`` or ``"unfused"``, with the commits of the same backend."""
    triton, commit = name != "reference", "triton.shared" if name == "fused" else "triton.replay"
    return Kernels(
        partial(call, ops.kda_chain_verify, f"triton.{name}" if triton else "torch.reference", config),
        partial(call, ops.kda_ring_commit, commit if triton else "torch.reference", config),
        partial(call, ops.kda_snapshot_commit, "triton.copy" if triton else "torch.reference", {}),
        partial(call, ops.conv_window_commit, "triton.copy" if triton else "torch.reference", {}),
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# --- what should come out ---------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """Of one layer, on the CPU."""

    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    A_log: torch.Tensor
    dt_bias: torch.Tensor


class After(NamedTuple):
    """What one request's layer holds: h [HV, V, K] in float64 and the last 3 inputs of the convolution [dim, 3]."""

    h: torch.Tensor
    history: torch.Tensor


class Own(NamedTuple):
    """The kernel's own rounded k [H, K] and v [HV, V] of one token, on the CPU."""

    k: torch.Tensor
    v: torch.Tensor


class Oracle:
    """One request in one layer: what it has committed, and what it holds after each token drafted since."""

    def __init__(self, HV: int, V: int, K: int, dim: int, act: torch.dtype) -> None:
        self.after = [After(torch.zeros(HV, V, K, dtype=torch.float64), torch.zeros(dim, 3, dtype=act))]

    def step(
        self, weights: Weights, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bound: float | None, own: Own | None
    ) -> torch.Tensor:
        """Draft one more token; returns its o [HV, V].

        own: the kernel's k and v after the convolution, held against ours and then taken: one ulp of them moves h by 1e-3.
        """
        h, history = self.after[-1]
        HV, V, K = h.shape
        taps = torch.cat((history, x[:, None]), 1)
        y = (taps.double() * weights.conv_weight.double()).sum(1)
        if weights.conv_bias is not None:
            y = y + weights.conv_bias.double()
        y = (y * torch.sigmoid(y)).to(x.dtype).double()
        width = (y.shape[0] - HV * V) // 2
        if own is not None:
            for name, got, wanted in (("k", own.k, y[width : 2 * width]), ("v", own.v, y[2 * width :])):
                assert_close(got.flatten(), wanted, 2 * max(torch.finfo(x.dtype).eps, 2.0**-20), f"{name} after the convolution")
            y = torch.cat((y[:width], own.k.flatten().double(), own.v.flatten().double()))
        q, k = (part.view(-1, K).repeat_interleave(HV * K // width, 0) for part in (y[:width], y[width : 2 * width]))
        q, k = (part / (part.square().sum(1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        v = y[2 * width :].view(HV, V)
        gate = a.double().view(HV, K) + weights.dt_bias.double().view(HV, K)
        rate = weights.A_log.double().exp()[:, None]
        g = -rate * torch.nn.functional.softplus(gate) if bound is None else bound * torch.sigmoid(rate * gate)
        h = h * g.exp()[:, None]
        u = torch.sigmoid(b.double())[:, None] * (v - (h @ k[..., None])[..., 0])
        h = h + u[..., None] * k[:, None]
        self.after.append(After(h, taps[:, 1:]))
        return (h @ q[..., None])[..., 0] * K**-0.5

    def accept(self, tokens: int) -> list[After]:
        """Commit so many of the drafted tokens: what was held before them and after each."""
        kept = self.after[: tokens + 1]
        self.after = kept[-1:]
        return kept


def assert_close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float, what: str) -> None:
    """Elementwise within `tolerance` of the largest wanted value."""
    error = (got.cpu().double() - wanted).abs().max().item()
    scale = wanted.abs().max().item()
    assert error <= tolerance * scale, f"{what}: off by {error:.3g} where the largest is {scale:.3g}"


# --- the engine -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    layers: int = 1
    H: int = 1
    HV: int = 2
    K: int = 16
    V: int = 20
    draft: int = 3
    slots: int = 4
    act: torch.dtype = torch.float32
    tolerance: float = 2e-5  # of outputs, and of states whose k and v the mode does not show

    @property
    def dim(self) -> int:
        return 2 * self.H * self.K + self.HV * self.V


@dataclass(frozen=True)
class Round:
    """Draft length and, for each batch row, (request name or None for padding, accepted tokens). Unknown names are new requests.

    track: rows that snapshot the state after their first accepted token.
    """

    draft: int
    rows: Sequence[tuple[str | None, int]]
    track: Sequence[int] = ()


@dataclass
class Engine:
    """Plays rounds of verify and commit on `kernels`; `transcript` keeps all outputs and states.

    check: compare with what should come out, on the way. Without it, only padding and untouched memory are looked at.
    """

    kernels: Kernels
    shape: Shape
    mode: str
    bound: float | None
    device: str
    bias: bool = False
    check: bool = True
    transcript: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        s = self.shape
        self.random = torch.Generator().manual_seed(7)
        self.weights = [
            Weights(
                self._draw(s.dim, 4, dtype=s.act) * 0.5,
                self._draw(s.dim, dtype=s.act) * 0.3 if self.bias else None,
                self._draw(s.HV) * 0.3,
                self._draw(s.HV * s.K) * 0.3,
            )
            for _ in range(s.layers)
        ]
        self.state = self._garbage(s.layers, s.slots, s.HV, s.V, s.K)
        self.conv_state = self._garbage(s.layers, s.slots + 1, 3, s.dim, dtype=s.act).transpose(2, 3)
        self.windows = self._garbage(s.layers, s.slots + 2, s.draft, 3, s.dim, dtype=s.act).transpose(3, 4)
        self.snapshots = self.rings = None
        if self.mode == "snapshot":
            self.snapshots = self._garbage(s.layers, s.slots + 2, s.draft, s.HV, s.V, s.K)
        else:
            head, act = (s.layers, s.slots), {"dtype": s.act}
            self.rings = {
                "ring_k": self._garbage(*head, s.H, s.draft + 1, s.K, **act),
                "ring_v": self._garbage(*head, s.HV, s.draft + 1, s.V, **act),
                "ring_g": self._garbage(*head, s.HV, s.draft + 1, s.K),
                "ring_beta": self._garbage(*head, s.HV, s.draft + 1),
            }
        self.oracles: dict[str, list[Oracle]] = {}
        self.slot_of: dict[str, int] = {}

    def _draw(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(dtype)

    def _garbage(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, 1e4, dtype=dtype, device=self.device)

    def play(self, rounds: Sequence[Round]) -> list[torch.Tensor]:
        for this in rounds:
            self._round(this)
        return self.transcript

    # -- one round

    def _round(self, this: Round) -> None:
        s, B, T = self.shape, len(this.rows), this.draft
        names = [name for name, _ in this.rows]
        for gone in self.slot_of.keys() - set(names):
            del self.slot_of[gone], self.oracles[gone]
        for name in names:
            if name is not None and name not in self.slot_of:
                self._admit(name)
        slots = [-1 if name is None else self.slot_of[name] for name in names]
        index = {
            "slots": self._index(slots),
            "conv_slots": self._index([-1 if x < 0 else s.slots - x for x in slots]),
            "window_rows": self._index([s.slots + 1 if x < 0 else (x + 2) % (s.slots + 1) for x in slots]),
        }
        x = [[self._draw(B * T, width, dtype=s.act) for width in (s.dim, s.HV * s.K, s.HV)] for _ in range(s.layers)]
        for layer in x:
            for row, slot in enumerate(slots):
                if slot < 0:
                    for part in layer:
                        part[row * T : (row + 1) * T] = float("nan")
        self._verify(this, index, x)
        self._commit(this, index, slots)

    def _admit(self, name: str) -> None:
        s = self.shape
        self.slot_of[name] = slot = min(set(range(s.slots)) - set(self.slot_of.values()))
        self.state[:, slot] = 0
        self.conv_state[:, s.slots - slot] = 0
        self.oracles[name] = [Oracle(s.HV, s.V, s.K, s.dim, s.act) for _ in range(s.layers)]

    def _index(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _on_device(self, x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.to(self.device)

    def _verify(self, this: Round, index: dict[str, Any], x: list[list[torch.Tensor]]) -> None:
        T = this.draft
        before = self._copies("state", "conv_state")
        for layer, ((mixed, a, b), weights) in enumerate(zip(x, self.weights, strict=True)):
            stores: dict[str, Any] = {"snapshots": None if self.snapshots is None else self.snapshots[layer][:, :T]}
            stores |= {name: ring[layer] for name, ring in (self.rings or {}).items()}
            o = self.kernels.verify(
                mixed_qkv=mixed.to(self.device),
                conv_state=self.conv_state[layer],
                windows=self.windows[layer][:, :T],
                a=a.to(self.device),
                b=b.to(self.device),
                state=self.state[layer],
                lower_bound=self.bound,
                **{name: self._on_device(value) for name, value in weights._asdict().items()},
                **stores,
                **index,
            )
            self.transcript.append(o.clone())
            for row, (name, _) in enumerate(this.rows):
                tokens = slice(row * T, (row + 1) * T)
                if name is None:
                    assert not o[tokens].any(), "output of a padded row"
                elif self.check:
                    oracle = self.oracles[name][layer]
                    own = self._own(name, layer, T)
                    steps = zip(mixed[tokens], a[tokens], b[tokens], own, strict=True)
                    wanted = torch.stack([oracle.step(weights, *token, self.bound, k_v) for *token, k_v in steps])
                    assert_close(o[tokens], wanted, max(self.shape.tolerance, torch.finfo(o.dtype).eps), f"o of {name}")
        for name, old in before.items():
            assert same_bits(getattr(self, name), old), f"verify wrote {name}"

    def _own(self, name: str, layer: int, draft: int) -> list[Own | None]:
        """What the ring shows of each drafted token; snapshots show nothing."""
        if self.rings is None:
            return [None] * draft
        k, v = (self.rings[ring][layer, self.slot_of[name]].cpu() for ring in ("ring_k", "ring_v"))
        return [Own(k[:, step], v[:, step]) for step in range(draft)]

    def _commit(self, this: Round, index: dict[str, Any], slots: list[int]) -> None:
        T = this.draft
        before = self._copies("state", "conv_state")
        common = {"accept": self._index([accepted for _, accepted in this.rows])}
        rows = {"window_rows": index["window_rows"]}
        free = iter(sorted(set(range(self.shape.slots)) - set(slots)))
        targets = [next(free) if row in this.track else -1 for row in range(len(slots))]
        track = {"track_slots": self._index(targets), "track_step": self._index([0] * len(slots))} if this.track else {}
        if self.rings is not None:
            self.kernels.ring_commit(state=self.state, slots=index["slots"], **self.rings, **common, **track)
        else:
            steps = self.snapshots[:, :, :T]
            self.kernels.snapshot_commit(state=self.state, snapshots=steps, slots=index["slots"], **rows, **common, **track)
        self.kernels.conv_commit(
            conv_state=self.conv_state, windows=self.windows[:, :, :T], conv_slots=index["conv_slots"], **rows, **common
        )
        self.transcript += [self.state.clone(), self.conv_state.clone()]
        for (name, accepted), slot, target in zip(this.rows, slots, targets, strict=True):
            if name is not None and self.check:
                self._check_commit(name, accepted, slot, target)
        untouched = set(range(self.shape.slots)) - {slot for (_, n), slot in zip(this.rows, slots, strict=True) if n > 0}
        for slot in untouched - set(targets):
            assert same_bits(self.state[:, slot], before["state"][:, slot]), f"commit wrote state slot {slot}"
        for slot in untouched:
            conv = self.shape.slots - slot
            assert same_bits(self.conv_state[:, conv], before["conv_state"][:, conv]), f"commit wrote conv slot {conv}"

    def _check_commit(self, name: str, accepted: int, slot: int, target: int) -> None:
        tolerance = self.shape.tolerance if self.rings is None else STATE_ERROR
        for layer, oracle in enumerate(self.oracles[name]):
            kept = oracle.accept(accepted)
            h, history = kept[-1]
            if h.any():
                assert_close(self.state[layer, slot], h, tolerance, f"state of {name}")
            if target >= 0:
                assert_close(self.state[layer, target], kept[1].h, tolerance, f"track snapshot of {name}")
            assert torch.equal(self.conv_state[layer, self.shape.slots - slot].cpu(), history), f"conv history of {name}"

    def _copies(self, *names: str) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name).clone() for name in names}
