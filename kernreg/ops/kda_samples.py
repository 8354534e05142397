"""Cases, input makers and parity checks of the KDA ops and of `conv_window_commit`.

Options that the ops share (a number for all rows, a tuple repeated over the rows, or "mixed"):
    slots, conv_slots, window_rows, layers   sizes of the pools; None means a few more than the batch needs
    padding    batch rows whose (first) slot is the null slot
    null       the null slot
    pool       memory of state, rings and snapshots: "packed", "padded", "alternate", "layer_inner" (see `_inputs.pool`)
    conv       memory of conv_state and windows: "dim" (dim contiguous), "padded", "overlap" (windows of one row share their
               columns), "width" (width contiguous; needs layout=any)
    strided    index tensors are strided views
    scale      of activations and state
    fast       torch's own generator: for benchmarks

Options of `kda_chain_verify` cases:
    ring       ring length L; None is the draft length
    lengths    window of each row (needs window=ragged): "mixed" or "full"
    tree       "mixed" (random parents), "chain", or a tuple of parents for all rows (needs window=tree)
    gap        tokens before the first window that no row covers (with cu_seqlens)
    conv_padding  batch rows whose conv slot is the null slot
    bad        {batch row: "slot", "conv_slot", "window_row", "window" (overlong, needs cu_seqlens) or "parent"}
    packed_gates  a and b are views of one packed tensor
    lower_bound   of the safe gate
    q_scale    the argument scale
    gates      scale of a and b
    cancel     the halves of every key and gate are equal, those of the state nearly opposite
    poison     what tokens that must not be read hold

Options of the commits:
    accept     accepted tokens, at most the ring or draft length
    track      1 for a track snapshot each row; "mixed" takes two of three (only with the fact track)
    bad        {batch row: "slot", "window_row", "accept", "accept_negative", "track_slot" or "track_step"}
    poison     what records past the accepted ones hold (`kda_ring_commit`)
    cancel     as for verify (`kda_ring_commit`)
    decay      largest |g| (`kda_ring_commit`)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from kernreg.contract import Case, Check, Op, Samples
from kernreg.ops import _inputs, conv, kda
from kernreg.ops._inputs import Inputs, dtype_of

STATE_ERROR = 1e-5  # of the largest |h| of a head: a few dozen fp32 roundings over T steps and K products
GATE_ERROR = 1e-6  # of g and beta, relative above 1: a few fp32 roundings and one fast exponential
CONV_FLOOR = 2.0**-22  # of the largest product of the convolution: where its fp32 sum cancels, an ulp of the result is less

WIDE = ("A_log", "dt_bias", "state", "snapshots", "ring_g", "ring_beta")


def _wide_dtype(act: torch.dtype) -> torch.dtype:
    return torch.float64 if act == torch.float64 else torch.float32


def _conv_pool(values: torch.Tensor, kind: str, aligned: bool) -> torch.Tensor:
    """[.., dim, 3] values in the memory of a convolution pool."""
    free = values.ndim - 2
    if kind == "width":
        return _inputs.pool(values, free, "packed", aligned)
    if kind == "overlap":
        return _overlapping(values, aligned)
    kind = {"dim": "packed"}.get(kind, kind)
    return _inputs.pool(values.transpose(-1, -2).contiguous(), free, kind, aligned).transpose(-1, -2)


def _overlapping(values: torch.Tensor, aligned: bool) -> torch.Tensor:
    """[.., T, dim, 3] as a view in which the T windows share T + 2 columns of memory; where they disagree the later one wins."""
    *lead, steps, dim, width = values.shape
    columns = _inputs.pool(values.new_full((*lead, steps + width - 1, dim), math.nan), len(lead), "packed", aligned)
    view = columns.as_strided(values.shape, (*columns.stride()[:-1], 1, columns.stride(-2)), columns.storage_offset())
    for step in range(steps):
        view[..., step, :, :] = values[..., step, :, :]
    return view


# --- verify ---------------------------------------------------------------------------------------------------------

VERIFY_OPTIONS: Mapping[str, Any] = {
    "slots": None,
    "conv_slots": None,
    "window_rows": None,
    "ring": None,
    "lengths": "mixed",
    "tree": "mixed",
    "gap": 0,
    "padding": (),
    "conv_padding": (),
    "bad": {},
    "null": -1,
    "pool": "packed",
    "conv": "dim",
    "strided": False,
    "packed_gates": False,
    "scale": 1.0,
    "lower_bound": -5.0,
    "q_scale": None,
    "gates": 1.0,
    "cancel": False,
    "poison": math.nan,
    "fast": False,
}


def _parents(random: _inputs.Random, tree: Any, batch: int, draft: int) -> list[list[int]]:
    if tree == "chain":
        return [list(range(-1, draft - 1))] * batch
    if tree != "mixed":
        return [list(tree)] * batch
    draws = random.integers("parents", batch * draft, 0, 1 << 20)
    # the root, then any earlier step or the root again
    return [[draws[i * draft + t] % (t + 1) - 1 for t in range(draft)] for i in range(batch)]


def _lengths(o: SimpleNamespace, window: str, batch: int, draft: int) -> list[int]:
    if window in ("ragged", "ragged_tree"):
        return _inputs.per_row(draft if o.lengths == "full" else o.lengths, batch, (draft, 1, draft - 1, 0))
    return [draft] * batch


def _targets(random: _inputs.Random, name: str, batch: int, size: int | None, first: int, spare: int) -> tuple[list[int], int]:
    """`batch` different rows of a pool whose first rows are reserved, and the pool's size."""
    size = size or first + batch + spare
    return [first + row for row in random.permutation(name, size - first)][:batch], size


def make_verify(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    facts, o = _inputs.facts_of(kda.kda_chain_verify, case), _inputs.options_of(case, VERIFY_OPTIONS)
    random = _inputs.Random(seed, device, o.fast)
    batch, draft, first = case.batch, int(facts["draft"]), max(o.null, -1) + 1
    slots, state_slots = _targets(random, "slots", batch, o.slots, first, 2)
    conv_slots, conv_size = _targets(random, "conv_slots", batch, o.conv_slots, first, 1)
    window_rows, window_size = _targets(random, "window_rows", batch, o.window_rows, 0, 1)
    lengths = _lengths(o, str(facts["window"]), batch, draft)
    parents = _parents(random, o.tree, batch, draft)
    offsets = _bend_verify(o, draft, lengths, parents, (slots, state_slots), (conv_slots, conv_size), (window_rows, window_size))

    inputs: Inputs = {
        **_verify_tokens(random, facts, o, offsets),
        **_verify_pools(random, facts, o, state_slots, conv_size, window_size),
        "cu_seqlens": None,
        "parents": None,
        "lower_bound": o.lower_bound if facts["gate"] == "safe" else None,
        "scale": o.q_scale,
        "null_slot": o.null,
    }
    make_index = _inputs.Indices(facts["index"], device, o.strided)
    inputs |= {name: make_index(x) for name, x in (("slots", slots), ("conv_slots", conv_slots), ("window_rows", window_rows))}
    if facts["window"] in ("ragged", "ragged_tree"):
        inputs["cu_seqlens"] = make_index(offsets)
    if facts["window"] in ("tree", "ragged_tree"):
        inputs["parents"] = make_index([p for row in parents for p in row]).unflatten(0, (batch, draft))
    return inputs


def _verify_dims(facts: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """HV, H, V, K and the channels of the convolution."""
    (value_heads, key_heads), v_dim, k_dim = _inputs.heads_of(facts), int(facts["v_dim"]), int(facts["k_dim"])
    return value_heads, key_heads, v_dim, k_dim, 2 * key_heads * k_dim + value_heads * v_dim


def _verify_tokens(random: _inputs.Random, facts: Mapping[str, Any], o: SimpleNamespace, offsets: Sequence[int]) -> Inputs:
    """What comes with each token; tokens of rows that are not live, and before the first row, hold poison."""
    value_heads, _, _, k_dim, dim = _verify_dims(facts)
    act, aligned, tokens = dtype_of(facts["act"]), facts["layout"] == "aligned", offsets[-1]
    width = value_heads * k_dim
    mixed = random.normal("mixed_qkv", (tokens, dim), o.scale, act)
    a = random.normal("a", (tokens, width), o.gates, act)
    b = random.normal("b", (tokens, value_heads), o.gates, act)
    if o.cancel:
        _cancel_keys(facts, mixed, 1)
        _inputs.cancel(a.unflatten(1, (value_heads, k_dim)), 2, 1)
    if o.poison is not None:
        idle = [(0, offsets[0]), *((offsets[row], offsets[row + 1]) for row in {*o.padding, *o.conv_padding, *o.bad})]
        for begin, end in idle:
            mixed[begin:end] = a[begin:end] = b[begin:end] = o.poison
    a, b = (_inputs.pool(x, 1, "packed", aligned) for x in (a, b))
    if o.packed_gates:
        gap = b.new_full((tokens, -value_heads % 8), math.nan)  # keeps the token stride a multiple of 16 bytes
        packed = _inputs.pool(torch.cat((a, b, gap), 1), 1, "packed", aligned)
        a, b = packed[:, :width], packed[:, width : width + value_heads]
    return {"mixed_qkv": _inputs.pool(mixed, 1, "packed", aligned), "a": a, "b": b}


def _cancel_keys(facts: Mapping[str, Any], channels: torch.Tensor, dim: int) -> None:
    """The halves of every head's q and k channels become equal; `dim` holds the channels of the convolution."""
    _, key_heads, _, k_dim, _ = _verify_dims(facts)
    keys = channels.narrow(dim, 0, 2 * key_heads * k_dim)
    _inputs.cancel(keys.unflatten(dim, (2 * key_heads, k_dim)), dim + 1, 1)


def _verify_pools(
    random: _inputs.Random, facts: Mapping[str, Any], o: SimpleNamespace, slots: int, conv_slots: int, window_rows: int
) -> Inputs:
    """Weights, what is read by slot, and what is written, full of NaN."""
    value_heads, key_heads, v_dim, k_dim, dim = _verify_dims(facts)
    act, weight, aligned = dtype_of(facts["act"]), dtype_of(facts["weight"]), facts["layout"] == "aligned"
    wide, draft = _wide_dtype(act), int(facts["draft"])

    def blank(shape: tuple[int, ...], free: int, dtype: torch.dtype) -> torch.Tensor:
        return _inputs.pool(torch.full(shape, math.nan, dtype=dtype, device=random.device), free, o.pool, aligned)

    conv_state = random.normal("conv_state", (conv_slots, dim, 3), o.scale, act)
    windows = torch.full((window_rows, draft, dim, 3), math.nan, dtype=act, device=random.device)
    state = random.normal("state", (slots, value_heads, v_dim, k_dim), o.scale, wide)
    conv_weight, conv_bias = random.normal("conv_weight", (dim, 4), 0.5, weight), random.normal("conv_bias", (dim,), 0.5, weight)
    dt_bias = random.uniform("dt_bias", (value_heads * k_dim,), -4.0, 0.0, wide)
    if o.cancel:
        for channels, at in ((conv_state, 1), (conv_weight, 0), (conv_bias, 0)):
            _cancel_keys(facts, channels, at)
        _inputs.cancel(dt_bias.unflatten(0, (value_heads, k_dim)), 1, 1)
        _inputs.cancel(state, -1, -1)
    pools: Inputs = {
        "conv_weight": conv_weight,
        "conv_bias": conv_bias if facts["bias"] else None,
        "conv_state": _conv_pool(conv_state, "dim" if o.conv == "overlap" else o.conv, aligned),
        "windows": _conv_pool(windows, o.conv, aligned),
        "A_log": random.uniform("A_log", (value_heads,), -1.0, 1.0, wide),
        "dt_bias": dt_bias,
        "state": _inputs.pool(state, 1, o.pool, aligned),
        **dict.fromkeys(("snapshots", "ring_k", "ring_v", "ring_g", "ring_beta")),
    }
    if facts["mode"] == "snapshot":
        return pools | {"snapshots": blank((window_rows, draft, value_heads, v_dim, k_dim), 2, wide)}
    ring = o.ring or draft
    return pools | {
        "ring_k": blank((slots, key_heads, ring, k_dim), 1, act),
        "ring_v": blank((slots, value_heads, ring, v_dim), 1, act),
        "ring_g": blank((slots, value_heads, ring, k_dim), 1, wide),
        "ring_beta": blank((slots, value_heads, ring), 1, wide),
    }


def _bend_verify(
    o: SimpleNamespace,
    draft: int,
    lengths: list[int],
    parents: list[list[int]],
    slots: tuple[list[int], int],
    conv_slots: tuple[list[int], int],
    window_rows: tuple[list[int], int],
) -> list[int]:
    """Put padding and values out of range where the options ask for them; returns the token offsets."""
    for row in o.padding:
        slots[0][row] = o.null
    for row in o.conv_padding:
        conv_slots[0][row] = o.null
    for row, what in o.bad.items():
        if what == "window":
            lengths[row] = draft + 1
        elif what == "parent":
            parents[row] = [*parents[row][:-1], draft - 1]  # its own parent
        else:
            values, size = {"slot": slots, "conv_slot": conv_slots, "window_row": window_rows}[what]
            values[row] = size
    return list(itertools.accumulate(lengths, initial=o.gap))


class Row(NamedTuple):
    """A live row of a verify call."""

    slot: int
    conv_slot: int
    window_row: int
    tokens: Sequence[int]
    parents: Sequence[int]


def live_rows(inputs: Inputs) -> Iterator[Row]:
    draft, null = inputs["windows"].shape[1], inputs["null_slot"]
    sizes = tuple(inputs[name].shape[0] for name in ("state", "conv_state", "windows"))
    names = [inputs[name].tolist() for name in ("slots", "conv_slots", "window_rows")]
    offsets, parents = inputs["cu_seqlens"], inputs["parents"]
    offsets = [i * draft for i in range(len(names[0]) + 1)] if offsets is None else offsets.tolist()
    for i, (slot, conv_slot, window_row) in enumerate(zip(*names, strict=True)):
        tokens = range(offsets[i], offsets[i + 1])
        tree = list(range(-1, draft - 1)) if parents is None else parents[i].tolist()
        tree = tree[: len(tokens)]
        fits = 0 <= offsets[i] <= offsets[i + 1] <= inputs["mixed_qkv"].shape[0] and len(tokens) <= draft
        places = (slot, conv_slot, window_row)
        in_range = all(0 <= x < size for x, size in zip(places, sizes, strict=True)) and min(slot, conv_slot) > null
        if fits and in_range and all(-1 <= p < t for t, p in enumerate(tree)):
            yield Row(slot, conv_slot, window_row, tokens, tree)


def _paths(rows: Sequence[Row], tree: bool) -> list[tuple[Row, list[int]]]:
    """The chains of steps that cover each row's tokens: the row itself, or in a tree the ways from the root to its leaves."""
    if not tree:
        return [(row, list(range(len(row.tokens)))) for row in rows]
    paths: list[tuple[Row, list[int]]] = []
    for row in rows:
        ways: list[list[int]] = []
        for step, parent in enumerate(row.parents):
            ways.append([*(ways[parent] if parent >= 0 else []), step])
        paths += [(row, way) for step, way in enumerate(ways) if step not in row.parents]
    return paths


def _as_ring(inputs: Inputs, paths: Sequence[tuple[Row, list[int]]]) -> Inputs:
    """A ring-mode call with one row for each path, whose rings show the rounded k and v of its tokens."""
    draft, (_, value_heads, v_dim, k_dim) = inputs["windows"].shape[1], inputs["state"].shape
    key_heads = (inputs["mixed_qkv"].shape[1] - value_heads * v_dim) // (2 * k_dim)
    tokens = [row.tokens[step] for row, path in paths for step in path]
    offsets = list(itertools.accumulate((len(path) for _, path in paths), initial=0))
    like, rows, dim = inputs["state"], len(paths), inputs["mixed_qkv"].shape[1]
    ragged = inputs["cu_seqlens"] is not None or inputs["parents"] is not None

    def fresh(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, math.nan, dtype=dtype, device=like.device)

    def numbers(values: Sequence[int], name: str) -> torch.Tensor:
        source = inputs[name] if inputs[name] is not None else inputs["slots"]
        return torch.tensor(values, dtype=source.dtype, device=like.device)

    act = inputs["mixed_qkv"].dtype
    return inputs | {
        **{name: inputs[name][tokens] for name in ("mixed_qkv", "a", "b")},
        "state": like[[row.slot for row, _ in paths]],
        "slots": numbers(range(rows), "slots"),
        "conv_slots": numbers([row.conv_slot for row, _ in paths], "conv_slots"),
        "window_rows": numbers(range(rows), "window_rows"),
        "windows": fresh(rows, draft, 3, dim, dtype=act).transpose(2, 3),
        "ring_k": fresh(rows, key_heads, draft, k_dim, dtype=act),
        "ring_v": fresh(rows, value_heads, draft, v_dim, dtype=act),
        "ring_g": fresh(rows, value_heads, draft, k_dim, dtype=like.dtype),
        "ring_beta": fresh(rows, value_heads, draft, dtype=like.dtype),
        "cu_seqlens": numbers(offsets, "cu_seqlens") if ragged else None,
        "snapshots": None,
        "parents": None,
        "null_slot": -1,
    }


def _with_q_as_k(inputs: Inputs) -> Inputs:
    """The same call with the channels of q and k exchanged: its ring shows the rounded q."""
    _, value_heads, v_dim, _ = inputs["state"].shape
    dim = inputs["mixed_qkv"].shape[1]
    half = (dim - value_heads * v_dim) // 2
    order = torch.cat((torch.arange(half, 2 * half), torch.arange(half), torch.arange(2 * half, dim)))
    order = order.to(inputs["state"].device)
    swapped = {"mixed_qkv": inputs["mixed_qkv"][:, order], "conv_weight": inputs["conv_weight"][order]}
    # channels stay contiguous in memory
    swapped["conv_state"] = inputs["conv_state"].transpose(1, 2)[:, :, order].transpose(1, 2)
    if inputs["conv_bias"] is not None:
        swapped["conv_bias"] = inputs["conv_bias"][order]
    return inputs | swapped


def _own_qkv(run: Callable[..., Any], inputs: Inputs, rows: Sequence[Row], got: Inputs) -> dict[int, tuple[torch.Tensor, ...]]:
    """The kernel's own rounded q, k [H, K] and v [HV, V] of each token; `got` are the arguments after its run.

    One ulp in the rounded convolution moves the state by 1e-3, so an oracle for state and output must start from them.
    """
    paths = _paths(rows, inputs["parents"] is not None)
    if not paths:
        return {}
    plain = _as_ring(inputs, paths)
    swapped = _with_q_as_k(_inputs.copy_inputs(plain))
    run(**swapped)
    if got["ring_k"] is not None:
        places = [row.slot for row, _ in paths]
        plain |= {"ring_k": got["ring_k"][places], "ring_v": got["ring_v"][places]}
    else:
        run(**plain)
    return {
        row.tokens[step]: (swapped["ring_k"][i, :, at], plain["ring_k"][i, :, at], plain["ring_v"][i, :, at])
        for i, (row, path) in enumerate(paths)
        for at, step in enumerate(path)
    }


class Oracle(NamedTuple):
    """Of one token in float64: state after it [HV, V, K], output [HV, V], the scaled q [HV, K], g [HV, K] and beta [HV]."""

    h: torch.Tensor
    o: torch.Tensor
    q: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


def oracle(inputs: Inputs, row: Row, qkv: Mapping[int, tuple[torch.Tensor, ...]]) -> list[Oracle]:
    """The delta rule of one row in float64, from rounded q, k, v."""
    start = inputs["state"][row.slot].double()
    value_heads, _, k_dim = start.shape
    scale = k_dim**-0.5 if inputs["scale"] is None else inputs["scale"]
    rate = inputs["A_log"].double().exp()[:, None]
    steps: list[Oracle] = []
    for token, parent in zip(row.tokens, row.parents, strict=True):
        q, k, v = (x.double() for x in qkv[token])
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(value_heads // x.shape[0], 0) for x in (q * scale, k))
        gate = inputs["a"][token].double().view(value_heads, k_dim) + inputs["dt_bias"].double().view(value_heads, k_dim)
        bound = inputs["lower_bound"]
        g = -rate * torch.nn.functional.softplus(gate) if bound is None else bound * torch.sigmoid(rate * gate)
        beta = torch.sigmoid(inputs["b"][token].double())
        h = (start if parent < 0 else steps[parent].h) * g.exp()[:, None, :]
        u = beta[:, None] * (v - torch.einsum("hvk,hk->hv", h, k))
        h = h + torch.einsum("hv,hk->hvk", u, k)
        steps.append(Oracle(h, torch.einsum("hvk,hk->hv", h, q), q, g, beta))
    return steps


def _head_max(h: torch.Tensor) -> torch.Tensor:
    return h.abs().amax((-1, -2), keepdim=True)


def check_verify(run: Callable[..., torch.Tensor], reference: Callable[..., torch.Tensor], inputs: Inputs) -> list[Check]:
    got, native = _inputs.copy_inputs(inputs), _inputs.copy_inputs(inputs)
    o = run(**got)
    reference(**native)
    rows = list(live_rows(inputs))
    qkv = _own_qkv(run, inputs, rows, got)
    ringed = inputs["ring_k"] is not None
    depth = {"ring_k": 1, "ring_v": 1, "ring_g": 1, "ring_beta": 0} if ringed else {"snapshots": 3}
    cells = {name: _inputs.touched(inputs[name], native[name], dims) for name, dims in depth.items()}
    wanted = {**inputs, "windows": native["windows"]}
    checks = [_inputs.bytes_check("windows and all else exact", got, wanted, cells)]

    ulp = max(torch.finfo(o.dtype).eps, 2.0**-20)  # fp32 sums in another order differ by more than their last bit
    idle = torch.ones(o.shape[0], dtype=torch.bool, device=o.device)
    for row in rows:
        truth = oracle(inputs, row, qkv)
        for step, (token, exact) in enumerate(zip(row.tokens, truth, strict=True)):
            idle[token] = False
            size = STATE_ERROR * _head_max(exact.h)
            allowed = size[..., 0] * exact.q.abs().sum(-1, keepdim=True) + torch.finfo(o.dtype).eps / 2 * exact.o.abs()
            checks.append(_inputs.close_check(f"o of token {token}", o[token], exact.o, allowed))
            if ringed:
                for name, value in (("ring_g", exact.g), ("ring_beta", exact.beta)):
                    allowed = GATE_ERROR * value.abs().clamp(min=1.0)
                    checks.append(_inputs.close_check(f"{name} of token {token}", got[name][row.slot, :, step], value, allowed))
            else:
                snapshot = got["snapshots"][row.window_row, step]
                checks.append(_inputs.close_check(f"snapshot of token {token}", snapshot, exact.h, size))
    if ringed and rows:
        live = [token for row in rows for token in row.tokens]
        taps = [inputs["mixed_qkv"][live], inputs["conv_state"][[row.conv_slot for row in rows]]]
        floor = CONV_FLOOR * float(inputs["conv_weight"].abs().max()) * max(float(t.abs().max()) for t in taps if t.numel())
        for name in ("ring_k", "ring_v"):
            pair = torch.stack((got[name].double().abs(), native[name].double().abs()))
            allowed = ulp * pair.amax(0) + floor
            checks.append(_inputs.close_check(name, got[name], native[name], allowed, cells[name]))
    checks.append(_inputs.exact_check("o of padding", o[idle], torch.zeros_like(o[idle])))
    return _inputs.worst_of_each(checks)


def _verify_case(
    name: str,
    draft: int = 3,
    heads: str = "2/1",
    k: int = 64,
    v: int = 16,
    batch: int = 2,
    *,
    mode: str = "ring",
    gate: str = "safe",
    window: str = "chain",
    bias: bool = False,
    act: str = "f16",
    weight: str = "f16",
    index: str = "i32",
    layout: str = "aligned",
    **options: Any,
) -> Case:
    facts = {"draft": draft, "heads": heads, "k_dim": k, "v_dim": v, "mode": mode, "gate": gate, "window": window}
    facts |= {"bias": bias, "act": act, "weight": weight, "index": index, "layout": layout}
    return _inputs.make_case(kda.kda_chain_verify, name, batch, options, facts)


SNAPSHOT: Mapping[str, Any] = {"mode": "snapshot"}
TREE: Mapping[str, Any] = {"mode": "snapshot", "window": "tree"}

VERIFY_CASES = (
    _verify_case("ring"),
    _verify_case("snapshot", **SNAPSHOT),
    _verify_case("batch_0", batch=0),
    _verify_case("draft_1", draft=1),
    _verify_case("draft_1_snapshot", draft=1, **SNAPSHOT),
    _verify_case("draft_4", draft=4, ring=7, batch=1),
    _verify_case("draft_8", draft=8, heads="1/1", ring=13, batch=1),
    _verify_case("draft_8_snapshot", draft=8, heads="1/1", batch=1, **SNAPSHOT),
    _verify_case("softplus", gate="softplus"),
    _verify_case("softplus_snapshot", gate="softplus", bias=True, **SNAPSHOT),
    _verify_case("bias", bias=True),
    _verify_case("ratio_1", heads="2/2"),
    _verify_case("ratio_3", draft=2, heads="6/2"),
    _verify_case("ratio_3_snapshot", heads="6/2", batch=1, **SNAPSHOT),
    _verify_case("ratio_16", draft=2, heads="16/1", batch=1),
    _verify_case("k_128", heads="1/1", k=128, v=128, draft=4, batch=1),
    _verify_case("k_128_v_80", k=128, v=80, batch=1),
    _verify_case("k_256_v_64", heads="1/1", k=256, v=64, batch=1),
    _verify_case("fp32", act="f32", weight="f32"),
    _verify_case("fp32_weight", weight="f32", bias=True),
    _verify_case("bf16", act="bf16", weight="bf16", heads="6/2"),
    _verify_case("bf16_fp32_weight_snapshot", act="bf16", weight="f32", **SNAPSHOT),
    _verify_case("ragged", window="ragged", draft=4, batch=4),
    _verify_case("ragged_gap", window="ragged", draft=3, batch=3, gap=2, padding=(1,), ring=5),
    _verify_case("ragged_snapshot", window="ragged", draft=3, batch=3, **SNAPSHOT),
    _verify_case("tree", draft=4, **TREE),
    _verify_case("tree_ragged", draft=3, batch=3, **{**TREE, "window": "ragged_tree"}),
    _verify_case("tree_is_chain", tree="chain", batch=1, **TREE),
    _verify_case("tree_roots", tree=(-1, -1, 0), bias=True, **TREE),
    _verify_case("padding", batch=4, padding=(0, 2)),
    _verify_case("padding_snapshot", batch=4, padding=(1,), conv_padding=(2,), **SNAPSHOT),
    _verify_case("padding_slot_0", batch=4, padding=(0,), conv_padding=(3,), null=0),
    _verify_case("all_padding", padding=(0, 1)),
    _verify_case("out_of_range", batch=4, bad={0: "slot", 1: "conv_slot", 3: "window_row"}),
    _verify_case("out_of_range_window", window="ragged", batch=3, bad={1: "window"}),
    _verify_case("out_of_range_parent", draft=2, bad={0: "parent"}, **TREE),
    _verify_case("int64_strided", index="i64", strided=True),
    _verify_case("mixed_indices", index="i64+i32+i64", strided=True),
    _verify_case("overlap", draft=4, conv="overlap"),
    _verify_case("overlap_ragged", draft=4, batch=3, window="ragged", conv="overlap"),
    _verify_case("pool_padded", pool="padded", conv="padded", packed_gates=True),
    _verify_case("pool_alternate_snapshot", pool="alternate", conv="padded", strided=True, **SNAPSHOT),
    _verify_case("odd_pitches", layout="any", v=80, heads="1/1", pool="padded", packed_gates=True),
    _verify_case("odd_pitches_snapshot", layout="any", conv="width", pool="alternate", **SNAPSHOT),
    _verify_case("odd_overlap", layout="any", conv="overlap"),
    _verify_case("scale_0.1", scale=0.1, q_scale=1.0),
    _verify_case("scale_3", scale=3.0, lower_bound=-2.0),
)

VERIFY = Samples(VERIFY_CASES, make_verify, check_verify)

# --- commits --------------------------------------------------------------------------------------------------------

COMMIT_OPTIONS: Mapping[str, Any] = {
    "layers": 1,
    "slots": None,
    "window_rows": None,
    "accept": "mixed",
    "track": 1,
    "padding": (),
    "bad": {},
    "null": -1,
    "pool": "packed",
    "strided": False,
    "scale": 1.0,
    "poison": math.nan,
    "fast": False,
}
RING_OPTIONS = {**COMMIT_OPTIONS, "decay": 2.0, "cancel": False}
CONV_OPTIONS = {**COMMIT_OPTIONS, "conv": "dim"}


def _accepts(limit: int) -> tuple[int, ...]:
    return (2, limit, 0, 1)


def make_ring_commit(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    facts, o = _inputs.facts_of(kda.kda_ring_commit, case), _inputs.options_of(case, RING_OPTIONS)
    random = _inputs.Random(seed, device, o.fast)
    value_heads, key_heads = _inputs.heads_of(facts)
    length, k_dim, v_dim = int(facts["ring"]), int(facts["k_dim"]), int(facts["v_dim"])
    act, aligned = dtype_of(facts["act"]), facts["layout"] == "aligned"
    wide = _wide_dtype(act)
    rows = _inputs.CommitRows(random, o, [length] * case.batch, o.slots, facts["track"], _accepts(length))
    lead = (o.layers, rows.pool_slots)
    rings = {
        "ring_k": random.normal("ring_k", (*lead, key_heads, length, k_dim), o.scale, act),
        "ring_v": random.normal("ring_v", (*lead, value_heads, length, v_dim), o.scale, act),
        "ring_g": random.uniform("ring_g", (*lead, value_heads, length, k_dim), -o.decay, 0.0, wide),
        "ring_beta": random.uniform("ring_beta", (*lead, value_heads, length), 0.0, 1.0, wide),
    }
    if o.poison is not None:
        accepted = dict(zip(rows.slots, rows.accept, strict=True))
        for slot in range(rows.pool_slots):
            for ring in rings.values():
                ring[:, slot, :, max(accepted.get(slot, 0), 0) :] = o.poison
    state = random.normal("state", (*lead, value_heads, v_dim, k_dim), o.scale, wide)
    if o.cancel:
        _inputs.cancel(rings["ring_k"], -1, 1)
        _inputs.cancel(rings["ring_g"], -1, 1)
        _inputs.cancel(state, -1, -1)
    make_index = _inputs.Indices(facts["index"], device, o.strided)
    return {
        "state": _inputs.pool(state, 2, o.pool, aligned),
        **{name: _inputs.pool(ring, 2, o.pool, aligned) for name, ring in rings.items()},
        "slots": make_index(rows.slots),
        "accept": make_index(rows.accept),
        **_tracks(facts, rows, make_index),
        "null_slot": o.null,
    }


def _tracks(facts: Mapping[str, Any], rows: _inputs.CommitRows, make_index: _inputs.Indices) -> Inputs:
    return rows.track(make_index) if facts["track"] else {"track_slots": None, "track_step": None}


def _copy_rows(
    facts: Mapping[str, Any], o: SimpleNamespace, random: _inputs.Random, batch: int
) -> tuple[_inputs.CommitRows, list[int], int]:
    """Rows of a commit that copies, their window rows, and how many window rows there are."""
    draft = int(facts["draft"])
    rows = _inputs.CommitRows(random, o, [draft] * batch, o.slots, facts["track"], _accepts(draft))
    window_rows, size = _targets(random, "window_rows", batch, o.window_rows, 0, 1)
    for row, what in o.bad.items():
        if what == "window_row":
            window_rows[row] = size
    return rows, window_rows, size


def make_snapshot_commit(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    facts, o = _inputs.facts_of(kda.kda_snapshot_commit, case), _inputs.options_of(case, COMMIT_OPTIONS)
    random, aligned = _inputs.Random(seed, device, o.fast), facts["layout"] == "aligned"
    rows, window_rows, size = _copy_rows(facts, o, random, case.batch)
    tail = (int(facts["value_heads"]), int(facts["v_dim"]), int(facts["k_dim"]))
    state = random.normal("state", (o.layers, rows.pool_slots, *tail), o.scale)
    snapshots = random.normal("snapshots", (o.layers, size, int(facts["draft"]), *tail), o.scale)
    make_index = _inputs.Indices(facts["index"], device, o.strided)
    return {
        "state": _inputs.pool(state, 2, o.pool, aligned),
        "snapshots": _inputs.pool(snapshots, 3, o.pool, aligned),
        "slots": make_index(rows.slots),
        "window_rows": make_index(window_rows),
        "accept": make_index(rows.accept),
        **_tracks(facts, rows, make_index),
        "null_slot": o.null,
    }


def make_conv_commit(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    facts, o = _inputs.facts_of(conv.conv_window_commit, case), _inputs.options_of(case, CONV_OPTIONS)
    random, aligned = _inputs.Random(seed, device, o.fast), facts["layout"] == "aligned"
    rows, window_rows, size = _copy_rows(facts, o, random, case.batch)
    act, dim = dtype_of(facts["act"]), int(facts["dim"])
    conv_state = random.normal("conv_state", (o.layers, rows.pool_slots, dim, 3), o.scale, act)
    windows = random.normal("windows", (o.layers, size, int(facts["draft"]), dim, 3), o.scale, act)
    make_index = _inputs.Indices(facts["index"], device, o.strided)
    return {
        "conv_state": _conv_pool(conv_state, "dim" if o.conv == "overlap" else o.conv, aligned),
        "windows": _conv_pool(windows, o.conv, aligned),
        "conv_slots": make_index(rows.slots),
        "window_rows": make_index(window_rows),
        "accept": make_index(rows.accept),
        **_tracks(facts, rows, make_index),
        "null_slot": o.null,
    }


def check_ring_commit(run: Callable[..., None], reference: Callable[..., None], inputs: Inputs) -> list[Check]:
    got, native = _inputs.copy_inputs(inputs), _inputs.copy_inputs(inputs)
    exact = _inputs.doubled(inputs, WIDE)
    run(**got)
    reference(**native)
    reference(**exact)
    cells = _inputs.touched(inputs["state"], native["state"], 3)
    allowed = STATE_ERROR * _head_max(exact["state"])
    return [
        _inputs.close_check("state", got["state"], exact["state"], allowed, cells),
        _inputs.bytes_check("all else exact", got, inputs, {"state": cells}),
    ]


def check_copy(run: Callable[..., None], reference: Callable[..., None], inputs: Inputs) -> list[Check]:
    got, native = _inputs.copy_inputs(inputs), _inputs.copy_inputs(inputs)
    run(**got)
    reference(**native)
    return [_inputs.bytes_check("all exact", got, native)]


def _ring_commit_case(
    name: str,
    ring: int = 4,
    heads: str = "2/1",
    k: int = 64,
    v: int = 16,
    batch: int = 3,
    *,
    act: str = "f16",
    track: bool = False,
    index: str = "i32",
    layout: str = "aligned",
    **options: Any,
) -> Case:
    facts = {"ring": ring, "heads": heads, "k_dim": k, "v_dim": v, "act": act, "track": track, "index": index, "layout": layout}
    return _inputs.make_case(kda.kda_ring_commit, name, batch, options, facts)


RING_COMMIT_CASES = (
    _ring_commit_case("plain"),
    _ring_commit_case("batch_0", batch=0),
    _ring_commit_case("accept_0", accept=0),
    _ring_commit_case("ring_1", ring=1),
    _ring_commit_case("ring_7", ring=7, accept=(7, 3, 5)),
    _ring_commit_case("ratio_1", heads="3/3", batch=2),
    _ring_commit_case("ratio_3", heads="6/2", batch=2),
    _ring_commit_case("ratio_16", heads="16/1", batch=1),
    _ring_commit_case("k_128_v_80", k=128, v=80, batch=2),
    _ring_commit_case("k_256_v_64", heads="1/1", k=256, v=64, batch=2),
    _ring_commit_case("k_128_v_128", heads="1/1", k=128, v=128, batch=2),
    _ring_commit_case("fp32", act="f32"),
    _ring_commit_case("bf16", act="bf16", heads="6/2"),
    _ring_commit_case("track", track=True, batch=4),
    _ring_commit_case("accept_all_track", track=True, accept=4, batch=2),
    _ring_commit_case("padding", batch=4, padding=(0, 2)),
    _ring_commit_case("padding_slot_0", batch=4, padding=(1,), null=0, track=True),
    _ring_commit_case("out_of_range", batch=4, bad={0: "slot", 1: "accept", 2: "accept_negative"}),
    _ring_commit_case("out_of_range_track", batch=3, track=True, accept=2, bad={0: "track_step", 2: "track_slot"}),
    _ring_commit_case("int64_strided", index="i64", strided=True, track=True),
    _ring_commit_case("mixed_indices", index="i64+i32", strided=True),
    _ring_commit_case("pool_padded", pool="padded", layers=2, track=True),
    _ring_commit_case("pool_alternate", pool="alternate", layers=2),
    _ring_commit_case("pool_layer_inner", pool="layer_inner", layers=2, track=True),
    _ring_commit_case("odd_pitches", layout="any", v=80, heads="1/1", pool="padded", layers=2),
    _ring_commit_case("scale_3", scale=3.0),
)

RING_COMMIT = Samples(RING_COMMIT_CASES, make_ring_commit, check_ring_commit)

COPY_OPTIONS: tuple[tuple[str, int, Mapping[str, Any], Mapping[str, Any]], ...] = (
    ("plain", 4, {}, {}),
    ("batch_0", 0, {}, {}),
    ("accept_0", 2, {}, {"accept": 0}),
    ("track", 4, {"track": True}, {}),
    ("padding", 4, {}, {"padding": (0, 2)}),
    ("padding_slot_0", 4, {"track": True}, {"padding": (1,), "null": 0}),
    ("out_of_range", 5, {}, {"bad": {0: "slot", 1: "window_row", 2: "accept", 3: "accept_negative"}}),
    ("out_of_range_track", 3, {"track": True}, {"accept": 2, "bad": {0: "track_step", 2: "track_slot"}}),
    ("int64_strided", 3, {"index": "i64", "track": True}, {"strided": True}),
    ("mixed_indices", 3, {"index": "i64+i32+i64"}, {"strided": True}),
)


def _copy_cases(
    op: Op, facts: Mapping[str, Any], *more: tuple[str, int, Mapping[str, Any], Mapping[str, Any]]
) -> tuple[Case, ...]:
    rows = (*COPY_OPTIONS, *more)
    return tuple(_inputs.make_case(op, name, batch, options, {**facts, **own}) for name, batch, own, options in rows)


SNAPSHOT_COMMIT_CASES = _copy_cases(
    kda.kda_snapshot_commit,
    {"draft": 3, "value_heads": 2, "k_dim": 64, "v_dim": 16},
    ("v_80", 2, {"v_dim": 80, "k_dim": 128, "draft": 1}, {}),
    ("k_256", 2, {"k_dim": 256, "draft": 8, "value_heads": 1}, {}),
    ("pool_padded", 3, {"track": True}, {"pool": "padded", "layers": 2}),
    ("pool_alternate", 3, {}, {"pool": "alternate", "layers": 2}),
    ("pool_layer_inner", 3, {"track": True}, {"pool": "layer_inner", "layers": 2}),
    ("odd_pitches", 3, {"layout": "any"}, {"pool": "padded", "layers": 2}),
)

SNAPSHOT_COMMIT = Samples(SNAPSHOT_COMMIT_CASES, make_snapshot_commit, check_copy)

CONV_COMMIT_CASES = _copy_cases(
    conv.conv_window_commit,
    {"draft": 3, "dim": 144, "act": "f16"},
    ("bf16", 3, {"act": "bf16", "track": True}, {}),
    ("fp32", 3, {"act": "f32"}, {"layers": 2}),
    ("draft_1", 3, {"draft": 1, "dim": 1024}, {}),
    ("overlap", 3, {"draft": 8, "track": True}, {"conv": "overlap", "layers": 2}),
    ("padded", 3, {}, {"conv": "padded", "layers": 2}),
    ("alternate", 3, {"track": True}, {"conv": "alternate", "layers": 2}),
    ("layer_inner", 3, {"track": True}, {"conv": "layer_inner", "layers": 2}),
    ("width", 3, {"layout": "any"}, {"conv": "width", "layers": 2}),
    ("odd_pitches", 3, {"layout": "any", "dim": 145}, {"conv": "padded", "layers": 2, "strided": True}),
    ("odd_overlap", 3, {"layout": "any", "track": True}, {"conv": "overlap"}),
)

CONV_COMMIT = Samples(CONV_COMMIT_CASES, make_conv_commit, check_copy)
