"""Fingerprints of many variants at once, in processes of their own: what crashes or hangs costs its own task only."""

from __future__ import annotations

import importlib
import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kernreg import registry as registries
from kernreg.contract import FactValue, Variant, variant_id
from kernreg.numerics import Fingerprint, fingerprint
from kernreg.registry import Registry
from kernreg.tuning.screen import Failure
from kernreg.tuning.workers import Crash, Note, Workers

Found: TypeAlias = "Fingerprint | Failure"
MOST_PROCESSES = 16  # each has a CUDA context, half a gigabyte, on a GPU that may be serving


@dataclass(frozen=True)
class Task:
    """One variant and one static key, by name, so that it can travel between processes.

    device: "cpu", "cuda" or "cuda:1". registry: ``"module:function"`` that makes it; empty for the installed backends.
    """

    op: str
    use: str
    config: tuple[tuple[str, FactValue], ...]
    facts: Mapping[str, FactValue]
    device: str
    registry: str = ""

    @staticmethod
    def of(variant: Variant, facts: Mapping[str, FactValue], device: str, registry: str = "") -> Task:
        return Task(variant.kernel.op, variant.kernel.name, variant.config, dict(facts), device, registry)

    @property
    def variant(self) -> str:
        return variant_id(self.use, dict(self.config))


def registry_named(name: str) -> Registry:
    """The installed backends, or what ``module:function`` makes."""
    if not name:
        return registries.default()
    module, _, function = name.partition(":")
    made = getattr(importlib.import_module(module), function)()
    if not isinstance(made, Registry):
        raise TypeError(f"{name} makes a {type(made).__name__}, wanted a Registry")
    return made


def measure(task: Task, note: Note) -> Found:
    """What a worker runs."""
    registry = registry_named(task.registry)
    try:
        variant = registry.kernel(task.op, task.use).variant(dict(task.config))
        return fingerprint(registry, variant, task.facts, task.device)
    except Exception as error:
        return Failure.of("launch", error)


def healthy() -> bool:
    """False after an error that a CUDA context does not survive."""
    import torch

    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def fingerprints(
    tasks: Sequence[Task], processes: int | None = None, timeout: float = 180.0
) -> Generator[tuple[Task, Found], None, None]:
    """Each task with what was found, as they end.

    processes: None is one for each core, up to `MOST_PROCESSES`: compiling takes a core. timeout: seconds for a task.
    """
    count = min(len(os.sched_getaffinity(0)), MOST_PROCESSES) if processes is None else processes
    workers = Workers(measure, max(1, min(count, len(tasks))), timeout, healthy)
    try:
        for task, value in workers.map(tasks):
            yield task, Failure("launch", value.reason) if isinstance(value, Crash) else value
    finally:
        workers.close()
