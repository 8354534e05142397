"""Choosing and building: a pure function from lines to the policy file."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from tuning_lines import H200, LATER, OP, OTHER_DIGEST, ROW, RUN, chosen, failed, line

from kernreg.policy_file import parse
from kernreg.tuning import build as building
from kernreg.tuning.build import build, scalar, write
from kernreg.tuning.choose import KEPT_VARIANTS, Timings, leaders
from kernreg.yaml_subset import PolicyError, read

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
    timings = Timings()
    timings.add(cells)
    assert building._areas(timings.table()) == [
        {"heads": ["12/4", "48/16"], "track": False, "batch": [1, 8]},
        {"heads": "48/16", "track": True, "batch": 8},
    ]


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
    results = [line("a", 10), line("b", 20), line("a", 30, digest=OTHER_DIGEST, date=LATER)]
    assert chosen(build(results)) == "triton.b"


def test_leaders_are_the_best_overall_and_the_best_of_each_cell() -> None:
    overall = [line(f"v{n}", 1000 + n, batch) for n in range(20) for batch in (8, 32)]
    special = [line("odd", 900, 8), line("odd", 5000, 32), *[line("out", 1, batch) for batch in (8, 32)], failed("out")]
    kept = leaders(overall + special)
    assert len(kept) == KEPT_VARIANTS
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
        "# what we own\ndevices:\n"
        '  nvidia-b300: {name: "NVIDIA B300", arch: "sm_103", sms: 148, measured: {date: "2026-10-01"}}   # lent\n',
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
    measured = {"torch": "2.11.0, 2.9.0", "triton": "3.6.0", OP.name: RUN, "kda_chain_verify": "2026-10-02"}
    assert dict(parse(text).devices["nvidia-h200"].measured) == measured
    assert build([line("a", 10)], previous=text) == text


def without(text: str, device: str) -> str:
    """The file without a device's section and rows."""
    kept = building.Kept.of(text)
    for piece in (kept.devices[device], *(row.text for rows in kept.rows.values() for row in rows if row.device == device)):
        assert text.count(piece) == 1
        text = text.replace(piece, "")
    return text


def test_a_deleted_section_is_rebuilt_byte_for_byte() -> None:
    results = [line("a", 10), line("b", 20, device={**H200, "id": "nvidia-a100", "name": "NVIDIA A100", "arch": "sm_80"})]
    text = build(results, previous=PREVIOUS)
    cut = without(text, "nvidia-a100")
    assert len(cut.splitlines()) < len(text.splitlines()) - 10 and "nvidia-a100" not in cut
    assert build(results, previous=cut) == text


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


def test_a_full_disk_is_said_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("the system has no /dev/full")
    file = tmp_path / "dispatch.yaml"
    file.write_text("old")
    monkeypatch.setattr(building.tempfile, "mkstemp", lambda **_: (os.open("/dev/full", os.O_WRONLY), str(tmp_path / "part")))
    with pytest.raises(OSError, match=r"No space left on device: '.*dispatch\.yaml'"):
        write(file, "new")
    assert file.read_text() == "old"


def test_a_device_says_what_it_was_measured_with_a_line_each() -> None:
    text = build([line("a", 10)])
    begin = text.index("    measured:\n")
    assert text[begin : text.index("    kernels:")].splitlines() == [
        "    measured:",
        '      torch: "2.11.0"',
        '      triton: "3.6.0"',
        f'      gdn_ring_commit: "{RUN}"',
    ]
