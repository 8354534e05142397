"""Rounds of GDN speculative decoding: verify, accept a part, advance, commit. The truth decodes token by token in float64.

Between the rounds windows differ in length, rows accept anything from nothing to all, and unused ring positions hold NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kernreg import ops, registry
from kernreg.check import facts_of
from kernreg.contract import DTYPES, Op
from kernreg.device import Device, current
from kernreg.dispatch import launcher
from kernreg_torch.gdn_ring_commit import gdn_ring_commit as reference_commit

REGISTRY = registry.default()
HERE = current() if torch.cuda.is_available() else Device.interpreter()
RING = ("ring_u", "ring_k", "ring_g", "ring_u_low", "ring_k_low")


def call(op: Op, kernel: str, **args: Any) -> Any:
    """Launch the named kernel, or skip the test if it does not serve these arguments."""
    bound = op.signature.bind(**args)
    bound.apply_defaults()
    facts, chosen = facts_of(op, bound.arguments), REGISTRY.kernel(op.name, kernel)
    variant = chosen.variant()
    if reason := REGISTRY.missing(chosen) or chosen.why_not(facts, HERE, dict(variant.config)):
        pytest.skip(reason)
    return launcher(REGISTRY, variant, facts)(**args)


class Kernels(NamedTuple):
    verify: str
    advance: str
    commit: str


REFERENCE = Kernels("torch.reference", "torch.reference", "torch.reference")
TRITON = Kernels("triton.chunked", "triton.rows", "triton.sequential")
TRITON_GROUP = TRITON._replace(commit="triton.head_group")


@dataclass(frozen=True)
class Setup:
    """What an engine fixes at its start."""

    kernels: Kernels
    lazy: bool
    state: str = "f32"
    ring_dtype: str = "f16"
    act: str = "f16"
    heads: tuple[int, int] = (2, 1)
    k_dim: int = 64
    v_dim: int = 16
    ring: int = 16
    draft: int = 4

    @property
    def tolerance(self) -> float:
        """Of a head's state, relative to its norm."""
        if self.state == "bf16":
            return 0.03  # 2^-9 a commit, kept for as many commits as the delta rule takes to overwrite it
        if self.ring_dtype == "f32":
            return 1e-4  # operands of products keep 16 bits or more
        return 1e-11 if self.state == "f64" else 2e-5


class Window(NamedTuple):
    lengths: list[int]
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor


class Truth:
    """All requests' states in float64, [B, HV, V, K], and one token's step."""

    def __init__(self, state: Tensor, A_log: Tensor, dt_bias: Tensor) -> None:
        self.state, self.A_log, self.dt_bias = state.double(), A_log.double(), dt_bias.double()

    def step(self, s: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, a, b = (x.double() for x in (q, k, v, a, b))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
        g = -self.A_log.exp() * torch.nn.functional.softplus(a + self.dt_bias)
        s = s * g.exp()[..., None, None]
        u = torch.sigmoid(b)[..., None] * (v - torch.einsum("bhvk,bhk->bhv", s, k))
        s = s + torch.einsum("bhv,bhk->bhvk", u, k)
        return s, torch.einsum("bhvk,bhk->bhv", s, q) * q.shape[-1] ** -0.5

    def decode(self, window: Window, accept: list[int]) -> list[Tensor]:
        """Outputs of every token of each row; the states go on from what was accepted."""
        begins = torch.tensor([0, *window.lengths[:-1]]).cumsum(0)
        states, outputs = [self.state], []
        for t in range(max(window.lengths)):  # rows whose window has ended decode their last token again, unused
            tokens = [int(begin) + min(t, max(n - 1, 0)) for begin, n in zip(begins, window.lengths, strict=True)]
            at = torch.tensor(tokens, device=self.state.device).clamp(max=window.q.shape[0] - 1)
            s, o = self.step(states[-1], *(x[at] for x in (window.q, window.k, window.v, window.a, window.b)))
            states.append(s)
            outputs.append(o)
        self.state = torch.stack([states[n][i] for i, n in enumerate(accept)])
        return [outputs[t][i] for i, n in enumerate(window.lengths) for t in range(n)]


class Engine:
    """B requests on a pool of slots and ring rows, one layer."""

    def __init__(self, setup: Setup, requests: int, device: str, seed: int = 0) -> None:
        self.setup, self.requests, self.device = setup, requests, device
        self.random = torch.Generator(device).manual_seed(seed)
        (HV, H), K, V, L = setup.heads, setup.k_dim, setup.v_dim, setup.ring
        self.slots = torch.arange(requests, 0, -1, dtype=torch.int32, device=device)
        self.rows = torch.arange(requests, dtype=torch.int32, device=device)
        rows = requests + 1
        state, ring = (getattr(torch, DTYPES[name]) for name in (setup.state, setup.ring_dtype))
        wide = torch.float64 if setup.state == "f64" else torch.float32
        self.pool: dict[str, Any] = {
            "state": self.normal(requests + 2, HV, V, K).mul(0.3).to(state),
            "ring_u": torch.full((rows, HV, L, V), math.nan, dtype=ring, device=device),
            "ring_k": torch.full((rows, H, L, K), math.nan, dtype=ring, device=device),
            "ring_g": torch.full((rows, HV, L), math.nan, dtype=wide, device=device),
            "ring_u_low": None,
            "ring_k_low": None,
            "write_pos": torch.zeros(rows, dtype=torch.int32, device=device),
            "base": torch.arange(rows, dtype=torch.int32, device=device) * 5,
        }
        if ring.itemsize == 2:
            for name in ("ring_u", "ring_k"):
                self.pool[f"{name}_low"] = self.pool[name].clone()
        self.fold = torch.zeros(rows, dtype=torch.int8, device=device)
        # gates from hardly any decay to a strong one
        self.A_log = torch.linspace(-7.0, 1.5, HV, device=device, dtype=wide)
        self.dt_bias = torch.linspace(0.5, -0.5, HV, device=device, dtype=wide)
        self.truth = Truth(self.pool["state"][self.slots.long()], self.A_log, self.dt_bias)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random, device=self.device)

    def numbers(self, high: list[int]) -> list[int]:
        """One number in 0..high for each request, rather high than low."""
        draws = torch.rand(len(high), 2, generator=self.random, device=self.device).amax(1).tolist()
        return [int(x * (n + 1)) for x, n in zip(draws, high, strict=True)]

    def window(self, lengths: list[int] | None = None) -> Window:
        (HV, H), act = self.setup.heads, getattr(torch, DTYPES[self.setup.act])
        lengths = lengths or [max(n, 1) for n in self.numbers([self.setup.draft] * self.requests)]
        tokens = sum(lengths)
        shapes = ((H, self.setup.k_dim), (H, self.setup.k_dim), (HV, self.setup.v_dim), (HV,), (HV,))
        return Window(lengths, *(self.normal(tokens, *shape).to(act) for shape in shapes))

    def verify(self, window: Window) -> Tensor:
        offsets = torch.tensor([0, *window.lengths], device=self.device).cumsum(0).to(torch.int32)
        tokens = {name: getattr(window, name) for name in ("q", "k", "v", "a", "b")}
        gates = {"A_log": self.A_log, "dt_bias": self.dt_bias}
        rows = {"slots": self.slots, "rows": self.rows, "cu_seqlens": offsets, "draft": self.setup.draft}
        return call(ops.gdn_ring_verify, self.setup.kernels.verify, **tokens, **gates, **self.pool, **rows)

    def count(self, accept: list[int]) -> None:
        call(
            ops.gdn_ring_advance,
            self.setup.kernels.advance,
            write_pos=self.pool["write_pos"],
            fold=self.fold,
            rows=self.rows,
            slots=self.slots,
            accept=torch.tensor(accept, dtype=torch.int32, device=self.device),
            ring=self.setup.ring,
            margin=self.setup.draft if self.setup.lazy else None,
        )

    def commit(self) -> None:
        layered = {name: None if self.pool[name] is None else self.pool[name][None] for name in ("state", *RING)}
        cursors = {name: self.pool[name] for name in ("write_pos", "base")}
        rows = {"fold": self.fold, "slots": self.slots, "rows": self.rows}
        folding = "lazy" if self.setup.lazy else "every"
        call(ops.gdn_ring_commit, self.setup.kernels.commit, **layered, **cursors, **rows, folding=folding)

    def round(self, window: Window, accept: list[int], miscount: int = 0) -> tuple[float, Tensor]:
        """One step of all requests. Returns the error of the outputs and that of each head's state, both relative."""
        o = self.verify(window)
        self.count([accept[0] + miscount, *accept[1:]])
        self.commit()
        wanted = torch.stack(self.truth.decode(window, accept))
        return float((o.double() - wanted).norm() / wanted.norm()), self.state_error(self.states())

    def step(self) -> tuple[float, Tensor]:
        window = self.window()
        return self.round(window, self.numbers(window.lengths))

    def states(self) -> Tensor:
        """Every request's state with its pending records, in float64."""
        pool = {n: self.pool[n] for n in ("state", *RING)}
        pool = {n: None if x is None else x.to(torch.float64, copy=True) for n, x in pool.items()}
        for name in ("ring_u", "ring_k"):
            if pool[f"{name}_low"] is not None:
                pool[name] += pool.pop(f"{name}_low")
        layered = {name: pool[name][None] for name in ("state", "ring_u", "ring_k", "ring_g")}
        cursors = {name: self.pool[name].clone() for name in ("write_pos", "base")}
        reference_commit(**layered, **cursors, fold=torch.ones_like(self.fold), slots=self.slots, rows=self.rows)
        return pool["state"][self.slots.long()]

    def state_error(self, states: Tensor) -> Tensor:
        """[B, HV]: distance of each head's state from the truth, relative to the truth."""
        return (states - self.truth.state).norm(dim=(2, 3)) / self.truth.state.norm(dim=(2, 3))

    def checkpoints(self) -> Tensor:
        return self.pool["state"][self.slots.long()].double()

    def replace(self, request: int, state: Tensor) -> None:
        """A new request takes the slot and ring row of a request that leaves: state and cursors, nothing else."""
        slot, row = int(self.slots[request]), int(self.rows[request])
        self.pool["state"][slot] = state
        self.pool["write_pos"][row] = 0
        self.fold[row] = 0
        self.truth.state[request] = state.double()


SETUPS = {
    "reference-every": Setup(REFERENCE, lazy=False),
    "reference-lazy": Setup(REFERENCE, lazy=True),
    "reference-f64-every": Setup(REFERENCE, lazy=False, state="f64", ring_dtype="f64", act="f64"),
    "reference-f64-lazy": Setup(REFERENCE, lazy=True, state="f64", ring_dtype="f64", act="f64"),
    "triton-every": Setup(TRITON, lazy=False),
    "triton-lazy": Setup(TRITON, lazy=True),
    "triton-ratio-3-lazy": Setup(TRITON, lazy=True, heads=(3, 1), ring=32, draft=9),
    "triton-group-lazy": Setup(TRITON_GROUP, lazy=True),
    "triton-fp32-ring-every": Setup(TRITON, lazy=False, ring_dtype="f32", act="f32"),
}


@pytest.fixture(params=SETUPS.values(), ids=SETUPS.keys())
def setup(request: pytest.FixtureRequest) -> Setup:
    return request.param


def check(setup: Setup, errors: tuple[float, Tensor]) -> None:
    outputs, states = errors
    allowed = setup.tolerance + torch.finfo(getattr(torch, DTYPES[setup.act])).eps
    assert outputs <= allowed, f"outputs are off by {outputs:.2g}"
    assert float(states.max()) <= setup.tolerance, f"states are off by {float(states.max()):.2g}"


def test_rounds_decode_token_by_token(setup: Setup, device: str) -> None:
    engine = Engine(setup, requests=2, device=device)
    folds, pending = 0, 0
    for _ in range(9):
        bases = engine.pool["base"].clone()
        check(setup, engine.step())
        folds += int((engine.pool["base"] != bases).sum())
        pending += int((engine.pool["write_pos"] > 0).sum())
    assert folds > 0
    assert (pending > 0) == setup.lazy, "lazy folding leaves records pending, and only lazy folding does"


@pytest.mark.parametrize("miscount", [1, -1])
@pytest.mark.parametrize("name", ["reference-every", "reference-lazy", "triton-every", "triton-lazy"])
def test_an_accepted_count_off_by_one_is_seen(name: str, miscount: int, device: str) -> None:
    setup = SETUPS[name]
    engine = Engine(setup, requests=2, device=device)
    for _ in range(2):
        check(setup, engine.step())
    with pytest.raises(AssertionError, match="states are off by"):
        check(setup, engine.round(engine.window([3, 2]), [2, 2], miscount))


def test_windows_without_tokens_and_rows_that_accept_nothing(setup: Setup, device: str) -> None:
    engine = Engine(setup, requests=3, device=device)
    check(setup, engine.round(engine.window([3, 2, 3]), [3, 2, 1]))
    before = engine.states()
    check(setup, engine.round(engine.window([0, 2, 3]), [0, 0, 0]))
    torch.testing.assert_close(engine.states(), before, rtol=0, atol=1e-14)
    check(setup, engine.round(engine.window([2, 0, 1]), [1, 0, 1]))


# --- slots that are reused, copied or moved (D11)


@pytest.mark.parametrize("name", ["reference-lazy", "triton-lazy"])
def test_d11_a_reused_row_forgets_the_request_before(name: str, device: str) -> None:
    """The new request's outputs and state are, bit for bit, those that it would have on a row that was never used."""
    setup = SETUPS[name]
    used, fresh = Engine(setup, 2, device), Engine(setup, 2, device)
    for _ in range(2):
        used.round(used.window([3, 3]), [3, 2])
    assert int(used.pool["write_pos"][0]) > 0, "nothing is pending"
    windows = [used.window([3, 3]), used.window([2, 3])]
    state = used.normal(*fresh.pool["state"].shape[1:]).to(fresh.pool["state"].dtype)
    for engine in (used, fresh):
        engine.replace(0, state)
    for window in windows:
        outputs = []
        for engine in (used, fresh):
            outputs.append(engine.verify(window)[: window.lengths[0]])
            engine.count([2, 0])
            engine.commit()
        assert torch.equal(*outputs)
    for engine in (used, fresh):
        engine.fold.fill_(1)
        engine.commit()
    assert torch.equal(used.checkpoints()[0], fresh.checkpoints()[0])


@pytest.mark.parametrize("name", ["reference-lazy", "triton-lazy"])
def test_d11_a_checkpoint_is_complete_only_after_a_fold(name: str, device: str) -> None:
    setup = SETUPS[name]
    engine = Engine(setup, 2, device)
    check(setup, engine.round(engine.window([3, 3]), [3, 2]))
    assert float(engine.state_error(engine.checkpoints()).min()) > 100 * setup.tolerance, "nothing was pending"
    engine.fold.fill_(1)
    engine.commit()
    assert float(engine.state_error(engine.checkpoints()).max()) <= setup.tolerance
    assert not engine.pool["write_pos"][:2].any()


# --- long runs

GPU = pytest.mark.gpu
BF16: dict[str, Any] = {"ring_dtype": "bf16", "act": "bf16", "draft": 8}
WIDE: dict[str, Any] = {**BF16, "heads": (6, 2), "k_dim": 128, "v_dim": 128}
LONG_RUNS = [
    pytest.param(Setup(REFERENCE, lazy=False, state="bf16", **BF16), id="reference-every"),
    pytest.param(Setup(TRITON_GROUP, lazy=False, state="bf16", **WIDE), id="triton-every", marks=GPU),
    pytest.param(Setup(TRITON, lazy=True, state="f32", **WIDE), id="triton-lazy", marks=GPU),
]


@pytest.mark.parametrize("setup", LONG_RUNS)
def test_256_rounds_do_not_drift(setup: Setup, device: str) -> None:
    """Each head's state is no worse in rounds 193..256 than in rounds 33..96, but for a factor of 1.5."""
    engine = Engine(setup, requests=2, device=device)
    errors = []
    for _ in range(256):
        outputs, states = engine.step()
        check(setup, (outputs, states))
        errors.append(states)
    history = torch.stack(errors)  # [256, B, HV]
    early, late = (part.flatten(0, 1).median(0).values for part in (history[32:96], history[192:256]))
    assert (late <= 1.5 * early).all(), f"from {early.tolist()} to {late.tolist()}"
    with pytest.raises(AssertionError, match="states are off by"):
        check(setup, engine.round(engine.window([8, 8]), [7, 7], miscount=1))
