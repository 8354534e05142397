"""Calls on some rows of a batch: which arguments have a part for each row, and where a row's tokens are.

By first dim: "B" has an entry a row, "N" the tokens of all rows one after another, "B1" the offsets of the rows' tokens.
Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kernreg.contract import Tensor


def windows(tensors: Mapping[str, Tensor], inputs: Mapping[str, Any]) -> str | None:
    """The argument with the offsets of the rows' tokens, if the call has one."""
    return next((name for name, spec in tensors.items() if spec.dims[0] == "B1" and inputs[name] is not None), None)


def token_bounds(tensors: Mapping[str, Tensor], inputs: Mapping[str, Any], batch: str) -> list[int]:
    """Where each row's tokens begin, and where those of the last row end: by the windows, or an equal share each.

    batch: the argument whose first dim is the rows.
    """
    if name := windows(tensors, inputs):
        found: list[int] = inputs[name].tolist()
        return found
    rows = inputs[batch].shape[0]
    packed = [inputs[name] for name, spec in tensors.items() if spec.dims[0] == "N" and inputs[name] is not None]
    share = packed[0].shape[0] // max(rows, 1) if packed else 0
    return [row * share for row in range(rows + 1)]


def cut(
    tensors: Mapping[str, Tensor],
    inputs: Mapping[str, Any],
    rows: Callable[[Any], Any],
    tokens: Callable[[Any], Any],
    offsets: Callable[[Any], Any],
) -> dict[str, Any]:
    """The arguments with those of "B", "N" and "B1" replaced by what these functions make of them; all else is passed whole."""
    by = {"B": rows, "N": tokens, "B1": offsets}
    parts = {name: by[spec.dims[0]] for name, spec in tensors.items() if spec.dims[0] in by and inputs[name] is not None}
    return {**inputs, **{name: part(inputs[name]) for name, part in parts.items()}}
