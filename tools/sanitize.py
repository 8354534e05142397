"""Run parity cases of the Triton kernels under compute-sanitizer, many processes at a time; needs a GPU.

    python tools/sanitize.py                                  memcheck and initcheck over every Triton kernel's cases
    python tools/sanitize.py --tool racecheck -k kda          racecheck over the kernels of one system

Each process has a share of the cases and no memory cache of torch's, so that every tensor is an allocation of its own. Compile
first (run the tests once): under a sanitizer compiling takes minutes. Exit status: 0 clean, 1 a finding, a failed case, or a
process that did not end in time.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests" / "test_parity.py"
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


@dataclass
class Share:
    """Cases of one process, and its files."""

    tool: str
    cases: list[str]
    log: Path
    output: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = ["compute-sanitizer", "--tool", self.tool, "--log-file", str(self.log), "--error-exitcode", "9"]
        command += [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *self.cases]
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
            return "did not end in time"
        found = SUMMARY.findall(self.log.read_text()) if self.log.exists() else []
        if not found:
            return f"no summary, exit status {status}: {self.output.read_text()[-400:]}"
        if status or int(found[-1]):
            return f"{found[-1]} findings, exit status {status}: {self.log.read_text()[:2000]} {self.output.read_text()[-400:]}"
        return None


def collect(expression: str) -> list[str]:
    """Ids of the parity cases that `-k expression` selects."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--collect-only", "-k", expression, str(TESTS)]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return [str(TESTS) + "::" + line.partition("::")[2] for line in listed if "test_kernel_agrees" in line]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sanitize.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", action="append", choices=("memcheck", "initcheck", "racecheck", "synccheck"))
    parser.add_argument("-k", dest="expression", default="triton", help="which cases, as for pytest")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--limit-seconds", type=float, default=540.0)
    args = parser.parse_args(argv)
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    cases = collect(args.expression)
    if not cases:
        parser.error(f"no case matches {args.expression!r}")
    deadline = time.monotonic() + args.limit_seconds
    bad = 0
    for tool in args.tool or ("memcheck", "initcheck"):
        with tempfile.TemporaryDirectory() as folder:
            shares = [
                Share(tool, cases[i :: args.processes], Path(folder, f"{i}.log"), Path(folder, f"{i}.out"))
                for i in range(min(args.processes, len(cases)))
            ]
            for share in shares:
                share.start()
            wrong = [(share, text) for share in shares if (text := share.finish(deadline))]
        for share, text in wrong:
            print(f"{tool}: {text}\n  cases: {' '.join(share.cases)}")
        print(f"{tool}: {len(cases)} cases in {len(shares)} processes, {len(wrong)} processes with findings", flush=True)
        bad += len(wrong)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
