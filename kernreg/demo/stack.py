"""The model of the demo: a random-weight stack of KDA and GDN layers that runs through bound plans.

Layers of one kind and setting share their pools and are committed in one call. Pools start as NaN: whatever is read before
it was written shows. Slot and ring row 0 (the null slot) and the last of each pool are never given to a request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kernreg.dispatch import Plan, bind

NULL = 0


@dataclass(frozen=True)
class Sizes:
    """Dims of the stack; heads are value heads, key heads."""

    hidden: int
    dims: int  # K and V
    kda_heads: tuple[int, int]
    gdn_heads: tuple[int, int]
    vocabulary: int = 512
    draft: int = 4
    ring: int = 16
    requests: int = 6  # at a time

    @property
    def slots(self) -> int:
        return self.requests + 2

    def batch(self, live: int) -> int:
        """Rows of a step as an engine captures them: powers of two, here with at least one padded row."""
        return 1 << live.bit_length()

    @property
    def window_rows(self) -> int:
        """One for each row of the largest batch, and one that padded rows name."""
        return self.batch(self.requests) + 1


CPU_SIZES = Sizes(hidden=96, dims=64, kda_heads=(2, 2), gdn_heads=(6, 2))
GPU_SIZES = Sizes(hidden=512, dims=128, kda_heads=(8, 8), gdn_heads=(12, 4))


class Rows(NamedTuple):
    """Index tensors of one batch."""

    slots: torch.Tensor
    ring_rows: torch.Tensor
    window_rows: torch.Tensor
    offsets: torch.Tensor


class Memory(NamedTuple):
    """What one layer keeps for one request between verify and commit, in bytes."""

    ring: int
    snapshots: int


class Maker:
    """Makes tensors on the device; random numbers come from one CPU generator, the same for every device."""

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self._generator) * scale + mean).to(self.device)

    def weight(self, width: int, out: int) -> torch.Tensor:
        return self.normal(width, out, scale=width**-0.5).bfloat16()

    def log_uniform(self, low: float, high: float, *shape: int) -> torch.Tensor:
        """log(x) with x uniform in low..high."""
        return (torch.rand(shape, generator=self._generator) * (high - low) + low).log().to(self.device)

    def pool(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.full(shape, math.nan, dtype=dtype, device=self.device)

    def index(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


class Layers:
    """Layers of one kind and setting: weights, pools, plans."""

    name: str
    state: torch.Tensor
    plans: tuple[Plan, ...]
    probes: tuple[Plan, ...] = ()  # serve the check, not the stack

    def __init__(self, count: int, heads: tuple[int, int], sizes: Sizes, make: Maker) -> None:
        self.count, self.heads, self.sizes, self.make = count, heads, sizes, make
        self.value_heads, self.key_heads = heads
        self.width = self.value_heads * sizes.dims
        self.inputs: list[dict[str, torch.Tensor]] = []  # of each layer, the projections onto the op's inputs
        self.out = [make.weight(self.width, sizes.hidden) for _ in range(count)]
        self._guarded: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def facts(self) -> dict[str, Any]:
        """What the plans of one group have in common."""
        return {"heads": "/".join(map(str, self.heads)), "k_dim": self.sizes.dims, "v_dim": self.sizes.dims}

    def state_pool(self, dtype: torch.dtype) -> torch.Tensor:
        dims = self.sizes.dims
        return self.make.pool(self.count, self.sizes.slots, self.value_heads, dims, dims, dtype=dtype)

    def guard(self, *pools: torch.Tensor, rows: Sequence[int] = (NULL, -1), dim: int = 1) -> None:
        """Remember the bits of what no request may touch."""
        views = [pool.narrow(dim, row % pool.shape[dim], 1) for pool in pools for row in rows]
        self._guarded += [(view, view.clone()) for view in views]

    def touched(self) -> int:
        """How many bytes of the guarded memory have changed."""
        pairs = [(now.contiguous().view(torch.uint8), then.contiguous().view(torch.uint8)) for now, then in self._guarded]
        return sum(int((now != then).sum()) for now, then in pairs)

    def verify(self, layer: int, inputs: dict[str, torch.Tensor], rows: Rows) -> torch.Tensor:
        """Run one layer's op over the draft windows; gives o [N, HV, V]."""
        raise NotImplementedError

    def commit(self, rows: Rows, accept: torch.Tensor, finished: Sequence[int]) -> None:
        """Commit every layer's accepted prefix; `finished` ring rows are left with nothing pending."""
        raise NotImplementedError

    def start(self, slot: int, ring_row: int) -> None:
        """Give a slot and a ring row to a new request."""
        raise NotImplementedError

    def pending(self, ring_row: int) -> bool:
        """Are there accepted tokens that the state does not have yet?"""
        return False

    def memory(self) -> Memory:
        """Bytes, of the real tensors; convolution windows, which both ways keep, are left out."""
        raise NotImplementedError

    def _would_be_snapshots(self) -> int:
        """One state for each draft token."""
        return int(self.sizes.draft * self.state[0, 0].nbytes)

    def project(self, layer: int, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The op's inputs from a layer's normalised input [N, hidden]."""
        return {name: x @ weight for name, weight in self.inputs[layer].items()}


class KdaLayers(Layers):
    """KDA in ring mode or in snapshot mode."""

    def __init__(
        self, mode: str, count: int, heads: tuple[int, int], sizes: Sizes, make: Maker, *, lower_bound: float | None
    ) -> None:
        super().__init__(count, heads, sizes, make)
        self.name, self.mode, self.lower_bound = f"kda {mode}", mode, lower_bound
        self.channels = 2 * self.key_heads * sizes.dims + self.width
        widths = {"mixed_qkv": self.channels, "a": self.width, "b": self.value_heads}
        self.inputs = [{n: make.weight(sizes.hidden, w) for n, w in widths.items()} for _ in range(count)]
        self.conv_weight = make.normal(count, self.channels, 4, scale=0.5).bfloat16()
        rates = (0.5, 2.0) if lower_bound is not None else (0.02, 0.3)
        self.A_log = make.log_uniform(*rates, count, self.value_heads)
        self.dt_bias = make.normal(count, self.width, mean=-4.0 if lower_bound is not None else 0.0, scale=0.5)
        self._allocate()
        self._bind()

    def _allocate(self) -> None:
        make, sizes, rows, dims, draft = self.make, self.sizes, self.sizes.window_rows, self.sizes.dims, self.sizes.draft
        self.state = self.state_pool(torch.float32)
        self.conv_state = make.pool(self.count, sizes.slots, 3, self.channels).transpose(2, 3)
        self.windows = make.pool(self.count, rows, draft, 3, self.channels).transpose(3, 4)
        lead = (self.count, sizes.slots)
        self.ring = {
            "ring_k": make.pool(*lead, self.key_heads, draft, dims),
            "ring_v": make.pool(*lead, self.value_heads, draft, dims),
            "ring_g": make.pool(*lead, self.value_heads, draft, dims, dtype=torch.float32),
            "ring_beta": make.pool(*lead, self.value_heads, draft, dtype=torch.float32),
        }
        self.guard(self.state, self.conv_state, *self.ring.values())
        self.guard(self.windows, rows=(-1,))
        if self.mode == "snapshot":
            self.snapshots = make.pool(self.count, rows, draft, self.value_heads, dims, dims, dtype=torch.float32)
            self.guard(self.snapshots, rows=(-1,))

    def _bind(self) -> None:
        sizes, device = self.sizes, self.make.device
        gate = "safe" if self.lower_bound is not None else "softplus"
        verify: dict[str, Any] = {"device": device, "draft": sizes.draft, "gate": gate, **self.facts}
        self.verify_plan = bind("kda_chain_verify", mode=self.mode, **verify)
        self.record_plan = self.verify_plan if self.mode == "ring" else bind("kda_chain_verify", mode="ring", **verify)
        if self.mode == "ring":
            self.commit_plan = bind("kda_ring_commit", device=device, ring=sizes.draft, **self.facts)
        else:
            dims: dict[str, Any] = {"value_heads": self.value_heads, "k_dim": sizes.dims, "v_dim": sizes.dims}
            self.commit_plan = bind("kda_snapshot_commit", device=device, draft=sizes.draft, **dims)
        self.conv_plan = bind("conv_window_commit", device=device, draft=sizes.draft, dim=self.channels)
        self.plans = (self.verify_plan, self.commit_plan, self.conv_plan)
        self.probes = () if self.mode == "ring" else (self.record_plan,)

    def start(self, slot: int, ring_row: int) -> None:
        self.state[:, slot] = 0
        self.conv_state[:, slot] = 0

    def verify(self, layer: int, inputs: dict[str, torch.Tensor], rows: Rows) -> torch.Tensor:
        arguments = {
            **inputs,
            "conv_weight": self.conv_weight[layer],
            "conv_state": self.conv_state[layer],
            "A_log": self.A_log[layer],
            "dt_bias": self.dt_bias[layer],
            "state": self.state[layer],
            "slots": rows.slots,
            "conv_slots": rows.slots,
            "window_rows": rows.window_rows,
            "lower_bound": self.lower_bound,
            "null_slot": NULL,
        }
        windows, ring = self.windows[layer], {name: pool[layer] for name, pool in self.ring.items()}
        if self.mode == "ring":
            return self.verify_plan(**arguments, windows=windows, **ring)
        # snapshots hold no k and v, which the check starts from: the ring mode gives them, from the same inputs
        self.record_plan(**arguments, windows=windows.clone(), **ring)
        return self.verify_plan(**arguments, windows=windows, snapshots=self.snapshots[layer])

    def commit(self, rows: Rows, accept: torch.Tensor, finished: Sequence[int]) -> None:
        if self.mode == "ring":
            self.commit_plan(self.state, **self.ring, slots=rows.slots, accept=accept, null_slot=NULL)
        else:
            self.commit_plan(self.state, self.snapshots, rows.slots, rows.window_rows, accept, null_slot=NULL)
        self.conv_plan(self.conv_state, self.windows, rows.slots, rows.window_rows, accept, null_slot=NULL)

    def records(self, layer: int, slot: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k [count, H, K] and v [count, HV, V] of the last window's first tokens, as the kernel rounded them."""
        k, v = (self.ring[name][layer, slot, :, :count].transpose(0, 1) for name in ("ring_k", "ring_v"))
        return k, v

    def records_are_its_own(self, batch: int) -> bool:
        """Does one kernel make the records and the state? Between two kernels k and v may differ by one ulp."""
        return self.verify_plan.variant(batch).kernel == self.record_plan.variant(batch).kernel

    def memory(self) -> Memory:
        ring = sum(pool[0, 0].nbytes for pool in self.ring.values())
        return Memory(ring, self.snapshots[0, 0].nbytes if self.mode == "snapshot" else self._would_be_snapshots())


class GdnLayers(Layers):
    """Gated DeltaNet on a circular ring, folding at every commit or only when the ring is nearly full."""

    def __init__(self, folding: str, count: int, heads: tuple[int, int], sizes: Sizes, make: Maker, *, state: str) -> None:
        super().__init__(count, heads, sizes, make)
        self.folding, self.state_dtype = folding, state
        self.name = f"gdn {state} {folding}"
        keys = self.key_heads * sizes.dims
        widths = {"q": keys, "k": keys, "v": self.width, "a": self.value_heads, "b": self.value_heads}
        self.inputs = [{n: make.weight(sizes.hidden, w) for n, w in widths.items()} for _ in range(count)]
        self.A_log = make.log_uniform(0.02, 0.3, count, self.value_heads)
        self.dt_bias = make.normal(count, self.value_heads, scale=0.5)
        self._allocate()
        facts = {"device": make.device, "ring": sizes.ring, "state": state, **self.facts}
        self.verify_plan = bind("gdn_ring_verify", draft=sizes.draft, **facts)
        self.advance_plan = bind("gdn_ring_advance", device=make.device, ring=sizes.ring)
        self.commit_plan = bind("gdn_ring_commit", folding=folding, **facts)
        self.plans = (self.verify_plan, self.advance_plan, self.commit_plan)

    def _allocate(self) -> None:
        make, sizes, dims = self.make, self.sizes, self.sizes.dims
        self.state = self.state_pool(torch.bfloat16 if self.state_dtype == "bf16" else torch.float32)
        lead = (self.count, sizes.slots)
        u, k = (*lead, self.value_heads, sizes.ring, dims), (*lead, self.key_heads, sizes.ring, dims)
        self.ring = {
            "ring_u": make.pool(*u),
            "ring_k": make.pool(*k),
            "ring_g": make.pool(*u[:-1], dtype=torch.float32),
            "ring_u_low": make.pool(*u),
            "ring_k_low": make.pool(*k),
        }
        self.write_pos = make.index([0] * sizes.slots)
        self.base = make.index([5 * row % sizes.ring for row in range(sizes.slots)])  # some rings wrap early, some late
        self.fold = make.index([0] * sizes.slots).to(torch.int8)
        self.guard(self.state, *self.ring.values())
        self.guard(self.write_pos, self.base, self.fold, dim=0)

    def start(self, slot: int, ring_row: int) -> None:
        """A new request starts with an empty history; its ring keeps the last owner's records, which nobody may read."""
        self.state[:, slot] = 0
        self.write_pos[ring_row] = 0

    def project(self, layer: int, x: torch.Tensor) -> dict[str, torch.Tensor]:
        flat = super().project(layer, x)
        heads = {"q": self.key_heads, "k": self.key_heads, "v": self.value_heads}
        return {name: t.view(t.shape[0], heads[name], -1) if name in heads else t for name, t in flat.items()}

    def verify(self, layer: int, inputs: dict[str, torch.Tensor], rows: Rows) -> torch.Tensor:
        return self.verify_plan(
            **inputs,
            A_log=self.A_log[layer],
            dt_bias=self.dt_bias[layer],
            state=self.state[layer],
            **{name: pool[layer] for name, pool in self.ring.items()},
            write_pos=self.write_pos,
            base=self.base,
            slots=rows.slots,
            rows=rows.ring_rows,
            cu_seqlens=rows.offsets,
            draft=self.sizes.draft,
            null_slot=NULL,
        )

    def commit(self, rows: Rows, accept: torch.Tensor, finished: Sequence[int]) -> None:
        margin = None if self.folding == "every" else self.sizes.draft
        self.advance_plan(
            self.write_pos, self.fold, rows.ring_rows, rows.slots, accept, ring=self.sizes.ring, margin=margin, null_slot=NULL
        )
        self.fold[list(finished)] = 1  # nothing stays pending in a state that is handed on
        cursors = {"write_pos": self.write_pos, "base": self.base, "fold": self.fold}
        self.commit_plan(
            state=self.state,
            **self.ring,
            **cursors,
            slots=rows.slots,
            rows=rows.ring_rows,
            null_slot=NULL,
            folding=self.folding,
        )

    def pending(self, ring_row: int) -> bool:
        return bool(self.write_pos[ring_row] != 0)

    def memory(self) -> Memory:
        ring = sum(pool[0, 0].nbytes for pool in self.ring.values())
        return Memory(ring, self._would_be_snapshots())


class Pass(NamedTuple):
    """One layer's part of a verify pass, as the check needs it: the op's inputs and output."""

    inputs: dict[str, torch.Tensor]
    o: torch.Tensor


class Stack:
    """Embedding, and for each layer: RMS norm, projections, the op, projection back, residual."""

    def __init__(self, sizes: Sizes, make: Maker) -> None:
        self.sizes, self.make = sizes, make
        ring = KdaLayers("ring", 2, sizes.kda_heads, sizes, make, lower_bound=-5.0)
        snapshot = KdaLayers("snapshot", 1, sizes.kda_heads, sizes, make, lower_bound=None)
        every = GdnLayers("every", 2, sizes.gdn_heads, sizes, make, state="bf16")
        lazy = GdnLayers("lazy", 1, sizes.gdn_heads, sizes, make, state="f32")
        self.groups: list[Layers] = [ring, snapshot, every, lazy]
        # group, and number in the group
        self.order: list[tuple[Layers, int]] = [(ring, 0), (every, 0), (snapshot, 0), (lazy, 0), (ring, 1), (every, 1)]
        self.embedding = make.normal(sizes.vocabulary, sizes.hidden).bfloat16()

    def rows(self, places: Sequence[tuple[int, int] | None]) -> Rows:
        """Index tensors from each batch row's slot and ring row; None is a padded row."""
        slots, ring_rows = zip(*(place or (NULL, NULL) for place in places), strict=True)
        windows = [self.sizes.window_rows - 1 if place is None else row for row, place in enumerate(places)]
        offsets = range(0, (len(places) + 1) * self.sizes.draft, self.sizes.draft)
        return Rows(*map(self.make.index, (slots, ring_rows, windows, offsets)))

    def verify(self, tokens: torch.Tensor, rows: Rows) -> list[Pass]:
        """Run the draft windows [B * T] through all layers; nothing is committed."""
        x = self.embedding[tokens]
        passes = []
        for group, layer in self.order:
            inputs = group.project(layer, _rms_norm(x))
            o = group.verify(layer, inputs, rows)
            x = x + o.flatten(1) @ group.out[layer]
            passes.append(Pass(inputs, o))
        return passes

    def commit(self, rows: Rows, accept: torch.Tensor, finished: Sequence[int]) -> None:
        """Commit the accepted prefixes, one call a group and op; `finished` ring rows are left with nothing pending."""
        for group in self.groups:
            group.commit(rows, accept, finished)

    def start(self, slot: int, ring_row: int) -> None:
        """Give a slot and a ring row to a new request."""
        for group in self.groups:
            group.start(slot, ring_row)


def _rms_norm(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)
