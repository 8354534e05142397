"""tools/sanitize.py with a stand-in for compute-sanitizer: it finds what the tool reports, and what the tool cannot report."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

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
    command = [sys.executable, str(TOOL), "--tool", "memcheck", "-k", "gdn_ring_advance and triton and lazy_border"]
    done = subprocess.run([*command, "--limit-seconds", limit], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, text in done.stdout) == (status, True), done.stdout + done.stderr
