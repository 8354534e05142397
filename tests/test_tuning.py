"""Measuring and building, on the CPU: journals that survive anything, a builder that is a pure function, runs that go on.

Run as a program, this file is a tuning run with invented times on an invented GPU: what the kill test kills.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from worker_tasks import sick, work

from kernreg import ops
from kernreg.contract import Backend, Kernel, variant_id
from kernreg.device import Device
from kernreg.policy_file import parse
from kernreg.registry import Registry
from kernreg.tuning import build as building
from kernreg.tuning import cells, grids, journal, measure, screen
from kernreg.tuning.build import build, leaders, scalar, write
from kernreg.tuning.journal import Journal, JournalError, Result, canonical
from kernreg.tuning.measure import Candidate, FakeBench, Timing
from kernreg.tuning.screen import Failure
from kernreg.tuning.tuner import Tuner, last_run
from kernreg.tuning.workers import Crash, Workers
from kernreg.yaml_subset import PolicyError, read

HERE = Path(__file__).resolve()
OP = ops.gdn_ring_commit
GPU = Device.declared("Fake GPU", "sm_90", 132)
RUN = "2026-11-30T10:00:00Z"
LATER = "2026-12-01T10:00:00Z"
H200 = {"id": "nvidia-h200", "name": "NVIDIA H200", "arch": "sm_90", "sms": 132}
ROW = {"ring": 16, "folding": "every"}


def line(variant: str, us: float, batch: int = 8, **more: Any) -> Result:
    """One result; `variant` is a kernel's name, or name:BV."""
    use, _, width = variant.partition(":")
    spread = more.pop("spread", 0.001)
    made = Result(
        run=RUN,
        op=OP.name,
        row=ROW,
        facts={"heads": "48/16"},
        batch=batch,
        load={"history": 4},
        use=f"triton.{use}",
        config={"BV": int(width)} if width else {},
        digest="d1",
        stage="full",
        us=(us * (1 - spread), us, us * (1 + spread)),
        samples=7,
        work=batch * 1000,
        reference="torch.reference",
        device=H200,
        software={"torch": "2.11.0", "triton": "3.6.0"},
        date=RUN,
    )
    return replace(made, **more)


def failed(variant: str, **more: Any) -> Result:
    made = line(variant, 1.0, stage="failed", batch=0, load={}, step="parity", reason="state: 9 times", **more)
    return replace(made, us=None, samples=0, work=0)


def chosen(text: str, row: int = 0) -> str:
    """What a row of the built file takes, as kernel and config."""
    use = parse(text).ops[OP.name][row].entries[0].use
    return use.kernel + ":".join(["", *map(str, use.config.values())])


# --- the journal


def test_a_line_reads_back_as_it_was() -> None:
    result = line("per_head:32", 12.345, conditions={"sm_mhz": 1980, "throttle": []}, command="tools/tune.py measure")
    assert Result.of_line(result.to_line()) == result
    assert Result.of_line(failed("per_head").to_line()) == failed("per_head")
    assert result.variant == "triton.per_head[BV=32]"


def test_every_field_has_its_place_in_the_line() -> None:
    assert sorted(journal.FIELDS) == sorted(field.name for field in fields(Result))


def test_a_file_cut_at_any_byte_loses_the_last_line_at_most(tmp_path: Path) -> None:
    results = [line("a", 1.0), failed("b"), line("c", 3.0)]
    whole = "".join(f"{result.to_line()}\n" for result in results).encode()
    ends = [n + 1 for n, byte in enumerate(whole) if byte == ord("\n")]
    path = tmp_path / "j.jsonl"
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        complete = sum(end <= size for end in ends)
        assert journal.read(path) == results[:complete]
        if size % 97 and not any(abs(size - end) < 2 for end in ends):
            continue  # opening syncs the disk
        with Journal(path) as opened:
            assert opened.results == results[:complete]
            opened.append([results[-1]])
        assert journal.read(path) == [*results[:complete], results[-1]]


def test_a_last_line_of_zeros_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(f"{line('a', 1.0).to_line()}\n".encode() + b"\0" * 40 + b"\n")
    assert len(journal.read(path)) == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("{", "Expecting"),
        ("[1]", "not a JSON object"),
        ('{"schema": 99}', "not of schema 1"),
        (line("a", 1.0).to_line().replace('"digest"', '"digits"'), "unknown field digits"),
        (line("a", 1.0).to_line().replace('"op": "gdn_ring_commit", ', ""), "no field op"),
        (line("a", 1.0).to_line().replace('"full"', '"failed"'), "a failure has no time"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damage: str, message: str) -> None:
    path = tmp_path / "j.jsonl"
    good = line("a", 1.0).to_line()
    path.write_text(f"{good}\n{damage}\n{good}\n")
    with pytest.raises(JournalError, match=rf"j\.jsonl, line 2: .*{message}"):
        Journal(path)
    with pytest.raises(JournalError):
        journal.read(path)
    assert path.read_text() == f"{good}\n{damage}\n{good}\n"


def test_a_whole_last_line_of_another_schema_is_not_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text('{"schema": 2}\n')
    with pytest.raises(JournalError, match="line 1: not of schema 1"):
        Journal(path)
    assert path.read_text() == '{"schema": 2}\n'


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.jsonl"), pytest.raises(JournalError, match="another process"):
        Journal(tmp_path / "j.jsonl")
    Journal(tmp_path / "j.jsonl").close()


def test_only_the_newest_source_of_a_kernel_counts() -> None:
    old, new = line("a", 1.0), line("a", 2.0, digest="d2", date=LATER)
    other = line("b", 1.0, digest="d0")
    elsewhere = line("a", 1.0, device={**H200, "id": "nvidia-b300"})
    assert journal.current([new, old, other, elsewhere]) == [new, other, elsewhere]


# --- choosing


def test_the_least_worst_case_wins_not_the_best_somewhere() -> None:
    results = [line("a", 1000, 8), line("b", 1300, 8), line("a", 4000, 128), line("b", 2500, 128)]
    text = build(results)
    assert chosen(text) == "triton.b"
    row = parse(text).ops[OP.name][0]
    assert (row.regret, row.entries[0].us, row.entries[0].next) == (1.3, 2500, 4000)
    assert row.entries[0].runner_up == "triton.a"
    assert dict(row.entries[0].at)["batch"] == 128
    assert row.measured[0]["batch"] == (8, 128)


def test_measured_areas_hold_only_what_was_timed() -> None:
    facts = [{"heads": h, "track": False} for h in ("48/16", "12/4")] * 2 + [{"heads": "48/16", "track": True}]
    batches = [1, 1, 8, 8, 8]
    cells = [replace(line("a", 10, batch), facts=given) for given, batch in zip(facts, batches, strict=True)]
    assert building._areas(cells) == [
        {"heads": ["12/4", "48/16"], "track": False, "batch": [1, 8]},
        {"heads": "48/16", "track": True, "batch": 8},
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("us", []),
        ("us", [0, 0, 0]),
        ("us", [3, 2, 1]),
        ("us", ["a", "b", "c"]),
        ("us", [float("nan")] * 3),
        ("us", [1, 2]),
        ("row", 5),
        ("device", None),
        ("load", 5),
        ("config", 5),
        ("batch", "x"),
        ("batch", -1),
    ],
)
def test_a_damaged_line_is_refused_with_its_place(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "journal.jsonl"
    good = line("a", 10, 8).to_line().rstrip("\n")
    path.write_text(json.dumps({**json.loads(good), field: value}) + "\n" + good + "\n")
    with pytest.raises(journal.JournalError, match=rf"journal\.jsonl.*1.*{field} is"):
        journal.read(path)


def test_microseconds_at_batch_1_do_not_outweigh_milliseconds_at_batch_128() -> None:
    results = [line("a", 18, 1), line("b", 11.5, 1), line("a", 3850, 128), line("b", 5400, 128)]
    assert chosen(build(results)) == "triton.a"


def test_equal_worst_cases_go_to_the_better_mean_then_to_the_name() -> None:
    worst = [line("a", 1200, 8), line("b", 1200, 8), line("c", 1000, 8), line("c", 3000, 128)]
    mean = [line("a", 2000, 128), line("b", 1900, 128)]
    assert chosen(build(worst + mean)) == "triton.b"
    even = [line("b", 1000, 8), line("a:16", 1004, 8), line("a:64", 999, 8)]
    assert chosen(build(even)) == "triton.a:16"


def test_a_candidate_that_failed_or_was_not_timed_everywhere_is_not_chosen() -> None:
    results = [line("fast", 10, 8), line("a", 1000, 8), line("half", 500, 8), line("a", 1000, 128), line("fast", 10, 128)]
    assert chosen(build(results)) == "triton.fast"
    assert chosen(build([*results, failed("fast")])) == "triton.a"
    retried = [line("fast", 10, batch, run=LATER) for batch in (8, 128)]
    assert chosen(build([*results, failed("fast"), *retried])) == "triton.fast"


def test_a_row_without_a_candidate_is_not_written() -> None:
    text = build([failed("a"), line("b", 5.0, row={**ROW, "ring": 32})])
    assert [row.when_text for row in parse(text).ops[OP.name]] == ["device=nvidia-h200 ring=32 folding=every", "otherwise"]


def test_an_unfinished_run_is_judged_on_what_all_share() -> None:
    quick = [line(v, us, batch, stage="quick") for v, us in (("a", 900), ("b", 1000), ("c", 1500)) for batch in (8, 128)]
    full = [line("a", 3000, 32), line("b", 1000, 32)]
    assert chosen(build(quick)) == "triton.a"
    assert chosen(build(quick + full)) == "triton.b"


def test_a_full_timing_counts_before_a_quick_one_whatever_their_order() -> None:
    results = [line("a", 100), line("a", 900, stage="quick"), line("b", 200)]
    assert chosen(build(results)) == chosen(build(results[::-1])) == "triton.a"


@pytest.mark.parametrize(
    ("gain", "spread", "kept"), [(0.02, 0.001, True), (0.05, 0.001, False), (0.05, 0.08, True), (0.12, 0.08, False)]
)
def test_an_incumbent_stays_unless_the_gain_exceeds_threshold_and_noise(gain: float, spread: float, kept: bool) -> None:
    first = build([line("old", 1000), line("new", 1100)])
    second = [line("old", 1000 * (1 + gain), run=LATER, spread=spread), line("new", 1000, run=LATER, spread=spread)]
    assert chosen(first) == "triton.old"
    text = build(second, previous=first)
    assert chosen(text) == ("triton.old" if kept else "triton.new")
    assert build(second, previous=text) == text
    assert chosen(build(second)) == "triton.new"


def test_runs_of_one_journal_are_replayed_in_order() -> None:
    first = [line("old", 1000), line("new", 1100)]
    second = [line("old", 1020, run=LATER), line("new", 1000, run=LATER)]
    assert chosen(build(first + second)) == chosen(build(second + first)) == "triton.old"
    assert build(first + second, previous=build(first)) == build(first + second)


def test_the_same_bytes_whatever_the_order_of_lines_and_shards() -> None:
    results = [
        line(v, 500 + 37 * n + ring, batch, row={**ROW, "ring": ring})
        for n, v in enumerate(("a:8", "a:16", "b"))
        for batch in (1, 8, 128)
        for ring in (16, 128, 32)
    ]
    text = build(results)
    assert [row.when[1].values for row in parse(text).ops[OP.name][:-1]] == [(16,), (32,), (128,)]
    for seed in range(5):
        random.Random(seed).shuffle(results)
        assert build(results) == text
        assert build(results, previous=text) == text


def test_stale_results_do_not_decide() -> None:
    results = [line("a", 10), line("b", 20), line("a", 30, digest="d2", date=LATER)]
    assert chosen(build(results)) == "triton.b"


def test_leaders_are_the_best_overall_and_the_best_of_each_cell() -> None:
    overall = [line(f"v{n}", 1000 + n, batch) for n in range(20) for batch in (8, 32)]
    special = [line("odd", 900, 8), line("odd", 5000, 32), *[line("out", 1, batch) for batch in (8, 32)], failed("out")]
    kept = leaders(overall + special)
    assert len(kept) == building.KEPT_VARIANTS
    assert "triton.odd" in kept and "triton.out" not in kept
    assert kept[:4] == [f"triton.v{n}" for n in range(4)]


# --- the file


PREVIOUS = """\
# an old header
schema: 1
# what we own
devices:
  nvidia-b300: {name: "NVIDIA B300", arch: "sm_103", sms: 148, measured: {date: "2026-10-01"}}   # lent
  nvidia-h200: {name: "NVIDIA H200", arch: "sm_90", sms: 132, measured: {kda_chain_verify: "2026-10-02", torch: "2.9.0"}}
ops:
  # the first system
  gdn_ring_commit:
    - when: {device: nvidia-b300, ring: 16}
      use: triton.per_head   # as measured there

    - when: {device: nvidia-h200, ring: 16}
      use: triton.old
    # any other GPU
    - when: {platform: cuda}
      use: triton.per_head
    - otherwise: {use: torch.reference}
  kda_chain_verify:
    - when: {device: nvidia-h200, draft: 4}
      use: triton.fused
    - otherwise:
        use: torch.reference
pins:
  # until the driver is fixed
  - {op: gdn_ring_commit, when: {ring: 32}, use: triton.per_head, reason: "driver bug: 12:30"}
"""


def test_what_was_not_measured_stays_as_it_is_comments_included() -> None:
    text = build([line("a", 10)], previous=PREVIOUS)
    for kept in (
        '  nvidia-b300: {name: "NVIDIA B300", arch: "sm_103", sms: 148, measured: {date: "2026-10-01"}}   # lent\n',
        "# what we own\ndevices:\n",
        "  # the first system\n  gdn_ring_commit:\n    - when: {device: nvidia-b300, ring: 16}\n"
        "      use: triton.per_head   # as measured there\n",
        "    # any other GPU\n    - when: {platform: cuda}\n      use: triton.per_head\n"
        "    - otherwise: {use: torch.reference}\n",
        "  kda_chain_verify:\n    - when: {device: nvidia-h200, draft: 4}\n      use: triton.fused\n"
        "    - otherwise:\n        use: torch.reference\n",
        "pins:\n  # until the driver is fixed\n"
        '  - {op: gdn_ring_commit, when: {ring: 32}, use: triton.per_head, reason: "driver bug: 12:30"}\n',
    ):
        assert kept in text
    assert "an old header" not in text and text.startswith(building.HEADER)
    assert [row.when_text for row in parse(text).ops[OP.name]] == [
        "device=nvidia-b300 ring=16",
        "device=nvidia-h200 ring=16 folding=every",
        "platform=cuda",
        "otherwise",
    ]
    measured = {"torch": "2.11.0", "triton": "3.6.0", OP.name: RUN, "kda_chain_verify": "2026-10-02"}
    assert dict(parse(text).devices["nvidia-h200"].measured) == measured
    assert build([line("a", 10)], previous=text) == text


def test_a_deleted_section_is_rebuilt_byte_for_byte() -> None:
    results = [line("a", 10), line("b", 20, device={**H200, "id": "nvidia-a100", "name": "NVIDIA A100", "arch": "sm_80"})]
    text = build(results, previous=PREVIOUS)
    lines = text.splitlines(keepends=True)
    first = next(n for n, text_line in enumerate(lines) if "device: nvidia-a100" in text_line)
    last = next(n for n in range(first + 1, len(lines)) if lines[n].startswith("    - "))
    cut = [text_line for text_line in lines[:first] + lines[last:] if not text_line.startswith("  nvidia-a100:")]
    assert len(cut) < len(lines) - 5
    assert build(results, previous="".join(cut)) == text


def test_other_journals_do_not_touch_a_section() -> None:
    both = build([line("a", 10), line("b", 20, device={**H200, "id": "nvidia-a100", "name": "NVIDIA A100"})])
    again = build([line("c", 5, device={**H200, "id": "nvidia-a100", "name": "NVIDIA A100"}, run=LATER)], previous=both)
    section = both[both.index("    - when: {device: nvidia-h200") :]
    assert section in again


def test_pins_given_replace_those_of_the_file() -> None:
    pins = [{"op": OP.name, "when": {"ring": [16, 32]}, "use": "triton.a", "reason": "asked for"}]
    policy = parse(build([line("a", 10)], pins=pins, previous=PREVIOUS))
    assert [(pin.reason, pin.when[0].values) for pin in policy.pins] == [("asked for", (16, 32))]
    assert parse(build([line("a", 10)], pins=[], previous=PREVIOUS)).pins == ()


@pytest.mark.parametrize(
    "flow",
    [
        'schema: 1\ndevices: {b: {name: "B", arch: "sm_90", sms: 1}, c: {name: "C", arch: "sm_90", sms: 1}}\nops: {}\n',
        "schema: 1\ndevices: {}\nops:\n  gdn_ring_commit: [{otherwise: {use: torch.reference}}]\n",
    ],
)
def test_what_cannot_be_kept_as_text_is_refused(flow: str) -> None:
    parse(flow)
    with pytest.raises(PolicyError, match="begin a line here"):
        build([line("a", 10)], previous=flow)


def test_a_damaged_previous_file_is_refused() -> None:
    with pytest.raises(PolicyError, match="unknown key"):
        build([line("a", 10)], previous=PREVIOUS.replace("use: triton.old", "uses: triton.old"))


@pytest.mark.parametrize(
    "value",
    [
        "word",
        "48/16",
        "2.11.0",
        "on",
        "Null",
        "017",
        "12:30",
        "1e-5",
        " blank ",
        "",
        'quo"te',
        "a # b",
        "ü",
        "x, y",
        "[1]",
        5,
        -3,
        True,
    ],
)
def test_scalars_read_back_as_the_same_value(value: object) -> None:
    node = read(f"key: {scalar(value)}\n", "test").mapping()["key"]
    assert node.value == value and type(node.value) is type(value)


def test_the_published_ring_table_gives_the_published_choice() -> None:
    text = build(journal.read(HERE.parent / "data" / "gb300.jsonl"))
    takes = {
        (row.when[1].values[0], row.when[2].values[0]): row.entries[0].use.kernel
        for row in parse(text).ops[OP.name]
        if row.kind == "row"
    }
    assert takes[16, "every"] == takes[16, "lazy"] == "triton.head_group"
    assert {takes[ring, "lazy"] for ring in (32, 64, 128)} == {"triton.per_head"}


def test_writing_replaces_the_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "dispatch.yaml"
    write(path, "first\n")
    path.chmod(0o640)
    write(path, "second\n")
    assert path.read_text() == "second\n" and path.stat().st_mode & 0o777 == 0o640

    def interrupted(source: str, target: Path) -> None:
        assert Path(source).read_text() == "third\n" and target.read_text() == "second\n"
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(path, "third\n")
    assert path.read_text() == "second\n"
    assert [p.name for p in tmp_path.iterdir()] == ["dispatch.yaml"]


# --- timing, without a device


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


def test_the_reset_is_taken_off_and_the_rest_shared_by_the_copies() -> None:
    timing = measure._timing([104.0, 204.0, 154.0], [4.0, 4.0, 90.0], 10, {})
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


# --- screens


def _planted(kind: str) -> Callable[..., None]:
    """The reference, spoilt."""
    calls = itertools.count()

    def run(state: Any, *args: Any, **kwargs: Any) -> None:
        import torch

        from kernreg_torch.gdn_ring_commit import gdn_ring_commit

        names = list(OP.signature.parameters)[1:]
        given = dict(zip(names, args, strict=False)) | kwargs
        if kind == "wrong":
            given["ring_g"] = given["ring_g"] * 0.9
        if kind == "reads past its history":
            state += 0 * given["ring_k"].sum()
        gdn_ring_commit(state, **given)
        slots = given["slots"][given["slots"] > given["null_slot"]].long()
        if kind == "depends on the batch" and len(given["slots"]) > 8:
            state[:, slots[-1]] = torch.nextafter(state[:, slots[-1]], torch.tensor(0.0))
        if kind == "races" and len(given["slots"]) > 8:
            state[:, slots] *= 1 + 2.0**-20 * next(calls)
        if kind == "cannot launch":
            raise RuntimeError("out of resource: shared memory")

    run.__signature__ = OP.signature  # type: ignore[attr-defined]
    return run


KINDS = ("right", "wrong", "reads past its history", "depends on the batch", "races", "cannot launch")
planted = {kind: _planted(kind) for kind in KINDS}
globals().update({f"planted_{n}": run for n, run in enumerate(planted.values())})


class Autotuner:
    """Stands for Triton's: kernreg knows it by name and module."""

    def __call__(self) -> None:
        return


Autotuner.__module__ = "triton.runtime.autotuner"
tuned_online = Autotuner()


def tunes_itself(*args: Any, **kwargs: Any) -> None:
    tuned_online()


tunes_itself.__signature__ = OP.signature  # type: ignore[attr-defined]


def registry_of_planted() -> Registry:
    registry = Registry()
    registry.add_op(OP)
    reference = next(k for k in _torch_backend().kernels if k.op == OP.name and k.name == "torch.reference")
    registry.add(Backend("torch", (reference,)))
    kernels = [Kernel(OP.name, f"planted.{n}", f"{__name__}:planted_{n}") for n in range(len(KINDS))]
    kernels.append(Kernel(OP.name, "planted.autotuned", f"{__name__}:tunes_itself"))
    registry.add(Backend("planted", tuple(kernels)))
    return registry


def _torch_backend() -> Backend:
    from kernreg_torch import BACKEND

    return BACKEND


@pytest.mark.parametrize(
    ("kind", "step", "reason"),
    [
        ("wrong", "parity", "times what is allowed"),
        ("reads past its history", "parity", "times what is allowed"),
        ("depends on the batch", "determinism", "state: other bits when alone"),
        ("races", "determinism", "state: other bits when repeated"),
        ("cannot launch", "launch", "RuntimeError: out of resource: shared memory"),
        ("autotuned", "load", "RegistrationError"),
        ("right", "", ""),
    ],
)
def test_a_bad_candidate_is_found_and_named(kind: str, step: str, reason: str) -> None:
    registry = registry_of_planted()
    name = "planted.autotuned" if kind == "autotuned" else f"planted.{KINDS.index(kind)}"
    found = screen.screen(registry, "torch.reference", registry.kernel(OP.name, name).variant(), small_cell().facts, "cpu")
    if kind == "right":
        assert found is None
    else:
        assert found is not None and found.step == step and reason in found.reason, found


def test_one_row_of_a_call_with_tokens() -> None:
    import torch

    op = ops.gdn_ring_verify
    inputs = dict.fromkeys(op.signature.parameters)
    inputs |= {"q": torch.arange(6), "slots": torch.arange(3), "cu_seqlens": torch.tensor([0, 1, 1, 4])}
    cut = screen.one_row(op, inputs, 2)
    assert cut["q"].tolist() == [1, 2, 3] and cut["slots"].tolist() == [2] and cut["cu_seqlens"].tolist() == [0, 3]


# --- workers


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


# --- whole runs


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
        (canonical(c.row), canonical(c.where)): 18 for c in grid.cells if c.anchor
    }
    per_cell = Counter((r.row_key, r.cell_key) for r in full)
    assert len(per_cell) == len(grid.cells) and set(per_cell.values()) == {building.KEPT_VARIANTS}
    for result in results:
        assert result.device["id"] == "fake-gpu" and result.digest and result.reference == "fake.reference" and result.date


def test_a_candidate_that_fails_costs_itself_and_is_recorded(tmp_path: Path) -> None:
    with tuned(tmp_path / "a.jsonl", FakeBench(1)) as run:
        run.tune()
        clean = run.journal.results
    winner = Counter(r.variant for r in clean if r.stage == "full").most_common(1)[0][0]
    bench = FakeBench(1, failures={winner: Failure("launch", "killed by signal 11")})
    with tuned(tmp_path / "b.jsonl", bench) as run:
        assert run.tune()
        results = run.journal.results
    assert {r.variant for r in results if r.stage != "failed"} == {r.variant for r in clean} - {winner}
    assert {(r.variant, r.step, r.reason) for r in results if r.stage == "failed"} == {(winner, "launch", "killed by signal 11")}
    takes = [row.entries[0].use for row in parse(build(results)).ops[OP.name]]
    assert winner not in [variant_id(use.kernel, use.config) for use in takes]


def test_what_the_policy_takes_is_timed_everywhere(tmp_path: Path) -> None:
    with tuned(tmp_path / "a.jsonl", FakeBench(1)) as run:
        run.tune()
        results = run.journal.results
    row = canonical(small_grid().cells[0].row)
    full = {r.variant for r in results if r.stage == "full" and r.row_key == row}
    loser = next(r for r in results if r.row_key == row and r.variant not in full)
    text = build([replace(loser, stage="full")])
    keep = building.incumbents(parse(text), OP.name, GPU.id)
    with tuned(tmp_path / "b.jsonl", FakeBench(1), keep=keep) as run:
        run.tune()
        again = {r.variant for r in run.journal.results if r.stage == "full" and r.row_key == row}
    assert again == full | {loser.variant}


def test_a_cell_that_cannot_be_set_up_is_skipped(tmp_path: Path) -> None:
    class Short(FakeBench):
        def time(self, cell: cells.Cell, candidates: Sequence[Candidate], stage: str) -> dict[str, measure.Outcome]:
            if cell.batch == 128:
                raise measure.CellError("out of memory")
            return super().time(cell, candidates, stage)

    with tuned(tmp_path / "j.jsonl", Short(1)) as run:
        assert run.tune() and set(run.skipped) == {"out of memory"}
        assert {r.batch for r in run.journal.results} == {1, 8, 32}


def test_a_stopped_run_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    def stopping(after: int) -> Callable[[], bool]:
        asked = iter(range(10**9))
        return lambda: next(asked) >= after

    with tuned(tmp_path / "whole.jsonl", FakeBench(3)) as run:
        assert run.tune()
        whole = build(run.journal.results)
    path, stops, seen = tmp_path / "parts.jsonl", 0, []
    while True:
        with tuned(path, FakeBench(3), stop=stopping(115)) as run:
            complete = run.tune()
            seen.append(len(run.journal.results))
            assert build(run.journal.results) if run.journal.results else True
        if complete:
            break
        stops += 1
        assert stops < 50
    assert stops > 2 and seen == sorted(seen)
    results = journal.read(path)
    assert len(results) == len({(r.stage, r.row_key, r.cell_key, r.variant) for r in results})
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


def test_two_runs_with_noise_keep_every_row(tmp_path: Path) -> None:
    with tuned(tmp_path / "a.jsonl", FakeBench(1)) as run:
        run.tune()
        first = build(run.journal.results)
    with tuned(tmp_path / "b.jsonl", FakeBench(2), run=LATER, keep=building.incumbents(parse(first), OP.name, GPU.id)) as run:
        run.tune()
        second = build(run.journal.results, previous=first)
    uses = [[(r.entries[0].use.kernel, dict(r.entries[0].use.config)) for r in parse(t).ops[OP.name]] for t in (first, second)]
    assert uses[0] == uses[1] and first != second


# --- the tool


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tune", HERE.parent.parent / "tools" / "tune.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.GRIDS = {OP.name: small_grid}
    module.grid = lambda registry, op: small_grid()
    return module


def as_program() -> int:
    status: int = tool().main(registry=fake_registry())
    return status


def options(folder: Path, *more: str) -> list[str]:
    return ["--journal", str(folder / "j.jsonl"), "--policy", str(folder / "p.yaml"), "--fake-timer", "5", *more]


def test_the_tool_measures_builds_and_shows_the_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = tool().main
    assert main(["all", *options(tmp_path, "--dry-run")], fake_registry()) == 0
    assert "60 cells, 36 of them anchors, 648 quick timings" in capsys.readouterr().out.replace("\n", " ")
    assert not (tmp_path / "p.yaml").exists()
    assert main(["measure", *options(tmp_path, "--limit-seconds", "0")], fake_registry()) == 3
    assert main(["all", *options(tmp_path, "--run", RUN)], fake_registry()) == 0
    shown = capsys.readouterr()
    assert "+      use: fake." in shown.out and "wrote" in shown.err
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
    assert "no results" in errors and "this GPU is fake-gpu" in errors and "no kernel 'triton.nobody'" in errors
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


def _program(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(HERE), "all", *options(folder, "--run", RUN, *more)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _killed_when(process: subprocess.Popen[bytes], path: Path, size: int) -> bool:
    """Kill the process once the file has reached a size; False if it ended before."""
    while process.poll() is None:
        if path.exists() and path.stat().st_size >= size:
            process.kill()
            process.wait()
            return True
        time.sleep(0.001)
    return False


def test_a_run_killed_at_random_moments_ends_as_if_undisturbed(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    assert _program(tmp_path / "whole").wait() == 0
    wanted = (tmp_path / "whole" / "p.yaml").read_text()
    path, policy = tmp_path / "parts" / "j.jsonl", tmp_path / "parts" / "p.yaml"
    total = (tmp_path / "whole" / "j.jsonl").stat().st_size
    moments = sorted(random.Random(11).uniform(0.02, 0.95) for _ in range(4))
    lines = 0
    for moment in moments:
        assert _killed_when(_program(tmp_path / "parts", "--fake-pause", "0.005"), path, int(moment * total))
        assert not policy.exists() or parse(policy.read_text())
        kept = len(journal.read(path))
        assert kept >= lines
        lines = kept
    assert lines > 0
    assert _program(tmp_path / "parts").wait() == 0
    assert policy.read_text() == wanted
    results = journal.read(path)
    assert len(results) == len({(r.stage, r.row_key, r.cell_key, r.variant) for r in results})
    assert all(json.loads(text) for text in path.read_text().splitlines())


# --- on a GPU


@pytest.mark.gpu
def test_a_copy_is_timed_at_the_speed_of_memory(tmp_path: Path) -> None:
    from kernreg import device as devices
    from kernreg import registry as registries

    found = devices.current()
    cell = next(c for c in grids.gdn_ring_commit(OP).cells if c.batch == 8 and not c.facts["track"])
    bench = measure.GpuBench(0, found.uuid, "torch.reference", cores=2)
    kernels = [k for k in registries.default().kernels(OP.name) if k.why_not(cell.facts, found, k.default) is None]
    candidates = [Candidate.of(k.variant()) for k in kernels if k.backend != "torch"]
    try:
        screened = list(bench.screen([measure.Trial(c, cell.facts) for c in candidates]))
        assert [failure for _, failure in screened] == [None] * len(candidates)
        outcomes = bench.time(cell, candidates, "full")
    finally:
        bench.close()
    for name, outcome in outcomes.items():
        assert isinstance(outcome, Timing), (name, outcome)
        assert outcome.us[0] <= outcome.us[1] <= outcome.us[2]
        assert cell.work / outcome.us[1] < 8e6, "faster than any memory: the cache was timed"


if __name__ == "__main__":
    sys.exit(as_program())
