"""What input makers and parity checks share: a generator with the same bytes everywhere, awkward memory, comparisons.

Random numbers are a pure function of (seed, name of the stream, position): splitmix64 over a counter, turned into floats by
single IEEE operations on exact integers. So every machine and every device gives the same bytes, and a new argument does
not move the numbers of the others.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from kernreg.contract import DTYPES, Case, Check, Op

Inputs = dict[str, Any]
POOLS = ("packed", "padded", "alternate", "layer_inner")
WILD_INDEX = 2**31 - 1  # fills memory between strided index values: whoever reads it names no row

_GOLDEN, _MIX1, _MIX2 = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_CHUNK = 1 << 24  # elements made at once: bounds the memory of the 64-bit intermediates
_NORMAL_SD = math.sqrt(4 * (65536**2 - 1) / 12)  # of the sum of four 16-bit uniforms


def dtype_of(name: object) -> torch.dtype:
    """``"bf16"`` -> torch.bfloat16."""
    dtype: torch.dtype = getattr(torch, DTYPES[str(name)])
    return dtype


def facts_of(op: Op, case: Case) -> Mapping[str, Any]:
    """The case's facts over the op's defaults; a fact that neither gives is an error."""
    facts = {name: fact.default for name, fact in op.facts.items()} | dict(case.facts)
    unknown = facts.keys() - op.facts.keys()
    missing = [name for name, value in facts.items() if value is None]
    if unknown or missing:
        raise ValueError(f"case {case.id} of {op.name}: unknown facts {sorted(unknown)}, missing facts {missing}")
    return facts


def make_case(op: Op, name: str, batch: int, options: Mapping[str, Any], facts: Mapping[str, Any]) -> Case:
    """A case with a whole key: `facts` over the op's defaults."""
    return Case(name, facts_of(op, Case(name, facts, batch)), batch, options)


def options_of(case: Case, defaults: Mapping[str, Any]) -> SimpleNamespace:
    """The case's options over `defaults`; a name that is not among them is an error."""
    unknown = case.options.keys() - defaults.keys()
    if unknown:
        raise ValueError(f"case {case.id}: unknown options {sorted(unknown)}; known are {sorted(defaults)}")
    return SimpleNamespace(**{**defaults, **case.options})


def heads_of(facts: Mapping[str, Any]) -> tuple[int, int]:
    """``heads="48/16"`` -> (48, 16): value heads, key heads."""
    value_heads, _, key_heads = str(facts["heads"]).partition("/")
    return int(value_heads), int(key_heads)


def with_dtypes(case: Case, **dtypes: str) -> Case:
    """The same case in other dtypes, e.g. ``with_dtypes(case, state="f32", ring_dtype="f16")``."""
    spelled = "-".join(f"{name}_{dtype}" for name, dtype in dtypes.items())
    return Case(f"{case.id}-{spelled}", {**case.facts, **dtypes}, case.batch, case.options)


# --- random numbers -------------------------------------------------------------------------------------------------


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch's shift of int64 is arithmetic


def _splitmix64(counter: torch.Tensor, key: int) -> torch.Tensor:
    z = counter * _GOLDEN + key
    z = (z ^ _shift_right(z, 30)) * _MIX1
    z = (z ^ _shift_right(z, 27)) * _MIX2
    return z ^ _shift_right(z, 31)


def _centred_sum(bits: torch.Tensor) -> torch.Tensor:
    """Sum of the four 16-bit parts, doubled and centred: an integer with the shape of a normal distribution."""
    total = sum((_shift_right(bits, shift) if shift else bits) & 0xFFFF for shift in (0, 16, 32, 48))
    return 2 * total - 4 * 65535


class Random:
    """Named streams of numbers. `fast` takes torch's own generator of the device instead: quick, other bytes per device."""

    def __init__(self, seed: int, device: torch.device | str, fast: bool = False) -> None:
        self.seed, self.device, self.fast = seed, torch.device(device), fast

    def _key(self, name: str) -> int:
        key = (zlib.crc32(name.encode()) << 31) ^ (self.seed * 0x5851F42D4C957F2D)
        return ((key + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)

    def _fill(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, make: Callable[[torch.Tensor], torch.Tensor], unit: int = 1
    ) -> torch.Tensor:
        out = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        flat, key, step = out.view(-1), self._key(name), max(_CHUNK // unit, 1) * unit
        for start in range(0, flat.numel(), step):
            stop = min(start + step, flat.numel())
            values = make(_splitmix64(torch.arange(start, stop, dtype=torch.int64, device=self.device), key))
            # double to 16 bit goes through fp32 everywhere
            flat[start:stop] = values if dtype in (torch.float64, torch.int64) else values.float()
        return out

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self._key(name) & ((1 << 63) - 1))

    def uniform(
        self, name: str, shape: Sequence[int], low: float, high: float, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        if self.fast:
            out = torch.empty(tuple(shape), dtype=dtype, device=self.device)
            return out.uniform_(low, high, generator=self._generator(name))
        width = (high - low) / (1 << 24)
        return self._fill(name, shape, dtype, lambda bits: _shift_right(bits, 40).double() * width + low)

    def normal(self, name: str, shape: Sequence[int], scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Mean 0, standard deviation `scale`, at most 3.5 of them."""
        if self.fast:
            out = torch.empty(tuple(shape), dtype=dtype, device=self.device)
            return out.normal_(0.0, scale, generator=self._generator(name))
        factor = scale / (2 * _NORMAL_SD)
        return self._fill(name, shape, dtype, lambda bits: _centred_sum(bits).double() * factor)

    def unit(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Vectors of length 1 along the last dim."""
        if self.fast:
            return torch.nn.functional.normalize(self.normal(name, shape), dim=-1).to(dtype)

        def normalised(bits: torch.Tensor) -> torch.Tensor:
            vectors = _centred_sum(bits).view(-1, shape[-1])
            squares = (vectors * vectors).sum(-1, keepdim=True)  # exact: integers
            return (vectors.double() / squares.double().sqrt()).view(-1)

        return self._fill(name, shape, dtype, normalised, unit=shape[-1])

    def integers(self, name: str, count: int, low: int, high: int) -> list[int]:
        """`count` numbers in low..high."""
        bits = _splitmix64(torch.arange(count, dtype=torch.int64), self._key(name))
        return [low + bit % (high - low + 1) for bit in _shift_right(bits, 33).tolist()]

    def permutation(self, name: str, count: int) -> list[int]:
        bits = _splitmix64(torch.arange(count, dtype=torch.int64), self._key(name)).tolist()
        return sorted(range(count), key=bits.__getitem__)


# --- memory ---------------------------------------------------------------------------------------------------------


def pool(values: torch.Tensor, free: int, kind: str = "packed", aligned: bool = True) -> torch.Tensor:
    """The same values as a view whose `free` leading dims have the strides of an engine's pool; NaN lies in the gaps.

    kind: "packed"; "padded" (a gap behind every block); "alternate" (every other block of the last free dim); "layer_inner"
        (the first free dim varies fastest). With `aligned` false, address and pitches are odd numbers of elements.
    """
    if kind not in POOLS:
        raise ValueError(f"pool {kind!r}; known are {POOLS}")
    if kind == "packed" and aligned:
        return values
    inner = tuple(values.shape[free:])
    size = math.prod(inner)
    grain = 16 // values.element_size()
    pitch = size + (grain if kind == "padded" else 0)
    pitch = -(-pitch // grain) * grain if aligned else pitch | 1
    offset = 0 if aligned else 1
    strides = [0] * free
    order = range(free) if kind == "layer_inner" else reversed(range(free))
    for dim in order:
        strides[dim] = pitch * (2 if kind == "alternate" and dim == free - 1 else 1)
        pitch = strides[dim] * values.shape[dim]
        pitch += 0 if aligned else 1 - pitch % 2
    packed = [math.prod(inner[d + 1 :]) for d in range(len(inner))]
    buffer = values.new_full((pitch + offset,), math.nan)
    view = buffer.as_strided(values.shape, (*strides, *packed), offset)
    view.copy_(values)
    return view


def index(values: Sequence[int], dtype: torch.dtype, device: torch.device | str, strided: bool = False) -> torch.Tensor:
    """An index tensor; strided ones have wild numbers in between."""
    if not strided:
        return torch.tensor(values, dtype=dtype, device=device)
    buffer = torch.full((3 * len(values) + 1,), WILD_INDEX, dtype=dtype, device=device)
    view = buffer[1 : 1 + 3 * len(values) : 3]
    view.copy_(torch.tensor(values, dtype=dtype))
    return view


class Indices:
    """Makes the index tensors of a call in the order of its signature: ``index="i32"``, or one dtype each: ``"i32+i64"``."""

    def __init__(self, spec: object, device: torch.device | str, strided: bool) -> None:
        names = str(spec).split("+")
        self._dtypes = itertools.repeat(names[0]) if len(names) == 1 else iter(names)
        self.device, self.strided = device, strided

    def __call__(self, values: Sequence[int]) -> torch.Tensor:
        return index(values, dtype_of(next(self._dtypes)), self.device, self.strided)


THIRD_OFF = (1, 1, 0)


def per_row(value: Any, count: int, mixed: Sequence[int]) -> list[int]:
    """An option for `count` rows: one number for all, a sequence repeated to fit, or "mixed": the sequence `mixed`."""
    values = mixed if value == "mixed" else (value,) if isinstance(value, int) else value
    return list(itertools.islice(itertools.cycle(values), count))


class CommitRows:
    """Slots, accepted counts and track targets of a commit's rows: live, padding or out of range as the options say.

    limits: the most that each row may accept. slots: how many the pool has, None for a few more than needed. Uses the options
    null, accept, track, padding and bad (see `bend`).
    """

    def __init__(
        self, random: Random, o: SimpleNamespace, limits: Sequence[int], slots: int | None, track: bool, accept: Sequence[int]
    ) -> None:
        batch, first = len(limits), max(o.null, -1) + 1
        self.pool_slots = slots or first + batch * (2 if track else 1) + 1
        free = [first + slot for slot in random.permutation("slots", self.pool_slots - first)]
        self.slots, self.track_slots = free[:batch], free[batch : 2 * batch]
        wanted = per_row(o.accept, batch, accept)
        self.accept = [min(a, limit) for a, limit in zip(wanted, limits, strict=True)]
        # a row that accepted nothing has no step to track; among the others both the first and the last step occur
        tracked = per_row(o.track, batch, THIRD_OFF)
        self.track_step = [(0 if i % 2 else n - 1) if n and tracked[i] else -1 for i, n in enumerate(self.accept)]
        self._limits = limits
        for row in o.padding:
            self.slots[row] = o.null
        for row, what in o.bad.items():
            self.bend(row, what)

    def bend(self, row: int, what: str) -> None:
        """Put one value of a row out of range; names that belong to one op only are left to its maker."""
        if what == "slot":
            self.slots[row] = self.pool_slots
        elif what == "accept":
            self.accept[row] = self._limits[row] + 1
        elif what == "accept_negative":
            self.accept[row] = -1
        elif what == "track_slot":
            self.track_slots[row], self.track_step[row] = self.pool_slots, 0
        elif what == "track_step":
            self.track_step[row] = self.accept[row]

    def track(self, make_index: Indices) -> Inputs:
        return {"track_slots": make_index(self.track_slots), "track_step": make_index(self.track_step)}


def cancel(x: torch.Tensor, dim: int, sign: int) -> None:
    """Make the halves of a dim equal (sign 1), or nearly opposite (-1): then sums of products over it cancel, but not to zero."""
    half = x.shape[dim] // 2
    first, second = x.narrow(dim, 0, half), x.narrow(dim, half, half)
    second.copy_(first if sign > 0 else second / 64 - first)


def split_low(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """values ~ high + low, both of `dtype`."""
    high = values.to(dtype)
    return high, (values - high.to(values.dtype)).to(dtype)


# --- comparisons ----------------------------------------------------------------------------------------------------


def copy_inputs(inputs: Mapping[str, Any], device: torch.device | str | None = None) -> Inputs:
    """Copies with the same strides; whole storages are copied, so gaps and views that overlap survive.

    device: where to; None is where each is.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    copies: Inputs = {}
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            copies[name] = value
            continue
        storage = value.untyped_storage()
        if storage.data_ptr() not in storages:
            fresh_storage = torch.UntypedStorage(storage.nbytes(), device=device or storage.device)
            storages[storage.data_ptr()] = fresh_storage.copy_(storage)
        fresh = torch.empty(0, dtype=value.dtype, device=device or value.device)
        copies[name] = fresh.set_(storages[storage.data_ptr()], value.storage_offset(), value.shape, value.stride())
    return copies


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same elements as integers, so that NaN equals itself and -0 differs from 0."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def touched(before: torch.Tensor, after: torch.Tensor, cell: int) -> torch.Tensor:
    """Which cells (blocks of the last `cell` dims) changed in any bit; the shape of the leading dims, broadcastable."""
    changed = bits(before) != bits(after)
    for dim in range(changed.ndim - cell, changed.ndim):
        changed = changed.any(dim, keepdim=True)
    return changed


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def bytes_check(name: str, got: Inputs, wanted: Inputs, cells: Mapping[str, torch.Tensor] = MappingProxyType({})) -> Check:
    """Every byte of every storage is as wanted, gaps included, except in the given cells (see `touched`)."""
    masks: dict[int, torch.Tensor] = {}
    tensors = {name: value for name, value in wanted.items() if isinstance(value, torch.Tensor) and value.numel()}
    for argument, value in tensors.items():
        address = value.untyped_storage().data_ptr()
        if address not in masks:
            masks[address] = torch.zeros_like(_bytes_of(value), dtype=torch.bool)
        if argument in cells:
            width = value.element_size()
            strides = (*(s * width for s in value.stride()), 1)
            view = masks[address].as_strided((*value.shape, width), strides, value.storage_offset() * width)
            view |= cells[argument].expand(value.shape)[..., None]
    wrong = []
    for argument, value in tensors.items():
        mask = masks[value.untyped_storage().data_ptr()]
        moved = (_bytes_of(value) != _bytes_of(got[argument])) & ~mask
        if moved.any():
            wrong.append(f"{argument}: {int(moved.sum())} bytes, first at byte {int(moved.nonzero()[0])} of its storage")
    return Check(name, math.inf if wrong else 0.0, "; ".join(wrong))


def exact_check(name: str, got: torch.Tensor, wanted: torch.Tensor) -> Check:
    """Equal bit for bit."""
    differs = bits(got) != bits(wanted)
    if not differs.any():
        return Check(name, 0.0)
    where = tuple(differs.nonzero()[0].tolist())
    return Check(name, math.inf, f"{int(differs.sum())} elements differ, first {where}: {got[where]} for {wanted[where]}")


def close_check(
    name: str,
    got: torch.Tensor,
    wanted: torch.Tensor,
    allowed: torch.Tensor | float,
    cells: torch.Tensor | None = None,
) -> Check:
    """|got - wanted| <= allowed, elementwise, in `cells` only if given; a value that is not finite fails."""
    error = (got.double() - wanted.double()).abs()
    bound = torch.as_tensor(allowed, dtype=torch.float64, device=error.device).expand(error.shape)
    ratio = torch.where(error == 0, 0.0, error / bound)  # 0 / 0 is no error
    ratio = torch.where(got.double().isfinite(), ratio, math.inf).nan_to_num(nan=math.inf)
    if cells is not None:
        ratio = torch.where(cells, ratio, 0.0)
    if ratio.numel() == 0 or float(ratio.max()) == 0.0:
        return Check(name, 0.0)
    where = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
    detail = f"{where}: {float(got[where]):.9g} for {float(wanted[where]):.9g}, allowed {float(bound[where]):.3g}"
    return Check(name, float(ratio[where]), detail)


def worst_of_each(checks: Iterable[Check]) -> list[Check]:
    """For each name up to " of ", the check that came closest to failing, or failed."""
    worst: dict[str, Check] = {}
    for check in checks:
        key = check.name.partition(" of ")[0]
        if key not in worst or check.worst > worst[key].worst:
            worst[key] = check
    return list(worst.values())


def doubled(inputs: Mapping[str, Any], names: Iterable[str]) -> Inputs:
    """Packed copies, those in `names` as float64."""
    picked = set(names)
    return {
        name: (value.double() if name in picked else value.clone()) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }
