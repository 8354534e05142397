"""Processes that each do one task at a time: what kills or hangs a process costs its task and nothing else."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias

Note: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class Crash:
    """The task raised, or its process died or did not answer. note: what the task last said it was doing."""

    reason: str
    note: str = ""


def always_healthy() -> bool:
    return True


def _of_one_kind(task: Any) -> Hashable:
    return None


def _serve(pipe: Connection, target: Callable[[Any, Note], Any], healthy: Callable[[], bool]) -> None:
    noted = ""

    def note(text: str) -> None:
        nonlocal noted
        noted = text
        pipe.send(("note", text))

    try:
        while True:
            task = pipe.recv()
            try:
                value = target(task, note)
            except Exception as error:
                value = Crash(f"{type(error).__name__}: {str(error)[:300]}", noted)
            pipe.send(("done", (value, healthy())))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return  # the parent is gone or wants no more


class _Waiting:
    """Tasks in their order, but for that of their kinds."""

    def __init__(self, tasks: Iterable[Any], kind: Callable[[Any], Hashable]) -> None:
        self._kinds: dict[Hashable, list[Any]] = {}
        for task in tasks:
            self._kinds.setdefault(kind(task), []).append(task)
        for part in self._kinds.values():
            part.reverse()
        self._taken: dict[Hashable, int] = {}

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def take(self, preferred: Hashable) -> tuple[Any, Hashable]:
        """The next task of the preferred kind; without one, of the first kind that the fewest processes were given."""
        kind = preferred if preferred in self._kinds else min(self._kinds, key=lambda kind: self._taken.get(kind, 0))
        self._taken[kind] = self._taken.get(kind, 0) + (kind != preferred)
        task = self._kinds[kind].pop()
        if not self._kinds[kind]:
            del self._kinds[kind]
        return task, kind


class _Worker:
    """One process and the task it has."""

    def __init__(self, target: Callable[[Any, Note], Any], healthy: Callable[[], bool], timeout: float) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, target, healthy), daemon=True)
        self.process.start()
        theirs.close()
        self.timeout = timeout
        self.task: Any = None
        self.kind: Hashable = None
        self.note = ""
        self.deadline = float("inf")

    def give(self, task: Any, kind: Hashable) -> None:
        self.task, self.kind, self.note, self.deadline = task, kind, "", time.monotonic() + self.timeout
        self.pipe.send(task)

    def answer(self) -> tuple[Any, bool] | None:
        """The task's value and whether the process can go on, or None while there is only a note."""
        try:
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            return Crash(f"killed by signal {-code}" if code < 0 else f"exited with status {code}", self.note), False
        if kind == "note":
            self.note = value
            return None
        answer: tuple[Any, bool] = value
        return answer

    def late(self) -> Crash:
        return Crash(f"no answer within {self.timeout:g} s", self.note)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Workers:
    """Up to `count` processes that run `target(task, note)`; `target` and tasks must be picklable.

    healthy: asked in the process after each task; where it says no, the process is replaced.
    timeout: seconds that a task may take, the first task's imports included.
    kind: of a task. A process prefers tasks of the kind that it had last, so it can keep what they share.
    """

    def __init__(
        self,
        target: Callable[[Any, Note], Any],
        count: int,
        timeout: float,
        healthy: Callable[[], bool] = always_healthy,
        kind: Callable[[Any], Hashable] = _of_one_kind,
    ) -> None:
        self.target, self.count, self.timeout, self.healthy, self.kind = target, count, timeout, healthy, kind
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []

    def map(self, tasks: Iterable[Any]) -> Generator[tuple[Any, Any], None, None]:
        """Each task with its value or `Crash`, as they end. Leaving the loop early kills what still runs."""
        waiting = _Waiting(tasks, self.kind)
        try:
            while waiting or self._busy:
                while waiting and len(self._busy) < self.count:
                    self._start(waiting)
                yield from self._ended()
        finally:
            for worker in self._busy:
                worker.kill()
            self._busy.clear()

    def run(self, task: Any) -> Any:
        """One task's value or `Crash`."""
        return next(iter(self.map([task])))[1]

    def _start(self, waiting: _Waiting) -> None:
        self._idle = [worker for worker in self._idle if worker.process.is_alive()]
        worker = self._idle.pop() if self._idle else _Worker(self.target, self.healthy, self.timeout)
        self._busy.append(worker)
        worker.give(*waiting.take(worker.kind))

    def _ended(self) -> Iterator[tuple[Any, Any]]:
        rest = min(worker.deadline for worker in self._busy) - time.monotonic()
        ready = set(wait([worker.pipe for worker in self._busy], timeout=max(rest, 0)))
        for worker in list(self._busy):
            ended: tuple[Any, bool] | None = None
            if worker.pipe in ready:
                ended = worker.answer()
            elif time.monotonic() >= worker.deadline:
                ended = worker.late(), False
            if ended is None:
                continue
            self._busy.remove(worker)
            value, usable = ended
            if usable:
                self._idle.append(worker)
            else:
                worker.kill()
            yield worker.task, value

    def close(self) -> None:
        for worker in self._idle + self._busy:
            worker.kill()
        self._idle.clear()
        self._busy.clear()
