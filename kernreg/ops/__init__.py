"""The ops: call them as functions. Each docstring is the contract."""

from kernreg.ops.conv import conv_window_commit
from kernreg.ops.gdn import gdn_ring_advance, gdn_ring_commit, gdn_ring_verify
from kernreg.ops.kda import kda_chain_verify, kda_ring_commit, kda_snapshot_commit

__all__ = [
    "conv_window_commit",
    "gdn_ring_advance",
    "gdn_ring_commit",
    "gdn_ring_verify",
    "kda_chain_verify",
    "kda_ring_commit",
    "kda_snapshot_commit",
]
