"""What this machine is, what serves on it, and what is missing. Nothing raises: a fault is a finding."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import logging
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import kernreg
from kernreg import device as devices
from kernreg import dispatch, policy, registry
from kernreg.contract import FactValue, Op, Variant, format_facts
from kernreg.describe import Data, device_data, policy_data
from kernreg.device import Device
from kernreg.evidence import installed_triton
from kernreg.numerics import class_id, facts_key
from kernreg.policy import Row
from kernreg.registry import Registry

if TYPE_CHECKING:
    from kernreg.tuning.fingerprints import Found, Task

T = TypeVar("T")
Place: TypeAlias = tuple[str, str, str]  # op, variant id, static key as `facts_key` spells it
Measure: TypeAlias = "Callable[[Sequence[Task]], Generator[tuple[Task, Found], None, None]]"

ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    dispatch.FORCE_VARIABLE,
    dispatch.CHECK_VARIABLE,
    "TRITON_INTERPRET",
)

# Facts that have no default, at values that a serving engine would bind.
TYPICAL: dict[str, FactValue] = {"ring": 16, "draft": 4, "heads": "16/16", "value_heads": 16, "dim": 6144}


class Findings:
    """What is broken, what is missing with how to get it, and what the log said meanwhile."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.missing: list[str] = []
        self.notes: list[str] = []

    def attempt(self, what: str, step: Callable[[], T], otherwise: T) -> T:
        """The step's result; if it raises, that is a problem and `otherwise` is the result."""
        try:
            return step()
        except Exception as error:  # a doctor reports every fault of its patient
            self.problems.append(f"{what}: {str(error) or type(error).__name__}")
            return otherwise


def examine() -> Data:
    """All findings, as ``doctor --json`` prints them."""
    found = Findings()
    with _log_into(found.notes):
        # before torch: it must work without it
        nvml = devices.read_nvml(devices.import_nvml())
        here = found.attempt("device", _devices, [Device.cpu()])
        software = _software(found, nvml, here)
        known = found.attempt("backends", registry.default, Registry())
        if not known.backends and not found.problems:
            found.problems.append(f"no kernels ({registry.no_backends()})")
        file = _policy(found, known)
        ops = _served(found, known, here[0], file)
    return {
        "software": software,
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "gpus": [
            {"name": c.name, "uuid": c.uuid, "pci": c.pci} if c else dict.fromkeys(("name", "uuid", "pci"), "") for c in nvml
        ],
        "devices": [device_data(device) for device in here],
        "policy": file,
        "ops": ops,
        "notes": found.notes,
        "missing": found.missing,
        "problems": found.problems,
    }


@contextmanager
def _log_into(lines: list[str]) -> Iterator[None]:
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("kernreg")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _devices() -> list[Device]:
    """Every device that CUDA shows, or the CPU."""
    found = [devices.current(0)]
    while found[-1].platform == "cuda":
        try:
            found.append(devices.current(len(found)))
        except ValueError:
            break
    return found


def _software(found: Findings, nvml: tuple[Any, ...], here: list[Device]) -> dict[str, str | None]:
    """Versions by name; None for what is not installed."""
    torch = _module(found, "torch", "run 'pip install torch' (see pytorch.org for the build that fits the driver)")
    triton = _module(found, "triton", "it comes with torch on Linux with CUDA; else run 'pip install triton'")
    pynvml = _module(found, "pynvml", "run 'pip install nvidia-ml-py'")
    if not nvml and pynvml:
        found.missing.append("an NVIDIA driver with NVML: no GPU is seen; install the driver, or start the container with GPUs")
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    if torch and here[0].platform == "cuda":
        _compare_with_torch(found, torch, cuda, len(here))
    return {
        "kernreg": kernreg.__version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "torch": torch and str(torch.__version__),
        "torch_cuda": cuda,
        "triton": triton and str(triton.__version__),
        "driver": devices.driver_version(pynvml),
    }


def _module(found: Findings, name: str, remedy: str) -> Any:
    if importlib.util.find_spec(name) is None:
        found.missing.append(f"{name}: {remedy}")
        return None
    return found.attempt(f"import {name}", lambda: importlib.import_module(name), None)


def _compare_with_torch(found: Findings, torch: Any, cuda: str | None, count: int) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found.notes += [str(warning.message) for warning in said]
    if cuda is None:
        found.missing.append("a torch with CUDA: this one is built for the CPU; see pytorch.org for the build that fits")
    elif usable != count:
        found.problems.append(
            f"torch sees {usable} CUDA device(s), the driver shows {count}: is the driver too old for CUDA {cuda}?"
        )


def _policy(found: Findings, known: Registry) -> Data:
    path = dispatch.shipped_policy()
    nothing: Data = {"file": str(path), "digest": None, "errors": 1, "warnings": 0, "rows": 0}
    nothing |= {"problems": [], "stale": [], "results": []}
    data = found.attempt("policy", lambda: policy_data(path, known), nothing)
    found.problems += [f"policy: {problem['text']}" for problem in data["problems"] if problem["severity"] == "error"]
    return data


def _served(found: Findings, known: Registry, device: Device, file: Data) -> list[Data]:
    """Which kernel serves a typical call of each op, one row of batch."""
    loaded = None if file["errors"] else policy.load(file["file"], known)
    return [_serves(found, known, device, loaded, op) for op in known.ops.values()]


def _serves(found: Findings, known: Registry, device: Device, loaded: policy.Policy | None, op: Op) -> Data:
    key = typical_key(op)
    given = {name: value for name, value in key.items() if op.facts[name].default is None}
    data: Data = {"op": op.name, "key": given, "batch": 1, "variant": None, "source": None, "why": "the policy has errors"}
    if loaded is None:
        return data
    try:
        binding = dispatch.Binding(op, key, device, loaded, known, dispatch.overrides())
        chosen = binding.serves(1, binding.evidence(installed_triton()))
    except ValueError as error:
        found.problems.append(str(error))
        return {**data, "why": str(error)}
    matched = chosen.row.when_text if chosen.row else chosen.level
    return {**data, "variant": chosen.variant.id, "source": chosen.source, "why": f"{matched}, {chosen.level}"}


# --- doctor --numerics

KEYS_PER_ROW = 16  # of a row measured for more, these are spread over them
SECONDS = 50.0


@dataclass(frozen=True)
class Chosen:
    """A row with a class: the variants that it takes, the static keys measured for it, and those that are recomputed."""

    row: Row
    variants: tuple[Variant, ...]
    measured: tuple[dict[str, FactValue], ...]
    keys: tuple[dict[str, FactValue], ...]

    @property
    def whole(self) -> bool:
        """Can the class be compared? Its id covers every measured key."""
        return 0 < len(self.keys) == len(self.measured)

    def places(self) -> Iterator[tuple[Place, Variant, dict[str, FactValue]]]:
        """What is recomputed."""
        for variant, key in itertools.product(self.variants, self.keys):
            yield (self.row.op, variant.id, facts_key(key)), variant, key


def numerics(names: Collection[str] = (), file: Path | None = None) -> Data:
    """Recompute the fingerprints of what the policy takes on this GPU, as ``doctor --numerics --json`` prints it.

    Args:
        names: only these ops; none means all.
        file: a policy; None is the shipped one.
    """
    from kernreg.tuning.fingerprints import fingerprints

    known = registry.default()
    loaded = policy.load(file or dispatch.shipped_policy(), known)
    return recompute(loaded, known, devices.current(0), names, lambda tasks: fingerprints(tasks, timeout=SECONDS))


def recompute(
    loaded: policy.Policy,
    known: Registry,
    device: Device,
    names: Collection[str],
    measure: Measure,
    clock: Callable[[], float] = time.monotonic,
) -> Data:
    """Hold the recorded classes against fresh fingerprints; rows that `SECONDS` do not suffice for say so."""
    from kernreg.tuning.fingerprints import Task

    began = clock()
    data: Data = {"policy": loaded.path, "device": device_data(device), "nothing": None, "rows": [], "moved": 0, "seconds": 0.0}
    if device.platform != "cuda":
        return {**data, "nothing": "there is no GPU here, so there is nothing to recompute"}
    rows = list(chosen(loaded, known, device, names))
    if not rows:
        text = f"no row of {loaded.path} for {device}{' and these ops' if names else ''} records classes"
        return {**data, "nothing": text}
    tasks = {place: Task.of(variant, key, "cuda:0") for one in rows for place, variant, key in one.places()}
    found: dict[Place, Found] = {}
    ended = measure(list(tasks.values()))
    for task, value in ended:
        found[task.op, task.variant, facts_key(task.facts)] = value
        if clock() - began > SECONDS:
            break
    ended.close()
    data["rows"] = [_verdict(one, found) for one in rows]
    data["moved"] = sum(row["state"] == "moved" for row in data["rows"])
    return {**data, "seconds": round(clock() - began, 1)}


def chosen(loaded: policy.Policy, known: Registry, device: Device, names: Collection[str]) -> Iterator[Chosen]:
    """The rows with classes that the section for this device brings, in the order of the file."""
    for op, rows in loaded.ops.items():
        fit = policy.section_for(loaded, rows, device)
        for row in rows:
            if fit and fit[0].id in row.devices and row.classes and row.numerics and (not names or op in names):
                variants = [known.kernel(op, entry.use.kernel).variant(entry.use.config) for entry in row.entries]
                measured = measured_keys(row, known.op(op))
                step = max(len(measured) / KEYS_PER_ROW, 1.0)
                keys = tuple(measured[int(n * step)] for n in range(min(KEYS_PER_ROW, len(measured))))
                yield Chosen(row, tuple({v.id: v for v in variants}.values()), measured, keys)


def measured_keys(row: Row, op: Op) -> tuple[dict[str, FactValue], ...]:
    """Every static key that the row's measurements cover, as far as its conditions and areas name it."""
    named = {c.key: c.values for c in row.when if c.key in op.facts}
    keys: dict[str, dict[str, FactValue]] = {}
    for area in row.measured:
        values: Mapping[str, tuple[FactValue, ...]] = named | {name: area[name] for name in area if name in op.facts}
        for combination in itertools.product(*values.values()):
            key = dict(zip(values, combination, strict=True))
            keys.setdefault(facts_key(key), key)
    return tuple(keys.values())


def _verdict(one: Chosen, found: Mapping[Place, Found]) -> Data:
    """What became of a row: "same", "moved", "sampled" (what was recomputed agrees) or "not reached", as without a key."""
    row, moved, missing = one.row, list(_moved(one, found)), [place for place, _, _ in one.places() if place not in found]
    return {
        "op": row.op,
        "row": {"file": row.place.file, "line": row.place.line, "key": row.place.key, "when": row.when_text},
        "class": row.numerics,
        "variants": [variant.id for variant in one.variants],
        "keys": len(one.keys),
        "measured": len(one.measured),
        "state": "moved" if moved else "not reached" if missing or not one.keys else "same" if one.whole else "sampled",
        "why": moved,
    }


def _moved(one: Chosen, found: Mapping[Place, Found]) -> Iterator[str]:
    """What is no longer as recorded, in words."""
    from kernreg.tuning.screen import Failure

    bits: dict[str, dict[str, str]] = {variant.id: {} for variant in one.variants}  # by variant and key
    for place, variant, key in one.places():
        value = found.get(place)
        if isinstance(value, Failure):
            yield f"{variant.id} cannot run for {format_facts(key.items())}: {value.step}: {value.reason}"
        elif value is not None and not value.ok:
            yield f"{variant.id} for {format_facts(key.items())} is {value}"
        elif value is not None:
            bits[variant.id][place[2]] = value.bits
    for name, of in bits.items():
        if one.whole and len(of) == len(one.keys) and class_id(of) != one.row.numerics:
            yield f"{name} is now of class {class_id(of)}"
    for key in one.keys:  # whether they agree is seen before all keys are recomputed
        here = {name: of[facts_key(key)] for name, of in bits.items() if facts_key(key) in of}
        if len(set(here.values())) > 1:
            yield f"other bits for {format_facts(key.items())}: {', '.join(f'{name} {text}' for name, text in here.items())}"


def typical_key(op: Op) -> dict[str, FactValue]:
    """The op's defaults, and a usual value for each fact that has none."""
    guess = {name: TYPICAL.get(name, fact.values[0] if fact.values else 16) for name, fact in op.facts.items()}
    return {name: guess[name] if fact.default is None else fact.default for name, fact in op.facts.items()}
