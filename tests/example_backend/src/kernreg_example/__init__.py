"""A whole backend in two files: metadata here, the kernel in advance.py."""

from kernreg.contract import Backend, Kernel

BACKEND = Backend(
    name="example",
    kernels=(
        Kernel(
            op="gdn_ring_advance",
            name="example.vectorised",
            target="kernreg_example.advance:vectorised",
            why_not=lambda facts, device, config: "the example serves rings of up to 64" if facts["ring"] > 64 else None,
            doc="a few torch operations instead of a loop",
        ),
    ),
    requires=("torch",),
)
