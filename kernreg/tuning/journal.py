"""Measurements on disk: one JSON object a line, appended and fsynced, never rewritten.

Every line stands alone: what was measured, of which source, on what, with which software, by which command. A process may
be killed at any byte: a torn last line is cut off when the file is next opened, and nothing else is lost.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from kernreg.contract import FactValue, variant_id
from kernreg.numerics import facts_key

SCHEMA = 1
TIMED = ("quick", "full", "again")
STAGES = (*TIMED, "failed", "bits")
SHOWN = 80  # characters of a wrong value that a message quotes
LARGEST = 2**53  # of numbers: beyond it they are no longer exact everywhere


class JournalError(ValueError):
    """A journal that cannot be read, or that another process is writing; the message has file and line."""


@dataclass(frozen=True)
class Result:
    """One line.

    run: when the tuning run began that this belongs to; runs are told apart and ordered by it.
    row: the facts that policy rows of this op are keyed on.
    facts: the other facts that the grid varies. batch: rows of a call.
    load: what else the time depends on: layers, history, accepted tokens. What a screen finds has neither batch nor load.
    use, config: the variant.
    digest: of the kernel's source, comments and docstrings left out. reference: the kernel that it was held against.
    stage: "quick" (every candidate, at the anchors), "full" (those that lead, everywhere), "again" (as full, once more),
        "failed", or "bits".
    us: 20th, 50th and 80th percentile of a call, microseconds.
    work: bytes that a call must move.
    step, reason: of a failure: where ("load", "launch", "parity", "bits", "timing") and why.
    bits: the variant's fingerprint for the static key of `row` and `facts`, 16 hex digits; only of stage "bits".
    conditions: clocks, temperature, throttle reasons and foreign processes seen while timing.
    device: id, name, arch and sms. software: versions of driver, CUDA, torch, Triton.
    """

    run: str
    op: str
    row: Mapping[str, FactValue]
    facts: Mapping[str, FactValue]
    use: str
    config: Mapping[str, FactValue]
    digest: str
    stage: str
    batch: int = 0
    load: Mapping[str, int] = field(default_factory=dict)
    us: tuple[float, float, float] | None = None
    samples: int = 0
    copies: int = 0
    work: int = 0
    step: str = ""
    reason: str = ""
    bits: str = ""
    reference: str = ""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    software: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    date: str = ""

    @property
    def variant(self) -> str:
        return variant_id(self.use, self.config)

    @property
    def row_key(self) -> str:
        return facts_key(self.row)

    @property
    def key(self) -> str:
        """The static key, as far as row and facts name it."""
        return facts_key({**self.row, **self.facts})

    @property
    def timed(self) -> bool:
        return self.us is not None

    @property
    def disturbed(self) -> bool:
        """Was it timed under throttling, or beside another process on the GPU?"""
        return bool(self.conditions.get("throttle") or self.conditions.get("foreign"))

    @property
    def cell(self) -> dict[str, FactValue]:
        """The point within its row: facts, batch and load."""
        return {**self.facts, "batch": self.batch, **self.load}

    @property
    def cell_key(self) -> str:
        return facts_key(self.cell)

    @property
    def median(self) -> float:
        assert self.us is not None, self
        return self.us[1]

    @property
    def spread(self) -> float:
        """Half the distance from the 20th to the 80th percentile, as a part of the median."""
        assert self.us is not None, self
        return (self.us[2] - self.us[0]) / (2 * self.us[1])

    def to_line(self) -> str:
        """The line, without its newline."""
        shown: dict[str, Any] = {"schema": SCHEMA}
        for name in FIELDS:
            value = getattr(self, name)
            if value not in (None, "", 0) and value != {}:
                shown[name] = list(value) if isinstance(value, tuple) else value
        return json.dumps(shown, ensure_ascii=False)

    @staticmethod
    def of_line(text: str) -> Result:
        """Raises ValueError: not one of our lines. RecursionError: brackets in brackets without end."""
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        if value.pop("schema", None) != SCHEMA:
            raise ValueError(f"not of schema {SCHEMA}")
        if unknown := sorted(set(value) - set(Result.__dataclass_fields__)):
            raise ValueError(f"unknown field {printable(', '.join(unknown))}")
        needed = ("run", "op", "row", "use", "digest", "stage", "device")
        if absent := [name for name in needed if name not in value]:
            raise ValueError(f"no field {', '.join(absent)}")
        if value["stage"] not in STAGES or (value["stage"] in TIMED) != ("us" in value):
            raise ValueError(f"stage is {_said(value['stage'])}: a failure has no time, nor have bits; every other line has one")
        _check_fields(value)
        _check_bits(value)
        if missing := [name for name in ("id", "name", "arch", "sms") if name not in value["device"]]:
            raise ValueError(f"device has no {', '.join(missing)}")
        times = value.pop("us", None)
        return Result(**{"facts": {}, "config": {}, **value}, us=None if times is None else tuple(times))


# --- what a line may hold


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_name(value: object) -> bool:
    return _is_text(value) and value != ""


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= LARGEST  # type: ignore[operator]


def _is_scalar(value: object) -> bool:
    return _is_text(value) or type(value) is bool or (type(value) is int and abs(value) <= LARGEST)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_times(times: object) -> bool:
    return isinstance(times, list) and len(times) == 3 and all(map(_is_number, times)) and 0 < times[0] <= times[1] <= times[2]


_Kind: TypeAlias = "tuple[str, Callable[[object], bool]]"
TEXT: _Kind = ("printable text", _is_text)
NAME: _Kind = ("printable text that is not empty", _is_name)
COUNT: _Kind = ("a whole number of 0 or more", _is_count)
NUMBER: _Kind = ("a number of 0 or more", _is_number)
SCALAR: _Kind = ("text, a whole number or a boolean", _is_scalar)
TIMES: _Kind = ("three times above 0: p20 <= p50 <= p80", _is_times)

KINDS: Mapping[str, _Kind] = {
    **dict.fromkeys(("run", "op", "use", "digest"), NAME),
    **dict.fromkeys(("reference", "command", "date", "step", "reason"), TEXT),
    **dict.fromkeys(("batch", "samples", "copies", "work"), COUNT),
    "us": TIMES,
}
# of mappings: what any key holds, and what single keys hold
PARTS: Mapping[str, tuple[_Kind, Mapping[str, _Kind]]] = {
    **dict.fromkeys(("row", "facts", "config"), (SCALAR, {})),
    "load": (COUNT, {}),
    "software": (TEXT, {}),
    "device": (SCALAR, {"id": NAME, "name": NAME, "arch": NAME, "sms": COUNT}),
    "conditions": (NUMBER, {"throttle": ("a list of printable texts", _is_texts)}),
}


def _check_fields(value: Mapping[str, Any]) -> None:
    for name, found in value.items():
        if name in KINDS and not KINDS[name][1](found):
            raise ValueError(f"{name} is {_said(found)}, wanted {KINDS[name][0]}")
        if name in PARTS:
            _check_parts(name, found)
    if value["stage"] in TIMED and not value.get("batch"):
        raise ValueError(f"batch is {value.get('batch', 0)}: what was timed is a call of at least one row")


def _check_parts(name: str, found: object) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"{name} is {_said(found)}, wanted a mapping")
    usual, special = PARTS[name]
    for key, part in found.items():
        wanted, is_right = special.get(key, usual)
        if not _is_name(key):
            raise ValueError(f"a key of {name} is {_said(key)}, wanted {NAME[0]}")
        if not is_right(part):
            raise ValueError(f"{name}.{key} is {_said(part)}, wanted {wanted}")


def _said(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _check_bits(value: Mapping[str, Any]) -> None:
    bits = value.get("bits")
    if value["stage"] != "bits" and bits is not None:
        raise ValueError(f"bits is {_said(bits)}: only a line of stage 'bits' has them")
    if value["stage"] == "bits" and not (isinstance(bits, str) and re.fullmatch("[0-9a-f]{16}", bits)):
        raise ValueError(f"bits is {_said(bits)}, wanted 16 hexadecimal digits")
    if value["stage"] == "bits" and (extra := [name for name in ("batch", "load") if value.get(name)]):
        raise ValueError(f"{extra[0]} is {value[extra[0]]!r}: a fingerprint is of a static key, whatever the batch and the load")


def printable(text: str) -> str:
    """Text as a line may hold it: what cannot be shown is escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


# in the order in which a line shows them
FIELDS = (
    *("run", "op", "row", "facts", "batch", "load", "use", "config", "stage", "us", "samples", "copies", "work", "step"),
    *("reason", "bits", "digest", "reference", "conditions", "device", "software", "command", "date"),
)


def read(*paths: str | os.PathLike[str]) -> list[Result]:
    """The results of several journals (shards), in the order of the files; torn last lines are left out.

    Raises:
        JournalError: a line, other than the last, that cannot be read.
    """
    return [result for path in paths for result in _parse(Path(path))[0]]


def _parse(path: Path) -> tuple[list[Result], int]:
    """Results, and the length in bytes of the part of the file that is whole."""
    results: list[Result] = []
    whole = 0
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            results.append(Result.of_line(line.decode()))
        except (ValueError, RecursionError) as error:
            if number == len(lines) - 1 and not lines[-1] and not _is_json(line):
                break
            raise JournalError(f"{path}, line {number}: {error}") from error
        whole += len(line) + 1
    return results, whole


def _is_json(line: bytes) -> bool:
    """Was the line written whole, whatever it says?"""
    try:
        json.loads(line)
    except RecursionError:  # no line of ours that was torn
        return True
    except ValueError:
        return False
    return True


class Journal:
    """A journal opened for appending; one process at a time.

    Attributes:
        results: everything in the file, appended lines included.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")  # noqa: SIM115 - closed by `close`
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise JournalError(f"{self.path}: another process is writing it") from error
        try:
            self.results, whole = _parse(self.path)
        except JournalError:
            self._file.close()
            raise
        self._file.truncate(whole)
        os.fsync(self._file.fileno())
        sync_folder(self.path)

    def append(self, results: Sequence[Result]) -> None:
        """Write the lines and return when they are on the disk."""
        lines = b"".join(result.to_line().encode() + b"\n" for result in results)
        with naming(self.path):
            self._file.write(lines)
            self._file.flush()
            os.fsync(self._file.fileno())
        self.results.extend(results)

    def close(self) -> None:
        with naming(self.path):  # closing tries once more to write what a full disk did not take
            self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """What the system says of an open file, a full disk above all, does not name it: do so."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(path: Path) -> None:
    """Put a new or renamed file's name on the disk too."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def current(results: Iterable[Result]) -> list[Result]:
    """Without what no longer counts: results of kernels whose source has changed since, and of rows that are keyed otherwise now.

    Each kernel's newest digest on a device counts, and the facts that each op's newest rows on it name.
    """
    results = list(results)
    by_date = sorted(results, key=lambda r: (r.date, r.digest))
    digests = {(r.op, r.use, r.device.get("id")): r.digest for r in by_date}
    by_run = sorted(results, key=lambda r: (r.run, r.date, sorted(r.row)))
    keys = {(r.op, r.device.get("id")): r.row.keys() for r in by_run}
    return [
        r
        for r in results
        if digests[r.op, r.use, r.device.get("id")] == r.digest and keys[r.op, r.device.get("id")] == r.row.keys()
    ]
