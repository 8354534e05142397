"""Debug-mode checks of index values (KERNREG_CHECK=1): read them back, and name the first bad row. Slow by design."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from kernreg.contract import ContractError


class Rows:
    """The live rows of one call, and checks over them. A row is live when its slots are above the null slot."""

    def __init__(self, op: str, args: Mapping[str, Any], *slots: str) -> None:
        self.op = op
        self.args = args
        self.slots = slots or ("slots",)
        self.null = int(args["null_slot"])
        columns = [args[name].tolist() for name in self.slots]
        self.live = [row for row, values in enumerate(zip(*columns, strict=True)) if min(values) > self.null]

    def fail(self, name: str, row: int, got: object, wanted: str) -> None:
        raise ContractError(f"{self.op}: {name}[{row}] is {got}, wanted {wanted}")

    def index(self, name: str, size: int, *, unique: bool = False) -> None:
        """Live rows' `name` lies in 0..size-1 and, if `unique`, names nothing twice."""
        values = self.args[name].tolist()
        seen: dict[int, int] = {}
        for row in self.live:
            value = values[row]
            if not 0 <= value < size:
                self.fail(name, row, value, f"0..{size - 1}")
            if unique and value in seen:
                self.fail(name, row, value, f"one row for it; row {seen[value]} has it too")
            seen[value] = row

    def count(self, name: str, low: int, high: int | Sequence[int]) -> list[int]:
        """Live rows' `name` lies in low..high (one bound, or one for each live row); returns them in live order."""
        values = [self.args[name].tolist()[row] for row in self.live]
        self._within(name, self.live, values, low, high)
        return values

    def gather(self, name: str, by: str, low: int, high: int | Sequence[int]) -> list[int]:
        """As `count` for a per-ring-row tensor read through the index tensor `by`."""
        rings = [self.args[by].tolist()[row] for row in self.live]
        values = [self.args[name].tolist()[ring] for ring in rings]
        highs = [high] * len(rings) if isinstance(high, int) else high
        for row, ring, value, top in zip(self.live, rings, values, highs, strict=True):
            if not low <= value <= top:
                raise ContractError(f"{self.op}: {name}[{ring}], of row {row}, is {value}, wanted {low}..{top}")
        return values

    def windows(self, name: str, tokens: int, draft: int) -> list[int]:
        """Offsets are non-decreasing in 0..tokens with windows of at most `draft`; returns the live rows' lengths."""
        offsets = self.args[name].tolist()
        for row, (begin, end) in enumerate(pairwise(offsets)):
            if not 0 <= begin <= end <= tokens:
                self.fail(name, row, f"{begin}..{end}", f"an interval inside 0..{tokens}, offsets non-decreasing")
            if row in self.live and end - begin > draft:
                self.fail(name, row, f"{begin}..{end}", f"at most {draft} tokens")
        return [offsets[row + 1] - offsets[row] for row in self.live]

    def track(self, slots: int, accepted: Sequence[int]) -> None:
        """Track slots are in range, name no live slot and nothing twice; track steps are below the accepted count."""
        if self.args.get("track_slots") is None:
            return
        targets, steps = self.args["track_slots"].tolist(), self.args["track_step"].tolist()
        state_slots = self.args[self.slots[0]].tolist()
        owner = {state_slots[row]: row for row in self.live}
        for row, count in zip(self.live, accepted, strict=True):
            target, step = targets[row], steps[row]
            if step < 0 or target <= self.null:
                continue
            if target >= slots:
                self.fail("track_slots", row, target, f"at most {slots - 1}")
            if step >= count:
                self.fail("track_step", row, step, f"below the {count} accepted steps")
            if target in owner:
                self.fail("track_slots", row, target, f"a slot that is free; row {owner[target]} uses it")
            owner[target] = row

    def _within(self, name: str, rows: Sequence[int], values: Sequence[int], low: int, high: int | Sequence[int]) -> None:
        highs = [high] * len(rows) if isinstance(high, int) else high
        for row, value, top in zip(rows, values, highs, strict=True):
            if not low <= value <= top:
                self.fail(name, row, value, f"{low}..{top}")
