"""tools/sanitize.py with a stand-in for compute-sanitizer: it finds what the tool reports, and what the tool cannot report."""

from __future__ import annotations

import os
import pathlib
import runpy
import subprocess
import sys

import pytest
import torch

from kernreg import registry
from kernreg.contract import Kernel
from kernreg.device import Device

TOOL = pathlib.Path(__file__).parent.parent / "tools" / "sanitize.py"
STAND_IN = """#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
{body}
"""
BODIES = {
    "clean": ('echo "========= ERROR SUMMARY: 0 errors" > "$2"', 0, "0 processes with findings"),
    "finding": ('echo "========= ERROR SUMMARY: 3 errors" > "$2"; exit 9', 1, "3 findings"),
    "crash": ("exit 11", 1, "no summary, exit status 11"),
    "hang": ("exec sleep 60", 1, "did not end in time"),
}


@pytest.mark.parametrize("kind", BODIES)
def test_every_end_is_told_apart(tmp_path: pathlib.Path, kind: str) -> None:
    body, status, text = BODIES[kind]
    stand_in = tmp_path / "compute-sanitizer"
    stand_in.write_text(STAND_IN.format(body=body))
    stand_in.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    limit = "3" if kind == "hang" else "100"
    command = [sys.executable, str(TOOL), "--tool", "memcheck", "-k", "gdn_ring_advance", "-k", "lazy_border"]
    done = subprocess.run([*command, "--limit-seconds", limit], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, text in done.stdout) == (status, True), done.stdout + done.stderr


def reason(kernels: registry.Registry, kernel: Kernel, here: Device) -> str:
    """Why the kernel does not serve the first case of its op here; empty if it does."""
    return kernel.why_not(kernels.op(kernel.op).samples.cases[0].facts, here, dict(kernel.variant().config)) or ""


def test_the_runs_cover_every_triton_kernel_and_config_value(kernels: registry.Registry, here: Device) -> None:
    found = runpy.run_path(str(TOOL))["runs"](kernels, here, [])
    every = [k for op in kernels.ops for k in kernels.kernels(op) if k.backend == "triton"]
    gpu_only = {(k.op, k.name) for k in every if here.platform != "cuda" and "needs an NVIDIA GPU" in reason(kernels, k, here)}
    expected = {(k.op, k.name) for k in every} - gpu_only
    assert {(run.variant.kernel.op, run.variant.kernel.name) for run in found} == expected
    assert len({run.id for run in found}) == len(found)
    widths = {dict(r.variant.config).get("BV") for r in found if r.variant.kernel.op == "kda_chain_verify"}
    assert len(widths) > 2


def test_a_failed_case_is_named(kernels: registry.Registry, here: Device, device: str) -> None:
    tool = runpy.run_path(str(TOOL))
    run = next(run for run in tool["runs"](kernels, here, ["gdn_ring_advance"]) if run.case.batch)
    assert tool["failures"](kernels, run, device) == []
    tool["failures"].__globals__["on_device"] = lambda function, device: lambda **arguments: None
    assert any(run.id in text for text in tool["failures"](kernels, run, device))


def test_a_tensor_goes_over_with_its_storage_and_comes_back(device: str) -> None:
    storage = torch.arange(12.0)
    windows = storage.as_strided((4, 3), (2, 1), 1)  # rows overlap

    def add_one(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert (x.device.type, x.stride(), x.storage_offset()) == (device, (2, 1), 1)
        assert x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        return x[0].add_(1)

    result = runpy.run_path(str(TOOL))["on_device"](add_one, device)(x=windows, y=storage)
    assert storage.tolist() == [0.0, 2.0, 3.0, 4.0, *range(4, 12)]
    assert result.tolist() == [2.0, 3.0, 4.0]
