"""How a variant is probed: one input, its rows arranged in calls in many ways, and what is written compared bit for bit.

Rows are told apart by the contract's dims: tensors [B, ..] have a row each, tensors [N, ..] the rows' tokens, [B1] their
offsets. What a row writes lies where its indices point, so the pools after a call are the same however rows are arranged.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from kernreg.contract import Case, Facts, Op
from kernreg.numerics import BATCH_VARIANT, RACY, Effort, Fingerprint, Probe
from kernreg.ops._inputs import Inputs, bits, copy_inputs
from kernreg.rows import cut, token_bounds, windows

Rows: TypeAlias = "Sequence[int | None]"  # batch rows of the probe in the order of a call; None is a row of padding
Tensors: TypeAlias = dict[str, torch.Tensor]

# The index arguments that point into a pool's dim. A third party's pools may have others: then a difference names no row.
POINTERS = {"S": ("slots", "track_slots"), "R": ("rows",), "CS": ("conv_slots", "track_slots"), "WR": ("window_rows",)}
SEED = 1
PIECE, HASHERS = 1 << 24, 8  # bytes hashed at once, and by how many threads
CROWD_ELEMENTS = 1 << 25  # bounds the tokens of a crowd's call, and so a kernel's scratch memory


def examine(op: Op, run: Callable[..., Any], facts: Facts, probes: Sequence[Probe], device: str, effort: Effort) -> Fingerprint:
    """Run every arrangement of every probe until one differs."""
    total = hashlib.sha256()
    rows = elements = alone = 0
    with _on(device) as busy:
        for number, probe in enumerate(probes):
            trial = _Trial.make(op, run, facts, probe, device, effort, SEED + number, grows=not number)
            if found := trial.difference(busy):
                return Fingerprint(verdict=found[0], reason=found[1], rows=rows + trial.batch)
            rows, elements, alone = rows + trial.batch, elements + trial.elements, alone + len(trial.sample)
            for name, tensor in sorted(trial.base.items()):
                total.update(f"{probe.name} {name} {tensor.dtype} {list(tensor.shape)}".encode())
                for digest in _digests(tensor):
                    total.update(digest)
    overlapped = busy is not None and busy.overlapped
    return Fingerprint(total.hexdigest()[:16], rows=rows, elements=elements, alone=alone, busy=overlapped)


@contextmanager
def _on(device: str) -> Iterator[_Busy | None]:
    """The device made current, with what keeps it busy; nothing of this for the CPU."""
    if not device.startswith("cuda"):
        yield None
        return
    with torch.cuda.device(device):
        yield _Busy()


def _digests(tensor: torch.Tensor) -> Iterator[bytes]:
    """SHA-256 of each piece of the tensor's bytes, its elements in order; several at once, since that is most of the time."""
    host = tensor.contiguous().cpu()
    first, size = host.data_ptr(), host.numel() * host.element_size()
    pieces = [(first + at, min(PIECE, size - at)) for at in range(0, size, PIECE)]
    with ThreadPoolExecutor(HASHERS) as pool:
        yield from pool.map(lambda piece: hashlib.sha256((ctypes.c_char * piece[1]).from_address(piece[0])).digest(), pieces)


class _Busy:
    """Another stream that fills the GPU with work while a call runs.

    overlapped: did all calls so far end before that work did? A call may outlast `MOST` pieces of it.
    """

    MOST = 2048

    def __init__(self) -> None:
        self.overlapped = True
        self._stream = torch.cuda.Stream()
        self._ballast = torch.ones(1 << 24, device="cuda")
        self._launches = 16

    def during(self, call: Callable[[], Tensors]) -> Tensors:
        while True:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(self._launches):
                    self._ballast.sin_()
                done = torch.cuda.Event()
                done.record()
            result = call()
            torch.cuda.current_stream().synchronize()  # launches return before the kernels have run
            overlapped = not done.query()
            done.synchronize()
            if overlapped or self._launches >= self.MOST:
                self.overlapped &= overlapped
                return result
            self._launches *= 4


@dataclass(frozen=True)
class _Arrangement:
    """how: for the message. calls: the rows of each call, one after another."""

    how: str
    calls: tuple[Rows, ...]


class _Trial:
    """One probe on one device, and what the variant made of it in one batch: `base`, by tensor."""

    def __init__(self, op: Op, run: Callable[..., Any], probe: Probe, inputs: Inputs, effort: Effort) -> None:
        self.op, self.run, self.probe, self.inputs, self.effort = op, run, probe, inputs, effort
        self.batch: int = inputs[op.batch].shape[0]
        self.mutated = [name for name in op.mutates if inputs[name] is not None]
        self.spans = _spans(op, inputs)
        step = max(self.batch / max(effort.alone, 1), 1.0)
        self.sample = [int(n * step) for n in range(min(effort.alone, self.batch))]
        self.base = self._call_whole()

    @staticmethod
    def make(
        op: Op, run: Callable[..., Any], facts: Facts, probe: Probe, device: str, effort: Effort, seed: int, *, grows: bool
    ) -> _Trial:
        """With so many rows that enough is written, if it `grows`."""

        def trial(rows: int) -> _Trial:
            with torch.device("cpu"):  # whatever default device an engine has set
                inputs = op.samples.make_inputs(Case(probe.name, facts, rows, probe.options), device=device, seed=seed)
            return _Trial(op, run, probe, inputs, effort)

        made = trial(probe.rows)
        if not grows or made.elements >= effort.elements:
            return made
        rows = -(-probe.rows * effort.elements // max(made.elements, 1))
        return trial(max(min(rows, effort.most_rows), probe.rows))

    @property
    def elements(self) -> int:
        return sum(tensor.numel() for tensor in self.base.values())

    def difference(self, busy: _Busy | None) -> tuple[str, str] | None:
        """Verdict and reason of the first arrangement that gives other bits."""
        for _ in range(self.effort.repeats):
            if text := self._compare(self._call_whole(), "when repeated"):
                return RACY, text
        for _ in range(self.effort.repeats if busy else 0):
            assert busy is not None
            if text := self._compare(busy.during(self._call_whole), "while another stream keeps the GPU busy"):
                return RACY, text
        for arrangement in self._arrangements():
            first = self._call(arrangement)
            if text := self._compare(first, arrangement.how):
                again = [self._call(arrangement) for _ in range(self.effort.repeats)]
                racy = any(_differing(first, other) for other in again)
                return RACY if racy else BATCH_VARIANT, text
        return None

    def _arrangements(self) -> Iterator[_Arrangement]:
        every = list(range(self.batch))
        if self.batch > 1:
            shuffled = random.Random(SEED).sample(every, self.batch)
            yield _Arrangement("in another order", (shuffled,))
        if self.batch > 1 and self.sample:
            rest = [row for row in every if row not in set(self.sample)]
            yield _Arrangement("when alone", (*([row] for row in self.sample), *([rest] if rest else [])))
        for size in self.effort.crowds if "null_slot" in self.inputs else ():
            if self.batch < size <= self._largest_crowd:
                crowd: list[int | None] = [None] * size
                for row in every:
                    crowd[(2 * row + 1) * size // (2 * self.batch)] = row
                yield _Arrangement(f"in a batch of {size} with padding", (crowd,))

    @property
    def _largest_crowd(self) -> int:
        packed = [self.inputs[n] for n, spec in self.op.tensors.items() if spec.dims[0] == "N" and self.inputs[n] is not None]
        elements: int = sum(tensor.numel() for tensor in packed)
        return CROWD_ELEMENTS // max(elements // self.batch, 1)

    # --- calls

    def _call_whole(self) -> Tensors:
        """All rows as the maker put them, with the tokens that no row covers."""
        arguments = self._fresh()
        # copies: a kernel may return one buffer of its own from every call
        returned = {name: tensor.clone() for name, tensor in _returned(self.op, self.run(**arguments)).items()}
        return {**{name: arguments[name] for name in self.mutated}, **returned}

    def _call(self, arrangement: _Arrangement) -> Tensors:
        arguments = self._fresh()
        gathered = {name: self.base[name].clone() for name in self.op.returns}
        padding: list[torch.Tensor] = []
        for rows in arrangement.calls:
            chosen, tokens = pick(self.op, arguments, rows, self.spans)
            for name, part in _returned(self.op, self.run(**chosen)).items():
                places = tokens if self.op.returns[name].dims[0] == "N" else [-1 if row is None else row for row in rows]
                live = [at for at, place in enumerate(places) if place >= 0]
                gathered[name][_index([places[at] for at in live], part)] = part[_index(live, part)]
                idle = [at for at, place in enumerate(places) if place < 0]
                padding += [part[_index(idle, part)]] if idle else []
        result = {**{name: arguments[name] for name in self.mutated}, **gathered}
        if padding:
            result[PADDING] = torch.stack([bits(part).ne(0).any() for part in padding]).any()
        return result

    def _fresh(self) -> Inputs:
        """The arguments; those that a call mutates are copies."""
        return {**self.inputs, **copy_inputs({name: self.inputs[name] for name in self.mutated})}

    # --- comparisons

    def _compare(self, got: Tensors, how: str) -> str | None:
        """The first row whose bits differ, where and when; or None."""
        padding = got.pop(PADDING, None)
        if padding is not None and bool(padding):
            return f"probe {self.probe.name}: a row of padding returned something other than zeros {how}"
        found = [(row, name, place) for name in _differing(self.base, got) for row, place in [self._first(name, got[name])]]
        if not found:
            return None
        row, name, place = min(found, key=lambda item: (item[0] is None, item[0] or 0))
        where = f"{name}{list(place)} is {got[name][place].item()!r}, was {self.base[name][place].item()!r}"
        return f"probe {self.probe.name}, {'no row' if row is None else f'row {row}'}: {where} {how}"

    def _first(self, name: str, got: torch.Tensor) -> tuple[int | None, tuple[int, ...]]:
        """Of a tensor that differs, the first row to which a difference belongs, and that element."""
        differs = bits(got) != bits(self.base[name])
        spec = self.op.tensors.get(name) or self.op.returns[name]
        owned: list[tuple[int, tuple[int, ...]]] = []
        for dim, label in enumerate(spec.dims):
            owners = self._owners(label)
            for index in self._places(differs, dim) if owners else ():
                inner = differs.select(dim, index).nonzero()[0].tolist()
                owned += [(owners[index], (*inner[:dim], index, *inner[dim:]))] if index in owners else []
        if owned:
            return min(owned)
        return None, tuple(differs.nonzero()[0].tolist())

    @staticmethod
    def _places(differs: torch.Tensor, dim: int) -> list[int]:
        """Indices of one dim at which anything differs."""
        found: list[int] = differs.movedim(dim, 0).reshape(differs.shape[dim], -1).any(1).nonzero().flatten().tolist()
        return found

    def _owners(self, label: str) -> dict[int, int]:
        """Which row an index of this dim belongs to."""
        if label in ("B", "N"):
            spans = self.spans if label == "N" else [range(row, row + 1) for row in range(self.batch)]
            return {token: row for row, span in enumerate(spans) for token in span}
        owners: dict[int, int] = {}
        for name in POINTERS.get(label, ()):
            if self.inputs.get(name) is not None:
                for row, index in enumerate(self.inputs[name].tolist()):
                    owners.setdefault(index, row)
        return owners


PADDING = "padding"


def _index(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def _returned(op: Op, value: Any) -> Tensors:
    values = value if len(op.returns) > 1 else (value,)
    return dict(zip(op.returns, values, strict=True)) if op.returns else {}


def _differing(one: Tensors, other: Tensors) -> list[str]:
    return [name for name, tensor in one.items() if name in other and not torch.equal(bits(tensor), bits(other[name]))]


# --- rows of a call


def _spans(op: Op, inputs: Mapping[str, Any]) -> list[range]:
    """Each row's tokens."""
    return [range(begin, end) for begin, end in itertools.pairwise(token_bounds(op.tensors, inputs, op.batch))]


def pick(op: Op, inputs: Mapping[str, Any], rows: Rows, spans: Sequence[range] | None = None) -> tuple[Inputs, list[int]]:
    """The arguments of a call with these rows of the batch, in this order; pools are shared, not copied.

    A row that is None is padding: it is row 0 with the null slot, and no tokens where windows are ragged.

    Returns:
        the arguments, and for each token of the call the token of `inputs` that it is; -1 for one of padding.
    """
    spans = _spans(op, inputs) if spans is None else spans
    empty = range(0, 0)
    shares = [spans[row] if row is not None else empty if windows(op.tensors, inputs) else spans[0] for row in rows]
    sources = [token for share in shares for token in share]
    tokens = [-1 if row is None else token for row, share in zip(rows, shares, strict=True) for token in share]
    row_index, token_index = (_index(values, inputs[op.batch]) for values in ([row or 0 for row in rows], sources))
    offsets = list(itertools.accumulate(map(len, shares), initial=0))
    chosen = cut(
        op.tensors,
        inputs,
        lambda value: value[row_index],
        lambda value: value[token_index],
        lambda value: torch.tensor(offsets, dtype=value.dtype, device=value.device),
    )
    idle = [at for at, row in enumerate(rows) if row is None]
    if idle:
        chosen[op.batch][_index(idle, chosen[op.batch])] = inputs["null_slot"]
    return chosen, tokens
