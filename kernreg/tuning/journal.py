"""Measurements on disk: one JSON object a line, appended and fsynced, never rewritten.

Every line stands alone: what was measured, of which source, on what, with which software, by which command. A process may
be killed at any byte: a torn last line is cut off when the file is next opened, and nothing else is lost.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from kernreg.contract import FactValue, variant_id

SCHEMA = 1
TIMED = ("quick", "full", "again")
STAGES = (*TIMED, "failed", "bits")


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
        return canonical(self.row)

    @property
    def key(self) -> str:
        """The static key, as far as row and facts name it: `kernreg.numerics.facts_key` spells it the same."""
        return canonical({**self.row, **self.facts})

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
        return canonical(self.cell)

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
        """Raises ValueError: not one of our lines."""
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        if value.pop("schema", None) != SCHEMA:
            raise ValueError(f"not of schema {SCHEMA}")
        if unknown := sorted(set(value) - set(Result.__dataclass_fields__)):
            raise ValueError(f"unknown field {', '.join(unknown)}")
        needed = ("run", "op", "row", "use", "digest", "stage")
        if absent := [name for name in needed if name not in value]:
            raise ValueError(f"no field {', '.join(absent)}")
        if value["stage"] not in STAGES or (value["stage"] in TIMED) != ("us" in value):
            raise ValueError(f"stage is {value['stage']!r}: a failure has no time, nor have bits; every other line has one")
        times = value.pop("us", None)
        if times is not None and not _is_times(times):
            raise ValueError(f"us is {times!r}, wanted three times above 0: p20 <= p50 <= p80")
        for name in ("row", "facts", "load", "config", "conditions", "device", "software"):
            if not isinstance(value.get(name, {}), dict):
                raise ValueError(f"{name} is {value[name]!r}, wanted a mapping")
        if type(value.get("batch", 1)) is not int or value.get("batch", 1) < 0:
            raise ValueError(f"batch is {value['batch']!r}, wanted a whole number")
        _check_bits(value)
        return Result(**{"facts": {}, "config": {}, **value}, us=None if times is None else tuple(times))


def _check_bits(value: Mapping[str, Any]) -> None:
    bits = value.get("bits")
    if value["stage"] != "bits" and bits is not None:
        raise ValueError(f"bits is {bits!r}: only a line of stage 'bits' has them")
    if value["stage"] == "bits" and not (isinstance(bits, str) and re.fullmatch("[0-9a-f]{16}", bits)):
        raise ValueError(f"bits is {bits!r}, wanted 16 hexadecimal digits")
    if value["stage"] == "bits" and (extra := [name for name in ("batch", "load") if value.get(name)]):
        raise ValueError(f"{extra[0]} is {value[extra[0]]!r}: a fingerprint is of a static key, whatever the batch and the load")


def _is_times(times: object) -> bool:
    numbers = isinstance(times, list) and len(times) == 3 and all(type(t) in (int, float) for t in times)
    return numbers and 0 < times[0] <= times[1] <= times[2] < math.inf  # type: ignore[index]


# in the order in which a line shows them
FIELDS = (
    *("run", "op", "row", "facts", "batch", "load", "use", "config", "stage", "us", "samples", "copies", "work", "step"),
    *("reason", "bits", "digest", "reference", "conditions", "device", "software", "command", "date"),
)


def canonical(value: Mapping[str, Any]) -> str:
    """One spelling of a mapping: for keys and for a fixed order."""
    return json.dumps(dict(value), sort_keys=True)


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
        except (ValueError, TypeError) as error:
            if number == len(lines) - 1 and not lines[-1] and not _is_json(line):
                break
            raise JournalError(f"{path}, line {number}: {error}") from error
        whole += len(line) + 1
    return results, whole


def _is_json(line: bytes) -> bool:
    """Was the line written whole, whatever it says?"""
    try:
        json.loads(line)
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
        self._file.write(b"".join(result.to_line().encode() + b"\n" for result in results))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.results.extend(results)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


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
