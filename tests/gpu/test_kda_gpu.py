"""KDA on a GPU: long runs of the engine, one numerics class over all tiles and warps, busy GPUs, batches past grid limits."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))  # tests are no package
from kda_engine import REGISTRY, RING, Engine, Round, Shape, call, kernels, same_bits

from kernreg import Case, ops
from kernreg.device import Device
from kernreg.ops import _inputs, kda_samples

pytestmark = pytest.mark.gpu
VERIFY = ops.kda_chain_verify
WRITTEN = ("windows", "snapshots", *RING)


# Each draft length is a binary of its own: together the heads see all from 1 to 16.
DRAFTS = {"2/2": (1, 2, 3, 5, 8, 16), "4/2": (1, 4, 6, 7, 12, 16), "3/1": (1, 9, 10, 11, 13, 14, 15, 16)}
SMALL = {"BV": 32, "num_warps": 4}
WHOLE = {"BV": 64, "tiles": 2, "ahead": True, "num_warps": 4, "registers": 128}
OTHERS = (
    ("unfused", "ring", {"BV": 32, "num_warps": 2}),
    ("fused", "snapshot", WHOLE),
    ("unfused", "snapshot", {"BV": 64, "num_warps": 4}),
)


def rounds(count: int, drafts: tuple[int, ...], slots: int, seed: int) -> list[Round]:
    """Requests come and go; drafts of any length, any number of them accepted; now and then padding and track snapshots."""
    draw, live, made = random.Random(seed), [], 0
    plan = []
    for i in range(count):
        live = [name for name in live if draw.random() > 0.1]
        while len(live) < slots - 1 and draw.random() < 0.6:
            live.append(f"r{made}")
            made += 1
        length = drafts[-i] if i < 2 else draw.choice(drafts)
        rows = [(name, draw.choice((0, length, draw.randint(0, length)))) for name in draw.sample(live, len(live))]
        if draw.random() < 0.3:
            rows.insert(draw.randint(0, len(rows)), (None, draw.randint(0, length)))
        tracked = [row for row, (name, accepted) in enumerate(rows) if name and accepted][:1]
        plan.append(Round(length, rows or [(None, 0)], tracked if draw.random() < 0.3 else ()))
    return plan


def shape(heads: str, act: torch.dtype) -> Shape:
    HV, H = map(int, heads.split("/"))
    # with 16 bits, a convolution that rounds the other way moves v and so the state by an ulp; tight bounds are for fp32
    tolerance = 5e-5 if act == torch.float32 else 1e-2
    return Shape(layers=3, H=H, HV=HV, K=128, V=128, draft=16, slots=5, act=act, tolerance=tolerance)


@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("heads", DRAFTS)
@pytest.mark.parametrize(
    ("name", "mode", "config"), OTHERS, ids=lambda value: value if isinstance(value, str) else f"BV{value['BV']}"
)
def test_64_rounds_in_both_modes_and_both_launches_have_the_same_bits(
    name: str, mode: str, config: dict[str, int], heads: str, act: torch.dtype
) -> None:
    bound = -5.0 if heads != "4/2" else None
    plan = rounds(64, DRAFTS[heads], 5, seed=len(heads) + int(heads[0]))
    assert {this.draft for this in plan} == set(DRAFTS[heads])
    first = (name, mode) == OTHERS[0][:2]  # float64 need not say the same three times
    base = Engine(kernels("fused", **SMALL), shape(heads, act), "ring", bound, "cuda", check=first).play(plan)
    chosen = kernels(name, **config)
    other = Engine(chosen, shape(heads, act), mode, bound, "cuda", check=False).play(plan)
    assert all(same_bits(x, y) for x, y in zip(base, other, strict=True))


def inputs(batch: int, facts: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    wide = {"draft": 4, "heads": "6/2", "k_dim": 128, "v_dim": 128, "act": "bf16", "weight": "bf16"}
    return kda_samples.make_verify(Case("test", wide | (facts or {}), batch, options), device="cuda")


def variants(op: str, facts: dict[str, Any]) -> list[Any]:
    """Kernel and config of all variants of the Triton backend that serve this key on an H200."""
    found = []
    for kernel in REGISTRY.kernels(op):
        for values in itertools.product(*kernel.config.values()) if kernel.backend == "triton" else ():
            config = dict(zip(kernel.config, values, strict=True))
            if kernel.why_not(REGISTRY.op(op).complete(facts), Device.declared("NVIDIA H200", "sm_90", 132), config) is None:
                found.append(pytest.param(kernel.name, config, id=kernel.variant(config).id))
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[dict[str, Any], torch.Tensor]]:
    """Inputs as they were, and what one variant makes of them, by mode."""
    made = {}
    for mode in ("ring", "snapshot"):
        args = inputs(3, {"mode": mode, "v_dim": 80})
        o = call(VERIFY, "triton.unfused", {"BV": 32, "num_warps": 4}, **args)
        made[mode] = (args, o)
    return made


@pytest.mark.parametrize(("kernel", "config"), variants(VERIFY.name, {"draft": 4, "heads": "6/2", "v_dim": 80}))
def test_all_variants_are_one_numerics_class(
    kernel: str, config: dict[str, int], expected: dict[str, tuple[dict[str, Any], torch.Tensor]]
) -> None:
    assert same_bits(expected["ring"][1], expected["snapshot"][1])
    for mode, (wanted, o) in expected.items():
        args = inputs(3, {"mode": mode, "v_dim": 80})
        assert same_bits(call(VERIFY, kernel, config, **args), o)
        for n in WRITTEN:
            assert args[n] is None or same_bits(args[n], wanted[n]), n


@pytest.mark.parametrize(("kernel", "config"), variants("kda_ring_commit", {"ring": 4, "heads": "6/2"}))
def test_a_committed_ring_is_the_snapshot(kernel: str, config: dict[str, int]) -> None:
    ring, snapshot = (inputs(3, {"mode": mode}) for mode in ("ring", "snapshot"))
    for args in (ring, snapshot):
        call(VERIFY, "triton.unfused", {"BV": 32, "num_warps": 4}, **args)
    accept = torch.tensor([4, 1, 3], dtype=torch.int32, device="cuda")
    rings = {n: ring[n][None] for n in RING}
    call(ops.kda_ring_commit, kernel, config, state=ring["state"][None], slots=ring["slots"], accept=accept, **rings)
    for slot, row, count in zip(ring["slots"].tolist(), snapshot["window_rows"].tolist(), accept.tolist(), strict=True):
        assert same_bits(ring["state"][slot], snapshot["snapshots"][row, count - 1])


@pytest.mark.parametrize("name", ["triton.fused", "triton.unfused"])
@pytest.mark.parametrize("batch", [2, 7, 64])
def test_a_row_alone_and_in_a_batch_has_the_same_bits(name: str, batch: int) -> None:
    together = inputs(batch)
    alone = _inputs.copy_inputs(together)
    o = call(VERIFY, name, **together)
    for row in reversed(range(batch)):
        cut = {n: alone[n][row : row + 1] for n in ("slots", "conv_slots", "window_rows")}
        cut |= {n: alone[n][row * 4 : row * 4 + 4] for n in ("mixed_qkv", "a", "b")}
        assert same_bits(call(VERIFY, name, **alone | cut), o[row * 4 : row * 4 + 4])
    for n in WRITTEN:
        assert together[n] is None or same_bits(together[n], alone[n]), n


@pytest.mark.parametrize("name", ["triton.fused", "triton.unfused"])
@pytest.mark.parametrize("mode", ["ring", "snapshot"])
def test_d06_a_busy_gpu_changes_nothing(name: str, mode: str) -> None:
    args = inputs(1, {"draft": 6, "heads": "16/1", "mode": mode})
    before = _inputs.copy_inputs(args)
    config = SMALL
    quiet = call(VERIFY, name, config, **args)
    stored = {n: args[n].clone() for n in WRITTEN if args[n] is not None}
    filler, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    for _ in range(16):
        for n in stored:
            args[n].copy_(before[n])
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for _ in range(4):
                filler @ filler
        o = call(VERIFY, name, config, **args)
        torch.cuda.synchronize()
        assert same_bits(o, quiet)
        for n, value in stored.items():
            assert same_bits(args[n], value), n
    for n in ("conv_state", "state"):
        assert same_bits(args[n], before[n]), n


def test_d10_more_heads_and_rows_than_a_grid_axis_carries() -> None:
    """B * HV = 65,536; most rows are padding, live ones at the ends and in between."""
    facts = {"draft": 3, "heads": "32/32", "k_dim": 64, "v_dim": 64}
    few = inputs(8, facts)
    rows = [0, 1, 511, 1023, 1024, 1500, 2046, 2047]
    for name in ("triton.fused", "triton.unfused"):
        wanted_args, args = _inputs.copy_inputs(few), _inputs.copy_inputs(few)
        wanted = call(VERIFY, name, **wanted_args)
        for n in ("slots", "conv_slots", "window_rows"):
            many = torch.full((2048,), -1, dtype=few[n].dtype, device="cuda")
            many[rows] = few[n]
            args[n] = many
        tokens = [3 * row + t for row in rows for t in range(3)]
        for n in ("mixed_qkv", "a", "b"):
            args[n] = few[n].new_full((3 * 2048, few[n].shape[1]), float("nan"))
            args[n][tokens] = few[n]
        o = call(VERIFY, name, **args)
        assert same_bits(o[tokens], wanted)
        rest = torch.ones(3 * 2048, dtype=torch.bool, device="cuda")
        rest[tokens] = False
        assert not o[rest].any()
        for n in WRITTEN:
            assert args[n] is None or same_bits(args[n], wanted_args[n]), n


@pytest.mark.parametrize("name", ["triton.shared", "triton.replay"])
def test_d10_a_commit_of_65536_rows_equals_its_halves(name: str) -> None:
    facts = {"ring": 2, "heads": "1/1", "k_dim": 64, "v_dim": 64, "act": "bf16"}
    args = kda_samples.make_ring_commit(Case("many", facts, 65_536, {"fast": True}), device="cuda")
    halves = _inputs.copy_inputs(args)
    call(ops.kda_ring_commit, name, **args)
    for part in (slice(0, 32_768), slice(32_768, None)):
        call(ops.kda_ring_commit, name, **halves | {n: halves[n][part] for n in ("slots", "accept")})
    assert same_bits(args["state"], halves["state"])


def test_one_binary_for_a_static_key() -> None:
    """Batches, addresses and pool sizes of one key never compile anew."""
    from kernreg_triton.kda_chain_fused import _heads

    cache = _heads["aligned"].device_caches
    args = inputs(1, {"v_dim": 64, "draft": 5})
    call(VERIFY, "triton.fused", **args)
    compiled = sum(len(c[0]) for c in cache.values())
    assert compiled
    for batch, slots, ring in ((2, 16, 16), (16, 33, 7), (17, 64, 5)):
        args = inputs(batch, {"v_dim": 64, "draft": 5}, slots=slots, conv_slots=slots, window_rows=slots, ring=ring)
        call(VERIFY, "triton.fused", **args)
    assert sum(len(c[0]) for c in cache.values()) == compiled
