"""The reference of every op: one readable loop each, on any device torch runs on. Oracle of the tests and last resort.

Sums are taken in fp32, and in float64 when given float64. Index tensors are read back to the host, so a call waits for the
device: these are not kernels for serving.
"""

from kernreg.contract import Backend, Kernel

OPS = (
    "conv_window_commit",
    "gdn_ring_advance",
    "gdn_ring_commit",
    "gdn_ring_verify",
    "kda_chain_verify",
    "kda_ring_commit",
    "kda_snapshot_commit",
)

BACKEND = Backend(
    "torch",
    kernels=tuple(
        Kernel(
            op=op,
            name="torch.reference",
            target=f"kernreg_torch.{op}:{op}",
            sources=("kernreg_torch._shared",),
            capturable=False,
            doc="the contract as a loop over rows and tokens",
        )
        for op in OPS
    ),
    requires=("torch",),
)
