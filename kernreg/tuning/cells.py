"""A grid of cells to time, and the inputs that calls of a cell walk through. The default grids are in `grids`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kernreg.contract import Case, FactValue, Op, Tensor
from kernreg.rows import cut, token_bounds

COLD_BYTES = 4e8  # inputs rotate over this much: several times the largest L2 cache there is


@dataclass(frozen=True)
class Cell:
    """One point that is timed.

    row: the facts that the op's policy rows are keyed on. shown: the other facts that the grid varies.
    facts: the whole static key.
    load: what else the time depends on: layers (1 if not given), history, accepted tokens, step of the track snapshot.
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
        return (self.op, *((k, v) for k, v in self.facts.items() if k != "folding"), self.batch, self.load.get("layers", 1))


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

    calls: keyword arguments of each copy's call.
    kept: cursors and flags that calls change, with what they were; `reset` puts them back. States keep what a call made of
        them: decay bounds them.
    """

    grid: Grid
    cell: Cell
    inputs: dict[str, Any]
    calls: list[dict[str, Any]] = field(default_factory=list)
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
        op = self.grid.op
        mutated = [self.inputs[name] for name in op.mutates if self.inputs[name] is not None]
        self.kept = [(tensor, tensor.clone()) for tensor in mutated if not tensor.dtype.is_floating_point]
        bounds = token_bounds(op.tensors, self.inputs, op.batch)
        self.calls = [part(op.tensors, self.inputs, bounds, copy * cell.batch, cell.batch) for copy in range(cell.copies)]

    def reset(self) -> None:
        for tensor, saved in self.kept:
            tensor.copy_(saved)

    def walk(self, call: Callable[..., Any]) -> None:
        """Every copy's call, from cursors put back."""
        self.reset()
        for arguments in self.calls:
            call(**arguments)


@dataclass
class Pool:
    """The rotation of the last cell, kept for the next ones as long as these can be timed on it."""

    device: str
    rotation: Rotation | None = None

    def turn(self, grid: Grid, cell: Cell) -> Rotation:
        """The rotation turned to a cell; a new one only where the block is another."""
        import torch

        if self.rotation is not None and self.rotation.cell.block == cell.block:
            self.rotation.use(cell)
        else:
            self.release()
            self.rotation = Rotation.make(grid, cell, self.device)
            torch.cuda.empty_cache()
        return self.rotation

    def release(self) -> None:
        """Give the memory back."""
        import torch

        self.rotation = None
        torch.cuda.empty_cache()


def part(
    tensors: Mapping[str, Tensor], inputs: Mapping[str, Any], bounds: Sequence[int], first: int, count: int
) -> dict[str, Any]:
    """The arguments of a call on `count` rows from `first` on, as views of `inputs`; pools are passed whole.

    bounds: of the rows' tokens (see `kernreg.rows.token_bounds`).
    """
    last = first + count
    return cut(
        tensors,
        inputs,
        lambda value: value[first:last],
        lambda value: value[bounds[first] : bounds[last]],
        lambda value: value[first : last + 1] - value[first],
    )


def shard(whole: Grid, share: str) -> Grid:
    """``"2/3"``: the second, fifth, ... of the grid's rows, so that no row is measured on two GPUs.

    Raises:
        ValueError: not a part of a whole.
    """
    number, _, count = share.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise ValueError(f"a shard looks like 2/3; got {share!r}")
    rows = list(dict.fromkeys(tuple(cell.row.items()) for cell in whole.cells))
    mine = set(rows[int(number) - 1 :: int(count)])
    return replace(whole, cells=tuple(cell for cell in whole.cells if tuple(cell.row.items()) in mine))
