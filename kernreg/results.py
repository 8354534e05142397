"""Results of comparisons with other kernels (``tools/comparisons/*.jsonl``): are they older than the kernels?

Each line has the variants that were timed and the digests of their sources, by op. Comments and docstrings are no change.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kernreg.evidence import installed_source
from kernreg.registry import Registry

FOLDER = Path("tools", "comparisons")  # beside the policy file


class ResultsError(ValueError):
    """A file of comparisons that cannot be read; the message has file and line."""


@dataclass(frozen=True, slots=True)
class Outdated:
    """A kernel whose installed source is not the measured one; both as 16 digits of their digests. lines: results of it."""

    file: str
    op: str
    kernel: str
    measured: str
    installed: str
    lines: int

    def __str__(self) -> str:
        was = f"{self.lines} results are of {self.kernel} ({self.op}) as {self.measured}, installed is {self.installed}"
        return f"{self.file}: {was}: run tools/compare.py again"


def outdated(path: Path, registry: Registry) -> list[Outdated]:
    """The kernels of one file that changed since.

    Raises:
        ResultsError: a line that is none of a comparison.
    """
    measured: Counter[tuple[str, str, str]] = Counter()

    def count(line: dict[str, Any]) -> None:
        variants = line.get("variants", {})
        for op, digest in line.get("digests", {}).items():
            if not isinstance(digest, str):
                raise TypeError(f"digest of {op} is {digest!r}")
            measured[op, variants[op].partition("[")[0], digest] += 1

    _each(path, count)
    found = []
    for (op, kernel, digest), lines in sorted(measured.items()):
        if (installed := installed_source(registry, op, kernel)) != digest:
            found.append(Outdated(str(path), op, kernel, digest, installed, lines))
    return found


def copy_bandwidths(policy: Path) -> dict[str, float]:
    """By device id, the bytes a second of a large copy, as the comparisons beside a policy file measured it.

    Raises:
        ResultsError: a line that is none of a comparison.
    """
    found: dict[str, float] = {}

    def keep(device: str, line: dict[str, Any]) -> None:
        if line.get("section") == "copy":
            rate = line["bytes_per_second"]
            if type(rate) not in (int, float) or not 0 < rate < math.inf:
                raise ValueError(f"bytes_per_second is {rate!r}, wanted a number above 0")
            found[device] = float(rate)

    for path in beside(policy):
        _each(path, partial(keep, path.stem))
    return found


def _each(path: Path, take: Callable[[dict[str, Any]], None]) -> None:
    """Give each line to `take`; whatever it cannot make sense of is a ResultsError."""
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            take(json.loads(text.decode()))
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError) as error:
            raise ResultsError(f"{path}, line {number}: not a line of a comparison: {type(error).__name__}: {error}") from error


def beside(policy: Path) -> list[Path]:
    """The results files that belong to a policy file of a checkout; an installed package has none."""
    return sorted((policy.parent / FOLDER).glob("*.jsonl"))
