"""tools/tune.py with invented times: what it says, what it refuses, and that it survives being killed."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import tune_program
from tune_program import fake_registry, options, tool
from tuning_lines import H200, LATER, RUN, line, nothing_twice, timings

from kernreg.policy_file import parse
from kernreg.tuning import journal
from kernreg.tuning.build import build, write
from kernreg.tuning.journal import Result


def test_the_tool_measures_builds_and_shows_the_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = tool().main
    assert main(["all", *options(tmp_path, "--dry-run")], fake_registry()) == 0
    assert "72 cells, 54 of them anchors, 972 quick timings" in capsys.readouterr().out.replace("\n", " ")
    assert not (tmp_path / "p.yaml").exists()
    assert main(["measure", *options(tmp_path, "--limit-seconds", "0", "--run", RUN)], fake_registry()) == 3
    assert main(["all", *options(tmp_path, "--run", RUN)], fake_registry()) == 0
    shown = capsys.readouterr()
    assert "use: fake." in shown.out and "wrote" in shown.err
    assert "quick screening" in shown.err and "again timing" in shown.err
    text = (tmp_path / "p.yaml").read_text()
    assert text == build(journal.read(tmp_path / "j.jsonl"))
    size = (tmp_path / "j.jsonl").stat().st_size
    assert main(["all", *options(tmp_path)], fake_registry()) == 0
    assert "up to date" in capsys.readouterr().err and (tmp_path / "j.jsonl").stat().st_size == size
    assert main(["measure", *options(tmp_path, "--again", "--run", LATER)], fake_registry()) == 0
    assert {r.run for r in journal.read(tmp_path / "j.jsonl")} == {RUN, LATER}
    assert main(["build", *options(tmp_path, "--dry-run")], fake_registry()) == 0
    assert (tmp_path / "p.yaml").read_text() == text


def test_the_tool_refuses_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = tool().main
    assert main(["build", *options(tmp_path)], fake_registry()) == 1
    assert main(["measure", *options(tmp_path, "--device", "nvidia-h200")], fake_registry()) == 1
    (tmp_path / "j.jsonl").write_text(line("nobody", 5.0, device={**H200, "id": "fake-gpu"}).to_line() + "\n")
    assert main(["build", *options(tmp_path)], fake_registry()) == 1
    errors = capsys.readouterr().err
    assert "no results" in errors and "this GPU is fake-gpu" in errors
    assert "left out: results of triton.nobody, which no backend offers any more" in errors
    assert not (tmp_path / "p.yaml").exists()


def test_shards_measured_apart_build_the_same_policy(tmp_path: Path) -> None:
    main = tool().main
    assert main(["all", *options(tmp_path, "--run", RUN)], fake_registry()) == 0
    parts = [str(tmp_path / f"{n}.jsonl") for n in (1, 2)]
    for n, part in enumerate(parts, 1):
        common = ["--journal", part, "--policy", str(tmp_path / "s.yaml"), "--fake-timer", "5", "--run", RUN]
        assert main(["measure", *common, "--shard", f"{n}/2"], fake_registry()) == 0
    both = [option for part in parts for option in ("--journal", part)]
    assert main(["build", *both, "--policy", str(tmp_path / "s.yaml"), "--fake-timer", "5"], fake_registry()) == 0
    assert (tmp_path / "s.yaml").read_text() == (tmp_path / "p.yaml").read_text()


def test_the_tool_compares_policies_and_journals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = tool().main
    for name, seed in (("a", "5"), ("b", "6")):
        files = ["--journal", str(tmp_path / f"{name}.jsonl"), "--policy", str(tmp_path / f"{name}.yaml")]
        assert main(["all", *files, "--fake-timer", seed, "--run", RUN], fake_registry()) == 0
    both = [*journal.read(tmp_path / "a.jsonl"), *(replace(r, run=LATER) for r in journal.read(tmp_path / "b.jsonl"))]
    (tmp_path / "both.jsonl").write_text("".join(f"{r.to_line()}\n" for r in both))
    capsys.readouterr()
    for sides in (["a.jsonl", "b.jsonl"], [f"both.jsonl@{RUN}", f"both.jsonl@{LATER}"]):
        assert main(["compare", *(str(tmp_path / side) for side in sides)], fake_registry()) == 0
        said = capsys.readouterr().out
        assert "from nothing: 0 of 12 rows differ" in said and "with the first in place: 0 of 12 rows differ" in said
        assert re.search(r"plain arg-min: the winner flips in \d of 72 cells", said)
        assert said.count("price of determinism in") == 2 and "72 of 72 cells, median 1.0" in said
    text = (tmp_path / "a.yaml").read_text()
    entry = next(line for line in text.splitlines() if "upto: rest" in line)
    other = text.replace(entry, re.sub(r"BV: \d+", lambda old: "BV: 16" if old[0] == "BV: 8" else "BV: 8", entry, count=1))
    assert other != text
    (tmp_path / "other.yaml").write_text(other)
    files = ["--journal", str(tmp_path / "a.jsonl")]
    assert main(["compare", str(tmp_path / "a.yaml"), str(tmp_path / "other.yaml"), *files], fake_registry()) == 0
    said = capsys.readouterr().out
    assert "as they are: 1 of 12 rows differ (8.3%)" in said and "a cell's time by up to" in said
    with pytest.raises(SystemExit):
        main(["compare", "one.yaml"], fake_registry())
    assert main(["compare", "none.jsonl", "other.jsonl"], fake_registry()) == 1


# --- killed


class Nursery:
    """Starts the tool in processes that can be killed: see tune_program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.program = subprocess.Popen(
            [sys.executable, str(Path(tune_program.__file__))],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def start(self, *arguments: str) -> int:
        assert self.program.stdin and self.program.stdout
        told = [arguments[0], *options(self.folder, "--run", RUN, *arguments[1:])]
        self.program.stdin.write(json.dumps([str(self.folder), told]) + "\n")
        return int(self.program.stdout.readline())

    def ended(self) -> int:
        assert self.program.stdin and self.program.stdout
        self.program.stdin.write("\n")
        return int(self.program.stdout.readline())

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *error: object) -> None:
        assert self.program.stdin and self.program.stdout
        self.program.stdin.close()
        self.program.wait()
        self.program.stdout.close()


def _seconds(nursery: Nursery, command: str) -> float:
    began = time.monotonic()
    nursery.start(command, "--fake-pause", "0.004")
    assert nursery.ended() == 0
    return time.monotonic() - began


def _killed(nursery: Nursery, command: str, after: float, grown: bool = False) -> bool:
    """False if it had ended before. grown: seconds count from when its first new line is written."""
    path = nursery.folder / "j.jsonl"
    before, deadline = len(_bytes(path)), time.monotonic() + 10
    child = nursery.start(command, "--fake-pause", "0.004")
    while grown and len(_bytes(path)) == before and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    return nursery.ended() == -signal.SIGKILL


def test_a_run_killed_at_fifty_random_moments_ends_as_if_undisturbed(tmp_path: Path) -> None:
    """At every moment the policy is valid; each kill loses the one measurement under way at most."""
    whole = tmp_path / "whole"
    whole.mkdir()
    with Nursery(whole) as nursery:
        measuring, building = (_seconds(nursery, command) for command in ("all", "build"))
    wanted, results = (whole / "p.yaml").read_text(), journal.read(whole / "j.jsonl")
    stale = wanted.replace("upto: 8", "upto: 9").replace("us: 1", "us: 2")
    assert parse(stale) and stale != wanted
    moments, kills, hit = random.Random(11), 0, set()
    for number in itertools.count():
        folder = tmp_path / f"parts{number}"
        folder.mkdir()
        with Nursery(folder) as nursery:
            lost = 0
            while kills < 40 and len(before := _bytes(folder / "j.jsonl")) < (whole / "j.jsonl").stat().st_size:
                if _killed(nursery, "all", moments.uniform(0.0, 0.05 * measuring), grown=moments.random() < 0.8):
                    after = _bytes(folder / "j.jsonl")
                    assert after.startswith(before[: before.rfind(b"\n") + 1]), "a whole line was lost"
                    assert not (folder / "p.yaml").exists() or parse((folder / "p.yaml").read_text())
                    kills, lost = kills + 1, lost + 1
                    hit.add(len(after))
            nursery.start("all")
            assert nursery.ended() == 0
        _is_as_if_undisturbed(folder, wanted, results, lost)
        if kills >= 40:
            break
    assert len(hit) > 20, "the kills fell on different measurements"
    with Nursery(folder) as nursery:
        for _ in range(10):
            write(folder / "p.yaml", stale)  # so that the killed process has something to write
            _killed(nursery, "build", moments.uniform(0.0, 1.2 * building))
            assert (folder / "p.yaml").read_text() in (stale, wanted)
        nursery.start("all")
        assert nursery.ended() == 0
    assert (folder / "p.yaml").read_text() == wanted


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _is_as_if_undisturbed(folder: Path, wanted: str, whole: list[Result], kills: int) -> None:
    assert (folder / "p.yaml").read_text() == wanted
    results = journal.read(folder / "j.jsonl")
    assert nothing_twice(results) and timings(results) == timings(whole)
    assert {(r.stage, r.row_key, r.cell_key, r.variant, r.us) for r in results} == {
        (r.stage, r.row_key, r.cell_key, r.variant, r.us) for r in whole
    }
    begun = (folder / tune_program.BEGUN).read_text().count("\n")
    measured: Counter[tuple[str, ...]] = Counter()
    for (stage, row, cell, _), count in timings(r for r in results if r.timed).items():
        measured[stage, row, cell] = max(measured[stage, row, cell], count)
    assert begun - measured.total() <= kills, "a kill lost more than the measurement under way"
