"""Tasks for the worker tests: a spawned process imports them by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace

from kernreg.registry import Registry
from kernreg.tuning.measure import Outcome, Screening, ScreenTask, TimeTask, Timing, Trial
from kernreg.tuning.screen import Failure, screen
from kernreg.tuning.workers import Note


def work(task: str, note: Callable[[str], None]) -> str:
    note(f"on {task}")
    match task:
        case "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exits":
            os._exit(7)
        case "hangs":
            time.sleep(60)
        case "raises":
            raise ValueError("no")
    return f"{task} done"


def sick() -> bool:
    return False


def screen_on_cpu(trial: Trial, note: Note) -> Screening:
    """A screening of the planted kernels, as the GPU's workers do it."""
    from planted_kernels import registry

    known = registry()
    variant = known.kernel(trial.candidate.op, trial.candidate.use).variant(dict(trial.candidate.config))
    found = screen(known, trial.reference, variant, trial.facts, "cpu")
    return found if isinstance(found, Failure) else found.bits


def planted_few(*left_out: str) -> Registry:
    """The planted kernels in their default configs, without some."""
    from planted_kernels import BACKEND, registry

    kernels = tuple(
        replace(kernel, config={name: (value,) for name, value in kernel.default.items()})
        for kernel in BACKEND.kernels
        if kernel.name not in left_out
    )
    made = Registry()
    made.add_op(registry().op(BACKEND.kernels[0].op))
    made.add(registry().backends["torch"])
    made.add(replace(BACKEND, kernels=kernels))
    return made


def planted_fast() -> Registry:
    """Without those that are right and slow."""
    return planted_few("planted.honest", "planted.one_ulp")


def screen_nothing(task: ScreenTask, note: Note) -> Screening:
    """A screening process that screens nothing: its number stands for the fingerprint."""
    return None if task.trial.compile_only else f"{os.getpid():016x}"


def time_nothing(task: TimeTask, note: Note) -> dict[str, Outcome]:
    """A timing process that times nothing: kernels named after what they do."""
    if task.cell is None:
        return {}
    if task.cell.batch == 128:
        raise MemoryError("OutOfMemoryError: no room for the pool")
    for candidate in task.candidates:
        note(candidate.id)
        if candidate.use == "fake.dies":
            os.kill(os.getpid(), signal.SIGSEGV)
    return {c.id: Timing((1.0, 2.0, 3.0), os.getpid(), len(task.ours), {}) for c in task.candidates}
