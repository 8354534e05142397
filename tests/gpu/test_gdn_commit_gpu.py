"""gdn_ring_commit on a GPU: huge pitches, huge batches, CUDA graphs, and bits that do not follow the batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernreg
from kernreg import Case, Kernel, NotWarm, ops, registry
from kernreg.dispatch import launcher

pytestmark = pytest.mark.gpu
OP = ops.gdn_ring_commit
REGISTRY = registry.default()
KERNELS = [k for k in REGISTRY.kernels(OP.name) if k.backend != "torch"]
MUTATED = ("state", "write_pos", "base", "fold")


def facts(**given: Any) -> dict[str, Any]:
    return OP.complete({"ring": 16, "heads": "6/2", "k_dim": 128, "v_dim": 128, **given})


def run_of(kernel: Kernel, key: dict[str, Any]) -> Callable[..., None]:
    if reason := kernel.why_not(key, kernreg.device.current(), dict(kernel.variant().config)):
        pytest.skip(reason)
    return launcher(REGISTRY, kernel.variant(), key)


@pytest.fixture(params=KERNELS, ids=lambda k: k.name)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return request.param


def small(batch: int, layers: int = 1, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """H = HV = 1, K = V = 64: one row a slot, histories 0..16, wrapping bases."""
    torch.manual_seed(batch)
    index = torch.arange(batch, dtype=torch.int32, device="cuda")
    return {
        "state": torch.randn(layers, batch, 1, 64, 64, device="cuda").to(dtype),
        "ring_u": torch.randn(layers, batch, 1, 16, 64, device="cuda").to(dtype),
        "ring_k": torch.randn(layers, batch, 1, 16, 64, device="cuda").to(dtype),
        "ring_g": -torch.rand(layers, batch, 1, 16, device="cuda"),
        "write_pos": index % 17,
        "base": (index * 5) % 16,
        "fold": (index % 3 != 0).to(torch.int8),
        "slots": index.flip(0).contiguous(),
        "rows": index.clone(),
    }


SMALL = {"heads": "1/1", "k_dim": 64, "v_dim": 64, "low": False}


def test_d10_a_batch_of_65536_equals_its_halves(kernel: Kernel) -> None:
    run = run_of(kernel, facts(**SMALL))
    batch = 65_536
    whole = small(batch)
    halves = {name: value.clone() for name, value in whole.items()}
    run(**whole)
    for part in (slice(0, batch // 2), slice(batch // 2, batch)):
        run(**{**halves, "slots": halves["slots"][part], "rows": halves["rows"][part]})
    for name in MUTATED:
        assert torch.equal(whole[name], halves[name]), name


def many_heads() -> dict[str, Any]:
    return facts(heads="48/16", low=True, track=True)


@pytest.mark.parametrize("batch", [2, 8, 64])
def test_a_row_alone_and_in_a_batch_has_the_same_bits(kernel: Kernel, batch: int) -> None:
    key = facts(low=True, track=True)
    run = run_of(kernel, key)
    together = OP.samples.make_inputs(Case("batch", key, batch), device="cuda")
    alone = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in together.items()}
    run(**together)
    for row in reversed(range(batch)):
        cut = {n: alone[n][row : row + 1] for n in ("slots", "rows", "accept", "track_slots", "track_step")}
        run(**{**alone, **cut})
    for name in MUTATED:
        assert torch.equal(together[name].view(torch.uint8), alone[name].view(torch.uint8)), name


def test_bits_do_not_depend_on_a_busy_gpu(kernel: Kernel) -> None:
    key = many_heads()
    run = run_of(kernel, key)
    first = OP.samples.make_inputs(Case("busy", key, 8), device="cuda")
    start = {n: first[n].clone() for n in MUTATED}
    run(**first)
    quiet = {n: first[n].clone() for n in MUTATED}
    filler = torch.randn(4096, 4096, device="cuda")
    side = torch.cuda.Stream()
    for _ in range(8):
        for name in MUTATED:
            first[name].copy_(start[name])
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for _ in range(4):
                filler @ filler
        run(**first)
        torch.cuda.synchronize()
        for name in MUTATED:
            assert torch.equal(first[name].view(torch.uint8), quiet[name].view(torch.uint8)), name


def test_d17_capture_needs_a_warm_plan_and_replays_the_same_bits() -> None:
    key = many_heads()
    plan = kernreg.bind(OP, device="cuda", **key)
    given = OP.samples.make_inputs(Case("graph", key, 8), device="cuda")
    start = {n: given[n].clone() for n in MUTATED}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # torch's word on a capture that raised
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(NotWarm, match=r"gdn_ring_commit: .*ring=16 heads=48/16.*plan\.warmup\(\)"), torch.cuda.graph(graph):
            plan(**given)
    plan.warmup()
    plan(**given)
    eager = {n: given[n].clone() for n in MUTATED}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(**given)
    for name in MUTATED:
        given[name].copy_(start[name])
    graph.replay()
    for name in MUTATED:
        assert torch.equal(given[name].view(torch.uint8), eager[name].view(torch.uint8)), name


def test_a_graph_captured_at_8_rows_replays_with_5_live_ones(kernel: Kernel) -> None:
    key = facts(low=True)
    run = run_of(kernel, key)
    given = OP.samples.make_inputs(Case("tail", key, 8), device="cuda")
    run(**{n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in given.items()})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(**given)
    fresh = OP.samples.make_inputs(Case("tail", key, 8, {"fold": 1, "history": 4}), device="cuda", seed=1)
    fresh["slots"][5:] = -1
    for name, value in fresh.items():
        if isinstance(value, torch.Tensor):
            given[name].copy_(value)
    graph.replay()
    run(**{**fresh, "slots": fresh["slots"][:5], "rows": fresh["rows"][:5]})
    for name in MUTATED:
        assert torch.equal(given[name].view(torch.uint8), fresh[name].view(torch.uint8)), name


def test_d05_every_pool_layout_gives_the_same_bits(kernel: Kernel) -> None:
    results = []
    for pool in ("packed", "padded", "alternate", "layer_inner"):
        key = facts(low=True)
        given = OP.samples.make_inputs(Case(pool, key, 6, {"pool": pool, "layers": 2}), device="cuda")
        run_of(kernel, key)(**given)
        results.append(given["state"].contiguous())
    for other in results[1:]:
        assert torch.equal(results[0].view(torch.uint8), other.view(torch.uint8))


def test_the_device_is_identified_through_nvml() -> None:
    found = kernreg.device.current()
    properties = torch.cuda.get_device_properties(0)
    assert found.platform == "cuda"
    assert found.name == properties.name
    assert found.arch == (properties.major, properties.minor)
    assert found.sms == properties.multi_processor_count
    assert found.source == "nvml"
