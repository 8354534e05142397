"""What a candidate must pass before it is timed: it loads, compiles, agrees with the reference, and gives the same bits again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from kernreg.contract import Case, FactValue, Op, Variant
from kernreg.dispatch import launcher
from kernreg.registry import Registry

Run: TypeAlias = Callable[..., Any]
PARITY_BATCH = 5  # the makers' mixed histories and windows repeat after five rows
ALONE_BATCH = 37


@dataclass(frozen=True)
class Failure:
    """A candidate is out. step: "load", "launch", "parity", "determinism" or "timing"."""

    step: str
    reason: str

    @staticmethod
    def of(step: str, error: BaseException) -> Failure:
        lines = str(error).strip().splitlines() or [""]
        return Failure(step, f"{type(error).__name__}: {lines[0][:300]}")


def screen(registry: Registry, reference: str, variant: Variant, facts: Mapping[str, FactValue], device: str) -> Failure | None:
    """Try a variant on small cases of a static key; None if it may be timed."""
    op = registry.op(variant.kernel.op)
    step = "load"
    try:
        run = launcher(registry, variant, facts)
        oracle = launcher(registry, registry.kernel(op.name, reference).variant(), facts)
        step = "launch"
        run(**op.samples.make_inputs(Case("launch", facts, 1), device=device))
        _synchronize(device)
        step = "parity"
        if reason := parity(op, run, oracle, facts, device):
            return Failure(step, reason)
        step = "determinism"
        reason = determinism(op, run, op.samples.make_inputs(Case("alone", facts, ALONE_BATCH), device=device, seed=1))
        return Failure(step, reason) if reason else None
    except Exception as error:
        return Failure.of(step, error)


def _synchronize(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def parity(op: Op, run: Run, reference: Run, facts: Mapping[str, FactValue], device: str) -> str | None:
    """The first check that fails on a small case, or None."""
    inputs = op.samples.make_inputs(Case("parity", facts, PARITY_BATCH), device=device)
    for check in op.samples.parity(run, reference, inputs):
        if not check.ok:
            return f"{check.name}: {check.worst:.3g} times what is allowed {check.detail}".rstrip()
    return None


def determinism(op: Op, run: Run, inputs: Mapping[str, Any]) -> str | None:
    """Are a row's bits the same in the batch, in the batch once more, and alone? The tensor that differs, or None."""
    batch = _bits_of(op, run, inputs, _whole)
    for name, attempt in (("repeated", _whole), ("alone", _row_by_row)):
        other = _bits_of(op, run, inputs, attempt)
        differing = [tensor for tensor, bits in batch.items() if not bits.equal(other[tensor])]
        if differing:
            return f"{', '.join(differing)}: other bits when {name}"
    return None


def _bits_of(op: Op, run: Run, inputs: Mapping[str, Any], attempt: Callable[[Op, Run, dict[str, Any]], Any]) -> dict[str, Any]:
    """Bits of everything that the call writes and returns, from fresh copies of the inputs."""
    from kernreg.ops._inputs import bits, copy_inputs

    copies = copy_inputs(inputs)
    returned = attempt(op, run, copies)
    written = {name: copies[name] for name in op.mutates if copies[name] is not None}
    return {name: bits(tensor) for name, tensor in {**written, **dict(zip(op.returns, returned, strict=True))}.items()}


def _whole(op: Op, run: Run, inputs: dict[str, Any]) -> tuple[Any, ...]:
    returned = run(**inputs)
    return (returned,) if op.returns else ()


def _row_by_row(op: Op, run: Run, inputs: dict[str, Any]) -> tuple[Any, ...]:
    import torch

    parts = [run(**one_row(op, inputs, row)) for row in range(inputs[op.batch].shape[0])]
    return (torch.cat(parts),) if op.returns else ()


def one_row(op: Op, inputs: Mapping[str, Any], row: int) -> dict[str, Any]:
    """The arguments of a call with one row of the batch: tensors [B, ..] and, where rows have tokens, [N, ..] cut down."""
    begin, end = _tokens(op, inputs, row)
    cut: dict[str, Any] = dict(inputs)
    for name, spec in op.tensors.items():
        value = inputs[name]
        if value is None:
            continue
        match spec.dims[0]:
            case "B":
                cut[name] = value[row : row + 1]
            case "N":
                cut[name] = value[begin:end]
            case "B1":
                cut[name] = value[row : row + 2] - value[row]
    return cut


def _tokens(op: Op, inputs: Mapping[str, Any], row: int) -> tuple[int, int]:
    """The row's tokens: by its window, or an equal share."""
    windows = [n for n, spec in op.tensors.items() if spec.dims[0] == "B1" and inputs[n] is not None]
    if windows:
        return int(inputs[windows[0]][row]), int(inputs[windows[0]][row + 1])
    packed = [inputs[n] for n, spec in op.tensors.items() if spec.dims[0] == "N"]
    share = packed[0].shape[0] // max(inputs[op.batch].shape[0], 1) if packed else 0
    return row * share, (row + 1) * share
