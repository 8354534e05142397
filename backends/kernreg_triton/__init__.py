"""The Triton backend.

Names in kernel files: ``p_`` pointer, ``b_`` block value, ``o_`` offset, ``m_`` mask, ``i_`` index; ``B T H HV K V L`` dims as in
the contracts; ``BK BV BT`` tile sizes; ``UPPER_CASE`` is a compile-time constant. Importing this package imports no Triton.
"""

from kernreg.contract import Backend, Kernel
from kernreg_triton import _limits

_COMMON = ("kernreg_triton._common",)

_GDN = (
    Kernel(
        op="gdn_ring_commit",
        name="triton.per_head",
        target="kernreg_triton.gdn_ring_commit:per_head",
        config={"BV": (64,), "num_warps": (4, 8)},
        default={"BV": 64, "num_warps": 4},
        why_not=_limits.whole_ring,
        sources=_COMMON,
        doc="a program per value head and V tile; the whole ring in one product",
    ),
    Kernel(
        op="gdn_ring_commit",
        name="triton.head_group",
        target="kernreg_triton.gdn_ring_commit:head_group",
        config={"BV": (32,), "num_warps": (4,), "stages": (1, 3)},
        default={"BV": 32, "num_warps": 4, "stages": 3},
        why_not=_limits.gdn_ring_commit,
        sources=_COMMON,
        doc="a program per key head serves its value heads; 16 records a product, parts stacked along the reduction",
    ),
    Kernel(
        op="gdn_ring_commit",
        name="triton.sequential",
        target="kernreg_triton.gdn_ring_commit:sequential",
        config={"BV": (32, 64), "num_warps": (2, 4), "ahead": (0, 2)},
        default={"BV": 32, "num_warps": 4, "ahead": 0},
        why_not=_limits.tile_in_registers,
        sources=_COMMON,
        doc="rank-1 updates in fp32 over the records that are there: time follows the history, not the ring",
    ),
    Kernel(
        op="gdn_ring_commit",
        name="triton.products",
        target="kernreg_triton.gdn_ring_commit:products",
        config={"BV": (64, 128), "ahead": (0, 2)},
        default={"BV": 64, "ahead": 2},
        why_not=_limits.gdn_products,
        sources=_COMMON,
        doc="products of the records that are there, 16 or 32 at a time, in the layout that tensor cores leave",
    ),
)

_VERIFY = (
    Kernel(
        op="gdn_ring_verify",
        name="triton.chunked",
        target="kernreg_triton.gdn_ring_verify:chunked",
        config={"BV": (16, 32), "tiles": (1, 2, 4, 8), "stages": (1, 3), "registers": (168, 255)},
        default={"BV": 16, "tiles": 1, "stages": 1, "registers": 255},
        why_not=_limits.gdn_ring_verify,
        sources=_COMMON,
        doc="all tokens at once by the chunked delta rule; a warp per value head and `tiles` V tiles",
    ),
    Kernel(
        op="gdn_ring_advance",
        name="triton.rows",
        target="kernreg_triton.gdn_ring_advance:rows",
        why_not=_limits.gdn_ring_advance,
        sources=_COMMON,
        doc="one small launch over the rows",
    ),
)

_KDA_STEP = (*_COMMON, "kernreg_triton.kda_step")
_KDA_SHARED = (*_KDA_STEP, "kernreg_triton.kda_shared")
_COPY = (*_COMMON, "kernreg_triton._accepted")

_KDA = (
    Kernel(
        op="kda_chain_verify",
        name="triton.unfused",
        target="kernreg_triton.kda_chain_verify:unfused",
        config={"BV": (16, 32, 64), "num_warps": (2,)},
        default={"BV": 32, "num_warps": 2},
        why_not=_limits.kda,
        sources=_KDA_STEP,
        doc="convolution and gates of all tokens, then the recurrence by V tiles; serves ragged windows and draft trees",
    ),
    Kernel(
        op="kda_chain_verify",
        name="triton.fused",
        target="kernreg_triton.kda_chain_fused:fused",
        config={"BV": (32, 64, 128), "tiles": (1, 2), "ahead": (False, True), "num_warps": (4, 8), "registers": (128, 168)},
        default={"BV": 32, "tiles": 1, "ahead": False, "num_warps": 4, "registers": 128},
        why_not=_limits.kda_fused,
        sources=(*_KDA_SHARED, "kernreg_triton.kda_chain_verify"),
        doc="one launch; a program serves one or more V tiles of a head, with the head's records in shared memory",
    ),
    Kernel(
        op="kda_ring_commit",
        name="triton.replay",
        target="kernreg_triton.kda_ring_commit:replay",
        config={"BV": (16, 32), "num_warps": (2,)},
        default={"BV": 32, "num_warps": 2},
        why_not=_limits.kda,
        sources=(*_KDA_STEP, "kernreg_triton._accepted"),
        doc="verify's own step over the accepted records, one program per layer, row, value head and V tile",
    ),
    Kernel(
        op="kda_ring_commit",
        name="triton.shared",
        target="kernreg_triton.kda_ring_commit_shared:shared",
        config={"BV": (32, 64), "num_warps": (2, 4)},
        default={"BV": 64, "num_warps": 4},
        why_not=_limits.kda_shared,
        sources=(*_KDA_SHARED, "kernreg_triton._accepted", "kernreg_triton.kda_ring_commit"),
        doc="the same with keys and decays of all records once for each program, in shared memory",
    ),
    Kernel(
        op="kda_snapshot_commit",
        name="triton.copy",
        target="kernreg_triton.kda_snapshot_commit:copy",
        config={"BLOCK": (1024, 2048, 4096, 8192), "num_warps": (4, 8)},
        default={"BLOCK": 4096, "num_warps": 4},
        why_not=_limits.kda_copy,
        sources=_COPY,
        doc="whole states in 16-byte vectors",
    ),
    Kernel(
        op="conv_window_commit",
        name="triton.copy",
        target="kernreg_triton.conv_window_commit:copy",
        config={"BLOCK": (256, 512, 1024, 2048), "num_warps": (1, 2, 4)},
        default={"BLOCK": 1024, "num_warps": 4},
        why_not=_limits.kda_copy,
        sources=_COPY,
        doc="blocks of channels; 16-byte vectors when the channels are contiguous, any strides otherwise",
    ),
)

BACKEND = Backend("triton", kernels=(*_GDN, *_VERIFY, *_KDA), requires=("torch", "triton"))
