"""Journals: lines that read back, files that survive anything."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from tuning_lines import H200, LATER, OTHER_DIGEST, bits, failed, line

from kernreg.tuning import journal
from kernreg.tuning.journal import Journal, JournalError, Result


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
    old, new = line("a", 1.0), line("a", 2.0, digest=OTHER_DIGEST, date=LATER)
    other = line("b", 1.0, digest="d0")
    elsewhere = line("a", 1.0, device={**H200, "id": "nvidia-b300"})
    assert journal.current([new, old, other, elsewhere]) == [new, other, elsewhere]


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
    with pytest.raises(JournalError, match=rf"journal\.jsonl.*1.*{field} is"):
        journal.read(path)


def test_a_fingerprint_reads_back_as_it_was() -> None:
    result = bits("per_head:32", "one")
    assert Result.of_line(result.to_line()) == result
    assert '"stage": "bits"' in result.to_line() and '"batch"' not in result.to_line() and '"us"' not in result.to_line()
    assert result.key == '{"folding": "every", "heads": "48/16", "ring": 16}'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": "5" * 15}, "bits is '555555555555555', wanted 16 hexadecimal digits"),
        ({"bits": "G" * 16}, "wanted 16 hexadecimal digits"),
        ({"bits": 5}, "bits is 5, wanted 16"),
        ({"bits": None}, "bits is None, wanted 16"),
        ({"batch": 4}, "batch is 4: a fingerprint is of a static key"),
        ({"load": {"history": 4}}, "load is {'history': 4}: a fingerprint is of a static key"),
        ({"us": [1.0, 2.0, 3.0]}, "a failure has no time, nor have bits"),
        ({"stage": "failed"}, "bits is '.*': only a line of stage 'bits' has them"),
    ],
)
def test_a_damaged_fingerprint_is_named(change: dict[str, object], message: str) -> None:
    text = json.dumps({**json.loads(bits("a", 1).to_line()), **change})
    with pytest.raises(ValueError, match=message):
        Result.of_line(text)


def test_what_disturbed_a_timing_is_told() -> None:
    assert not line("a", 1.0, conditions={"throttle": [], "foreign": 0, "sm_mhz": 1980}).disturbed
    assert line("a", 1.0, conditions={"throttle": ["power_cap"]}).disturbed
    assert line("a", 1.0, conditions={"foreign": 1}).disturbed


def test_rows_that_are_keyed_otherwise_now_do_not_count() -> None:
    old, new = line("a", 1.0), line("b", 2.0, row={"ring": 16}, run=LATER, date=LATER)
    other = line("a", 1.0, op="kda_ring_commit")
    assert journal.current([old, new, other]) == [new, other]
