"""Cases, input makers and parity checks of the GDN ring ops.

Options of `gdn_ring_commit` cases (a number for all rows, a tuple repeated over the rows, or "mixed"):
    layers, slots, ring_rows   sizes of the pools; None means a few more than the batch needs
    history    records of each row: a number, a tuple, "full", or "mixed" (0, 1, 4, full, half)
    accept     tokens accepted in this step, at most the history
    base       ring position of record 0; "mixed" wraps around for some rows
    fold       0 or 1 each row; "mixed" folds two of three
    track      1 for a track snapshot each row; "mixed" takes two of three (only with the fact track)
    padding    batch rows whose slot is the null slot
    bad        {batch row: what is out of range}: "slot", "row", "row_negative", "write_pos", "write_pos_negative", "accept",
               "accept_negative", "track_slot", "track_step"
    null       the null slot
    pool       memory of state and ring: "packed", "padded", "alternate", "layer_inner" (see `_inputs.pool`)
    strided    index tensors are strided views
    scale      of state and u
    decay      largest |g|
    cancel     records come in pairs that undo each other but for the decay between them
    poison     what records past the history hold; None leaves them random
    fast       torch's own generator: for benchmarks

Options of `gdn_ring_advance` cases: history, accept, ring_rows, padding, null, strided, and
    margin     None folds at every commit
    bad        {batch row: "row", "row_negative", "accept_negative" or "overrun"}

Options of `gdn_ring_verify` cases: history, base, slots, ring_rows, padding, null, pool, strided, scale, decay, poison, fast, and
    cancel     pairs as above; and the halves of every key are equal, those of the state nearly opposite
    gates      scale of a and b
    lengths    window of each row, at most the fact draft; "mixed" or "full"
    gap        tokens before the first and after the last window that no row covers
    packed_qkv q, k and v are views of one tensor [N, dim], a and b of another
    q_scale    the argument scale
    bad        {batch row: "slot", "row", "write_pos", "write_pos_negative" or "window" (overlong)}
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from kernreg.contract import Case, Check, Samples
from kernreg.ops import _inputs, gdn
from kernreg.ops._inputs import Inputs, dtype_of

# Error of a committed state, as parts of A = |S| exp(P_n) + sum_j exp(P_n - P_j) |u_j| |k_j|, the sum of sizes: operands, sums
# and exponentials in fp32 lose a few 2^-24 each, a product of 16-bit parts is exact, and dropping low * low loses 2^-18.
SPLIT_ERROR = 2.0**-16
TF32_ERROR = 2.0**-9  # fp32 records enter the tensor cores with 10 bits of mantissa: 2^-11 an operand, and margin
BF16_ROUNDING = 2.0**-8  # half a step of bf16's 8-bit significand


def _history(option: Any, length: int, count: int) -> list[int]:
    return _inputs.per_row(length if option == "full" else option, count, (4, length, 1, 0, length // 2))


def _base(option: Any, length: int, count: int) -> list[int]:
    return _inputs.per_row(option, count, (0, length - 3, 5, length - 1))


def _ring(
    random: _inputs.Random, facts: Mapping[str, Any], lead: tuple[int, ...], o: SimpleNamespace
) -> dict[str, torch.Tensor | None]:
    """ring_u, ring_k, ring_g and low parts with `lead` dims in front of the heads, packed, every position filled."""
    value_heads, key_heads = _inputs.heads_of(facts)
    length, dtype = int(facts["ring"]), dtype_of(facts["ring_dtype"])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    made = torch.float32 if facts["low"] else dtype
    u = random.normal("ring_u", (*lead, value_heads, length, int(facts["v_dim"])), o.scale, made)
    k = random.unit("ring_k", (*lead, key_heads, length, int(facts["k_dim"])), made)
    if o.cancel:
        u[..., 1::2, :], k[..., 1::2, :] = -u[..., ::2, :], k[..., ::2, :]
    ring: dict[str, torch.Tensor | None] = {"ring_u_low": None, "ring_k_low": None}
    ring["ring_u"], ring["ring_k"] = u, k
    if facts["low"]:
        ring["ring_u"], ring["ring_u_low"] = _inputs.split_low(u, dtype)
        ring["ring_k"], ring["ring_k_low"] = _inputs.split_low(k, dtype)
    ring["ring_g"] = random.uniform("ring_g", (*lead, value_heads, length), -o.decay, 0.0, wide)
    return ring


def _poison_unused(
    ring: Mapping[str, torch.Tensor | None], history: Sequence[int], base: Sequence[int], poison: float | None
) -> None:
    """Ring positions at or past each ring row's history hold `poison`."""
    if poison is None:
        return
    g = ring["ring_g"]
    assert g is not None
    position = torch.arange(g.shape[-1], device=g.device)
    record = (position - torch.tensor(base, device=g.device)[:, None]) % g.shape[-1]
    unused = record >= torch.tensor(history, device=g.device)[:, None]  # [R, L]
    for name, tensor in ring.items():
        if tensor is not None:
            tail = (1,) if name == "ring_g" else (1, 1)
            mask = unused.view(unused.shape[0], 1, unused.shape[1], *tail[1:])
            tensor.masked_fill_(mask, poison)


def _placed(names: Sequence[int], ring_rows: int, values: Sequence[int], spare: int) -> list[int]:
    """Per-ring-row list with `values[i]` at ring row `names[i]`, and `spare` at rows that nobody uses; no row beyond."""
    placed = [spare] * ring_rows
    for name, value in zip(names, values, strict=True):
        if name < ring_rows:
            placed[name] = value
    return placed


COMMIT_OPTIONS: Mapping[str, Any] = {
    "layers": 1,
    "slots": None,
    "ring_rows": None,
    "history": "mixed",
    "accept": "mixed",
    "base": "mixed",
    "fold": 1,
    "track": 1,
    "padding": (),
    "bad": {},
    "null": -1,
    "pool": "packed",
    "strided": False,
    "scale": 1.0,
    "decay": 0.5,
    "cancel": False,
    "poison": math.nan,
    "fast": False,
}


def make_commit(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    facts, o = _inputs.facts_of(gdn.gdn_ring_commit, case), _inputs.options_of(case, COMMIT_OPTIONS)
    random = _inputs.Random(seed, device, o.fast)
    batch, length = case.batch, int(facts["ring"])
    value_heads, _ = _inputs.heads_of(facts)
    ring_rows = o.ring_rows or batch + 2
    aligned = facts["layout"] == "aligned"

    rows = random.permutation("rows", ring_rows)[:batch]
    history = _history(o.history, length, batch)
    base = _base(o.base, length, batch)
    fold = _inputs.per_row(o.fold, batch, _inputs.THIRD_OFF)
    picked = _inputs.CommitRows(random, o, history, o.slots, facts["track"], accept=(3,))

    write_pos, bases = _placed(rows, ring_rows, history, 2), _placed(rows, ring_rows, base, 5)
    folds = _placed(rows, ring_rows, fold, 1)
    ring = _ring(random, facts, (o.layers, ring_rows), o)
    _poison_unused(ring, write_pos, bases, o.poison)
    shape = (o.layers, picked.pool_slots, value_heads, int(facts["v_dim"]), int(facts["k_dim"]))
    state = random.normal("state", shape, o.scale, dtype_of(facts["state"]))

    for row, what in o.bad.items():
        if what in ("write_pos", "write_pos_negative"):
            write_pos[rows[row]] = length + 1 if what == "write_pos" else -1
        elif what in ("row", "row_negative"):
            rows[row] = ring_rows if what == "row" else -1

    make_index = _inputs.Indices(facts["index"], device, o.strided)
    inputs: Inputs = {
        "state": _inputs.pool(state, 2, o.pool, aligned),
        **{name: None if t is None else _inputs.pool(t, 2, o.pool, aligned) for name, t in ring.items()},
        "write_pos": torch.tensor(write_pos, dtype=torch.int32, device=device),
        "base": torch.tensor(bases, dtype=torch.int32, device=device),
        "fold": torch.tensor(folds, dtype=torch.int8, device=device),
        "slots": make_index(picked.slots),
        "rows": make_index(rows),
        "accept": None,
        "track_slots": None,
        "track_step": None,
        "null_slot": o.null,
        "folding": facts["folding"],
    }
    if facts["track"]:
        inputs |= {"accept": make_index(picked.accept), **picked.track(make_index)}
    return inputs


def _combined(inputs: Inputs) -> Inputs:
    """The same records as one float64 ring without low parts, and a float64 state."""
    wide = _inputs.doubled(inputs, ("state", "ring_u", "ring_k", "ring_g"))
    for name in ("ring_u", "ring_k"):
        if inputs[f"{name}_low"] is not None:
            wide[name] += inputs[f"{name}_low"]
            wide[f"{name}_low"] = None
    return wide


def _layer(inputs: Inputs, layer: int) -> Inputs:
    """One layer of pools that lead with NL."""
    pools = ("state", "ring_u", "ring_k", "ring_g", "ring_u_low", "ring_k_low")
    return {n: x[layer : layer + 1] if n in pools and x is not None else x for n, x in inputs.items()}


def check_commit(run: Callable[..., None], reference: Callable[..., None], inputs: Inputs) -> list[Check]:
    got, native = _inputs.copy_inputs(inputs), _inputs.copy_inputs(inputs)
    run(**got)
    reference(**native)
    cells = _inputs.touched(inputs["state"], native["state"], 3)
    cursors = {name: native[name] for name in ("write_pos", "base", "fold")}
    rounding = BF16_ROUNDING if inputs["state"].dtype == torch.bfloat16 else 0.0
    error = TF32_ERROR if inputs["ring_u"].dtype == torch.float32 else SPLIT_ERROR

    states = []
    for layer in range(inputs["state"].shape[0]):  # one at a time: float64 copies of all layers may not fit
        exact, sizes = _combined(_layer(inputs, layer)), _combined(_layer(inputs, layer))
        for name in ("state", "ring_u", "ring_k"):
            sizes[name].abs_()
        reference(**exact)
        reference(**sizes)
        allowed = rounding * exact["state"].abs() + error * sizes["state"]
        one = slice(layer, layer + 1)
        states.append(_inputs.close_check(f"state[{layer}]", got["state"][one], exact["state"], allowed, cells[one]))
    return [
        max(states, key=lambda check: check.worst),
        _inputs.bytes_check("cursors and all else exact", got, {**inputs, **cursors}, {"state": cells}),
    ]


def _commit_case(
    name: str,
    heads: str = "2/1",
    k: int = 64,
    v: int = 16,
    ring: int = 16,
    batch: int = 3,
    *,
    state: str = "f32",
    ring_dtype: str = "f16",
    low: bool | None = None,
    track: bool = False,
    index: str = "i32",
    layout: str = "aligned",
    **options: Any,
) -> Case:
    facts = {"ring": ring, "heads": heads, "k_dim": k, "v_dim": v, "state": state, "ring_dtype": ring_dtype}
    facts |= {"low": ring_dtype != "f32" if low is None else low, "track": track, "index": index, "layout": layout}
    return _inputs.make_case(gdn.gdn_ring_commit, name, batch, options, facts)


COMMIT_CASES = (
    _commit_case("plain", history=4),
    _commit_case("batch_0", batch=0),
    _commit_case("histories", batch=5, base=0),
    _commit_case("wrap", batch=4, base=13, history=(4, 16, 3, 7)),
    _commit_case("empty_history", history=0, fold=1),
    _commit_case("full", history="full", base=(0, 9, 15)),
    _commit_case("fold_some", batch=4, fold="mixed", base=-3),
    _commit_case("ratio_3", "6/2", v=32),
    _commit_case("ratio_3_three_key_heads", "9/3", k=64, v=64, batch=2),
    _commit_case("ratio_16", "16/1", batch=2),
    _commit_case("ratio_1", "3/3", batch=2),
    _commit_case("k_128_v_80", "2/1", k=128, v=80, batch=2),
    _commit_case("k_256_v_64", "2/1", k=256, v=64, batch=2),
    _commit_case("v_128", "2/1", k=128, v=128, batch=2),
    _commit_case("ring_32", ring=32, history=(32, 17, 4), base=(30, 1, 0)),
    _commit_case("ring_64", ring=64, history=(64, 33, 1), base=(60, 1, 0)),
    _commit_case("ring_fp32", ring_dtype="f32"),
    _commit_case("ring_fp32_wide", "6/2", k=128, v=80, ring=32, ring_dtype="f32", batch=2, history=(20, 32)),
    _commit_case("high_parts_only", low=False),
    _commit_case("bf16", state="bf16", ring_dtype="bf16", batch=5),
    _commit_case("bf16_fp32_state", state="f32", ring_dtype="bf16", track=True),
    _commit_case("bf16_high_parts_only", state="bf16", ring_dtype="bf16", low=False),
    _commit_case("bf16_state_fp32_ring", state="bf16", ring_dtype="f32"),
    _commit_case("track", track=True, batch=5, base=11),
    _commit_case("track_no_fold", track=True, fold=0),
    _commit_case("padding", batch=4, padding=(0, 2)),
    _commit_case("padding_slot_0", batch=4, padding=(1, 3), null=0),
    _commit_case("padding_track", batch=4, padding=(1,), null=0, track=True),
    _commit_case("all_padding", padding=(0, 1, 2)),
    _commit_case("out_of_range", batch=6, bad={0: "slot", 1: "row", 2: "row_negative", 3: "write_pos", 4: "write_pos_negative"}),
    _commit_case(
        "out_of_range_track",
        batch=5,
        track=True,
        history=4,
        bad={0: "accept", 1: "accept_negative", 2: "track_step", 3: "track_slot"},
    ),
    _commit_case("int64_strided", index="i64", strided=True, track=True),
    _commit_case("mixed_indices", index="i64+i32", strided=True),
    _commit_case("pool_padded", pool="padded", layers=2, track=True),
    _commit_case("pool_alternate", pool="alternate", layers=2, strided=True),
    _commit_case("pool_layer_inner", pool="layer_inner", layers=2, track=True),
    _commit_case("odd_pitches", v=80, layout="any", pool="padded", layers=2, track=True),
    _commit_case("poison_inf", poison=math.inf, base=13, track=True),
    _commit_case("scale_0.1", scale=0.1, history="full", track=True),
    _commit_case("scale_3", scale=3.0, history="full", track=True),
    _commit_case("strong_decay", decay=20.0, history="full"),
    _commit_case("layers_2", layers=2, batch=2),
)

COMMIT = Samples(COMMIT_CASES, make_commit, check_commit)


# --- advance --------------------------------------------------------------------------------------------------------

ADVANCE_OPTIONS: Mapping[str, Any] = {
    "ring_rows": None,
    "history": "mixed",
    "accept": "mixed",
    "margin": None,
    "padding": (),
    "bad": {},
    "null": -1,
    "strided": False,
    "fast": False,
}


def make_advance(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    facts, o = _inputs.facts_of(gdn.gdn_ring_advance, case), _inputs.options_of(case, ADVANCE_OPTIONS)
    random = _inputs.Random(seed, device)
    batch, length = case.batch, int(facts["ring"])
    ring_rows = o.ring_rows or batch + 2
    rows = random.permutation("rows", ring_rows)[:batch]
    slots = [max(o.null, -1) + 1 + slot for slot in random.permutation("slots", batch)]
    history = _history(o.history, length, batch)
    accept = _inputs.per_row(o.accept, batch, (1, 0, 4, 2))
    accept = [min(a, length - n) for a, n in zip(accept, history, strict=True)]
    write_pos = _placed(rows, ring_rows, history, 3)
    for row in o.padding:
        slots[row] = o.null
    for row, what in o.bad.items():
        if what in ("accept_negative", "overrun"):
            accept[row] = -1 if what == "accept_negative" else length - history[row] + 1
        else:
            rows[row] = {"row": ring_rows, "row_negative": -1}[what]
    make_index = _inputs.Indices(facts["index"], device, o.strided)
    return {
        "write_pos": torch.tensor(write_pos, dtype=torch.int32, device=device),
        "fold": torch.tensor([i % 2 for i in range(ring_rows)], dtype=torch.int8, device=device),
        "rows": make_index(rows),
        "slots": make_index(slots),
        "accept": make_index(accept),
        "ring": length,
        "margin": o.margin,
        "null_slot": o.null,
    }


def check_advance(run: Callable[..., None], reference: Callable[..., None], inputs: Inputs) -> list[Check]:
    got, native = _inputs.copy_inputs(inputs), _inputs.copy_inputs(inputs)
    run(**got)
    reference(**native)
    return [_inputs.bytes_check("all exact", got, native)]


def _advance_case(name: str, batch: int = 6, ring: int = 16, index: str = "i32", **options: Any) -> Case:
    return _inputs.make_case(gdn.gdn_ring_advance, name, batch, options, {"ring": ring, "index": index})


ADVANCE_CASES = (
    _advance_case("every"),
    _advance_case("lazy", margin=4),
    _advance_case("lazy_border", history=(10, 11, 12), accept=1, margin=4),
    _advance_case("batch_0", batch=0),
    _advance_case("nothing_accepted", accept=0, history=0),
    _advance_case("padding", padding=(0, 3)),
    _advance_case("padding_slot_0", padding=(2,), null=0, margin=8),
    _advance_case("out_of_range", bad={0: "row", 1: "row_negative", 2: "accept_negative", 3: "overrun"}),
    _advance_case("int64_strided", index="i64", strided=True),
    _advance_case("mixed_indices", index="i32+i64+i32", strided=True),
    _advance_case("many_rows", batch=700, ring=64, margin=6),
)

ADVANCE = Samples(ADVANCE_CASES, make_advance, check_advance)

# --- verify ---------------------------------------------------------------------------------------------------------

# Error of a record u and of an output, as parts of the sum of sizes that the last step adds up (see `Oracle`). Where ring and
# activations are 16-bit it is the fold's error (SPLIT_ERROR), carried through the window's triangular solve; the history's
# high parts alone, in bf16, would be off by 2^-9. Otherwise TF32_ERROR.
VERIFY_SPLIT_ERROR = 2.0**-13
GATE_ERROR = 1e-6  # of g, relative above 1: a few fp32 roundings and one fast exponential
KEY_ERROR = 2.0**-20  # of a normalised key before it is rounded: fp32 sum of squares and root
LOW_PARTS_ERROR = 2.0**-15  # high and low part together hold 16 bits in bf16, and more in fp16 above its subnormals

VERIFY_OPTIONS: Mapping[str, Any] = {
    "slots": None,
    "ring_rows": None,
    "history": "mixed",
    "base": "mixed",
    "lengths": "mixed",
    "gap": 0,
    "padding": (),
    "bad": {},
    "null": -1,
    "pool": "packed",
    "packed_qkv": False,
    "strided": False,
    "scale": 1.0,
    "q_scale": None,
    "decay": 0.5,
    "gates": 1.0,
    "cancel": False,
    "poison": math.nan,
    "fast": False,
}


def make_verify(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    facts, o = _inputs.facts_of(gdn.gdn_ring_verify, case), _inputs.options_of(case, VERIFY_OPTIONS)
    random = _inputs.Random(seed, device, o.fast)
    batch, length, draft = case.batch, int(facts["ring"]), int(facts["draft"])
    value_heads, _ = _inputs.heads_of(facts)
    aligned = facts["layout"] == "aligned"
    wide = torch.float64 if facts["ring_dtype"] == "f64" else torch.float32

    ring_rows = o.ring_rows or batch + 2
    first = max(o.null, -1) + 1
    state_slots = o.slots or first + batch + 1
    rows = random.permutation("rows", ring_rows)[:batch]
    slots = [first + slot for slot in random.permutation("slots", state_slots - first)][:batch]
    lengths = _inputs.per_row(draft if o.lengths == "full" else o.lengths, batch, (draft, 1, draft - 1, 0))
    room = [length - t for t in lengths]
    history = [min(n, most) for n, most in zip(_history(o.history, length, batch), room, strict=True)]
    base = _base(o.base, length, batch)
    for row in o.padding:
        slots[row] = o.null
    for row, what in o.bad.items():
        if what == "window":
            lengths[row] = draft + 1
        elif what == "write_pos":
            history[row] = length - lengths[row] + 1
        elif what == "write_pos_negative":
            history[row] = -1
        else:
            values, size = {"slot": (slots, state_slots), "row": (rows, ring_rows)}[what]
            values[row] = size
    write_pos, bases = _placed(rows, ring_rows, history, 2), _placed(rows, ring_rows, base, 5)
    ring = _ring(random, facts, (ring_rows,), o)
    _poison_unused(ring, write_pos, bases, o.poison)

    offsets = list(itertools.accumulate(lengths, initial=o.gap))
    shape = (state_slots, value_heads, int(facts["v_dim"]), int(facts["k_dim"]))
    state = random.normal("state", shape, o.scale, dtype_of(facts["state"]))
    if o.cancel:
        _inputs.cancel(state, -1, -1)
        for name in ("ring_k", "ring_k_low"):
            if (keys := ring[name]) is not None:
                _inputs.cancel(keys, -1, 1)
    make_index = _inputs.Indices(facts["index"], device, o.strided)
    return {
        **_verify_tokens(random, facts, o, offsets),
        "A_log": random.uniform("A_log", (value_heads,), -3.0, math.log(o.decay), wide),
        "dt_bias": random.uniform("dt_bias", (value_heads,), -1.0, 1.0, wide),
        "state": _inputs.pool(state, 1, o.pool, aligned),
        **{name: None if t is None else _inputs.pool(t, 1, o.pool, aligned) for name, t in ring.items()},
        "write_pos": torch.tensor(write_pos, dtype=torch.int32, device=device),
        "base": torch.tensor(bases, dtype=torch.int32, device=device),
        "slots": make_index(slots),
        "rows": make_index(rows),
        "cu_seqlens": make_index(offsets),
        "draft": draft,
        "scale": o.q_scale,
        "null_slot": o.null,
    }


def _verify_tokens(random: _inputs.Random, facts: Mapping[str, Any], o: SimpleNamespace, offsets: Sequence[int]) -> Inputs:
    """q, k, v, a and b; tokens of rows that are not live, and of no row, hold poison."""
    value_heads, key_heads = _inputs.heads_of(facts)
    k_dim, v_dim = int(facts["k_dim"]), int(facts["v_dim"])
    act, aligned, tokens = dtype_of(facts["act"]), facts["layout"] == "aligned", offsets[-1] + o.gap
    widths = (key_heads * k_dim, key_heads * k_dim, value_heads * v_dim)
    qkv = random.normal("qkv", (tokens, sum(widths)), o.scale, act)
    gates = random.normal("gates", (tokens, 2 * value_heads), o.gates, act)
    if o.cancel:
        _inputs.cancel(qkv[:, : 2 * widths[0]].unflatten(1, (2 * key_heads, k_dim)), 2, 1)
    if o.poison is not None:
        idle = [(0, offsets[0]), (offsets[-1], tokens), *((offsets[i], offsets[i + 1]) for i in {*o.padding, *o.bad})]
        for begin, end in idle:
            qkv[begin:end] = gates[begin:end] = o.poison
    q, k, v = _inputs.pool(qkv, 1, "packed", aligned).split(widths, 1)
    views = {
        "q": q.unflatten(1, (key_heads, k_dim)),
        "k": k.unflatten(1, (key_heads, k_dim)),
        "v": v.unflatten(1, (value_heads, v_dim)),
        "a": gates[:, :value_heads],
        "b": gates[:, value_heads:],
    }
    keep = o.packed_qkv or not aligned
    return {name: x if keep else x.contiguous() for name, x in views.items()}


class Row(NamedTuple):
    """A live row of a verify call."""

    slot: int
    ring_row: int
    tokens: Sequence[int]
    history: int
    base: int


def live_rows(inputs: Inputs) -> Iterator[Row]:
    offsets, history, bases = (inputs[name].tolist() for name in ("cu_seqlens", "write_pos", "base"))
    length = inputs["ring_g"].shape[-1]
    for i, (slot, r) in enumerate(zip(inputs["slots"].tolist(), inputs["rows"].tolist(), strict=True)):
        tokens = range(offsets[i], offsets[i + 1])
        in_range = inputs["null_slot"] < slot < inputs["state"].shape[0] and slot >= 0 and 0 <= r < len(history)
        fits = 0 <= offsets[i] <= offsets[i + 1] <= inputs["q"].shape[0] and len(tokens) <= inputs["draft"]
        if in_range and fits and 0 <= history[r] <= length - len(tokens):
            yield Row(slot, r, tokens, history[r], bases[r])


class Oracle(NamedTuple):
    """Of one token in float64: record u [HV, V], key [H, K] and g [HV], output [HV, V], and the sums of sizes behind u and o."""

    u: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor
    o: torch.Tensor
    u_size: torch.Tensor
    o_size: torch.Tensor


def oracle(inputs: Inputs, combined: Inputs, row: Row) -> list[Oracle]:
    """Decode one row's history and window token by token in float64; `combined` are the inputs with wide rings."""
    value_heads, length = inputs["ring_g"].shape[1:]
    group = value_heads // inputs["q"].shape[1]
    scale = inputs["q"].shape[-1] ** -0.5 if inputs["scale"] is None else inputs["scale"]
    h = combined["state"][row.slot]
    size = h.abs()
    for j in range(row.history):
        at = (row.base + j) % length
        u, g = combined["ring_u"][row.ring_row, :, at], combined["ring_g"][row.ring_row, :, at]
        added = torch.einsum("hv,hk->hvk", u, combined["ring_k"][row.ring_row, :, at].repeat_interleave(group, 0))
        h, size = (x * g.exp()[:, None, None] + y for x, y in ((h, added), (size, added.abs())))
    steps: list[Oracle] = []
    for token in row.tokens:
        q, k, v, a, b = (inputs[name][token].double() for name in ("q", "k", "v", "a", "b"))
        q, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(group, 0) for x in (q, key))
        g = -inputs["A_log"].double().exp() * torch.nn.functional.softplus(a + inputs["dt_bias"].double())
        h, size = (x * g.exp()[:, None, None] for x in (h, size))
        beta = torch.sigmoid(b)[:, None]
        u = beta * (v - torch.einsum("hvk,hk->hv", h, k))
        u_size = beta * (v.abs() + torch.einsum("hvk,hk->hv", size, k.abs()))
        added = torch.einsum("hv,hk->hvk", u, k)
        h, size = h + added, size + added.abs()
        out, o_size = (scale * torch.einsum("hvk,hk->hv", x, y) for x, y in ((h, q), (size, q.abs())))
        steps.append(Oracle(u, key, g, out, u_size, o_size))
    return steps


def check_verify(run: Callable[..., torch.Tensor], reference: Callable[..., torch.Tensor], inputs: Inputs) -> list[Check]:
    got, native = _inputs.copy_inputs(inputs), _inputs.copy_inputs(inputs)
    o = run(**got)
    reference(**native)
    low = inputs["ring_u_low"] is not None
    depth = {"ring_u": 1, "ring_k": 1, "ring_g": 0, **({"ring_u_low": 1, "ring_k_low": 1} if low else {})}
    cells = {name: _inputs.touched(inputs[name], native[name], dims) for name, dims in depth.items()}
    checks = [_inputs.bytes_check("all else exact", got, inputs, cells)]

    tf32 = torch.float32 in (inputs["ring_u"].dtype, inputs["q"].dtype)
    error = TF32_ERROR if tf32 else VERIFY_SPLIT_ERROR
    rounding = LOW_PARTS_ERROR if low else torch.finfo(inputs["ring_u"].dtype).eps / 2
    combined, records, length = _combined(inputs), _combined(got), inputs["ring_g"].shape[-1]
    idle = torch.ones(o.shape[0], dtype=torch.bool, device=o.device)
    for row in live_rows(inputs):
        for t, (token, exact) in enumerate(zip(row.tokens, oracle(inputs, combined, row), strict=True)):
            idle[token] = False
            at = (row.base + row.history + t) % length
            u, k, g = (records[name][row.ring_row, :, at] for name in ("ring_u", "ring_k", "ring_g"))
            allowed = error * exact.o_size + torch.finfo(o.dtype).eps / 2 * exact.o.abs()
            checks.append(_inputs.close_check(f"o of token {token}", o[token], exact.o, allowed))
            allowed = error * exact.u_size + rounding * exact.u.abs()
            checks.append(_inputs.close_check(f"ring_u of token {token}", u, exact.u, allowed))
            allowed = KEY_ERROR + rounding * exact.k.abs()
            checks.append(_inputs.close_check(f"ring_k of token {token}", k, exact.k, allowed))
            allowed = GATE_ERROR * exact.g.abs().clamp(min=1.0)
            checks.append(_inputs.close_check(f"ring_g of token {token}", g, exact.g, allowed))
    checks.append(_inputs.exact_check("o of padding", o[idle], torch.zeros_like(o[idle])))
    return _inputs.worst_of_each(checks)


def _verify_case(
    name: str,
    draft: int = 3,
    heads: str = "2/1",
    k: int = 64,
    v: int = 16,
    ring: int = 16,
    batch: int = 3,
    *,
    state: str = "f32",
    ring_dtype: str = "f16",
    low: bool | None = None,
    act: str = "f16",
    index: str = "i32",
    layout: str = "aligned",
    **options: Any,
) -> Case:
    facts = {"draft": draft, "ring": ring, "heads": heads, "k_dim": k, "v_dim": v, "state": state, "ring_dtype": ring_dtype}
    facts |= {"low": ring_dtype != "f32" if low is None else low, "act": act, "index": index, "layout": layout}
    return _inputs.make_case(gdn.gdn_ring_verify, name, batch, options, facts)


VERIFY_CASES = (
    _verify_case("plain", history=4),
    _verify_case("batch_0", batch=0),
    _verify_case("ragged", draft=4, batch=5, gap=2),
    _verify_case("no_history", history=0, lengths="full"),
    _verify_case("draft_1", draft=1, lengths=1),
    _verify_case("draft_8_full_ring", draft=8, history="full", lengths="full", batch=2, base=11),
    _verify_case("draft_is_ring", draft=16, history=0, lengths=(16, 5), batch=2, base=7),
    _verify_case("ratio_1", heads="2/2", batch=2),
    _verify_case("ratio_3", heads="6/2", batch=2),
    _verify_case("ratio_16", heads="16/1", batch=2),
    _verify_case("k_128_v_80", k=128, v=80, batch=2),
    _verify_case("k_128_v_128", k=128, v=128, heads="1/1", batch=2, draft=4),
    _verify_case("k_256_v_64", k=256, v=64, heads="1/1", batch=2),
    _verify_case("ring_64", ring=64, history=(60, 17), draft=4, lengths=4, base=50, batch=2),
    _verify_case("fp32", ring_dtype="f32", act="f32"),
    _verify_case("fp32_ring", ring_dtype="f32", heads="6/2", batch=2),
    _verify_case("high_parts_only", low=False),
    _verify_case("bf16", state="bf16", ring_dtype="bf16", act="bf16", draft=4, heads="6/2", history=(4, 16, 0)),
    _verify_case("bf16_fp32_state", ring_dtype="bf16", act="bf16", draft=4),
    _verify_case("bf16_high_parts_only", state="bf16", ring_dtype="bf16", act="bf16", low=False),
    _verify_case("padding", batch=4, padding=(0, 2)),
    _verify_case("padding_slot_0", batch=4, padding=(1,), null=0),
    _verify_case("all_padding", padding=(0, 1, 2)),
    _verify_case(
        "out_of_range",
        batch=6,
        lengths=2,
        history=4,
        bad={0: "slot", 1: "row", 2: "write_pos", 3: "write_pos_negative", 4: "window"},
    ),
    _verify_case("int64_strided", index="i64", strided=True),
    _verify_case("mixed_indices", index="i64+i32+i64", strided=True),
    _verify_case("pool_padded", pool="padded", packed_qkv=True),
    _verify_case("pool_alternate", pool="alternate", packed_qkv=True, strided=True),
    _verify_case("odd_pitches", layout="any", v=80, heads="1/1", pool="padded"),
    _verify_case("poison_inf", poison=math.inf, base=13),
    _verify_case("scale_0.1", scale=0.1, q_scale=1.0),
    _verify_case("scale_3", scale=3.0),
)

VERIFY = Samples(VERIFY_CASES, make_verify, check_verify)
