"""What bounds each kernel that the policy chooses, by Nsight Compute: bytes against the least possible, bandwidth, occupancy.

    python tools/bounds.py            prints a Markdown table; needs a GPU and `ncu`

The profiled process calls every plan once, with caches flushed before each kernel, and puts a fill of one element between the
calls, which tells their kernels apart. Commits are profiled on 8 layers: a layer's traffic does not depend on their number.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import kernreg
from kernreg import registry
from kernreg.contract import FactValue
from kernreg.tuning import grids
from kernreg.tuning.cells import COLD_BYTES, Cell, Grid, Rotation

LAYERS = 8
MARKER = "at::"  # PyTorch's own kernels
METRICS: Mapping[str, str] = {
    "time": "gpu__time_duration.sum",
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
    "bandwidth": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "memory_wait": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "shared_wait": "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio",
    "barrier_wait": "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
}
UNITS = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3}
BYTES = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def cells() -> Iterator[tuple[str, Cell]]:
    """A title and a cell for each row of the table."""
    ops = registry.default().ops
    commit, verify = ops["gdn_ring_commit"], ops["gdn_ring_verify"]
    gdn: dict[str, FactValue] = {"heads": "48/16"}
    commits = ((16, "bf16", 128, 4), (16, "bf16", 128, 16), (16, "f32", 64, 4), (64, "f32", 64, 64), (128, "bf16", 64, 128))
    for ring, state, batch, history in commits:
        folding = "lazy" if (history, state) == (ring, "f32") else "every"
        cell = grids.commit_cell(commit, {**gdn, "ring": ring, "state": state, "folding": folding}, batch, history, False)
        yield f"commit, ring {ring}, {history} records, {state}, batch {batch}", _fewer_layers(cell, grids.GDN_LAYERS)
    for batch in (1, 32, 128):
        given: dict[str, FactValue] = {"ring": 16, "draft": 8, "state": "bf16", "heads": "48/16"}
        yield f"verify, 8 tokens, batch {batch}", grids.gdn_verify_cell(verify, given, batch, 4, False)
    kda, replay = ops["kda_chain_verify"], ops["kda_ring_commit"]
    for draft, batch in ((4, 1), (4, 16), (4, 128), (8, 128)):
        given = {"mode": "ring", "draft": draft, "heads": "8/8"}
        yield f"KDA verify, {draft} tokens, batch {batch}", grids.kda_verify_cell(kda, given, batch, False)
    for heads, batch in (("8/8", 64), ("32/32", 1)):
        cell = grids.kda_commit_cell(replay, {"ring": 4, "heads": heads}, batch, 4, False)
        yield f"KDA commit, {heads} heads, batch {batch}", _fewer_layers(cell, grids.KDA_LAYERS)


def _fewer_layers(cell: Cell, layers: int) -> Cell:
    return replace(
        cell,
        load={**cell.load, "layers": LAYERS},
        work=cell.work * LAYERS // layers,
        touched=cell.touched * LAYERS // layers,
    )


def profiled() -> None:
    """The process that Nsight Compute looks at."""
    import torch

    marker = torch.zeros(1, device="cuda")
    kernels = registry.default()
    for _, cell in cells():
        grid: Grid = grids.grid(kernels, cell.op)
        # two copies, one to warm up and one to profile: the profiler flushes the caches itself
        rotation = Rotation.make(grid, replace(cell, touched=int(COLD_BYTES)), "cuda")
        facts: Mapping[str, Any] = cell.facts
        plan = kernreg.bind(grid.op, device="cuda", **facts).warmup()
        plan(**rotation.calls[0])
        rotation.reset()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        marker.fill_(1.0)
        plan(**rotation.calls[1])
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        print(f"chosen {plan.explain(cell.batch).variant.id}", flush=True)


def measure() -> tuple[list[str], list[dict[str, str]]]:
    """What was chosen for each cell, and Nsight Compute's rows: one for each metric of each kernel."""
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--metrics", ",".join(METRICS.values())]
    done = subprocess.run([*command, sys.executable, __file__, "--profiled"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ncu: exit status {done.returncode}: {done.stdout[-800:]} {done.stderr[-800:]}")
    lines = done.stdout.splitlines()
    table = "\n".join(line for line in lines if line.startswith('"'))
    chosen = [line.partition(" ")[2] for line in lines if line.startswith("chosen ")]
    return chosen, list(csv.DictReader(io.StringIO(table)))


def calls(rows: Sequence[Mapping[str, str]]) -> list[list[dict[str, float]]]:
    """Metrics of each kernel, by call."""
    found: list[list[dict[str, float]]] = []
    names = {metric: name for name, metric in METRICS.items()}
    for _, group in groupby(rows, key=lambda row: row["ID"]):
        part = list(group)
        if MARKER in part[0]["Kernel Name"]:
            found.append([])
            continue
        found[-1].append({names[r["Metric Name"]]: _number(r) for r in part if r["Metric Name"] in names})
    return found


def _number(row: Mapping[str, str]) -> float:
    value = float(row["Metric Value"].replace(",", "") or "nan")
    return value * UNITS.get(row["Metric Unit"], 1.0) * BYTES.get(row["Metric Unit"], 1.0)


def line(title: str, cell: Cell, chosen: str, kernels: Sequence[Mapping[str, float]]) -> str:
    """One row: sums over the call's kernels; shares and waits of the longest one."""
    total: Callable[[str], float] = lambda name: sum(kernel[name] for kernel in kernels)  # noqa: E731
    longest = max(kernels, key=lambda kernel: kernel["time"])
    moved, us = total("read") + total("written"), total("time")
    waits = {name: longest[f"{name}_wait"] for name in ("memory", "shared", "barrier")}
    wait = max(waits, key=lambda name: waits[name])
    columns = [
        title,
        f"`{chosen}`",
        f"{us:.1f}",
        f"{moved / cell.work:.2f}",
        f"{moved / us / 1e6:.2f}",
        f"{longest['bandwidth']:.0f} %",
        f"{longest['warps']:.0f} %",
        f"{longest['issue']:.0f} %",
        f"{longest['registers']:.0f}",
        f"{wait} ({waits[wait]:.1f})",
    ]
    return "| " + " | ".join(columns) + " |"


HEADER = ("call", "variant", "us", "bytes / least", "TB/s", "DRAM", "warps", "issue", "registers", "longest wait")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bounds.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.profiled:
        profiled()
        return 0
    if shutil.which("ncu") is None:
        parser.error("ncu is not on the PATH; it comes with the CUDA toolkit")
    chosen, rows = measure()
    print("| " + " | ".join(HEADER) + " |\n|" + " --- |" * len(HEADER))
    for (title, cell), variant, kernels in zip(cells(), chosen, calls(rows), strict=True):
        print(line(title, cell, variant, kernels))
    return 0


if __name__ == "__main__":
    sys.exit(main())
