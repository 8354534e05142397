"""Timing and whole runs, on the CPU: what is timed in which order, runs that go on, processes that crash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tune_program import OP, fake_registry, small_grid
from tuning_lines import LATER, RUN, line, nothing_twice, timings
from worker_tasks import planted_few, screen_nothing, screen_on_cpu, sick, time_nothing, work

from kernreg.contract import variant_id
from kernreg.device import Device
from kernreg.numerics import facts_key
from kernreg.policy_file import parse
from kernreg.tuning import build as building
from kernreg.tuning import cells, grids, journal, measure
from kernreg.tuning import workers as workers_module
from kernreg.tuning.build import build
from kernreg.tuning.choose import KEPT_VARIANTS, Timings
from kernreg.tuning.journal import Journal
from kernreg.tuning.measure import Candidate, Effort, FakeBench, Timing
from kernreg.tuning.prices import differences
from kernreg.tuning.screen import Failure
from kernreg.tuning.tuner import CLOSE, Tuner, last_run
from kernreg.tuning.workers import Crash, Workers

GPU = Device.declared("Fake GPU", "sm_90", 132)


# --- timing, without a device


def test_contestants_are_interleaved_and_the_reset_is_taken_off() -> None:
    calls: list[str] = []

    def takes(name: str, *us: float) -> Callable[[], float]:
        """Each call takes the next of these times, and from then on the last."""

        def replay() -> float:
            calls.append(name)
            return us[min(calls.count(name), len(us)) - 1]

        return replay

    replays = {"a": takes("a", 100.0), "slow": takes("slow", 900.0)}
    reset = takes("reset", 90.0, 4.0, 40.0)  # what counts is the median
    samples = measure.interleaved(replays, reset, Effort(2, 5, 500.0), 1, lambda: calls.append("half"))
    assert samples == {"a": [60.0] * 5, "slow": [860.0] * 2}
    assert calls[:2] == ["a", "slow"] and calls.count("reset") == 7
    assert calls.index("half") == 2 + 2 * 4, "after the fourth of seven"
    assert measure.interleaved(replays, None, Effort(1, 1, 1.0), 1) == {"a": [100.0], "slow": [900.0]}
    assert measure.interleaved({}, takes("reset", 1.0), Effort(1, 1, 1.0), 1) == {}


def test_shuffled_rounds_give_each_candidate_its_replays_and_mix_them() -> None:
    order = list(measure.shuffled_rounds({"a": 5, "b": 5, "slow": 2}, seed=1))
    assert Counter(order) == {"a": 5, "b": 5, "slow": 2}
    assert all(set(order[3 * n : 3 * n + 3]) == {"a", "b", "slow"} for n in range(2))
    assert order == list(measure.shuffled_rounds({"slow": 2, "b": 5, "a": 5}, seed=1))
    assert len({tuple(measure.shuffled_rounds({"a": 1, "b": 1, "c": 1}, seed)) for seed in range(20)}) > 3


def test_short_cells_are_repeated_more_often_than_long_ones() -> None:
    full, quick = measure.EFFORT["full"], measure.EFFORT["quick"]
    assert full.replays(300, 300) > full.replays(60_000, 60_000) == full.least
    assert quick.replays(60_000, 60_000) == quick.least
    assert quick.replays(60_000, 10_000) == 1
    assert full.replays(60_000, 10_000) == full.least


def test_a_replay_is_shared_by_the_copies() -> None:
    timing = measure._timing([100.0, 200.0, 150.0], 10, {})
    assert timing.us == pytest.approx((12.0, 15.0, 18.0))
    assert timing.samples == 3
    assert measure.percentiles([5.0]) == (5.0, 5.0, 5.0)


def small_cell(**facts: Any) -> cells.Cell:
    """Three copies of two rows of a tiny pool."""
    key = {"ring": 16, "heads": "2/1", "k_dim": 64, "v_dim": 16, "state": "f32", "ring_dtype": "f16", **facts}
    cell = grids.commit_cell(OP, {"folding": "every", **key}, 2, 4, False)
    return replace(cell, load={**cell.load, "layers": 2}, touched=int(cells.COLD_BYTES / 2.5))


def test_a_rotation_touches_its_rows_once_and_puts_only_the_cursors_back() -> None:
    from kernreg_torch.gdn_ring_commit import gdn_ring_commit

    cell = small_cell()
    assert cell.copies == 3
    rotation = cells.Rotation.make(grids.gdn_ring_commit(OP), cell, "cpu")
    before = rotation.inputs["state"].clone()
    calls = rotation.calls
    slots = [slot for call in calls for slot in call["slots"].tolist()]
    assert len(set(slots)) == 6 and all(call["slots"].shape == (2,) for call in calls)
    for call in calls:
        gdn_ring_commit(**call)
    rows = [row for call in calls for row in call["rows"].tolist()]
    assert rotation.inputs["write_pos"][rows].tolist() == [0] * 6
    rotation.reset()
    assert rotation.inputs["write_pos"].tolist() == [4] * rotation.inputs["write_pos"].numel()
    assert rotation.inputs["fold"].eq(1).all() and rotation.inputs["base"].eq(0).all()
    moved = (rotation.inputs["state"] != before).flatten(2).any(-1).all(0)
    assert sorted(slots) == moved.nonzero().flatten().tolist()


def test_cells_of_a_block_share_a_pool() -> None:
    grid = grids.gdn_ring_commit(OP)
    cell = small_cell(track=True)
    longer = replace(cell, load={**cell.load, "history": 16, "accept": 2, "track_step": 1})
    assert cell.block == longer.block == replace(cell, facts={**cell.facts, "folding": "lazy"}).block
    rotation = cells.Rotation.make(grid, cell, "cpu")
    state = rotation.inputs["state"]
    rotation.use(longer)
    call = rotation.calls[0]
    assert call["state"] is state
    assert (call["write_pos"][0], call["accept"][0], call["track_step"][0]) == (16, 2, 1)


# --- workers


def test_a_process_keeps_to_tasks_of_its_kind() -> None:
    waiting = workers_module._Waiting(["a1", "a2", "b1", "a3", "b2", "c1"], kind=lambda task: task[0])
    first, second = waiting.take(None), waiting.take(None)
    assert (first, second) == (("a1", "a"), ("b1", "b"))
    assert [waiting.take("a"), waiting.take("a")] == [("a2", "a"), ("a3", "a")]
    assert [waiting.take("a"), waiting.take("b")] == [("c1", "c"), ("b2", "b")] and not waiting
    plain = workers_module._Waiting([3, 1, 2], kind=lambda task: None)
    assert [plain.take(None)[0] for _ in range(3)] == [3, 1, 2]


def test_a_crash_costs_its_task_only() -> None:
    workers = Workers(work, count=2, timeout=120)
    try:
        values = dict(workers.map(["a", "dies", "exits", "b", "raises", "c"]))
    finally:
        workers.close()
    assert {task: values[task] for task in "abc"} == {task: f"{task} done" for task in "abc"}
    assert values["dies"] == Crash("killed by signal 11", "on dies")
    assert values["exits"] == Crash("exited with status 7", "on exits")
    assert values["raises"] == Crash("ValueError: no", "on raises")


def test_a_task_that_hangs_is_ended() -> None:
    workers = Workers(work, count=1, timeout=3)
    assert workers.run("hangs").reason == "no answer within 3 s"
    workers.timeout = 120
    assert workers.run("a") == "a done"
    workers.close()


def test_a_process_that_is_no_longer_healthy_is_replaced() -> None:
    workers = Workers(work, count=1, timeout=30, healthy=sick)
    try:
        assert workers.run("a") == "a done"
        assert workers._idle == [] and workers._busy == []
        assert workers.run("b") == "b done"
    finally:
        workers.close()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[measure.GpuBench]:
    """The GPU's bench with processes that do nothing."""
    monkeypatch.setattr(measure, "screen_on_gpu", screen_nothing)
    monkeypatch.setattr(measure, "time_on_gpu", time_nothing)
    for name in ("leaves_room", "healthy"):
        monkeypatch.setattr(measure, name, workers_module.always_healthy)
    made = measure.GpuBench(0, "no such GPU", timeout=120, cores=2)
    yield made
    made.close()


def candidates(*names: str) -> list[Candidate]:
    return [Candidate(OP.name, f"fake.{name}", ()) for name in names]


def test_the_bench_keeps_its_processes(bench: measure.GpuBench) -> None:
    cell = small_cell()
    trials = [measure.Trial(c, cell.facts, "fake.reference") for c in candidates("a", "b", "c", "d")]
    pids = {bits for _, bits in bench.screen(trials)}
    timed = [bench.time(cell, candidates("a", "b"), "quick", measure.EFFORT["quick"]) for _ in range(2)]
    assert len({outcome.samples for found in timed for outcome in found.values() if isinstance(outcome, Timing)}) == 1
    assert {bits for _, bits in bench.screen(trials)} <= pids and len(pids) <= 2
    assert [found for _, found in bench.screen([replace(trials[0], compile_only=True)])] == [None]
    assert bench._timing and [worker.process.pid for worker in bench._timing._idle] == [timed[0]["fake.a"].samples]


def test_a_candidate_that_kills_the_timing_process_costs_itself(bench: measure.GpuBench) -> None:
    found = bench.time(small_cell(), candidates("a", "dies", "b"), "full", measure.EFFORT["full"])
    assert found["fake.dies"] == Failure("timing", "killed by signal 11")
    assert isinstance(found["fake.a"], Timing) and isinstance(found["fake.b"], Timing)


def test_where_memory_is_short_the_screening_processes_make_room(bench: measure.GpuBench) -> None:
    cell = replace(small_cell(), batch=128)
    list(bench.screen([measure.Trial(c, cell.facts, "fake.reference") for c in candidates("a")]))
    screening = bench._screening
    assert screening and len(screening._idle) == 1
    with pytest.raises(measure.CellError, match=r"batch=128 .*no room for the pool"):
        bench.time(cell, candidates("a"), "full", measure.EFFORT["full"])
    assert bench._screening is None and screening._idle == []
    assert bench.time(small_cell(), candidates("a"), "full", measure.EFFORT["full"])


# --- whole runs


def tuner(path: Path, bench: FakeBench, **more: Any) -> Tuner:
    fields: dict[str, Any] = {"registry": fake_registry(), "run": RUN, **more}
    return Tuner(device=GPU, grid=small_grid(), journal=Journal(path), bench=bench, **fields)


@contextmanager
def tuned(path: Path, bench: FakeBench, **more: Any) -> Iterator[Tuner]:
    made = tuner(path, bench, **more)
    try:
        yield made
    finally:
        made.journal.close()


def test_a_run_times_all_at_the_anchors_and_the_leaders_everywhere(tmp_path: Path) -> None:
    with tuned(tmp_path / "j.jsonl", FakeBench(1)) as run:
        assert run.tune()
        results = run.journal.results
    grid = small_grid()
    quick = [r for r in results if r.stage == "quick"]
    full = [r for r in results if r.stage == "full"]
    assert Counter((r.row_key, r.cell_key) for r in quick) == {
        (facts_key(c.row), facts_key(c.where)): 18 for c in grid.cells if c.anchor
    }
    per_cell = Counter((r.row_key, r.cell_key) for r in full)
    assert len(per_cell) == len(grid.cells) and set(per_cell.values()) == {KEPT_VARIANTS}
    for result in results:
        assert result.device["id"] == "fake-gpu" and result.digest and result.reference == "fake.reference" and result.date


def test_a_candidate_that_fails_costs_itself_and_is_recorded(tmp_path: Path) -> None:
    with tuned(tmp_path / "a.jsonl", FakeBench(1)) as run:
        run.tune()
        clean = run.journal.results
    winner = Counter(r.variant for r in clean if r.stage == "full").most_common(1)[0][0]
    bench = FakeBench(1, failures={winner: Failure("launch", "a\tsignal \ud800")})
    with tuned(tmp_path / "b.jsonl", bench) as run:
        assert run.tune()
        results = run.journal.results
    assert {r.variant for r in results if r.stage != "failed"} == {r.variant for r in clean} - {winner}
    assert {(r.variant, r.step, r.reason) for r in results if r.stage == "failed"} == {(winner, "launch", "a\\tsignal \\ud800")}
    assert journal.read(tmp_path / "b.jsonl") == results
    takes = [row.entries[0].use for row in parse(build(results)).ops[OP.name]]
    assert winner not in [variant_id(use.kernel, use.config) for use in takes]


def test_what_the_policy_takes_is_timed_everywhere(tmp_path: Path) -> None:
    with tuned(tmp_path / "a.jsonl", FakeBench(1)) as run:
        run.tune()
        results = run.journal.results
    row = facts_key(small_grid().cells[0].row)
    full = {r.variant for r in results if r.stage == "full" and r.row_key == row}
    mine = [r for r in results if r.timed and r.row_key == row and r.use == "fake.per_head"]
    losers = {r.variant: r for r in mine if r.variant not in full}
    small, large = (replace(losers[v], stage="full", batch=batch) for v, batch in zip(sorted(losers)[:2], (1, 8), strict=True))
    known = [replace(r, stage="bits", us=None, samples=0, batch=0, load={}, bits="1" * 16) for r in (small, large)]
    other = [replace(one, us=(9e6, 9e6, 9e6), batch=two.batch) for one, two in ((small, large), (large, small))]
    text = build([small, large, *other, *known])
    assert len(parse(text).ops[OP.name][0].entries) == 2
    keep = building.incumbents(parse(text), OP.name, GPU.id)
    with tuned(tmp_path / "b.jsonl", FakeBench(1), keep=keep) as run:
        run.tune()
        again = {r.variant for r in run.journal.results if r.stage == "full" and r.row_key == row}
    assert again == full | {small.variant, large.variant}


def test_a_cell_that_cannot_be_set_up_is_skipped(tmp_path: Path) -> None:
    class Short(FakeBench):
        def time(
            self, cell: cells.Cell, candidates: Sequence[Candidate], stage: str, effort: Effort
        ) -> dict[str, measure.Outcome]:
            if cell.batch == 128:
                raise measure.CellError("out of memory")
            return super().time(cell, candidates, stage, effort)

    with tuned(tmp_path / "j.jsonl", Short(1)) as run:
        assert run.tune() and set(run.skipped) == {"out of memory"}
        assert {r.batch for r in run.journal.results if r.timed} == {1, 8, 32}


def test_a_stopped_run_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    def stopping(after: int) -> Callable[[], bool]:
        asked = iter(range(10**9))
        return lambda: next(asked) >= after

    with tuned(tmp_path / "whole.jsonl", FakeBench(3)) as run:
        assert run.tune()
        whole, counted = build(run.journal.results), timings(run.journal.results)
    path, stops, seen = tmp_path / "parts.jsonl", 0, []
    while True:
        with tuned(path, FakeBench(3), stop=stopping(220)) as run:
            complete = run.tune()
            seen.append(len(run.journal.results))
            assert build(run.journal.results) if run.journal.results else True
        if complete:
            break
        stops += 1
        assert stops < 50
    assert stops > 2 and seen == sorted(seen)
    results = journal.read(path)
    assert nothing_twice(results) and timings(results) == counted
    assert build(results) == whole


def test_a_changed_kernel_is_measured_again_and_the_others_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j.jsonl"
    digest = fake_registry().source_digest(fake_registry().kernel(OP.name, "fake.per_head"))
    with tuned(path, FakeBench(1)) as run:
        run.tune()
        before = len(run.journal.results)
    registry = fake_registry()
    monkeypatch.setattr(registry, "source_digest", lambda kernel: "new" if kernel.name == "fake.per_head" else digest)
    with tuned(path, FakeBench(1), registry=registry) as run:
        run.tune()
        added = run.journal.results[before:]
    assert added and {r.use for r in added} == {"fake.per_head"}
    assert last_run(journal.read(path), OP.name, GPU.id) == RUN
    assert last_run([], OP.name, GPU.id) is None


def test_a_run_goes_on_only_with_the_same_software() -> None:
    lines = [line("a", 1.0), line("a", 1.0, run=LATER, software={"triton": "3.6.0"})]
    assert last_run(lines, OP.name, "nvidia-h200", {"triton": "3.6.0"}) == LATER
    assert last_run(lines, OP.name, "nvidia-h200", {"triton": "3.7.0"}) is None
    assert last_run(lines, OP.name, "nvidia-h200") == LATER


def test_two_runs_with_noise_keep_every_row(tmp_path: Path) -> None:
    with tuned(tmp_path / "a.jsonl", FakeBench(1)) as run:
        run.tune()
        first, results = build(run.journal.results), run.journal.results
    with tuned(tmp_path / "b.jsonl", FakeBench(2), run=LATER, keep=building.incumbents(parse(first), OP.name, GPU.id)) as run:
        run.tune()
        second = build(run.journal.results, previous=first)
    assert first != second and differences(parse(first), parse(second), results) == []


# --- fingerprints


class Counting(FakeBench):
    """Remembers what it was asked."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.trials: list[measure.Trial] = []
        self.timings: list[tuple[str, Effort]] = []

    def screen(self, trials: Sequence[measure.Trial]) -> measure.Screened:
        self.trials += trials
        return super().screen(trials)

    def time(self, cell: cells.Cell, candidates: Sequence[Candidate], stage: str, effort: Effort) -> dict[str, measure.Outcome]:
        self.timings.append((stage, effort))
        return super().time(cell, candidates, stage, effort)


def test_screening_leaves_a_fingerprint_for_each_variant_and_key(tmp_path: Path) -> None:
    with tuned(tmp_path / "j.jsonl", Counting(1)) as run:
        run.tune()
        results = run.journal.results
    known = {(r.variant, r.key) for r in results if r.stage == "bits"}
    timed = {(r.variant, r.key) for r in results if r.timed}
    assert timed == known and len(known) == sum(r.stage == "bits" for r in results)
    for row in {r.row_key for r in results}:
        keys = {r.key for r in results if r.row_key == row}
        full = {r.variant for r in results if r.row_key == row and r.stage == "full"}
        assert {(variant, key) for variant in full for key in keys} <= known, "of all keys of the row, for those that go on"
    assert {r.use for r in results if r.stage == "full"} == {"fake.per_head", "fake.head_group"}


def test_a_run_that_goes_on_compiles_what_it_has_screened_and_no_more(tmp_path: Path) -> None:
    path, first, second = tmp_path / "j.jsonl", Counting(1), Counting(1)
    stopped = iter([False] * 150 + [True] * 9)
    with tuned(path, first, stop=lambda: next(stopped)) as run:
        assert not run.tune()
        known = {(r.variant, r.key) for r in run.journal.results if r.stage == "bits"}
    with tuned(path, second) as run:
        assert run.tune()
        results = run.journal.results
    assert not any(trial.compile_only for trial in first.trials)
    assert {t.candidate.id for t in second.trials if t.compile_only} == {variant for variant, _ in known}
    new = [t for t in second.trials if not t.compile_only]
    assert len(new) == sum(r.stage == "bits" for r in results) - len(known), "each pair is screened once in all"
    assert sum(r.stage == "bits" for r in results) == len({(r.variant, r.key) for r in results if r.stage == "bits"})
    with tuned(path, third := Counting(1)) as run:
        assert run.tune() and third.trials == [] == third.timings, "nothing is left to do"


def test_what_fails_late_does_not_change_who_leads(tmp_path: Path) -> None:
    """A run that was killed after a leader failed goes on with the others, not with a new one in its place."""

    class Failing(FakeBench):
        def time(
            self, cell: cells.Cell, candidates: Sequence[Candidate], stage: str, effort: Effort
        ) -> dict[str, measure.Outcome]:
            found = super().time(cell, candidates, stage, effort)
            return {v: Failure("timing", "out of memory") if stage == "full" and v == bad else one for v, one in found.items()}

    with tuned(tmp_path / "clean.jsonl", FakeBench(1)) as run:
        run.tune()
        bad = next(r.variant for r in run.journal.results if r.stage == "full")
    with tuned(tmp_path / "whole.jsonl", Failing(1)) as run:
        assert run.tune()
        whole = run.journal.results
    assert any(r.stage == "failed" and r.variant == bad for r in whole)
    cut = next(n for n, r in enumerate(whole) if r.stage == "failed") + 9
    (tmp_path / "parts.jsonl").write_text("".join(f"{r.to_line()}\n" for r in whole[:cut]))
    with tuned(tmp_path / "parts.jsonl", Failing(1)) as run:
        assert run.tune()
        assert timings(run.journal.results) == timings(whole)


# --- once more


def test_close_calls_are_timed_again_and_count_together(tmp_path: Path) -> None:
    with tuned(tmp_path / "j.jsonl", FakeBench(1)) as run:
        run.tune()
        results = run.journal.results
    again = Counter((r.row_key, r.cell_key, r.variant) for r in results if r.stage == "again")
    assert set(again) <= {(r.row_key, r.cell_key, r.variant) for r in results if r.stage == "full"}
    assert {1, 3} <= set(again.values()) <= {1, 2, 3}, "what stays close is timed more often"
    for row in {r.row_key for r in results}:
        known = Timings()
        known.add([r for r in results if r.row_key == row and r.stage != "again"])
        close = {(row, one.cell, v) for one in known.table().close() for v in one.variants}
        assert close == {place for place in again if place[0] == row}
        often = {(row, one.cell, v) for one in known.table().close() for v in one.variants if one.gap <= CLOSE / 2}
        assert all(again[place] > 1 for place in often)


def test_what_was_disturbed_is_timed_again_once(tmp_path: Path) -> None:
    class Hot(Counting):
        def time(
            self, cell: cells.Cell, candidates: Sequence[Candidate], stage: str, effort: Effort
        ) -> dict[str, measure.Outcome]:
            found = super().time(cell, candidates, stage, effort)
            if cell.batch not in (8, 32) or (stage == "again" and cell.batch == 8):
                return found
            hot = {"throttle": ["hw_thermal"]} if cell.batch == 8 else {"foreign": 1}
            return {v: replace(one, conditions=hot) for v, one in found.items() if isinstance(one, Timing)}

    with tuned(tmp_path / "j.jsonl", Hot(1)) as run:
        assert run.tune()
        results = run.journal.results
        left = {(r.row_key, r.cell_key, r.variant) for r in results if r.stage == "full" and r.batch == 32}
        assert run.disturbed == len(left) > 0, "what had company again stays disturbed"
    full = {(r.row_key, r.cell_key, r.variant) for r in results if r.stage == "full" and r.batch in (8, 32)}
    assert full <= {(r.row_key, r.cell_key, r.variant) for r in results if r.stage == "again"}


def test_a_budget_shortens_timings_and_leaves_out_the_last_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**9))
    monkeypatch.setattr("kernreg.tuning.tuner.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    with tuned(tmp_path / "a.jsonl", slow := Counting(1), budget=1e9) as run:
        assert run.tune()
    assert {stage.partition(" ")[0]: effort for stage, effort in slow.timings} == dict(measure.EFFORT)
    with tuned(tmp_path / "b.jsonl", quick := Counting(1), budget=10.0) as run:
        assert run.tune()
        assert {stage for stage, _ in quick.timings} == {"quick", "full"}
        assert build(run.journal.results)
    assert all(effort.budget_us < measure.EFFORT[stage].budget_us for stage, effort in quick.timings)
    assert quick.timings[-1][1].replays(100.0, 100.0) == measure.EFFORT["full"].least


def test_an_effort_within_a_time_costs_half_of_it() -> None:
    full = measure.EFFORT["full"]
    assert full.within(1e9) == full
    assert full.within(0.002).replays(100.0, 100.0) == 10
    assert full.within(0.0).replays(100.0, 100.0) == full.least


# --- kernels with planted faults

BAD = {
    "planted.wrong": ("parity", "times what is allowed"),
    "planted.reads_past": ("parity", "nan"),
    "planted.depends_on_batch[above=1]": ("bits", "batch-variant: probe mixed, row 0: state"),
    "planted.races": ("bits", "racy: probe mixed, row "),
    "planted.cannot_compile": ("launch", "no such instruction on this chip"),
    "planted.autotunes": ("load", "tuned_online carries @triton.autotune"),
    "planted.crashes": ("launch", "killed by signal 11"),
}


class Planted(FakeBench):
    """Screens in processes of their own as on a GPU, and has every bad kernel win by far."""

    def screen(self, trials: Sequence[measure.Trial]) -> measure.Screened:
        workers = Workers(screen_on_cpu, 2, 120, kind=lambda trial: repr(trial.facts))
        try:
            for trial, value in workers.map(trials):
                yield trial, Failure("launch", value.reason) if isinstance(value, Crash) else value
        finally:
            workers.close()

    def _invented(self, cell: cells.Cell, candidate: Candidate, stage: str) -> Timing:
        us = 1.0 if candidate.id in BAD else 10.0 if candidate.use == "planted.honest" else 20.0
        return Timing((us, us, us), 7, cell.copies, {})


def planted_grid() -> cells.Grid:
    facts = {"ring": 16, "folding": "every", "state": "f32", "heads": "2/1", "k_dim": 16, "v_dim": 16, "ring_dtype": "f16"}
    timed = tuple(grids.commit_cell(OP, facts, batch, 4, True) for batch in (1, 8))
    return replace(grids.gdn_ring_commit(OP), cells=timed)


def test_planted_faults_are_found_named_and_not_chosen(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.jsonl") as book:
        run = Tuner(planted_few("planted.wins_eagerly", "planted.wins_in_graphs"), GPU, planted_grid(), book, Planted(1), RUN)
        assert run.reference.name == "torch.reference" and run.tune()
        results = book.results
    failures = {r.variant: (r.step, r.reason) for r in results if r.stage == "failed"}
    for variant, (step, reason) in BAD.items():
        assert failures[variant][0] == step and reason in failures[variant][1], failures[variant]
    assert not set(BAD) & {r.variant for r in results if r.timed}
    (row,) = [row for row in parse(build(results)).ops[OP.name] if row.devices]
    assert [entry.use.kernel for entry in row.entries] == ["planted.honest"]
    assert not [v for part in row.classes.values() for v in part if v in BAD]
    ours = next(part for part in row.classes.values() if "planted.honest" in part)
    assert not [v for v in ours if v.startswith("planted.one_ulp")], "a bit off is another class"
