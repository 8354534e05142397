"""The default grids: which keys, batches and loads each op is timed on, and in which order.

A grid lists its cells so that a run that is stopped has covered it evenly, with the anchors first: cells that between them
favour every kind of kernel. Heads are those of one rank, from the whole model down to an eighth of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product, zip_longest
from typing import Any

from kernreg.contract import Case, FactValue, Op
from kernreg.dispatch import complete
from kernreg.registry import Registry
from kernreg.tuning.cells import COLD_BYTES, Cell, Grid

SIZES = {"bf16": 2, "f16": 2, "f32": 4}
DRAFTS = (4, 8, 3, 16)


def interleaved(rows: Iterable[Iterable[list[Cell]]]) -> tuple[Cell, ...]:
    """The blocks of several rows, one of each row after the other."""
    return tuple(cell for tier in zip_longest(*rows) for block in tier if block for cell in block)


def _size(facts: Mapping[str, FactValue], name: str) -> int:
    return SIZES[str(facts[name])]


def _heads(facts: Mapping[str, FactValue]) -> tuple[int, int]:
    value_heads, key_heads = map(int, str(facts["heads"]).split("/"))
    return value_heads, key_heads


def _state_bytes(facts: Mapping[str, FactValue], value_heads: int, dtype: str) -> int:
    return value_heads * int(facts["v_dim"]) * int(facts["k_dim"]) * _size(facts, dtype)


def _nothing(inputs: dict[str, Any], cell: Cell) -> None:
    """The load was made with the inputs."""


# --- Gated DeltaNet

GDN_LAYERS = 48
RINGS = (16, 32, 64, 128)
GDN_HEADS = ("48/16", "12/4", "24/8", "6/2")
# batches of each rank: between the ends, a rank with fewer heads is like a whole model with fewer rows
GDN_BATCHES: Mapping[str, tuple[int, ...]] = {"48/16": (128, 8, 1, 32), "12/4": (128, 8, 1, 32), "24/8": (64,), "6/2": (1, 64)}
ACCEPTED = 4  # tokens a step
FOLDS = (("every", "bf16"), ("every", "f32"), ("lazy", "f32"))  # engines fold lazily only with an fp32 checkpoint


def gdn_ring_commit(op: Op, rings: Iterable[int] = RINGS, heads: tuple[str, ...] = GDN_HEADS) -> Grid:
    """Rings, fold disciplines, checkpoints, ranks' heads and batches; every row folds, in 48 layers.

    A ring that folds at every commit holds a draft or a few; one that folds lazily is full, or half full when a snapshot is
    taken soon after.
    """
    rows = [list(row(op, ring, *fold, heads)) for ring, fold in product(rings, FOLDS) for row in (_commit_row, _track_row)]
    return Grid(op, ("ring", "folding", "state", "track"), interleaved(rows), _commit_case, _load_commit)


def _commit_row(op: Op, ring: int, folding: str, state: str, heads: tuple[str, ...]) -> Iterator[list[Cell]]:
    """Blocks of one row, those that decide most first."""
    histories = _histories(ring, folding)
    wide, narrow = heads[0], heads[1] if len(heads) > 1 else heads[0]
    anchors = {(wide, 128), (narrow, 1), (wide, 8)}
    points = [(head, batch) for head in heads for batch in GDN_BATCHES[head]]
    points.sort(key=lambda point: point not in anchors)  # stable: the rest stays in order
    facts: dict[str, FactValue] = {"ring": ring, "folding": folding, "state": state}
    for head, batch in points:
        anchor = (head, batch) in anchors
        yield [commit_cell(op, {**facts, "heads": head}, batch, history, anchor) for history in histories]


def _histories(ring: int, folding: str) -> list[int]:
    return [ACCEPTED, min(16, ring)] if folding == "every" else [ring, ring // 2]


def _track_row(op: Op, ring: int, folding: str, state: str, heads: tuple[str, ...]) -> Iterator[list[Cell]]:
    """The same row where every request takes a snapshot."""
    wide, narrow = heads[0], heads[1] if len(heads) > 1 else heads[0]
    facts: dict[str, FactValue] = {"ring": ring, "folding": folding, "state": state, "track": True}
    anchors = ((wide, 128), (narrow, 1), (wide, 8))
    for head, batch in dict.fromkeys([*anchors, (wide, 32), (wide, 1)]):
        yield [commit_cell(op, {**facts, "heads": head}, batch, _histories(ring, folding)[0], (head, batch) in anchors)]


def commit_cell(op: Op, given: Mapping[str, FactValue], batch: int, history: int, anchor: bool) -> Cell:
    facts = complete(op, given)
    load = {"layers": GDN_LAYERS, "history": history}
    if facts["track"]:
        load |= {"accept": ACCEPTED, "track_step": ACCEPTED - 1}
    state = _state_bytes(facts, _heads(facts)[0], "state")
    moved = state * (3 if facts["track"] else 2) + history * _record_bytes(facts)
    return Cell(
        op.name,
        row={name: facts[name] for name in ("ring", "folding", "state", "track")},
        shown={"heads": facts["heads"]},
        facts=facts,
        batch=batch,
        load=load,
        anchor=anchor,
        work=GDN_LAYERS * batch * moved,
        touched=GDN_LAYERS * batch * state,
    )


def _record_bytes(facts: Mapping[str, FactValue]) -> int:
    """One step in a ring: u, k, their low parts, g."""
    value_heads, key_heads = _heads(facts)
    parts = _size(facts, "ring_dtype") * (2 if facts["low"] else 1)
    return (value_heads * int(facts["v_dim"]) + key_heads * int(facts["k_dim"])) * parts + value_heads * 4


def _commit_case(cell: Cell, rows: int) -> Case:
    options = {"layers": cell.load["layers"], "history": cell.load["history"], "base": 0, "fold": 1, "fast": True, "poison": None}
    return Case("timing", cell.facts, rows, {**options, "accept": ACCEPTED, "track": 1})


def _load_commit(inputs: dict[str, Any], cell: Cell) -> None:
    inputs["folding"] = cell.facts["folding"]
    inputs["write_pos"].fill_(cell.load["history"])
    inputs["base"].zero_()
    inputs["fold"].fill_(1)
    if cell.facts["track"]:
        inputs["accept"].fill_(cell.load["accept"])
        inputs["track_step"].fill_(cell.load["track_step"])


def gdn_ring_verify(op: Op, rings: Iterable[int] = RINGS, drafts: Iterable[int] = DRAFTS) -> Grid:
    """Rings, drafts, checkpoints, ranks' heads and batches; windows are full.

    With a bf16 checkpoint every commit folds, and a window meets the few records of the last step; with an fp32 one the
    history is anything up to what a window leaves room for.
    """
    keys = [key for key in product(rings, drafts, ("bf16", "f32")) if key[1] < key[0]]
    rows = [list(_gdn_verify_row(op, *key)) for key in keys]
    return Grid(op, ("ring", "draft", "state"), interleaved(rows), _gdn_verify_case, _load_gdn_verify)


def _gdn_verify_row(op: Op, ring: int, draft: int, state: str) -> Iterator[list[Cell]]:
    short = min(ACCEPTED, ring - draft)
    histories = dict.fromkeys([short] if state == "bf16" else [short, ring - draft])
    points = [("48/16", 128), ("48/16", 1), ("48/16", 32), ("48/16", 8), ("12/4", 1), ("12/4", 128)]
    for head, batch in points:
        facts: dict[str, FactValue] = {"ring": ring, "draft": draft, "state": state, "heads": head}
        anchor = head == "48/16" and batch != 8
        yield [gdn_verify_cell(op, facts, batch, history, anchor) for history in histories]


def gdn_verify_cell(op: Op, given: Mapping[str, FactValue], batch: int, history: int, anchor: bool) -> Cell:
    facts = complete(op, given)
    value_heads, key_heads = _heads(facts)
    state, tokens = _state_bytes(facts, value_heads, "state"), int(facts["draft"])
    width = 2 * key_heads * int(facts["k_dim"]) + 2 * value_heads * int(facts["v_dim"]) + 2 * value_heads  # q, k, v, o, a, b
    moved = state + (history + tokens) * _record_bytes(facts) + tokens * width * _size(facts, "act")
    return Cell(
        op.name,
        row={name: facts[name] for name in ("ring", "draft", "state")},
        shown={"heads": facts["heads"]},
        facts=facts,
        batch=batch,
        load={"history": history},
        anchor=anchor,
        work=batch * moved,
        touched=batch * state,
    )


def _gdn_verify_case(cell: Cell, rows: int) -> Case:
    options = {"history": cell.load["history"], "base": 0, "lengths": "full", "fast": True, "poison": None}
    return Case("timing", cell.facts, rows, options)


def _load_gdn_verify(inputs: dict[str, Any], cell: Cell) -> None:
    inputs["write_pos"].fill_(cell.load["history"])


def gdn_ring_advance(op: Op) -> Grid:
    """Rings and batches: cursors are so few bytes that the time is that of a launch."""
    rows = [[[_advance_cell(op, ring, batch)] for batch in (128, 1, 8, 32)] for ring in RINGS]
    return Grid(op, ("ring",), interleaved(rows), _advance_case, _load_advance)


def _advance_cell(op: Op, ring: int, batch: int) -> Cell:
    facts = complete(op, {"ring": ring})
    moved = batch * (2 * 4 + 1 + 3 * 4)  # write_pos, fold, and three index tensors
    anchor = batch in (1, 128)
    return Cell(op.name, {"ring": ring}, {}, facts, batch, {}, anchor, work=moved, touched=int(COLD_BYTES // 64))


def _advance_case(cell: Cell, rows: int) -> Case:
    return Case("timing", cell.facts, rows, {"history": 4, "accept": 4})


def _load_advance(inputs: dict[str, Any], cell: Cell) -> None:
    inputs["write_pos"].fill_(4)


# --- Kimi Delta Attention

KDA_LAYERS = 20
KDA_HEADS = ("8/8", "32/32", "16/16", "8/4", "48/16")
KDA_BATCHES = (1, 128, 16, 4, 64, 256)
MODES = ("ring", "snapshot")
MOST_BYTES = 48e9  # of one pool: a grid must fit beside an engine's weights on cards with less memory


def kda_chain_verify(op: Op, drafts: Iterable[int] = DRAFTS, heads: Iterable[str] = KDA_HEADS) -> Grid:
    """Modes, drafts, ranks' heads and batches; chains of full length, safe gate, one layer."""
    rows = [list(_kda_verify_row(op, *key)) for key in product(MODES, drafts, heads)]
    return Grid(op, ("mode", "draft", "heads"), interleaved(rows), _kda_verify_case, _nothing)


def _kda_verify_row(op: Op, mode: str, draft: int, heads: str) -> Iterator[list[Cell]]:
    for batch in KDA_BATCHES:
        cell = kda_verify_cell(op, {"mode": mode, "draft": draft, "heads": heads}, batch, batch in (1, 16, 128))
        if cell.work * cell.copies <= MOST_BYTES:
            yield [cell]


def kda_verify_cell(op: Op, given: Mapping[str, FactValue], batch: int, anchor: bool) -> Cell:
    facts = complete(op, given)
    value_heads, key_heads = _heads(facts)
    k_dim, v_dim, tokens = int(facts["k_dim"]), int(facts["v_dim"]), int(facts["draft"])
    state, act = _state_bytes(facts, value_heads, "state"), _size(facts, "act")
    channels = 2 * key_heads * k_dim + value_heads * v_dim
    # a token: mixed_qkv, the window of three inputs after it, a, b and o
    token = (4 * channels + value_heads * (k_dim + 1 + v_dim)) * act
    left = state if facts["mode"] == "snapshot" else _kda_record_bytes(facts)
    moved = state + 3 * channels * act + tokens * (token + left)
    return Cell(
        op.name,
        row={name: facts[name] for name in ("mode", "draft", "heads")},
        shown={},
        facts=facts,
        batch=batch,
        load={},
        anchor=anchor,
        work=batch * moved,
        touched=batch * state,
    )


def _kda_record_bytes(facts: Mapping[str, FactValue]) -> int:
    """One step in a ring: raw k, raw v, g, beta."""
    value_heads, key_heads = _heads(facts)
    k_dim, v_dim, act = int(facts["k_dim"]), int(facts["v_dim"]), _size(facts, "act")
    return (key_heads * k_dim + value_heads * v_dim) * act + value_heads * (k_dim + 1) * _size(facts, "state")


def _kda_verify_case(cell: Cell, rows: int) -> Case:
    return Case("timing", cell.facts, rows, {"fast": True, "poison": None})


COMMIT_BATCHES = (64, 1, 16, 256)


def kda_ring_commit(op: Op, rings: Iterable[int] = DRAFTS, heads: Iterable[str] = KDA_HEADS) -> Grid:
    """Rings of a draft's length, ranks' heads and batches, in 20 layers; all of the draft is accepted, or one token."""
    rows = [list(_kda_commit_row(op, ring, heads)) for ring in rings]
    return Grid(op, ("ring",), interleaved(rows), _kda_commit_case, _load_accept)


def _kda_commit_row(op: Op, ring: int, heads: Iterable[str]) -> Iterator[list[Cell]]:
    anchors = {("8/8", 64), ("32/32", 1), ("8/8", 1)}
    for head, batch in sorted(product(heads, COMMIT_BATCHES), key=lambda point: point not in anchors):
        facts: dict[str, FactValue] = {"ring": ring, "heads": head}
        block = [kda_commit_cell(op, facts, batch, accept, (head, batch) in anchors) for accept in (ring, 1)]
        if block[0].work * block[0].copies <= MOST_BYTES:
            yield block
    for batch in (64, 1):
        yield [kda_commit_cell(op, {"ring": ring, "heads": "8/8", "track": True}, batch, ring, False)]


def kda_commit_cell(op: Op, given: Mapping[str, FactValue], batch: int, accept: int, anchor: bool) -> Cell:
    facts = complete(op, given)
    state = _state_bytes(facts, _heads(facts)[0], "state")
    moved = state * (3 if facts["track"] else 2) + accept * _kda_record_bytes(facts)
    return Cell(
        op.name,
        row={"ring": facts["ring"]},
        shown={name: facts[name] for name in ("heads", "track")},
        facts=facts,
        batch=batch,
        load={"layers": KDA_LAYERS, "accept": accept},
        anchor=anchor,
        work=KDA_LAYERS * batch * moved,
        touched=KDA_LAYERS * batch * state,
    )


def _kda_commit_case(cell: Cell, rows: int) -> Case:
    options = {"layers": cell.load["layers"], "accept": cell.load["accept"], "track": 1, "fast": True, "poison": None}
    return Case("timing", cell.facts, rows, options)


def _load_accept(inputs: dict[str, Any], cell: Cell) -> None:
    inputs["accept"].fill_(cell.load["accept"])
    if cell.facts["track"]:
        inputs["track_step"].fill_(cell.load["accept"] - 1)


def kda_snapshot_commit(op: Op) -> Grid:
    """Copies of states: ranks' heads and batches, with and without track snapshots."""
    return _copy_grid(op, "value_heads", (8, 32, 16, 48), lambda facts: _state_bytes(facts, int(facts["value_heads"]), "state"))


def conv_window_commit(op: Op) -> Grid:
    """Copies of convolution states: ranks' channels and batches, with and without track snapshots."""
    return _copy_grid(op, "dim", (3072, 12288, 6144, 10240), lambda facts: int(facts["dim"]) * 3 * _size(facts, "act"))


def _copy_grid(op: Op, width: str, widths: Sequence[int], size: Callable[[Mapping[str, FactValue]], int]) -> Grid:
    rows = [list(_copy_row(op, width, widths, size, track)) for track in (False, True)]
    return Grid(op, ("track",), interleaved(rows), _copy_case, _load_accept)


def _copy_row(
    op: Op, width: str, widths: Sequence[int], size: Callable[[Mapping[str, FactValue]], int], track: bool
) -> Iterator[list[Cell]]:
    for wide, batch in product(widths, COMMIT_BATCHES):
        facts = complete(op, {width: wide, "draft": DRAFTS[0], "track": track})
        moved = KDA_LAYERS * batch * size(facts)
        cell = Cell(
            op.name,
            row={"track": track},
            shown={width: wide, "draft": DRAFTS[0]},
            facts=facts,
            batch=batch,
            load={"layers": KDA_LAYERS, "accept": DRAFTS[0]},
            anchor=wide == widths[0] and batch in (1, 64),
            work=moved * (4 if track else 2),
            touched=moved * 2,
        )
        if moved * (DRAFTS[0] + 2) * cell.copies <= MOST_BYTES:
            yield [cell]


def _copy_case(cell: Cell, rows: int) -> Case:
    return Case("timing", cell.facts, rows, {"layers": cell.load["layers"], "track": 1, "fast": True, "poison": None})


GRIDS: Mapping[str, Callable[[Op], Grid]] = {
    "gdn_ring_commit": gdn_ring_commit,
    "gdn_ring_verify": gdn_ring_verify,
    "gdn_ring_advance": gdn_ring_advance,
    "kda_chain_verify": kda_chain_verify,
    "kda_ring_commit": kda_ring_commit,
    "kda_snapshot_commit": kda_snapshot_commit,
    "conv_window_commit": conv_window_commit,
}


def grid(registry: Registry, op: str) -> Grid:
    """The default grid of an op.

    Raises:
        ValueError: the op has none.
    """
    if op not in GRIDS:
        raise ValueError(f"{op} has no grid to tune (there are {', '.join(sorted(GRIDS))})")
    return GRIDS[op](registry.op(op))
