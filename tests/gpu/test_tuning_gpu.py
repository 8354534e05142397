"""Timing on a real GPU: at the speed of memory, without the bad kernels, and through a kill."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import planted_kernels
import pytest
import torch
from tuning_lines import RUN, nothing_twice
from worker_tasks import planted_fast

from kernreg import device as devices
from kernreg import ops
from kernreg import registry as registries
from kernreg.dispatch import launcher
from kernreg.policy_file import parse
from kernreg.tuning import grids, journal
from kernreg.tuning.build import build
from kernreg.tuning.cells import Rotation
from kernreg.tuning.journal import Journal
from kernreg.tuning.measure import EFFORT, Candidate, GpuBench, Timing, Trial
from kernreg.tuning.tuner import Tuner

pytestmark = pytest.mark.gpu
OP = ops.gdn_ring_commit
ROOT = Path(__file__).resolve().parents[2]


def test_a_copy_is_timed_at_the_speed_of_memory() -> None:
    found = devices.current()
    cell = next(c for c in grids.gdn_ring_commit(OP).cells if c.batch == 8 and not c.facts["track"])
    bench = GpuBench(0, found.uuid, cores=2)
    kernels = [k for k in registries.default().kernels(OP.name) if k.why_not(cell.facts, found, k.default) is None]
    candidates = [Candidate.of(k.variant()) for k in kernels if k.backend != "torch"]
    try:
        screened = [bits for _, bits in bench.screen([Trial(c, cell.facts, "torch.reference") for c in candidates])]
        assert all(isinstance(bits, str) and len(bits) == 16 for bits in screened), screened
        outcomes = bench.time(cell, candidates, "full", EFFORT["full"])
        again = list(bench.screen([Trial(c, cell.facts, "torch.reference", compile_only=True) for c in candidates]))
        assert [found for _, found in again] == [None] * len(candidates)
    finally:
        bench.close()
    for name, outcome in outcomes.items():
        assert isinstance(outcome, Timing), (name, outcome)
        assert outcome.us[0] <= outcome.us[1] <= outcome.us[2]
        assert cell.work / outcome.us[1] < 8e6, "faster than any memory: the cache was timed"
        assert not outcome.conditions.get("foreign"), "the bench's own processes are not foreign"


# --- kernels with planted faults

BAD = {
    "planted.wrong": "parity",
    "planted.reads_past": "parity",
    "planted.depends_on_batch[above=1]": "bits",
    "planted.races": "bits",
    "planted.cannot_compile": "launch",
    "planted.autotunes": "load",
    "planted.crashes": "launch",
}


def test_planted_faults_are_found_named_and_not_chosen(tmp_path: Path) -> None:
    device = devices.current()
    facts = {"ring": 16, "folding": "every", "state": "bf16", "heads": "6/2"}
    cells = tuple(grids.commit_cell(OP, facts, batch, 4, True) for batch in (1, 8))
    bench = GpuBench(0, device.uuid, cores=4, registry="worker_tasks:planted_fast")
    with Journal(tmp_path / "j.jsonl") as book:
        run = Tuner(planted_fast(), device, replace(grids.gdn_ring_commit(OP), cells=cells), book, bench, RUN)
        try:
            assert run.tune() and not run.skipped
        finally:
            bench.close()
        results = book.results
    failures = {r.variant: (r.step, r.reason) for r in results if r.stage == "failed"}
    assert {variant: failures[variant][0] for variant in BAD} == BAD, failures
    (row,) = [row for row in parse(build(results)).ops[OP.name] if row.devices]
    assert {entry.use.kernel for entry in row.entries} == {"planted.wins_in_graphs"}, "launches are not what is timed"
    eager = {name: eagerly(name, cells[0]) for name in ("planted.wins_eagerly", "planted.wins_in_graphs")}
    assert eager["planted.wins_eagerly"] < eager["planted.wins_in_graphs"], "timed eagerly, the other would have won"


def eagerly(name: str, cell: grids.Cell) -> float:
    """Seconds of a call as a loop of plain launches sees them."""
    known = planted_kernels.registry()
    run = launcher(known, known.kernel(OP.name, name).variant(), cell.facts)
    calls = Rotation.make(grids.gdn_ring_commit(OP), cell, "cuda").calls[:4]
    return min(_loop(run, calls) for _ in range(5))


def _loop(run: Callable[..., object], calls: list[dict[str, object]]) -> float:
    run(**calls[0])
    torch.cuda.synchronize()
    began = time.perf_counter()
    for call in calls:
        run(**call)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / len(calls)


# --- killed


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """The whole grid of the smallest op, killed once while it measures."""
    path, policy = tmp_path / "j.jsonl", tmp_path / "p.yaml"
    command = [sys.executable, str(ROOT / "tools" / "tune.py"), "all", "--op", "conv_window_commit", "--budget-seconds", "20"]
    command += ["--journal", str(path), "--policy", str(policy)]
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while program.poll() is None and not (path.exists() and '"stage": "full"' in path.read_text(errors="replace")):
        time.sleep(0.02)
    time.sleep(random.Random(3).uniform(0.0, 1.0))
    assert program.poll() is None, "it was to be killed while it measures"
    os.killpg(program.pid, signal.SIGKILL)
    program.wait()
    kept = journal.read(path)
    assert kept and not policy.exists()
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0
    results = journal.read(path)
    assert results[: len(kept)] == kept and len(results) > len(kept)
    assert nothing_twice(results), "something was measured twice"
    assert len({r.run for r in results}) == 1 and parse(policy.read_text())
