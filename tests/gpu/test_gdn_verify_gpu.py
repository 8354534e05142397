"""gdn_ring_verify on a GPU, and random cases of both GDN kernels against float64: bits that follow nothing but the request."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernreg
from kernreg import Case, ops, registry
from kernreg.contract import Op
from kernreg.dispatch import launcher

pytestmark = pytest.mark.gpu
OP = ops.gdn_ring_verify
REGISTRY = registry.default()
RECORDS = ("ring_u", "ring_k", "ring_g", "ring_u_low", "ring_k_low")
ONE_TILE = {"BV": 16, "tiles": 1, "stages": 1, "registers": 255}
VARIANTS = (
    ONE_TILE,
    {"BV": 32, "tiles": 1, "stages": 1, "registers": 255},
    {"BV": 16, "tiles": 2, "stages": 1, "registers": 168},
    {"BV": 32, "tiles": 4, "stages": 1, "registers": 168},
    {"BV": 16, "tiles": 8, "stages": 3, "registers": 168},
)
KEY = {"draft": 8, "ring": 16, "heads": "6/2", "k_dim": 128, "v_dim": 128}
POOLS = ("packed", "padded", "alternate", "layer_inner")


def run_of(op: Op, facts: dict[str, Any], kernel: str, config: dict[str, Any] | None = None) -> Callable[..., Any]:
    chosen = REGISTRY.kernel(op.name, kernel)
    variant = chosen.variant(config)
    reason = chosen.why_not(facts, kernreg.device.current(), dict(variant.config))
    assert reason is None, reason
    return launcher(REGISTRY, variant, facts)


def verify(facts: dict[str, Any], config: dict[str, Any] = ONE_TILE) -> Callable[..., Tensor]:
    return run_of(OP, OP.complete(facts), "triton.chunked", config)


def inputs_of(batch: int, facts: dict[str, Any] = KEY, seed: int = 0, **options: Any) -> dict[str, Any]:
    return OP.samples.make_inputs(Case("gpu", OP.complete(facts), batch, options), device="cuda", seed=seed)


def cloned(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs with records of their own."""
    return {n: x.clone() if n in RECORDS and x is not None else x for n, x in inputs.items()}


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# --- random cases against float64


def any_of(dice: random.Random, limit: int, count: int = 5) -> tuple[int, ...]:
    """Numbers in 0..limit; both ends are likely."""
    return tuple(dice.choice((0, limit, dice.randint(0, limit))) for _ in range(count))


def some_rows(dice: random.Random, facts: dict[str, Any]) -> dict[str, Any]:
    ring, small = facts["ring"], "f16" in (facts.get("ring_dtype"), facts.get("act"))  # f16 has no room for tiny numbers
    return {
        "history": any_of(dice, ring),
        "base": any_of(dice, ring - 1),
        "padding": tuple(i for i in range(5) if dice.random() < 0.2),
        "null": dice.choice((-1, 0)),
        "pool": dice.choice(POOLS),
        "strided": dice.random() < 0.5,
        "scale": dice.choice((1.0, 3.0) if small else (0.1, 1.0, 3.0)),
        "decay": dice.choice((0.001, 0.5) if small else (0.001, 0.5, 20.0)),
        "poison": dice.choice((math.nan, math.inf)),
    }


VERIFY_KEYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": (KEY, VARIANTS[2]),
    "ratio_16_short": ({**KEY, "draft": 3, "heads": "16/1", "v_dim": 80, "index": "i64"}, ONE_TILE),
    "long_ring_fp32_state": ({**KEY, "draft": 6, "ring": 128, "heads": "3/3", "state": "f32"}, VARIANTS[3]),
    "draft_16": ({**KEY, "draft": 16, "ring": 64, "heads": "3/1", "k_dim": 64, "v_dim": 48}, ONE_TILE),
    "fp16": ({**KEY, "draft": 5, "ring": 32, "heads": "4/2", "ring_dtype": "f16", "act": "f16", "k_dim": 64}, VARIANTS[1]),
    "k_256_no_low": ({**KEY, "draft": 4, "heads": "2/1", "k_dim": 256, "v_dim": 64, "low": False}, ONE_TILE),
    "fp32_any": (
        {**KEY, "draft": 2, "heads": "2/2", "ring_dtype": "f32", "low": False, "act": "f32", "state": "f32", "layout": "any"},
        ONE_TILE,
    ),
}


@pytest.mark.parametrize("name", VERIFY_KEYS)
def test_verify_random_cases(name: str) -> None:
    facts, config = VERIFY_KEYS[name]
    run, reference = verify(facts, config), run_of(OP, OP.complete(facts), "torch.reference")
    for seed in range(20):
        dice = random.Random(f"{name} {seed}")
        options = {"lengths": any_of(dice, facts["draft"]), "gap": dice.randint(0, 3), "packed_qkv": dice.random() < 0.5}
        inputs = inputs_of(5, facts, seed, **some_rows(dice, facts), **options)
        bad = [c for c in OP.samples.parity(run, reference, inputs) if not c.ok]
        assert not bad, f"seed {seed}: {bad}"


COMMIT_KEYS: dict[str, tuple[str, dict[str, Any]]] = {
    "sequential-bf16": ("triton.sequential", {"track": True}),
    "sequential-long": ("triton.sequential", {"ring": 128, "heads": "3/3", "state": "f32", "k_dim": 64, "v_dim": 80}),
    "sequential-fp32": ("triton.sequential", {"ring": 32, "ring_dtype": "f32", "low": False, "track": True, "layout": "any"}),
    "head_group-ratio_3": ("triton.head_group", {"heads": "6/2", "track": True, "index": "i64"}),
    "head_group-long": ("triton.head_group", {"ring": 64, "heads": "16/1", "k_dim": 64, "v_dim": 16}),
    "head_group-fp16": ("triton.head_group", {"ring": 32, "ring_dtype": "f16", "state": "f32", "k_dim": 256, "v_dim": 64}),
    "per_head-bf16": ("triton.per_head", {"heads": "6/2", "v_dim": 80}),
    "per_head-track": ("triton.per_head", {"ring": 64, "state": "f32", "track": True, "k_dim": 64, "v_dim": 48}),
    "per_head-no_low": ("triton.per_head", {"ring": 32, "low": False, "track": True}),
}


@pytest.mark.parametrize("name", COMMIT_KEYS)
def test_commit_random_cases(name: str) -> None:
    """450 cases over all axes, each element within the contract's bound of the float64 closed form."""
    op, (kernel, given) = ops.gdn_ring_commit, COMMIT_KEYS[name]
    facts = op.complete({"ring": 16, "heads": "2/1", "k_dim": 128, "v_dim": 128, **given})
    run, reference = run_of(op, facts, kernel), run_of(op, facts, "torch.reference")
    for seed in range(50):
        dice = random.Random(f"{name} {seed}")
        options = {
            "accept": any_of(dice, 8),
            "fold": any_of(dice, 1),
            "track": any_of(dice, 1),
            "layers": dice.randint(1, 2),
        }
        case = Case(name, facts, 5, {**some_rows(dice, facts), **options})
        bad = [c for c in op.samples.parity(run, reference, op.samples.make_inputs(case, device="cuda", seed=seed)) if not c.ok]
        assert not bad, f"seed {seed}: {bad}"


# --- equal bits


def test_one_class_over_variants_and_batches() -> None:
    """A row alone, in batches of 2, 8, 64 and 128, and by every kind of variant: the same output and records."""
    given = inputs_of(128)
    whole = cloned(given)
    o = verify(KEY)(**whole)
    offsets, rows = given["cu_seqlens"].tolist(), given["rows"].tolist()
    for config in VARIANTS:
        run = verify(KEY, config)
        for batch in (1, 2, 8, 64, 128):
            part = cloned(given)
            cut = {n: part[n][:batch] for n in ("slots", "rows")} | {"cu_seqlens": part["cu_seqlens"][: batch + 1]}
            got = run(**{**part, **cut})
            assert same(got[: offsets[batch]], o[: offsets[batch]]), (config, batch)
            assert not got[offsets[batch] :].any()
            for name in RECORDS:
                assert same(part[name][rows[:batch]], whole[name][rows[:batch]]), (config, batch, name)


def test_each_row_alone() -> None:
    given = inputs_of(64)
    whole, alone = cloned(given), cloned(given)
    run = verify(KEY)
    o = run(**whole)
    for row in reversed(range(64)):
        cut = {n: alone[n][row : row + 1] for n in ("slots", "rows")} | {"cu_seqlens": alone["cu_seqlens"][row : row + 2]}
        begin, end = cut["cu_seqlens"].tolist()
        assert same(run(**{**alone, **cut})[begin:end], o[begin:end])
    for name in RECORDS:
        assert same(alone[name], whole[name]), name


def test_bits_do_not_depend_on_a_busy_gpu() -> None:
    given = inputs_of(8, {**KEY, "heads": "48/16"})
    run = verify({**KEY, "heads": "48/16"}, VARIANTS[2])
    quiet = cloned(given)
    o = run(**quiet)
    filler, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    for _ in range(8):
        again = cloned(given)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for _ in range(4):
                filler @ filler
        assert same(run(**again), o)
        for name in RECORDS:
            assert same(again[name], quiet[name]), name


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_lies_past_the_history_changes_nothing(poison: float) -> None:
    """Unused ring positions, tokens of padding rows and tokens of no row hold anything at all."""
    options: dict[str, Any] = {"padding": (1, 4), "gap": 3, "history": (4, 0, 8, 2, 5)}
    clean, poisoned = inputs_of(6, poison=None, **options), inputs_of(6, poison=poison, **options)
    run = verify(KEY)
    assert same(run(**clean), run(**poisoned))
    offsets = clean["cu_seqlens"].tolist()
    for i, row in enumerate(clean["rows"].tolist()):
        if i not in options["padding"]:
            n, base = int(clean["write_pos"][row]), int(clean["base"][row])
            at = [(base + j) % KEY["ring"] for j in range(n + offsets[i + 1] - offsets[i])]
            for name in RECORDS:
                assert same(clean[name][row][:, at], poisoned[name][row][:, at]), (row, name)


def test_d05_every_pool_layout_gives_the_same_bits() -> None:
    results = []
    for pool in POOLS:
        given = inputs_of(6, pool=pool)
        o = verify(KEY)(**given)
        results.append([o, *(given[name].contiguous() for name in RECORDS)])
    for other in results[1:]:
        assert all(same(a, b) for a, b in zip(results[0], other, strict=True))


# --- memory


def test_tokens_outside_of_all_windows_are_zero_in_uninitialised_memory() -> None:
    given = inputs_of(6, gap=40, padding=(0, 3), lengths=8)
    run, inputs = verify(KEY), cloned(given)
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        assert given["q"].new_empty(4).isnan().all()
        o = run(**inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    offsets = given["cu_seqlens"].tolist()
    idle = [(0, offsets[0]), (offsets[0], offsets[1]), (offsets[3], offsets[4]), (offsets[6], o.shape[0])]
    assert all(end > begin and not o[begin:end].any() for begin, end in idle)
    assert o.isfinite().all()


def test_d04_pitches_past_2_to_the_31() -> None:
    facts = {**KEY, "heads": "1/1", "k_dim": 64, "v_dim": 64}
    given = inputs_of(5, facts, slots=6, ring_rows=6)
    run, compact = verify(facts), cloned(given)
    o = run(**compact)
    pitch = 2**29 + 16
    memory = torch.zeros(5 * pitch + 64 * 64, dtype=torch.bfloat16, device="cuda")
    for name in ("state", "ring_u"):
        inner = given[name].stride()[1:]
        apart = cloned(given)
        apart[name] = memory.as_strided(given[name].shape, (pitch, *inner)).copy_(given[name])
        assert same(run(**apart), o), name
        assert same(apart["ring_u"], compact["ring_u"]), name


def test_d10_more_than_65535_programs() -> None:
    facts = {**KEY, "draft": 2, "heads": "32/32", "k_dim": 64, "v_dim": 16, "low": False}
    given = inputs_of(2048, facts, fast=True, history=1, lengths=(2, 1), base=3)
    run, halves = verify(facts), cloned(given)
    o = run(**given)
    for first, last in ((0, 1024), (1024, 2048)):
        cut = {n: halves[n][first:last] for n in ("slots", "rows")}
        offsets = halves["cu_seqlens"][first : last + 1]
        begin, end = int(offsets[0]), int(offsets[-1])
        part = run(**{**halves, **cut, "cu_seqlens": offsets})
        assert same(part[begin:end], o[begin:end])
        assert not part[:begin].any() and not part[end:].any()
    assert same(given["ring_u"], halves["ring_u"])


# --- CUDA graphs


def test_a_graph_captured_at_8_rows_replays_with_5_live_ones() -> None:
    run = verify(KEY)
    given = inputs_of(8, lengths=8, history=4)
    run(**cloned(given))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = run(**given)
    fresh = inputs_of(8, seed=1, lengths=8, history=8)
    fresh["slots"][5:] = -1
    for name, value in fresh.items():
        if isinstance(value, Tensor):
            given[name].copy_(value)
    o.fill_(math.nan)
    graph.replay()
    cut = {n: fresh[n][:5] for n in ("slots", "rows")} | {"cu_seqlens": fresh["cu_seqlens"][:6]}
    expected = run(**{**fresh, **cut})
    assert same(o, expected)
    assert not o[40:].any()
    for name in RECORDS:
        assert same(given[name], fresh[name]), name
    # the engine may also shorten the windows of the tail to nothing
    given["cu_seqlens"][6:] = given["cu_seqlens"][5]
    o.fill_(math.nan)
    graph.replay()
    assert same(o, expected)
