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
        config={"BV": (32, 64), "num_warps": (4, 8)},
        default={"BV": 64, "num_warps": 8},
        why_not=_limits.whole_ring,
        sources=_COMMON,
        doc="a program per value head and V tile; the whole ring in one product",
    ),
    Kernel(
        op="gdn_ring_commit",
        name="triton.head_group",
        target="kernreg_triton.gdn_ring_commit:head_group",
        config={"BV": (32,), "num_warps": (4, 8), "stages": (1, 2, 3)},
        default={"BV": 32, "num_warps": 4, "stages": 3},
        why_not=_limits.gdn_ring_commit,
        sources=_COMMON,
        doc="a program per key head serves its value heads; 16 records a product, parts stacked along the reduction",
    ),
    Kernel(
        op="gdn_ring_commit",
        name="triton.sequential",
        target="kernreg_triton.gdn_ring_commit:sequential",
        config={"BV": (32, 64, 128), "num_warps": (4, 8), "layers": (1, 4)},
        default={"BV": 64, "num_warps": 4, "layers": 4},
        why_not=_limits.tile_in_registers,
        sources=_COMMON,
        doc="rank-1 updates in fp32 over the records that are there: time follows the history, not the ring",
    ),
    Kernel(
        op="gdn_ring_commit",
        name="triton.by_history",
        target="kernreg_triton.gdn_ring_commit:by_history",
        config={"BV": (64, 128), "num_warps": (4, 8), "layers": (1, 4), "stages": (2, 3)},
        default={"BV": 64, "num_warps": 4, "layers": 1, "stages": 2},
        why_not=_limits.tile_in_registers,
        sources=_COMMON,
        doc="sequential up to 8 records, products of 32 records for rows with more",
    ),
)

_VERIFY = (
    Kernel(
        op="gdn_ring_verify",
        name="triton.chunked",
        target="kernreg_triton.gdn_ring_verify:chunked",
        config={"BV": (16, 32), "tiles": (1, 2, 4, 8), "stages": (1, 3), "registers": (128, 168, 255)},
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
_COPY = (*_COMMON, "kernreg_triton._accepted")

_KDA = (
    Kernel(
        op="kda_chain_verify",
        name="triton.unfused",
        target="kernreg_triton.kda_chain_verify:unfused",
        config={"BV": (8, 16, 32, 64), "num_warps": (1, 2, 4, 8)},
        default={"BV": 32, "num_warps": 4},
        why_not=_limits.kda,
        sources=_KDA_STEP,
        doc="convolution and gates of all tokens, then the recurrence by V tiles; serves ragged windows and draft trees",
    ),
    Kernel(
        op="kda_chain_verify",
        name="triton.fused",
        target="kernreg_triton.kda_chain_verify:fused",
        config={"BV": (4, 8, 16, 32, 64), "num_warps": (2, 4, 8)},
        default={"BV": 16, "num_warps": 4},
        why_not=_limits.kda_fused,
        sources=_KDA_STEP,
        doc="one launch: each V tile computes convolution and gates for itself",
    ),
    Kernel(
        op="kda_ring_commit",
        name="triton.replay",
        target="kernreg_triton.kda_ring_commit:replay",
        config={"BV": (8, 16, 32, 64), "num_warps": (1, 2, 4, 8)},
        default={"BV": 32, "num_warps": 2},
        why_not=_limits.kda,
        sources=(*_KDA_STEP, "kernreg_triton._accepted"),
        doc="verify's own step over the accepted records, one program per layer, row, value head and V tile",
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
