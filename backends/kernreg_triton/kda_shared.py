"""What verify and commit share when a head's records lie in shared memory: layouts, tiles of the state, rows of records. Gluon.

Shared memory is read by the steps of the recurrence, where it matters most: each thread needs q, k and decay of its channels,
the same for all columns. As global loads, a warp's eight copies of 64 bytes cost nearly eight times what they bring.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # its name until Triton 3.6
# Gluon's name for another shape of the same memory became public in Triton 3.7
PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.constexpr_function
def tile_layout(BV, C, LANES, warps):
    """Of pieces [BV, C] of the state: LANES lanes along a row, so that a column's sum takes log2(LANES) shuffles."""
    return gl.BlockedLayout([max(BV * LANES // (32 * warps), 1), C // LANES], [32 // LANES, LANES], [warps, 1], [1, 0])


@gluon.constexpr_function
def row_layout(K, warps):
    """Of rows [T, K]: 4 channels a thread, and no row in two warps."""
    lanes = min(K // 4, 32)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def allocate(ROWS: gl.constexpr, COLUMNS: gl.constexpr, CHUNKS: gl.constexpr):
    """CHUNKS x ROWS rows of fp32."""
    return gl.allocate_shared_memory(gl.float32, [CHUNKS, ROWS, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def by_rows(memory, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The same memory as rows that an index chooses at run time."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if PUBLIC:
        rows = memory.reinterpret(memory.dtype, [ROWS, COLUMNS], FLAT)
    else:
        rows = memory._reinterpret(memory.dtype, [ROWS, COLUMNS], FLAT)
    return rows


@gluon.jit
def pieces(row, K: gl.constexpr, C: gl.constexpr, TILE: gl.constexpr):
    """K / C pieces [1, C] of a row in shared memory."""
    x = ()
    for j in gl.static_range(K // C):
        x = x + (row.slice(j * C, C).load(gl.SliceLayout(0, TILE))[None, :],)
    return x


@gluon.jit
def load_tile(p, o_v, o_c, V: gl.constexpr, K: gl.constexpr, C: gl.constexpr):
    """Pieces [BV, C] of rows o_v of a head's state [V, K]; zero past V."""
    p_rows = p + (o_v * K)[:, None] + o_c[None, :]
    h = ()
    for j in gl.static_range(K // C):
        h = h + (gl.load(p_rows + j * C, mask=(o_v < V)[:, None], other=0.0),)
    return h


@gluon.jit
def store_tile(p, h, o_v, o_c, V: gl.constexpr, K: gl.constexpr, C: gl.constexpr):
    p_rows = p + (o_v * K)[:, None] + o_c[None, :]
    for j in gl.static_range(K // C):
        gl.store(p_rows + j * C, h[j], mask=(o_v < V)[:, None])
