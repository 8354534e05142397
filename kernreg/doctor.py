"""What this machine is, what serves on it, and what is missing. Nothing raises: a fault is a finding."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import kernreg
from kernreg import device as devices
from kernreg import dispatch, policy, registry
from kernreg.contract import FactValue, Op
from kernreg.describe import Data, device_data, policy_data
from kernreg.device import Device
from kernreg.registry import Registry

T = TypeVar("T")

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
    nothing: Data = {"file": str(path), "digest": None, "errors": 1, "warnings": 0, "rows": 0, "problems": []}
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
        chosen = policy.choose(loaded, known, device, op, key, 1, dispatch.overrides())
    except ValueError as error:
        found.problems.append(str(error))
        return {**data, "why": str(error)}
    matched = chosen.row.when_text if chosen.row else chosen.level
    return {**data, "variant": chosen.variant.id, "source": chosen.source, "why": f"{matched}, {chosen.level}"}


def typical_key(op: Op) -> dict[str, FactValue]:
    """The op's defaults, and a usual value for each fact that has none."""
    guess = {name: TYPICAL.get(name, fact.values[0] if fact.values else 16) for name, fact in op.facts.items()}
    return {name: guess[name] if fact.default is None else fact.default for name, fact in op.facts.items()}
