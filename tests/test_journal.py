"""Journals: lines that read back, files that survive anything."""

from __future__ import annotations

import json
import time
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
        (line("a", 1.0, device={}).to_line(), "no field device"),
        (line("a", 1.0, device={"id": "nvidia-h200", "sms": 132}).to_line(), "device has no name, arch"),
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
        ("batch", 0),
        ("batch", True),
        *((name, odd) for name in ("run", "op", "use", "digest") for odd in (5, None, "", "a\nb", "\ud800", ["x"])),
        *((name, odd) for name in ("date", "reference", "command", "step", "reason") for odd in (5, {}, "a\x1b[31m", "\ud800")),
        *((name, odd) for name in ("samples", "copies", "work") for odd in (-1, 1.5, "7", True, None, 10**30)),
        ("us", [1, 2, 10**400]),
        ("us", [1, 2, True]),
        ("bits", "\ud800"),
        ("stage", ["full"]),
        ("software", ["torch"]),
    ],
)
def test_a_damaged_line_is_refused_with_its_place(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "journal.jsonl"
    good = line("a", 10, 8).to_line().rstrip("\n")
    path.write_text(json.dumps({**json.loads(good), field: value}) + "\n" + good + "\n")
    with pytest.raises(JournalError, match=rf"journal\.jsonl.*1.*{field} is"):
        journal.read(path)


@pytest.mark.parametrize(
    ("field", "key", "value"),
    [
        *((field, "x", odd) for field in ("row", "facts", "config") for odd in ([1], {}, None, 0.5, "\ud800", 10**30)),
        *(("load", "history", odd) for odd in ("4", -1, 0.5, True, None, [4])),
        *(("device", name, odd) for name in ("id", "name", "arch") for odd in (["nvidia-h200"], {}, 5, "", "\ud800")),
        *(("device", "sms", odd) for odd in ("132", -1, True, [])),
        *(("conditions", "throttle", odd) for odd in ("power_cap", [1], {"a": 1}, ["\ud800"], None, 1)),
        *(
            ("conditions", name, odd)
            for name in ("sm_mhz", "mem_mhz", "celsius", "foreign")
            for odd in ("1980", [], float("nan"), True)
        ),
        *(("software", "torch", odd) for odd in (2, None, ["2.11.0"], "\ud800")),
    ],
)
def test_a_damaged_part_is_refused_with_its_place(tmp_path: Path, field: str, key: str, value: object) -> None:
    path = tmp_path / "journal.jsonl"
    good = line("a", 10, 8).to_line()
    text = json.loads(good)
    path.write_text(f"{good}\n{json.dumps({**text, field: {**text.get(field, {}), key: value}})}\n{good}\n")
    with pytest.raises(JournalError, match=rf"journal\.jsonl, line 2: {field}\.{key} is .*, wanted "):
        journal.read(path)


def test_a_key_that_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    text = json.loads(line("a", 10, 8).to_line())
    for damaged in ({**text, "row": {"\ud800": 1}}, {**text, "\ud800": 1}):
        path.write_text(json.dumps(damaged) + "\n")
        with pytest.raises(JournalError, match=r"line 1: (a key of row is|unknown field) '?\\ud800"):
            journal.read(path)


@pytest.mark.parametrize("deep", ["[" * 200_000, "[" * 200_000 + "]" * 200_000, '{"row": ' + "[" * 900 + "]" * 900 + "}"])
def test_a_deep_line_is_named(tmp_path: Path, deep: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(line("a", 1.0).to_line() + f"\n{deep}\n")
    with pytest.raises(JournalError, match=r"journal\.jsonl, line 2: ") as caught:
        Journal(path)
    assert len(str(caught.value)) < 400
    assert path.read_text().endswith(f"\n{deep}\n"), "it is not cut off"


def test_what_is_written_can_be_read() -> None:
    odd = "tab\there, a colour \x1b[31m, half a pair \ud800, two\nlines"
    assert journal.printable(odd) == r"tab\there, a colour \x1b[31m, half a pair \ud800, two\nlines"
    written = failed("a", reason=journal.printable(odd)).to_line()
    assert Result.of_line(written).reason == journal.printable(odd)
    assert journal.printable("1.5 µs: \u4e2d\u6587") == "1.5 µs: \u4e2d\u6587"


def test_a_full_disk_is_said_with_the_file(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("the system has no /dev/full")
    path = tmp_path / "j.jsonl"
    with pytest.raises(OSError, match=r"No space left on device: '.*j\.jsonl'"), Journal(path) as book:
        book._file.close()
        book._file = open("/dev/full", "ab")  # noqa: SIM115 - the journal closes it
        book.append([line("a", 1.0)])
    assert book.results == []


def test_ten_thousand_lines_are_read_quickly(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text(
        f"{line('a', 1.0, conditions={'sm_mhz': 1980, 'throttle': []}, command='tools/tune.py all').to_line()}\n" * 10_000
    )
    began = time.process_time()
    assert len(journal.read(path)) == 10_000
    assert time.process_time() - began < 5.0


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
