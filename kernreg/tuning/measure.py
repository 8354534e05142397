"""Device time of a call: CUDA-graph replays with a cold L2, candidates interleaved in shuffled rounds, medians and spread.

A graph holds one call on each copy of the inputs, behind a reset of the cursors that calls move; the time of a graph with
the reset alone is taken off. Candidates are screened and timed in processes of their own, so that what crashes, hangs or
loses the CUDA context costs one candidate. `FakeBench` invents times from a seed, for everything that needs no GPU.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from kernreg.contract import FactValue, Variant, format_facts, variant_id
from kernreg.tuning.cells import Cell, Grid, Rotation
from kernreg.tuning.grids import grid
from kernreg.tuning.screen import Failure, screen
from kernreg.tuning.workers import Crash, Note, Workers

Clock: TypeAlias = Callable[[], float]


@dataclass(frozen=True)
class Timing:
    """us: 20th, 50th and 80th percentile of a call. samples: replays. copies: calls in a replay."""

    us: tuple[float, float, float]
    samples: int
    copies: int
    conditions: Mapping[str, Any] = field(default_factory=dict)


Outcome: TypeAlias = "Timing | Failure"


@dataclass(frozen=True)
class Candidate:
    """A variant by name, so that it can travel between processes."""

    op: str
    use: str
    config: tuple[tuple[str, FactValue], ...]

    @staticmethod
    def of(variant: Variant) -> Candidate:
        return Candidate(variant.kernel.op, variant.kernel.name, variant.config)

    @property
    def id(self) -> str:
        return variant_id(self.use, dict(self.config))


@dataclass(frozen=True)
class Trial:
    """One screening: may this candidate be timed for this static key?"""

    candidate: Candidate
    facts: Mapping[str, FactValue]


Screened: TypeAlias = "Generator[tuple[Trial, Failure | None], None, None]"


class CellError(RuntimeError):
    """A cell cannot be timed at all, whatever the candidate: no memory for its inputs, say."""


class Bench(Protocol):
    """Where candidates are screened and timed."""

    def screen(self, trials: Sequence[Trial]) -> Screened: ...

    def time(self, cell: Cell, candidates: Sequence[Candidate], stage: str) -> dict[str, Outcome]:
        """Outcomes by candidate id. Raises CellError."""
        ...

    def close(self) -> None: ...


# --- how often


@dataclass(frozen=True)
class Effort:
    """Replays of a candidate: as many as fit into `budget_us`, within bounds; one if it is `hopeless` times the fastest."""

    least: int
    most: int
    budget_us: float
    hopeless: float = math.inf

    def replays(self, replay_us: float, fastest_us: float) -> int:
        if replay_us > self.hopeless * fastest_us:
            return 1
        return max(self.least, min(self.most, int(self.budget_us / max(replay_us, 1.0))))


EFFORT: Mapping[str, Effort] = {"quick": Effort(3, 7, 12_000, hopeless=3.0), "full": Effort(7, 31, 60_000)}


def shuffled_rounds(replays: Mapping[str, int], seed: int) -> Iterator[str]:
    """Every name as often as `replays` says, one a round, each round in its own order."""
    order = random.Random(seed)
    for number in range(max(replays.values(), default=0)):
        names = sorted(name for name, count in replays.items() if count > number)
        order.shuffle(names)
        yield from names


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """20th, 50th and 80th, interpolated."""
    ordered = sorted(values)

    def at(part: float) -> float:
        place = part * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return at(0.2), at(0.5), at(0.8)


# --- what the GPU was doing


THROTTLES = {
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
}


class Watch:
    """Clocks, temperature, throttle reasons and foreign processes by NVML; says nothing where NVML is missing.

    Process numbers may be the host's and not ours, so a process is foreign if it was there before us or came after `start`.
    """

    def __init__(self, uuid: str) -> None:
        self._nvml, self._handle = _nvml_handle(uuid)
        self._before = self._processes()
        self._known = self._before

    def start(self) -> None:
        """Everything that runs now and did not when this watch was made is ours."""
        self._known = self._processes()

    def read(self) -> dict[str, Any]:
        if self._handle is None:
            return {}
        n, handle = self._nvml, self._handle
        now = self._processes()
        wanted: dict[str, Callable[[], Any]] = {
            "sm_mhz": lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_SM),
            "mem_mhz": lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_MEM),
            "celsius": lambda: n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU),
            "throttle": lambda: _throttles(n.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
            "foreign": lambda: len((now & self._before) | (now - self._known)),
        }
        return {name: value for name, ask in wanted.items() if (value := self._try(ask)) is not None}

    def driver(self) -> str:
        return "" if self._handle is None else str(self._try(self._nvml.nvmlSystemGetDriverVersion) or "")

    def _processes(self) -> frozenset[int]:
        if self._handle is None:
            return frozenset()
        return frozenset(p.pid for p in self._try(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)) or ())

    def _try(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except self._nvml.NVMLError:
            return None


def _throttles(bits: int) -> list[str]:
    return [name for bit, name in THROTTLES.items() if bits & bit]


def _nvml_handle(uuid: str) -> tuple[Any, Any]:
    try:
        import pynvml
    except ImportError:
        return None, None
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    except pynvml.NVMLError:
        return pynvml, None


# --- on the GPU, in a process of its own


@dataclass(frozen=True)
class TimeTask:
    cell: Cell
    candidates: tuple[Candidate, ...]
    stage: str
    seed: int
    gpu: int
    uuid: str


@dataclass(frozen=True)
class ScreenTask:
    trial: Trial
    reference: str
    gpu: int


def context_is_usable() -> bool:
    """False after an error that a CUDA context does not survive."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def screen_on_gpu(task: ScreenTask, note: Note) -> Failure | None:
    """What a screening worker runs."""
    from kernreg import registry as registries

    variant = _variant(registries.default(), task.trial.candidate)
    return screen(registries.default(), task.reference, variant, task.trial.facts, f"cuda:{task.gpu}")


def software(watch: Watch) -> dict[str, str]:
    """Versions that a time depends on."""
    import torch

    try:
        from importlib.metadata import version

        triton = version("triton")
    except ImportError:
        triton = ""
    found = {"driver": watch.driver(), "cuda": torch.version.cuda or "", "torch": str(torch.__version__), "triton": triton}
    return {name: text for name, text in found.items() if text}


def _variant(registry: Any, candidate: Candidate) -> Variant:
    kernel = registry.kernel(candidate.op, candidate.use)
    variant: Variant = kernel.variant(dict(candidate.config))
    return variant


_timer: CudaTimer | None = None


def time_on_gpu(task: TimeTask, note: Note) -> dict[str, Outcome]:
    """What the timing worker runs; it keeps the last pool for the next cell."""
    global _timer  # noqa: PLW0603 - one timer a process
    if _timer is None:
        _timer = CudaTimer(task.gpu, task.uuid)
    return _timer.time(task, note)


class CudaTimer:
    """Captures, replays and times; holds the pool of the last cell."""

    def __init__(self, gpu: int, uuid: str) -> None:
        import torch

        from kernreg import registry as registries

        self.device = f"cuda:{gpu}"
        self.registry = registries.default()
        self.watch = Watch(uuid)
        torch.cuda.set_device(gpu)
        torch.cuda.synchronize()
        self.watch.start()
        self.rotation: Rotation | None = None

    def time(self, task: TimeTask, note: Note) -> dict[str, Outcome]:
        note("")  # making the inputs is nobody's fault
        rotation = self._rotation(grid(self.registry, task.cell.op), task.cell)
        outcomes: dict[str, Outcome] = {}
        graphs: dict[str, Any] = {}
        for candidate in task.candidates:
            note(candidate.id)
            try:
                graphs[candidate.id] = self._prepare(candidate, rotation)
            except Exception as error:
                outcomes[candidate.id] = Failure.of("timing", error)
                if not context_is_usable():
                    raise
        note("")
        return {**outcomes, **self._replay(graphs, self._capture(rotation.reset) if rotation.kept else None, task, note)}

    def _rotation(self, grid: Grid, cell: Cell) -> Rotation:
        import torch

        if self.rotation is None or self.rotation.cell.block != cell.block:
            self.rotation = None
            torch.cuda.empty_cache()
            self.rotation = Rotation.make(grid, cell, self.device)
            torch.cuda.empty_cache()
        self.rotation.use(cell)
        return self.rotation

    def _prepare(self, candidate: Candidate, rotation: Rotation) -> Any:
        import torch

        from kernreg.dispatch import launcher

        launch = launcher(self.registry, _variant(self.registry, candidate), rotation.cell.facts)
        rotation.reset()
        launch(**rotation.calls[0])
        torch.cuda.synchronize()

        def run() -> None:
            rotation.reset()
            for arguments in rotation.calls:
                launch(**arguments)

        return self._capture(run)

    def _capture(self, run: Callable[[], None]) -> Any:
        import torch

        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin()
            try:
                run()
            except BaseException:
                _end_quietly(graph)
                raise
            graph.capture_end()
        torch.cuda.synchronize()
        return graph

    def _replay(self, graphs: Mapping[str, Any], reset: Any, task: TimeTask, note: Note) -> dict[str, Timing]:
        if not graphs:
            return {}

        def replay(name: str) -> float:
            note(name)
            return _elapsed_us(graphs[name])

        first = {name: replay(name) for name in graphs}  # also uploads the graphs and wakes the clocks
        fastest = min(first.values())
        replays = {name: EFFORT[task.stage].replays(us, fastest) for name, us in first.items()}
        samples: dict[str, list[float]] = {name: [] for name in graphs}
        overhead: list[float] = []
        order = list(shuffled_rounds(replays, task.seed))
        conditions: dict[str, Any] = {}
        for number, name in enumerate(order):
            overhead.append(_elapsed_us(reset) if reset else 0.0)
            samples[name].append(replay(name))
            if number == len(order) // 2:
                conditions = self.watch.read()
        return {name: _timing(values, overhead, task.cell.copies, conditions) for name, values in samples.items()}


def _timing(samples: list[float], overhead: list[float], copies: int, conditions: Mapping[str, Any]) -> Timing:
    alone = percentiles(overhead)[1]
    low, middle, high = (round(max(us - alone, 0.01) / copies, 3) for us in percentiles(samples))
    return Timing((low, middle, high), len(samples), copies, conditions)


def _elapsed_us(graph: Any) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def _end_quietly(graph: Any) -> None:
    """End a broken capture; its own error would hide the one that broke it."""
    try:
        graph.capture_end()
    except RuntimeError:
        return


@dataclass
class GpuBench:
    """Screens on all cores at once, which also fills the compile cache, and times in one process while nothing else runs."""

    gpu: int
    uuid: str
    reference: str
    seed: int = 0
    timeout: float = 180.0
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    _timing: Workers | None = None

    def screen(self, trials: Sequence[Trial]) -> Screened:
        self.close()  # the pool that the timing process holds makes room
        workers = Workers(screen_on_gpu, min(self.cores, len(trials)), self.timeout, context_is_usable)
        try:
            for task, value in workers.map(ScreenTask(trial, self.reference, self.gpu) for trial in trials):
                yield task.trial, Failure("launch", value.reason) if isinstance(value, Crash) else value
        finally:
            workers.close()

    def time(self, cell: Cell, candidates: Sequence[Candidate], stage: str) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        while left := [c for c in candidates if c.id not in outcomes]:
            if self._timing is None:
                self._timing = Workers(time_on_gpu, 1, self.timeout, context_is_usable)
            seed = int.from_bytes(hashlib.sha256(f"{self.seed} {cell.where} {stage}".encode()).digest()[:4])
            value = self._timing.run(TimeTask(cell, tuple(left), stage, seed, self.gpu, self.uuid))
            if not isinstance(value, Crash):
                return {**outcomes, **value}
            if not value.note:
                raise CellError(f"{cell.op} {format_facts([*cell.row.items(), *cell.where.items()])}: {value.reason}")
            outcomes[value.note] = Failure("timing", value.reason)
        return outcomes

    def close(self) -> None:
        if self._timing is not None:
            self._timing.close()
            self._timing = None


# --- without a GPU


@dataclass
class FakeBench:
    """Times invented from a seed, the cell and the candidate: the same ones whatever was measured before.

    pause: seconds that a measurement takes. failures: candidates that fail, by id.
    """

    seed: int
    pause: float = 0.0
    failures: Mapping[str, Failure] = field(default_factory=dict)

    def screen(self, trials: Sequence[Trial]) -> Screened:
        for trial in trials:
            yield trial, self.failures.get(trial.candidate.id)

    def time(self, cell: Cell, candidates: Sequence[Candidate], stage: str) -> dict[str, Outcome]:
        time.sleep(self.pause)
        return {candidate.id: self._invented(cell, candidate, stage) for candidate in candidates}

    def _invented(self, cell: Cell, candidate: Candidate, stage: str) -> Timing:
        limit = cell.work / 4e6 + 3.0
        slower = 1 + self._draw(candidate.id, cell.row) + 0.3 * self._draw(candidate.id, cell.row, cell.where)
        noise = 1 + 0.004 * (self._draw(self.seed, candidate.id, cell.row, cell.where, stage) - 0.5)
        us = limit * slower * noise
        return Timing((round(us * 0.998, 3), round(us, 3), round(us * 1.002, 3)), 7, cell.copies, {"throttle": []})

    @staticmethod
    def _draw(*what: object) -> float:
        digest = hashlib.sha256(repr([dict(w) if isinstance(w, Mapping) else w for w in what]).encode()).digest()
        return int.from_bytes(digest[:6]) / 2**48

    def close(self) -> None:
        return


def interrupted(deadline: float | None, clock: Clock = time.monotonic) -> Callable[[], bool]:
    """Is it time to stop? Asked between measurements."""
    return lambda: deadline is not None and clock() >= deadline
