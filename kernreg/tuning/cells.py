"""The default grid: which keys, batches and loads each op is timed on, in which order, and on which inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product, zip_longest
from typing import Any

from kernreg.contract import Case, FactValue, Op
from kernreg.dispatch import complete
from kernreg.registry import Registry

COLD_BYTES = 4e8  # inputs rotate over this much: several times the largest L2 cache there is
LAYERS = 48


@dataclass(frozen=True)
class Cell:
    """One point that is timed.

    row: the facts that the op's policy rows are keyed on. shown: the other facts that the grid varies.
    facts: the whole static key.
    load: what else the time depends on: layers, history, accepted tokens, step of the track snapshot.
    anchor: every candidate is timed here first, and those that lead go on to all cells.
    work: bytes that a call must move. touched: bytes of the pool that one copy of the inputs covers.
    """

    op: str
    row: Mapping[str, FactValue]
    shown: Mapping[str, FactValue]
    facts: Mapping[str, FactValue]
    batch: int
    load: Mapping[str, int]
    anchor: bool = False
    work: int = 0
    touched: int = 0

    @property
    def where(self) -> dict[str, FactValue]:
        """The cell within its row, as the journal has it."""
        return {**self.shown, "batch": self.batch, **self.load}

    @property
    def copies(self) -> int:
        """How many calls on different rows of the pool it takes to find none of it in the cache."""
        return int(COLD_BYTES // self.touched) + 1

    @property
    def block(self) -> tuple[object, ...]:
        """Cells with the same block can be timed on the same pool."""
        return (self.op, *((k, v) for k, v in self.facts.items() if k != "folding"), self.batch, self.load["layers"])


@dataclass(frozen=True)
class Grid:
    """An op's cells in the order they are timed, and how their inputs are made.

    row_keys: facts that a policy row names.
    case: the input case of a cell, for a pool of so many rows.
    load: writes the cell's load (history, ...) into inputs made for another cell of the same block.
    """

    op: Op
    row_keys: tuple[str, ...]
    cells: tuple[Cell, ...]
    case: Callable[[Cell, int], Case]
    load: Callable[[dict[str, Any], Cell], None]


@dataclass
class Rotation:
    """A pool that `cell.copies` calls walk through, each on its own rows.

    States keep what a call made of them: decay bounds them. Cursors and flags are put back by `reset`.
    """

    grid: Grid
    cell: Cell
    inputs: dict[str, Any]
    kept: list[tuple[Any, Any]] = field(default_factory=list)

    @staticmethod
    def make(grid: Grid, cell: Cell, device: str) -> Rotation:
        case = grid.case(cell, cell.copies * cell.batch)
        made = Rotation(grid, cell, grid.op.samples.make_inputs(case, device=device))
        made.use(cell)
        return made

    def use(self, cell: Cell) -> None:
        """Turn to another cell of the same block."""
        self.cell = cell
        self.grid.load(self.inputs, cell)
        mutated = [self.inputs[name] for name in self.grid.op.mutates if self.inputs[name] is not None]
        self.kept = [(tensor, tensor.clone()) for tensor in mutated if not tensor.dtype.is_floating_point]

    def reset(self) -> None:
        for tensor, saved in self.kept:
            tensor.copy_(saved)

    def calls(self) -> Iterator[dict[str, Any]]:
        """Keyword arguments of each copy's call."""
        batch, tensors = self.cell.batch, self.grid.op.tensors
        for first in range(0, self.cell.copies * batch, batch):
            yield {
                name: value[first : first + batch] if name in tensors and _per_row(tensors[name], value) else value
                for name, value in self.inputs.items()
            }


def _per_row(spec: Any, value: Any) -> bool:
    return value is not None and spec.dims[0] == "B"


# --- gdn_ring_commit


RINGS = (16, 32, 64, 128)
HEADS = ("48/16", "12/4")
BATCHES = (128, 8, 1, 32)
DRAFT = 4  # tokens accepted in a step
SIZES = {"bf16": 2, "f16": 2, "f32": 4}
ROWS = (("every", ("bf16", "f32")), ("lazy", ("f32",)))  # engines fold lazily only with an fp32 checkpoint


def gdn_ring_commit(op: Op, rings: Iterable[int] = RINGS, heads: tuple[str, ...] = HEADS) -> Grid:
    """Rings, fold disciplines, ranks' heads, checkpoints and batches; every row folds, in 48 layers.

    A ring that folds at every commit holds a draft or a few; one that folds lazily is full, or half full when a snapshot is
    taken soon after.
    """
    rows = [list(_commit_row(op, ring, *row, heads)) for ring, row in product(rings, ROWS)]
    cells = (cell for tier in zip_longest(*rows) for block in tier if block for cell in block)
    return Grid(op, ("ring", "folding"), tuple(cells), _commit_case, _load_commit)


def _commit_row(op: Op, ring: int, folding: str, states: tuple[str, ...], heads: tuple[str, ...]) -> Iterator[list[Cell]]:
    """Blocks of one row, those that decide most first."""
    histories = [DRAFT, min(16, ring)] if folding == "every" else [ring, ring // 2]
    main, wide, narrow = states[0], heads[0], heads[-1]
    anchors = {(main, wide, 128), (main, narrow, 1), (main, wide, 8), (states[-1], wide, 32)}
    points = list(product(states, heads, BATCHES))
    points.sort(key=lambda point: point not in anchors)  # stable: the rest stays in order
    for state, head, batch in points:
        facts: dict[str, FactValue] = {"ring": ring, "folding": folding, "heads": head, "state": state}
        anchor = (state, head, batch) in anchors
        yield [_commit_cell(op, facts, batch, history, anchor) for history in histories]
    for batch in (128, 8):
        tracking: dict[str, FactValue] = {"ring": ring, "folding": folding, "heads": wide, "state": main, "track": True}
        yield [_commit_cell(op, tracking, batch, histories[0], False)]


def _commit_cell(op: Op, given: Mapping[str, FactValue], batch: int, history: int, anchor: bool) -> Cell:
    facts = complete(op, given)
    load = {"layers": LAYERS, "history": history}
    if facts["track"]:
        load |= {"accept": DRAFT, "track_step": DRAFT - 1}
    value_heads, key_heads = map(int, str(facts["heads"]).split("/"))
    k_dim, v_dim = int(facts["k_dim"]), int(facts["v_dim"])
    state = LAYERS * batch * value_heads * v_dim * k_dim * SIZES[str(facts["state"])]
    parts = SIZES[str(facts["ring_dtype"])] * (2 if facts["low"] else 1)
    record = (value_heads * v_dim + key_heads * k_dim) * parts + value_heads * 4
    work = state * (3 if facts["track"] else 2) + LAYERS * batch * history * record
    return Cell(
        op.name,
        row={name: facts[name] for name in ("ring", "folding")},
        shown={name: facts[name] for name in ("heads", "state", "track")},
        facts=facts,
        batch=batch,
        load=load,
        anchor=anchor,
        work=work,
        touched=state,
    )


def _commit_case(cell: Cell, rows: int) -> Case:
    options = {"layers": cell.load["layers"], "history": cell.load["history"], "base": 0, "fold": 1, "fast": True, "poison": None}
    return Case("timing", cell.facts, rows, {**options, "accept": DRAFT, "track": 1})


def _load_commit(inputs: dict[str, Any], cell: Cell) -> None:
    inputs["folding"] = cell.facts["folding"]
    inputs["write_pos"].fill_(cell.load["history"])
    inputs["base"].zero_()
    inputs["fold"].fill_(1)
    if cell.facts["track"]:
        inputs["accept"].fill_(cell.load["accept"])
        inputs["track_step"].fill_(cell.load["track_step"])


GRIDS: Mapping[str, Callable[[Op], Grid]] = {"gdn_ring_commit": gdn_ring_commit}


def grid(registry: Registry, op: str) -> Grid:
    """The default grid of an op.

    Raises:
        ValueError: the op has none.
    """
    if op not in GRIDS:
        raise ValueError(f"{op} has no grid to tune (there are {', '.join(sorted(GRIDS))})")
    return GRIDS[op](registry.op(op))


def shard(whole: Grid, part: str) -> Grid:
    """``"2/3"``: the second, fifth, ... of the grid's rows, so that no row is measured on two GPUs.

    Raises:
        ValueError: not a part of a whole.
    """
    number, _, count = part.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise ValueError(f"a shard looks like 2/3; got {part!r}")
    rows = list(dict.fromkeys(tuple(cell.row.items()) for cell in whole.cells))
    mine = set(rows[int(number) - 1 :: int(count)])
    return replace(whole, cells=tuple(cell for cell in whole.cells if tuple(cell.row.items()) in mine))
