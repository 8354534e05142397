"""What a candidate must pass before it is timed: it loads, compiles, agrees with the reference, and has a fingerprint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from kernreg.contract import Case, FactValue, Op, Variant
from kernreg.dispatch import launcher
from kernreg.numerics import Effort, Fingerprint, fingerprint_of
from kernreg.registry import Registry

Run: TypeAlias = Callable[..., Any]
PARITY_BATCH = 5  # the makers' mixed histories and windows repeat after five rows


@dataclass(frozen=True)
class Failure:
    """A candidate is out.

    step: "load", "launch", "parity", "bits" (then the reason begins with the verdict of `kernreg.numerics`) or "timing".
    """

    step: str
    reason: str

    @staticmethod
    def of(step: str, error: BaseException) -> Failure:
        return Failure(step, f"{type(error).__name__}: {_line(str(error))[:300]}")


def _line(text: str) -> str:
    """The line that says what is wrong: the first, but Triton begins with a place and an excerpt of the source."""
    lines = [line.strip() for line in text.splitlines() if line.strip() not in ("", "^")] or [""]
    return f"{lines[-1]} ({lines[0].rstrip(':')})" if re.fullmatch(r"at \d+:\d+:", lines[0]) else lines[0]


def screen(
    registry: Registry,
    reference: str,
    variant: Variant,
    facts: Mapping[str, FactValue],
    device: str,
    effort: Effort | None = None,
) -> Failure | Fingerprint:
    """Try a variant for a static key: why it is out, or its fingerprint if it may be timed.

    effort: of the fingerprint; None is what every fingerprint of this device is made with.
    """
    op = registry.op(variant.kernel.op)
    step = "load"
    try:
        with current(device):
            run = launcher(registry, variant, facts)
            oracle = launcher(registry, registry.kernel(op.name, reference).variant(), facts)
            step = "launch"
            run(**op.samples.make_inputs(Case("launch", facts, 1), device=device))
            _synchronize(device)
            step = "parity"
            if reason := parity(op, run, oracle, facts, device):
                return Failure(step, reason)
            step = "launch"
            found = fingerprint_of(op, run, facts, device, effort)
            return found if found.ok else Failure("bits", str(found))
    except Exception as error:
        return Failure.of(step, error)


@contextmanager
def current(device: str) -> Iterator[None]:
    """Launches within go to this device: Triton asks for the current one, wherever the tensors are."""
    if device == "cpu":
        yield
        return
    import torch

    with torch.cuda.device(device):
        yield


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
