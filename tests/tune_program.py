"""tools/tune.py with a small grid, fake kernels and invented times, in this process or in others that can be killed.

As a program: for a line of arguments on stdin (JSON), fork a process that runs the tool, and print its number; after another
line, wait for it and print its status. Nothing heavy is imported, and a fork costs milliseconds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kernreg import ops
from kernreg.contract import Backend, Kernel
from kernreg.device import Device
from kernreg.registry import Registry
from kernreg.tuning import cells, grids
from kernreg.tuning.measure import Candidate, Effort, FakeBench, Outcome

ROOT = Path(__file__).resolve().parent.parent
OP = ops.gdn_ring_commit
BEGUN = "begun.txt"


def _on_cuda(facts: Any, device: Device, config: Any) -> str | None:
    return None if device.platform == "cuda" else "needs a GPU"


def fake_registry() -> Registry:
    """Two kernels with configs, and a reference; nothing of them is ever called."""
    registry = Registry()
    registry.add_op(OP)
    target, widths = "kernreg.contract:op", {"BV": (8, 16, 32), "num_warps": (1, 2, 4)}
    kernels = [
        Kernel(OP.name, f"fake.{name}", target, widths, {"BV": 8, "num_warps": 1}, why_not=_on_cuda)
        for name in ("per_head", "head_group")
    ]
    registry.add(Backend("fake", (Kernel(OP.name, "fake.reference", target), *kernels)))
    return registry


def small_grid(op: Any = OP) -> cells.Grid:
    return grids.gdn_ring_commit(op, rings=(16, 64), heads=("12/4",))


class Noting(FakeBench):
    """Leaves a line in a file when a timing begins."""

    folder: Path | None = None

    def time(self, cell: cells.Cell, candidates: Sequence[Candidate], stage: str, effort: Effort) -> dict[str, Outcome]:
        if self.folder:
            with open(self.folder / BEGUN, "ab", buffering=0) as file:
                file.write(f"{stage} {cell.row} {cell.where}\n".encode())
        return super().time(cell, candidates, stage, effort)


def tool() -> ModuleType:
    """tools/tune.py on the small grid."""
    spec = importlib.util.spec_from_file_location("tune", ROOT / "tools" / "tune.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.GRIDS = {OP.name: small_grid}  # type: ignore[attr-defined]
    module.grid = lambda registry, op: small_grid()  # type: ignore[attr-defined]
    module.FakeBench = Noting  # type: ignore[attr-defined]
    return module


def options(folder: Path, *more: str) -> list[str]:
    return ["--journal", str(folder / "j.jsonl"), "--policy", str(folder / "p.yaml"), "--fake-timer", "5", *more]


def main() -> None:
    tune, registry = tool(), fake_registry()
    while line := sys.stdin.readline():
        folder, arguments = json.loads(line)
        child = os.fork()
        if not child:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nowhere, stream)
            Noting.folder = Path(folder)
            os._exit(tune.main(arguments, registry))
        print(child, flush=True)
        sys.stdin.readline()  # until then the number stays the child's
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
