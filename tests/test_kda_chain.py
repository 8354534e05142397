"""KDA end to end: verify, commit, verify again; and the faults seen in public. For the reference and Triton kernels alike."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # tests are no package
from kda_engine import Engine, Kernels, Round, Shape, call, kernels, same_bits

from kernreg import Case, ops
from kernreg.ops import _inputs, kda_samples

VERIFY = ops.kda_chain_verify
NAMES = ("reference", "fused", "unfused")
TILES = {"BV": 32, "num_warps": 4}
SAFE, SOFTPLUS = -5.0, None

ROUNDS = (
    Round(3, [("a", 3), (None, 2), ("b", 0)]),  # all, padding, none
    Round(2, [("b", 1), ("a", 2)], track=(0,)),
    Round(3, [("c", 2), ("b", 3)]),  # a has left: c gets its slot
    Round(1, [("b", 1), ("c", 0), (None, 0)]),
)


def play(chosen: Kernels, mode: str, bound: float | None, device: str, **options: Any) -> list[torch.Tensor]:
    return Engine(chosen, Shape(), mode, bound, device, **options).play(ROUNDS)


@pytest.fixture(autouse=True)
def loud_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launcher allocates and does not write is NaN."""
    quiet = torch.Tensor.new_empty

    def new_empty(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        fresh = quiet(self, *args, **kwargs)
        return fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


# --- verify, commit, verify -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [SAFE, SOFTPLUS], ids=["safe", "softplus"])
@pytest.mark.parametrize("mode", ["ring", "snapshot"])
def test_rounds_of_verify_and_commit(name: str, mode: str, bound: float | None, device: str) -> None:
    play(kernels(name, **TILES), mode, bound, device, bias=bound is None)


def test_modes_tiles_and_launches_give_the_same_bits(device: str) -> None:
    variants = [
        ("unfused", mode, {"BV": BV, "num_warps": warps}) for BV, warps in ((8, 1), (32, 4)) for mode in ("ring", "snapshot")
    ]
    if device == "cuda":
        variants += [("fused", mode, {"BV": 64, "num_warps": 4, "registers": 168}) for mode in ("ring", "snapshot")]
    first, *others = (play(kernels(name, **config), mode, SAFE, device) for name, mode, config in variants)
    for other in others:
        assert len(other) == len(first)
        assert all(same_bits(x, y) for x, y in zip(first, other, strict=True))


FAULTS = {
    "one accepted token too few": lambda k: k._replace(
        ring_commit=lambda accept, **args: k.ring_commit(accept=(accept - 1).clamp(min=0), **args),
        snapshot_commit=lambda accept, **args: k.snapshot_commit(accept=(accept - 1).clamp(min=0), **args),
    ),
    "window shifted by one": lambda k: k._replace(
        conv_commit=lambda windows, **args: k.conv_commit(windows=windows.roll(1, -1), **args)
    ),
    "window of the step before": lambda k: k._replace(
        conv_commit=lambda accept, **args: k.conv_commit(accept=(accept - 1).clamp(min=0), **args)
    ),
    "nothing accepted, one committed": lambda k: k._replace(
        conv_commit=lambda accept, **args: k.conv_commit(accept=accept.clamp(min=1), **args)
    ),
    "track snapshot forgotten": lambda k: k._replace(
        ring_commit=lambda track_slots=None, track_step=None, **args: k.ring_commit(**args),
        snapshot_commit=lambda track_slots=None, track_step=None, **args: k.snapshot_commit(**args),
    ),
}


@pytest.mark.parametrize("mode", ["ring", "snapshot"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_checks_see_a_planted_fault(fault: str, mode: str) -> None:
    with pytest.raises(AssertionError):
        play(FAULTS[fault](kernels("reference")), mode, SAFE, "cpu")


COMPILE = """
import re, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from kernreg_triton import kda_chain_fused, kda_chain_verify, kda_ring_commit_shared
from kernreg_triton.kda_step import piece_width

FP32 = {"p_A_log", "p_dt_bias", "p_state", "p_g", "p_beta", "p_ring_g", "p_ring_beta", "p_records"}
INDEX = {"p_slots", "p_conv_slots", "p_window_rows", "p_accept"}
ABSENT = dict.fromkeys(("p_bias", "p_snapshots", "p_cu_seqlens", "p_parents", "p_track_slots", "p_track_step"))
FACTS = dict(T=4, L=4, H=1, HV=1, K=128, V=128, SAFE=True, RING=True, RAGGED=False, TREE=False, TRACK=False, BIAS=False,
             ALIGNED=True, UNIT_ACT=8, UNIT_STATE=4, TC=4, TP=4, LANES=8)

def reduced(source, kernel, num_warps, **constants):
    # the sizes of all sums in the compiled kernel
    names = list(kernel.arg_names)
    constants = FACTS | ABSENT | {"C": piece_width(constants.get("K", 128))} | constants
    constants = {n: v for n, v in constants.items() if n in names and not (n == "L" and "p_qkv" in names)}
    kind = lambda n: "fp32" if n in FP32 else "i32" if n in INDEX else "bf16"
    signature = {n: "constexpr" if n in constants else "*" + kind(n) if n.startswith("p_") else
                 "fp32" if n in ("scale", "lower_bound") else "i32" if n == "B" else "i64" for n in names}
    relied_on = [n for n in names if n.startswith("p_") and n not in constants and n not in INDEX]
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in relied_on}
    source = source(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    found = re.findall(r'tt.reduce"\\(.*?axis = (\\d).*?\\}\\) : \\(tensor<([0-9x]+)xf32', compiled.asm["ttgir"], re.S)
    return [int(shape.split("x")[int(axis)]) for axis, shape in found]

chain = kda_chain_verify._chain["aligned"]
for K, BV, num_warps in ((128, 8, 1), (128, 32, 4), (64, 16, 2)):
    print(*reduced(ASTSource, chain, num_warps, K=K, BV=BV, BW=128, PREPARE=False))
print(*reduced(ASTSource, chain, 4, BV=128, BW=128, PREPARE=True))
heads = kda_chain_fused._heads["aligned"]
for BV, TILES, AHEAD in ((32, 1, False), (64, 2, True)):
    print(*reduced(GluonASTSource, heads, 4, BV=BV, TILES=TILES, AHEAD=AHEAD))
print(*reduced(GluonASTSource, kda_ring_commit_shared._replay["aligned"], 4, BV=32))
"""


def test_every_sum_in_the_compiled_kernels_is_a_sum_of_two() -> None:
    """A sum of two has one order. Of more numbers, the compiler would choose one that follows tile, warps and chip."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    # a tile takes two sums of 4 levels, the commit's one; the first half three of 7, the commit's one
    assert [len(line.split()) for line in lines] == [8, 8, 8, 21, 8 + 21, 8 + 21, 4 + 7]
    assert {size for line in lines for size in line.split()} == {"2"}


# --- one call at a time -----------------------------------------------------------------------------------------------


def inputs(device: str, batch: int = 2, facts: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    small = {"draft": 3, "heads": "2/1", "k_dim": 16, "v_dim": 20, "act": "f32", "weight": "f32", "layout": "any"}
    return kda_samples.make_verify(Case("test", small | (facts or {}), batch, options), device=device)


def verify(name: str, args: dict[str, Any]) -> torch.Tensor:
    return kernels(name, **TILES).verify(**args)


WRITTEN = ("windows", "snapshots", "ring_k", "ring_v", "ring_g", "ring_beta")
TRITON = pytest.mark.parametrize("name", ["fused", "unfused"])


@TRITON
@pytest.mark.parametrize("mode", ["ring", "snapshot"])
def test_a_row_alone_is_the_row_in_a_batch(name: str, mode: str, device: str) -> None:
    together = inputs(device, 3, {"mode": mode})
    alone = _inputs.copy_inputs(together)
    o = verify(name, together)
    for row in (2, 0, 1):
        cut = {n: alone[n][row : row + 1] for n in ("slots", "conv_slots", "window_rows")}
        cut |= {n: alone[n][row * 3 : row * 3 + 3] for n in ("mixed_qkv", "a", "b")}
        assert same_bits(verify(name, alone | cut), o[row * 3 : row * 3 + 3])
    for n in WRITTEN:
        assert together[n] is None or same_bits(together[n], alone[n]), n


@pytest.mark.parametrize("name", ["reference", "unfused"])
def test_a_path_of_a_tree_is_a_chain(name: str, device: str) -> None:
    """Node 3 hangs on 1, which hangs on the root beside 0: its state is that of the chain of tokens 1, 3."""
    tree = inputs(device, 1, {"window": "tree", "mode": "snapshot", "draft": 4}, tree=(-1, -1, 0, 1))
    o = verify(name, tree)
    chain = _inputs.copy_inputs(tree)
    chain |= {n: chain[n][[1, 3]] for n in ("mixed_qkv", "a", "b")}
    chain |= {"parents": None, "windows": chain["windows"][:, :2].clone(), "snapshots": chain["snapshots"][:, :2].clone()}
    assert same_bits(verify(name, chain), o[[1, 3]])
    row = int(tree["window_rows"][0])
    for n in ("windows", "snapshots"):
        assert same_bits(chain[n][row], tree[n][row, [1, 3]]), n


@pytest.mark.parametrize("mode", ["ring", "snapshot"])
def test_ragged_rows_are_short_chains(mode: str, device: str) -> None:
    ragged = inputs(device, 3, {"window": "ragged", "mode": mode}, lengths=(3, 0, 1), gap=2)
    single = _inputs.copy_inputs(ragged)
    o = verify("unfused", ragged)
    assert not o[:2].any()
    for row, (begin, end) in ((0, (2, 5)), (2, (5, 6))):
        cut = {n: single[n][row : row + 1] for n in ("slots", "conv_slots", "window_rows")}
        cut |= {n: single[n][begin:end] for n in ("mixed_qkv", "a", "b")}
        cut |= {n: single[n][:, : end - begin] for n in ("windows", "snapshots") if single[n] is not None}
        assert same_bits(verify("unfused", single | cut | {"cu_seqlens": None}), o[begin:end])
    for n in WRITTEN:
        assert ragged[n] is None or same_bits(ragged[n], single[n]), n


# --- faults seen in public --------------------------------------------------------------------------------------------


def commit_inputs(device: str, batch: int = 3, facts: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    small = {"ring": 4, "heads": "2/1", "k_dim": 16, "v_dim": 20, "act": "f32", "layout": "any"}
    return kda_samples.make_ring_commit(Case("test", small | (facts or {}), batch, options), device=device)


def test_d02_accepted_counts_out_of_range_touch_nothing(name: str, device: str) -> None:
    args = commit_inputs(device, accept=4, poison=1e30)
    args["accept"] = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    live = int(args["slots"][1])
    for n in ("ring_k", "ring_v", "ring_g", "ring_beta"):
        for slot in range(args["state"].shape[1]):
            if slot != live:
                args[n][:, slot] = 1e30
    before = args["state"].clone()
    kernels(name, **TILES).ring_commit(**args)
    for slot in range(before.shape[1]):
        assert same_bits(args["state"][:, slot], before[:, slot]) == (slot != live), slot
    assert args["state"][:, live].abs().max() < 100  # of the 1e30 around it nothing came in


def test_d02_nothing_accepted_leaves_the_convolution_as_it_was(name: str, device: str) -> None:
    args = inputs(device, 2)
    before = args["conv_state"].clone()
    verify(name, args)
    kernels(name).conv_commit(
        conv_state=args["conv_state"][None],
        windows=args["windows"][None],
        conv_slots=args["conv_slots"],
        window_rows=args["window_rows"],
        accept=torch.zeros(2, dtype=torch.int32, device=device),
    )
    assert same_bits(args["conv_state"], before)


@pytest.mark.parametrize(("slots", "null"), [([0, -1, 2], -1), ([0, 0, 2], 0)], ids=["null=-1", "null=0"])
@pytest.mark.parametrize("padded_by", ["slots", "conv_slots"])
def test_d03_padding_writes_nothing(name: str, padded_by: str, slots: list[int], null: int, device: str) -> None:
    args = inputs(device, 3, {"mode": "ring" if padded_by == "slots" else "snapshot"})
    args |= {n: torch.tensor([3, 1, 2], device=device) for n in ("slots", "conv_slots")}
    args |= {padded_by: torch.tensor(slots, device=device), "null_slot": null}
    padded = [row for row, slot in enumerate(slots) if slot <= null]
    live = [row for row in range(3) if row not in padded]
    for row in padded:
        for n in ("mixed_qkv", "a", "b"):
            args[n][row * 3 : row * 3 + 3] = 1e30
    only = _inputs.copy_inputs(args)
    o = verify(name, args)
    tokens = [row * 3 + t for row in live for t in range(3)]
    cut = {n: only[n][live] for n in ("slots", "conv_slots", "window_rows")}
    wanted = verify(name, only | cut | {n: only[n][tokens] for n in ("mixed_qkv", "a", "b")})
    assert same_bits(o[tokens], wanted)
    assert all(not o[row * 3 : row * 3 + 3].any() for row in padded)
    for n in WRITTEN:
        assert args[n] is None or same_bits(args[n], only[n]), n


def wide_pool(values: torch.Tensor, pitch: int) -> torch.Tensor:
    """The same values, `pitch` elements from one to the next: memory that is only reserved, not used."""
    flat = torch.empty(pitch * (values.shape[0] - 1) + values[0].numel(), dtype=values.dtype, device=values.device)
    wide = flat.as_strided(values.shape, (pitch, *values[0].contiguous().stride()))
    wide.copy_(values)
    return wide


@pytest.mark.parametrize("pool", ["state", "conv_state", "windows", "ring_k", "ring_v", "ring_g"])
def test_d04_offsets_are_64_bits_in_verify(pool: str, name: str, device: str) -> None:
    args = inputs(device, 1, {"draft": 2, "heads": "1/1", "v_dim": 16, "act": "f16"}, slots=6, conv_slots=6, window_rows=6)
    args |= {n: torch.tensor([5], device=device) for n in ("slots", "conv_slots", "window_rows")}
    wide = _inputs.copy_inputs(args)
    wide[pool] = wide_pool(wide[pool], 2**29 + 16)
    assert wide[pool].stride(0) * 5 > 2**31
    assert same_bits(verify(name, wide), verify(name, args))
    for n in WRITTEN:
        assert args[n] is None or same_bits(wide[n][5], args[n][5]), n


@pytest.mark.parametrize("dim", [0, 1], ids=["layer", "slot"])
def test_d04_offsets_are_64_bits_in_commit(dim: int, name: str, device: str) -> None:
    args = commit_inputs(device, 1, {"heads": "1/1", "v_dim": 16}, accept=2, layers=6 if dim == 0 else 1, slots=6)
    args["slots"] = torch.tensor([5], dtype=torch.int32, device=device)
    args |= {n: args[n].nan_to_num(0.5) for n in ("ring_k", "ring_v", "ring_g", "ring_beta")}
    wide = _inputs.copy_inputs(args)
    wide["state"] = wide_pool(args["state"].transpose(0, dim), 2**29 + 16).transpose(0, dim)
    kernels(name, **TILES).ring_commit(**args)
    kernels(name, **TILES).ring_commit(**wide)
    assert same_bits(wide["state"], args["state"])


@pytest.mark.parametrize("pool", ["padded", "alternate"])
@pytest.mark.parametrize("mode", ["ring", "snapshot"])
def test_d05_strides_are_honoured(name: str, mode: str, pool: str, device: str) -> None:
    packed = inputs(device, 2, {"mode": mode})
    spread = inputs(device, 2, {"mode": mode}, pool=pool, conv="padded", packed_gates=True, strided=True)
    before = _inputs.copy_inputs(spread)
    assert same_bits(verify(name, spread), verify(name, packed))
    for n in WRITTEN:
        if packed[n] is not None:
            assert same_bits(spread[n], packed[n]), n
            before[n].copy_(packed[n])  # the gaps are as they were
    assert _inputs.bytes_check("bytes", spread, before).ok


@pytest.mark.parametrize("pool", ["padded", "alternate", "layer_inner"])
def test_d05_strides_are_honoured_in_commit(name: str, pool: str, device: str) -> None:
    packed, spread = (commit_inputs(device, 2, layers=2, pool=kind, strided=kind != "packed") for kind in ("packed", pool))
    before = _inputs.copy_inputs(spread)
    kernels(name, **TILES).ring_commit(**packed)
    kernels(name, **TILES).ring_commit(**spread)
    assert same_bits(spread["state"], packed["state"])
    before["state"].copy_(packed["state"])
    assert _inputs.bytes_check("bytes", spread, before).ok


@pytest.mark.parametrize("mode", ["ring", "snapshot"])
def test_d06_verify_reads_the_history_and_leaves_it(name: str, mode: str, device: str) -> None:
    args = inputs(device, 1, {"draft": 6, "heads": "4/1", "mode": mode})
    before = _inputs.copy_inputs(args)
    o = verify(name, args)
    again = verify(name, args)
    assert same_bits(o, again)
    for n in ("conv_state", "state", "mixed_qkv", "a", "b"):
        assert same_bits(args[n], before[n]), n


def one_hot(device: str, **facts: Any) -> dict[str, Any]:
    """Zero state and histories; the convolution passes the current token on, and SiLU(0) is 0."""
    args = inputs(device, 1, {"draft": 1, "heads": "1/1", "v_dim": 16, "act": "f16", "weight": "f16", **facts})
    for n in ("state", "conv_state", "mixed_qkv", "a", "b", "A_log", "dt_bias", "conv_weight"):
        args[n].zero_()
    args["conv_weight"][:, 3] = 1
    return args


def test_d07_beta_is_not_rounded_to_16_bits(name: str, device: str) -> None:
    for mode in ("ring", "snapshot"):
        args = one_hot(device, mode=mode)
        args["mixed_qkv"][0, 16], args["mixed_qkv"][0, 32] = 2.0, 3.0  # k and v
        args["b"].fill_(0.5)
        verify(name, args)
        slot, row = int(args["slots"][0]), int(args["window_rows"][0])
        if mode == "ring":
            assert args["ring_beta"][slot, 0, 0].item() == pytest.approx(0.62245935, abs=1e-6)
            k, v = args["ring_k"][slot, 0, 0, 0].item(), args["ring_v"][slot, 0, 0, 0].item()
        else:
            wanted = 0.62245935 * v * k / (k * k + 1e-6) ** 0.5
            assert args["snapshots"][row, 0, 0, 0, 0].item() == pytest.approx(wanted, abs=3e-6)


@pytest.mark.parametrize(("bound", "wanted"), [(SAFE, -4.7628703), (SOFTPLUS, -3.0485874)], ids=["safe", "softplus"])
def test_d08_each_gate_is_its_own_branch(name: str, bound: float | None, wanted: float, device: str) -> None:
    args = one_hot(device, gate="softplus" if bound is None else "safe") | {"lower_bound": bound}
    args["a"].fill_(3.0)
    args["state"].fill_(1.0)
    verify(name, args)
    slot = int(args["slots"][0])
    g = args["ring_g"][slot, 0, 0]
    assert (g - wanted).abs().max() < 1e-6
    rings = {n: args[n][None] for n in ("ring_k", "ring_v", "ring_g", "ring_beta")}
    accept = torch.tensor([1], dtype=torch.int32, device=device)
    kernels(name, **TILES).ring_commit(state=args["state"][None], slots=args["slots"], accept=accept, **rings)
    assert args["state"][slot].flatten().tolist() == pytest.approx([float(torch.tensor(wanted).exp())] * 256, rel=2e-6)


@pytest.mark.parametrize("heads", ["6/2", "6/3", "16/1"])
def test_d09_value_heads_read_their_key_head(name: str, heads: str, device: str) -> None:
    HV, H = map(int, heads.split("/"))
    args = one_hot(device, heads=heads)
    ring, snapshot = args, one_hot(device, heads=heads, mode="snapshot")
    for key in range(H):
        args["mixed_qkv"][0, (H + key) * 16 + key] = 4.0  # key head i holds e_i
    args["mixed_qkv"][0, 2 * H * 16 :] = 1.0
    snapshot["mixed_qkv"].copy_(args["mixed_qkv"])
    verify(name, snapshot)
    h = snapshot["snapshots"][int(snapshot["window_rows"][0]), 0]  # [HV, V, K]
    for value_head in range(HV):
        column = torch.zeros(16, dtype=torch.bool)
        column[value_head // (HV // H)] = True
        assert (h[value_head].cpu() != 0).eq(column).all(), value_head
    written = {"ring_k": H * 16, "ring_v": HV * 16, "ring_g": HV * 16, "ring_beta": HV}
    for n in written:
        ring[n].fill_(1e4)  # what is not written stays
    verify(name, ring)
    slot = int(ring["slots"][0])
    for n, cells in written.items():
        changed = ring[n] != 1e4
        assert int(changed.sum()) == cells, n
        assert changed[slot, :, 0].all(), n


def test_d10_a_batch_equals_its_halves(name: str, device: str) -> None:
    whole = inputs(device, 4)
    halves = _inputs.copy_inputs(whole)
    o = verify(name, whole)
    for part in (slice(0, 2), slice(2, 4)):
        cut = {n: halves[n][part] for n in ("slots", "conv_slots", "window_rows")}
        tokens = slice(3 * part.start, 3 * part.stop)
        assert same_bits(verify(name, halves | cut | {n: halves[n][tokens] for n in ("mixed_qkv", "a", "b")}), o[tokens])
    for n in WRITTEN:
        assert whole[n] is None or same_bits(whole[n], halves[n]), n


def test_a_window_that_is_no_chain_is_not_for_the_fused_kernel(device: str) -> None:
    for facts in ({"window": "ragged"}, {"window": "tree", "mode": "snapshot"}):
        with pytest.raises(pytest.skip.Exception, match="in a chain, got window="):
            call(VERIFY, "triton.fused", **inputs(device, 1, facts))
