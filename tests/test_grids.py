"""The default grids: what they cover, their order, and calls that walk through a pool."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernreg import registry
from kernreg.dispatch import complete
from kernreg.numerics import facts_key
from kernreg.rows import token_bounds
from kernreg.tuning import cells, grids
from kernreg.tuning.cells import Cell, Grid

OPS = tuple(registry.default().ops)
ROWS = {
    "gdn_ring_commit": 24,
    "gdn_ring_verify": 30,
    "gdn_ring_advance": 4,
    "kda_chain_verify": 40,
    "kda_ring_commit": 4,
    "kda_snapshot_commit": 2,
    "conv_window_commit": 2,
}


def grid_of(op: str) -> Grid:
    return grids.grid(registry.default(), op)


def test_every_op_has_a_grid() -> None:
    assert set(grids.GRIDS) == set(OPS) == set(ROWS)
    with pytest.raises(ValueError, match="nothing has no grid"):
        grids.grid(registry.default(), "nothing")


@pytest.mark.parametrize("op", OPS)
def test_a_grid_is_even_from_the_start_and_within_memory(op: str) -> None:
    grid = grid_of(op)
    rows = [facts_key(cell.row) for cell in grid.cells]
    assert len(set(rows)) == ROWS[op]
    assert len(grid.cells) == len({(facts_key(c.row), facts_key(c.where)) for c in grid.cells}), "a cell stands twice"
    anchors = [cell.anchor for cell in grid.cells]
    assert anchors == sorted(anchors, reverse=True), "anchors come first"
    anchored = Counter(row for row, anchor in zip(rows, anchors, strict=True) if anchor)
    assert set(anchored) == set(rows) and max(anchored.values()) <= 2 * min(anchored.values())
    first = Counter(rows[: 4 * len(set(rows))])
    assert set(first) == set(rows), "a run that is stopped early has no cell of some row"
    for cell in grid.cells:
        assert set(cell.row) == set(grid.row_keys) and set(cell.facts) == set(grid.op.facts)
        assert cell.facts == {**cell.facts, **cell.row, **cell.shown} == complete(grid.op, cell.facts)
        assert cell.copies * cell.touched >= cells.COLD_BYTES
        assert cell.work * cell.copies < 100e9


@pytest.mark.parametrize("op", OPS)
def test_shards_share_the_rows(op: str) -> None:
    grid = grid_of(op)
    shards = [cells.shard(grid, part).cells for part in ("1/3", "2/3", "3/3")]
    assert sorted(map(repr, grid.cells)) == sorted(repr(cell) for shard in shards for cell in shard)
    assert not {facts_key(c.row) for c in shards[0]} & {facts_key(c.row) for c in shards[1]}
    with pytest.raises(ValueError, match="a shard looks like"):
        cells.shard(grid, "4/3")


def test_the_grids_cover_what_engines_serve() -> None:
    verify, commit, gdn = map(grid_of, ("kda_chain_verify", "kda_ring_commit", "gdn_ring_commit"))
    for mode in ("ring", "snapshot"):
        served = {(c.facts["heads"], c.facts["draft"], c.batch) for c in verify.cells if c.facts["mode"] == mode}
        assert served == {(h, t, b) for h in grids.KDA_HEADS for t in (3, 4, 8, 16) for b in (1, 4, 16, 64, 128, 256)}
    assert {(c.facts["ring"], c.facts["heads"]) for c in commit.cells} == {(t, h) for t in (3, 4, 8, 16) for h in grids.KDA_HEADS}
    served = {(c.facts["ring"], c.facts["folding"], c.facts["track"]) for c in gdn.cells}
    assert served == {(r, f, t) for r in (16, 32, 64, 128) for f in ("every", "lazy") for t in (False, True)}
    assert {c.facts["heads"] for c in gdn.cells} == {"48/16", "24/8", "12/4", "6/2"}


# Bytes by hand, and microseconds that they take at the copy bandwidth of an H200.
def test_the_limit_of_a_cell_is_what_must_move() -> None:
    def one(op: str, batch: int, **wanted: Any) -> Cell:
        return next(c for c in grid_of(op).cells if c.batch == batch and wanted.items() <= {**c.facts, **c.load}.items())

    cell = one("gdn_ring_commit", 128, ring=16, heads="48/16", state="bf16", history=4, track=False)
    state, records = 48 * 128 * 128 * 2, 4 * ((48 * 128 + 16 * 128) * 4 + 48 * 4)
    assert cell.work == 48 * 128 * (2 * state + records)
    assert cell.work / 4.27e6 == pytest.approx(4720, rel=0.01)  # us
    cell = one("kda_chain_verify", 128, mode="ring", draft=4, heads="8/8")
    assert cell.work / 4.27e6 == pytest.approx(20.6, rel=0.02)
    assert one("kda_chain_verify", 128, mode="ring", draft=8, heads="8/8").work / 4.27e6 == pytest.approx(25.2, rel=0.02)
    assert one("kda_ring_commit", 64, ring=4, heads="8/8", accept=4, track=False).work / 4.27e6 == pytest.approx(332, rel=0.05)
    cell = one("gdn_ring_verify", 128, ring=16, draft=8, heads="48/16", state="bf16")
    assert cell.work / 4.27e6 == pytest.approx(64.9, rel=0.05)


# --- calls that walk through a pool

TINY = {
    "gdn_ring_verify": {"heads": "2/1", "k_dim": 64, "v_dim": 16, "act": "f16", "ring_dtype": "f16", "state": "f32"},
    "kda_chain_verify": {"heads": "2/1", "k_dim": 64, "v_dim": 16, "act": "f16", "weight": "f16"},
    "kda_ring_commit": {"heads": "2/1", "k_dim": 64, "v_dim": 16, "act": "f16"},
    "kda_snapshot_commit": {"value_heads": 2, "k_dim": 64, "v_dim": 16},
    "conv_window_commit": {"dim": 64, "act": "f16"},
    "gdn_ring_advance": {},
    "gdn_ring_commit": {"heads": "2/1", "k_dim": 64, "v_dim": 16, "ring_dtype": "f16"},
}


def tiny(op: str) -> tuple[Grid, Cell]:
    """A cell of the grid with three copies of two rows of a tiny pool."""
    grid = grid_of(op)
    cell = next(c for c in grid.cells if c.facts.get("mode") != "snapshot")
    load = {**cell.load, "layers": 2} if "layers" in cell.load else cell.load
    return grid, replace(cell, facts={**cell.facts, **TINY[op]}, batch=2, load=load, work=1, touched=int(cells.COLD_BYTES / 2.5))


@pytest.mark.parametrize("op", OPS)
def test_a_rotation_visits_each_row_of_its_pool_once(op: str) -> None:
    grid, cell = tiny(op)
    rotation = cells.Rotation.make(grid, cell, "cpu")
    assert len(rotation.calls) == cell.copies == 3
    reference = registry.default().load(registry.default().kernel(op, "torch.reference"))
    slots = [int(slot) for call in rotation.calls for slot in call[grid.op.batch]]
    assert len(set(slots)) == 6
    for call in rotation.calls:
        assert call[grid.op.batch].shape == (2,)
        reference(**call)  # a broken slice of tokens or windows does not run
    rotation.reset()
    for tensor, saved in rotation.kept:
        assert torch.equal(tensor, saved)


@pytest.mark.parametrize("op", ["gdn_ring_verify", "kda_chain_verify"])
def test_calls_have_their_own_tokens(op: str) -> None:
    grid, cell = tiny(op)
    rotation = cells.Rotation.make(grid, cell, "cpu")
    reference = registry.default().load(registry.default().kernel(op, "torch.reference"))
    whole = reference(**rotation.inputs)
    assert whole.isfinite().all()
    again = cells.Rotation.make(grid, cell, "cpu")
    parts = torch.cat([reference(**call) for call in again.calls])
    assert torch.equal(whole, parts)
    tokens = int(cell.facts["draft"]) * 2
    assert all(call["a"].shape[0] == tokens for call in rotation.calls)


def test_a_part_of_ragged_rows_has_its_windows() -> None:
    op = registry.default().op("gdn_ring_verify")
    inputs: dict[str, Any] = dict.fromkeys(op.signature.parameters)
    inputs |= {"slots": torch.arange(3), "cu_seqlens": torch.tensor([2, 5, 5, 9]), "q": torch.arange(9.0)}
    cut = cells.part(op.tensors, inputs, token_bounds(op.tensors, inputs, "slots"), 1, 2)
    assert cut["slots"].tolist() == [1, 2]
    assert cut["cu_seqlens"].tolist() == [0, 0, 4]
    assert cut["q"].tolist() == [5.0, 6.0, 7.0, 8.0]


def test_a_pool_serves_the_cells_of_its_block() -> None:
    grid, cell = tiny("kda_ring_commit")
    pool = cells.Pool("cpu")
    first = pool.turn(grid, cell)
    assert first.inputs["accept"].unique().tolist() == [cell.load["accept"]]
    second = pool.turn(grid, replace(cell, load={**cell.load, "accept": 1}))
    assert second is first and second.inputs["accept"].unique().tolist() == [1]
    third = pool.turn(grid, replace(cell, batch=1))
    assert third is not first and third.calls[0]["accept"].shape == (1,)
    pool.release()
    assert pool.rotation is None


def test_a_walk_makes_every_call_from_cursors_put_back() -> None:
    grid, cell = tiny("gdn_ring_advance")
    rotation = cells.Rotation.make(grid, cell, "cpu")
    rotation.inputs["write_pos"].zero_()
    seen: list[tuple[int, ...]] = []
    rotation.walk(lambda rows, write_pos, **more: seen.append((*write_pos.unique().tolist(), *rows.tolist())))
    assert [position for position, *_ in seen] == [4] * cell.copies
    assert len({row for _, *rows in seen for row in rows}) == 2 * cell.copies
