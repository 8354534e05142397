"""Run the sample cases of the Triton kernels under compute-sanitizer, many processes at a time; needs a GPU.

    python tools/sanitize.py                                  memcheck and initcheck over every Triton kernel's cases
    python tools/sanitize.py --tool racecheck -k kda          racecheck over the kernels of one system

Each process has a share of the cases. Inputs, references and comparisons stay on the CPU, so that only Triton kernels run
under the sanitizer, and every tensor is an allocation of its own. Compile first (run the tests once): under a sanitizer
compiling takes minutes. Exit status: 0 clean, 1 a finding, a failed case, or a process that did not end in time.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kernreg import registry
from kernreg.contract import Case, Variant
from kernreg.device import Device, current
from kernreg.dispatch import launcher

SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


class Run(NamedTuple):
    """One variant on one case."""

    variant: Variant
    case: Case

    @property
    def id(self) -> str:
        return f"{self.variant.kernel.op} {self.variant.id} {self.case.id}"


def device() -> Device:
    """This GPU; without one, Triton's interpreter."""
    found = current()
    return found if found.platform == "cuda" else Device.interpreter()


def runs(kernels: registry.Registry, here: Device, words: Sequence[str]) -> list[Run]:
    """Every case with each kernel's default config, and the first case that is served with every other config value, whose
    ids have all the words."""
    found = []
    for op in kernels.ops:
        for kernel in kernels.kernels(op):
            if kernel.backend != "triton" or kernels.missing(kernel):
                continue
            cases = kernels.op(op).samples.cases
            default = kernel.variant()
            others = [kernel.variant({name: value}) for name, values in kernel.config.items() for value in values]
            found += [Run(default, case) for case in cases if not _why_not(default, case, here)]
            for variant in others:
                found += [Run(variant, case) for case in cases if not _why_not(variant, case, here)][: variant != default]
    return [run for run in found if all(word in run.id for word in words)]


def _why_not(variant: Variant, case: Case, here: Device) -> str | None:
    return variant.kernel.why_not(case.facts, here, dict(variant.config))


def on_device(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The callable for tensors on the CPU: whole storages go to the device and come back, so strides and overlaps stay."""
    import torch

    from kernreg.ops._inputs import copy_inputs

    def call(**arguments: Any) -> Any:
        there = copy_inputs(arguments, device)
        result = function(**there)
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                value.untyped_storage().copy_(there[name].untyped_storage())
        return result.cpu() if isinstance(result, torch.Tensor) else result

    return call


def failures(kernels: registry.Registry, run: Run, device: str) -> list[str]:
    """The parity checks of one run that fail."""
    op = kernels.op(run.variant.kernel.op)
    reference = launcher(kernels, kernels.kernel(op.name, "torch.reference").variant(), run.case.facts)
    tested = on_device(launcher(kernels, run.variant, run.case.facts), device)
    checks = op.samples.parity(tested, reference, op.samples.make_inputs(run.case, device="cpu"))
    return [f"{run.id}: {check.name} {check.worst:.3g} of what is allowed {check.detail}" for check in checks if not check.ok]


def work(index: int, count: int, words: Sequence[str]) -> int:
    """What one process does; its runs are interleaved with the others', as a kernel's runs take about the same time."""
    import torch

    here, kernels = device(), registry.default()
    torch.set_num_threads(1)
    bad = 0
    for run in runs(kernels, here, words)[index::count]:
        print(f"at {run.id}", flush=True)
        wrong = failures(kernels, run, "cuda" if here.platform == "cuda" else "cpu")
        bad += len(wrong)
        print("\n".join(wrong), end="\n" if wrong else "", flush=True)
    return 1 if bad else 0


@dataclass
class Share:
    """One process under the sanitizer, and its files."""

    tool: str
    work: list[str]
    log: Path
    output: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = ["compute-sanitizer", "--tool", self.tool, "--log-file", str(self.log), "--error-exitcode", "9"]
        command += [sys.executable, __file__, *self.work]
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)

    def finish(self, deadline: float) -> str | None:
        """What is wrong, or None."""
        assert self.process is not None
        try:
            status = self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            return f"did not end in time: {self._said()}"
        found = SUMMARY.findall(self.log.read_text()) if self.log.exists() else []
        if not found:
            return f"no summary, exit status {status}: {self._said()}"
        if status or int(found[-1]):
            return f"{found[-1]} findings, exit status {status}: {self.log.read_text()[:2000]} {self._said()}"
        return None

    def _said(self) -> str:
        return self.output.read_text()[-600:]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sanitize.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", action="append", choices=("memcheck", "initcheck", "racecheck", "synccheck"))
    parser.add_argument("-k", dest="words", action="append", default=[], help="only ids with this word; repeatable")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--limit-seconds", type=float, default=540.0)
    parser.add_argument("--share", type=int, nargs=2, metavar=("INDEX", "COUNT"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.share:
        return work(args.share[0], args.share[1], args.words)
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    selected = runs(registry.default(), device(), args.words)
    if not selected:
        parser.error(f"no case has {' and '.join(args.words)}")
    deadline, bad = time.monotonic() + args.limit_seconds, 0
    count = min(args.processes, len(selected))
    words = [text for word in args.words for text in ("-k", word)]
    for tool in args.tool or ("memcheck", "initcheck"):
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            shares = [
                Share(tool, ["--share", str(i), str(count), *words], Path(folder, f"{i}.log"), Path(folder, f"{i}.out"))
                for i in range(count)
            ]
            for share in shares:
                share.start()
            wrong = [text for share in shares if (text := share.finish(deadline))]
        for text in wrong:
            print(f"{tool}: {text}")
        took = f"{time.monotonic() - start:.0f} s"
        print(f"{tool}: {len(selected)} runs in {count} processes, {took}, {len(wrong)} processes with findings", flush=True)
        bad += len(wrong)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
