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
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Protocol, TypeAlias

from kernreg.contract import Case, FactValue, Variant, format_facts, variant_id
from kernreg.evidence import installed_triton
from kernreg.registry import Registry
from kernreg.tuning.cells import Cell, Grid, Pool, Rotation
from kernreg.tuning.fingerprints import healthy, registry_named
from kernreg.tuning.grids import grid
from kernreg.tuning.screen import Failure, current, screen
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
    """One screening: may this candidate be timed for this static key?

    reference: the kernel that it is held against. compile_only: it has passed before; only the compile cache is to be filled.
    """

    candidate: Candidate
    facts: Mapping[str, FactValue]
    reference: str
    compile_only: bool = False


Screening: TypeAlias = "Failure | str | None"  # why it is out, or its fingerprint, or None if it was only compiled
Screened: TypeAlias = "Generator[tuple[Trial, Screening], None, None]"


class CellError(RuntimeError):
    """A cell cannot be timed at all, whatever the candidate: no memory for its inputs, say."""


class Bench(Protocol):
    """Where candidates are screened and timed."""

    def screen(self, trials: Sequence[Trial]) -> Screened: ...

    def time(self, cell: Cell, candidates: Sequence[Candidate], stage: str, effort: Effort) -> dict[str, Outcome]:
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

    def within(self, seconds: float) -> Effort:
        """The same, where a timing may cost only so much: half of it goes into capturing."""
        return replace(self, budget_us=min(self.budget_us, seconds * 1e6 / 2))


EFFORT: Mapping[str, Effort] = {
    "quick": Effort(3, 7, 8_000, hopeless=3.0),
    "full": Effort(5, 31, 30_000),
    "again": Effort(7, 41, 50_000),
}


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
    """Clocks, temperature, throttle reasons and foreign processes by NVML; says nothing where NVML is missing."""

    def __init__(self, uuid: str) -> None:
        self._nvml, self._handle = _nvml_handle(uuid)
        self._before = self.processes()

    def ours(self) -> frozenset[int]:
        """What runs now and did not when this watch was made. The numbers may be the host's, so our own say nothing."""
        return self.processes() - self._before

    def read(self, ours: frozenset[int] = frozenset()) -> dict[str, Any]:
        """What the GPU does now. foreign: how many processes are on it that are not among `ours`."""
        if self._handle is None:
            return {}
        n, handle = self._nvml, self._handle
        wanted: dict[str, Callable[[], Any]] = {
            "sm_mhz": lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_SM),
            "mem_mhz": lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_MEM),
            "celsius": lambda: n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU),
            "throttle": lambda: _throttles(n.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
            "foreign": lambda: len(self.processes() - ours),
        }
        return {name: value for name, ask in wanted.items() if (value := self._try(ask)) is not None}

    def driver(self) -> str:
        return "" if self._handle is None else str(self._try(self._nvml.nvmlSystemGetDriverVersion) or "")

    def processes(self) -> frozenset[int]:
        """Those that compute on the GPU."""
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
    """cell: None only starts the process, or has it give its pool back. ours: processes on the GPU that belong to the tuning.

    registry: ``"module:function"`` that makes it; empty for the installed backends.
    """

    gpu: int
    uuid: str
    registry: str = ""
    cell: Cell | None = None
    candidates: tuple[Candidate, ...] = ()
    effort: Effort = EFFORT["full"]
    seed: int = 0
    ours: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ScreenTask:
    trial: Trial
    gpu: int
    registry: str = ""

    @property
    def key(self) -> Hashable:
        """Tasks with the same one share inputs."""
        return (self.trial.candidate.op, *self.trial.facts.items())


MOST_HELD = 1 << 29  # bytes that a process may hold back while others time


def leaves_room() -> bool:
    """`healthy`, after giving memory back where much is held."""
    import torch

    if not healthy():
        return False
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > MOST_HELD:
        torch.cuda.empty_cache()
    return True


def screen_on_gpu(task: ScreenTask, note: Note) -> Screening:
    """What a screening worker runs."""
    registry, device = _registry(task.registry), f"cuda:{task.gpu}"
    variant = _variant(registry, task.trial.candidate)
    if task.trial.compile_only:
        return compiles(registry, variant, task.trial.facts, device)
    found = screen(registry, task.trial.reference, variant, task.trial.facts, device)
    return found if isinstance(found, Failure) else found.bits


@cache
def _registry(name: str) -> Registry:
    return registry_named(name)


def compiles(registry: Registry, variant: Variant, facts: Mapping[str, FactValue], device: str) -> Failure | None:
    """Load, compile and run it once; why it cannot, or None."""
    from kernreg.dispatch import launcher

    try:
        with current(device):
            run = launcher(registry, variant, facts)
            run(**registry.op(variant.kernel.op).samples.make_inputs(Case("launch", facts, 1), device=device))
    except Exception as error:
        return Failure.of("launch", error)
    return None


def software(watch: Watch) -> dict[str, str]:
    """Versions that a time depends on."""
    import torch

    found = {
        "driver": watch.driver(),
        "cuda": torch.version.cuda or "",
        "torch": str(torch.__version__),
        "triton": installed_triton(),
    }
    return {name: text for name, text in found.items() if text}


def _variant(registry: Registry, candidate: Candidate) -> Variant:
    return registry.kernel(candidate.op, candidate.use).variant(dict(candidate.config))


_timer: CudaTimer | None = None


def time_on_gpu(task: TimeTask, note: Note) -> dict[str, Outcome]:
    """What the timing worker runs; it keeps the last pool for the next cell."""
    global _timer  # noqa: PLW0603 - one timer a process
    if _timer is None:
        _timer = CudaTimer(task.gpu, task.uuid, _registry(task.registry))
    if task.cell is None:
        _timer.pool.release()
        return {}
    return _timer.time(task, task.cell, note)


class CudaTimer:
    """Captures, replays and times; holds the pool of the last cell."""

    def __init__(self, gpu: int, uuid: str, registry: Registry) -> None:
        import torch

        self.registry = registry
        self.watch = Watch(uuid)
        torch.cuda.set_device(gpu)
        torch.cuda.synchronize()
        self.grids: dict[str, Grid] = {}
        self.pool = Pool(f"cuda:{gpu}")

    def time(self, task: TimeTask, cell: Cell, note: Note) -> dict[str, Outcome]:
        note("")  # making the inputs is nobody's fault
        if cell.op not in self.grids:
            self.grids[cell.op] = grid(self.registry, cell.op)
        rotation = self.pool.turn(self.grids[cell.op], cell)
        outcomes: dict[str, Outcome] = {}
        graphs: dict[str, Any] = {}
        for candidate in task.candidates:
            note(candidate.id)
            try:
                graphs[candidate.id] = self._prepare(candidate, rotation)
            except Exception as error:
                outcomes[candidate.id] = Failure.of("timing", error)
                if not healthy():
                    raise
        note("")
        reset = capture(rotation.reset) if rotation.kept else None
        return {**outcomes, **self._replay(graphs, reset, cell.copies, task, note)}

    def _prepare(self, candidate: Candidate, rotation: Rotation) -> Any:
        import torch

        from kernreg.dispatch import launcher

        launch = launcher(self.registry, _variant(self.registry, candidate), rotation.cell.facts)
        rotation.reset()
        launch(**rotation.calls[0])
        torch.cuda.synchronize()
        return capture(partial(rotation.walk, launch))

    def _replay(self, graphs: Mapping[str, Any], reset: Any, copies: int, task: TimeTask, note: Note) -> dict[str, Timing]:
        conditions: dict[str, Any] = {}

        def replay(name: str) -> float:
            note(name)
            return elapsed_us(graphs[name])

        samples = interleaved(
            {name: partial(replay, name) for name in graphs},
            partial(elapsed_us, reset) if reset else None,
            task.effort,
            task.seed,
            lambda: conditions.update(self.watch.read(task.ours)),
        )
        return {name: _timing(values, copies, conditions) for name, values in samples.items()}


def _timing(samples: Sequence[float], copies: int, conditions: Mapping[str, Any]) -> Timing:
    low, middle, high = (round(max(us, 0.01) / copies, 3) for us in percentiles(samples))
    return Timing((low, middle, high), len(samples), copies, conditions)


Timed: TypeAlias = Callable[[], float]  # one replay: how long it took, in microseconds


def interleaved(
    replays: Mapping[str, Timed], reset: Timed | None, effort: Effort, seed: int, halfway: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Every contestant's times in microseconds, in shuffled rounds, without the median time of `reset`.

    reset: what every replay holds besides the calls that are timed, alone. halfway: called once, in the middle of it all.
    """
    first = {name: replay() for name, replay in replays.items()}  # also uploads the graphs and wakes the clocks
    fastest = min(first.values(), default=0.0)
    order = list(shuffled_rounds({name: effort.replays(us, fastest) for name, us in first.items()}, seed))
    samples: dict[str, list[float]] = {name: [] for name in replays}
    overhead: list[float] = []
    for number, name in enumerate(order):
        overhead.append(reset() if reset else 0.0)
        samples[name].append(replays[name]())
        if number == len(order) // 2:
            halfway()
    alone = percentiles(overhead)[1] if overhead else 0.0
    return {name: [us - alone for us in values] for name, values in samples.items()}


def capture(run: Callable[[], None]) -> Any:
    """A CUDA graph of a run, which must have run before: compiling cannot be captured."""
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


def elapsed_us(graph: Any) -> float:
    """Of one replay, on the GPU's clock."""
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
    """Screens on all cores at once, which also fills the compile cache, and times in one process while nothing else runs.

    All processes are kept until `close`: starting one costs seconds. While others screen, the timing process holds no pool.

    registry: as in `TimeTask`.
    """

    gpu: int
    uuid: str
    seed: int = 0
    timeout: float = 180.0
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    registry: str = ""

    def __post_init__(self) -> None:
        self._watch = Watch(self.uuid)
        self._ours: frozenset[int] | None = None
        self._screening: Workers | None = None
        self._timing: Workers | None = None

    def screen(self, trials: Sequence[Trial]) -> Screened:
        if self._timing is not None:
            self._start_timing()
        if self._screening is None:
            self._screening = Workers(screen_on_gpu, self.cores, self.timeout, leaves_room, lambda task: task.key)
        self._ours = None
        with closing(self._screening.map(ScreenTask(trial, self.gpu, self.registry) for trial in trials)) as ended:
            for task, value in ended:
                yield task.trial, Failure("launch", value.reason) if isinstance(value, Crash) else value

    def time(self, cell: Cell, candidates: Sequence[Candidate], stage: str, effort: Effort) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        while left := [c for c in candidates if c.id not in outcomes]:
            timing = self._timing or self._start_timing()
            if self._ours is None:
                self._ours = self._watch.ours()
            seed = int.from_bytes(hashlib.sha256(f"{self.seed} {cell.where} {stage}".encode()).digest()[:4])
            value = timing.run(TimeTask(self.gpu, self.uuid, self.registry, cell, tuple(left), effort, seed, self._ours))
            if not isinstance(value, Crash):
                return {**outcomes, **value}
            if value.note:
                outcomes[value.note] = Failure("timing", value.reason)
            elif not self._made_room(value):
                raise CellError(f"{cell.op} {format_facts([*cell.row.items(), *cell.where.items()])}: {value.reason}")
            self._start_timing()  # the process may be another one
        return outcomes

    def _start_timing(self) -> Workers:
        """The timing process, started if need be, without a pool."""
        if self._timing is None:
            self._timing = Workers(time_on_gpu, 1, self.timeout, healthy)
        self._timing.run(TimeTask(self.gpu, self.uuid, self.registry))
        self._ours = None
        return self._timing

    def _made_room(self, crash: Crash) -> bool:
        """Where memory was short: end the screening processes, if there are any."""
        if self._screening is None or "OutOfMemory" not in crash.reason:
            return False
        self._screening.close()
        self._screening = None
        return True

    def close(self) -> None:
        for workers in (self._screening, self._timing):
            if workers is not None:
                workers.close()
        self._screening = self._timing = None


# --- without a GPU


@dataclass
class FakeBench:
    """Times invented from a seed, the cell and the candidate: the same ones whatever was measured before.

    pause: seconds that a measurement takes. failures: candidates that fail, by id. family: candidates with an equal one have
        equal bits.
    """

    seed: int
    pause: float = 0.0
    failures: Mapping[str, Failure] = field(default_factory=dict)
    family: Callable[[Candidate], object] = field(default=lambda candidate: candidate.use)

    def screen(self, trials: Sequence[Trial]) -> Screened:
        for trial in trials:
            yield trial, self.failures.get(trial.candidate.id) or self._bits(trial)

    def _bits(self, trial: Trial) -> str | None:
        what = repr((self.family(trial.candidate), sorted(trial.facts.items())))
        return None if trial.compile_only else hashlib.sha256(what.encode()).hexdigest()[:16]

    def time(self, cell: Cell, candidates: Sequence[Candidate], stage: str, effort: Effort) -> dict[str, Outcome]:
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
