"""Device identity: which chip a CUDA ordinal is. Needs no CUDA context and initialises nothing in this process.

NVML describes every GPU but numbers them its own way, so a CUDA ordinal is never taken for an NVML index. If CUDA
already runs in this process, its UUID (or PCI id) finds the GPU in NVML. If not, CUDA_VISIBLE_DEVICES is read as CUDA
reads it; where only CUDA can tell what an entry means (unlike GPUs in fastest-first order, MIG), a short child process
asks the driver. What NVML cannot tell, CUDA's own properties do, and a log line says so once.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

log = logging.getLogger("kernreg")

Arch: TypeAlias = tuple[int, int]
PLATFORMS = ("cuda", "cpu", "interpreter")


@dataclass(frozen=True, slots=True)
class Device:
    """What a kernel may be chosen by. Two equal chips are equal, whichever of them it is.

    platform: "cuda", "cpu", or "interpreter" (Triton's CPU interpreter, built by hand in tests).
    source: who said so: "nvml", "driver" (CUDA, asked in a child process), "torch" or "declared".
    """

    platform: str
    name: str
    arch: Arch | None
    sms: int
    uuid: str = field(default="", compare=False)
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.platform not in PLATFORMS:
            raise ValueError(f"platform is one of {', '.join(PLATFORMS)}; got {self.platform!r}")

    @staticmethod
    def cpu() -> Device:
        return Device("cpu", "cpu", None, 0)

    @staticmethod
    def interpreter() -> Device:
        return Device("interpreter", "interpreter", None, 0)

    @staticmethod
    def declared(name: str, arch: str | Arch, sms: int) -> Device:
        """A CUDA device that need not be here, as a policy file or a test describes it."""
        return Device("cuda", name, parse_arch(arch) if isinstance(arch, str) else arch, sms, source="declared")

    @property
    def arch_name(self) -> str:
        """``sm_90``; empty off CUDA."""
        return f"sm_{self.arch[0]}{self.arch[1]}" if self.arch else ""

    @property
    def id(self) -> str:
        """The product as a name for files and keys: ``nvidia-h20-3e``."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @property
    def record(self) -> dict[str, str | int]:
        """What files of measurements say of it."""
        return {"id": self.id, "name": self.name, "arch": self.arch_name, "sms": self.sms}

    def __str__(self) -> str:
        return f"{self.name} ({self.arch_name}, {self.sms} SMs)" if self.arch else self.name


def parse_arch(name: str) -> Arch:
    """``sm_103`` -> (10, 3): the last digit is the minor version."""
    match = re.fullmatch(r"sm_([1-9][0-9]*)([0-9])", name)
    if not match:
        raise ValueError(f"an arch looks like sm_90 or sm_103; got {name!r}")
    return int(match[1]), int(match[2])


def current(index: int = 0) -> Device:
    """The device of a CUDA ordinal of this process; `Device.cpu()` when no GPU is visible.

    Cached for the ordinal and what decides its meaning, so a forked worker that narrows CUDA_VISIBLE_DEVICES is not
    given its parent's answer, and the first look after CUDA came up is CUDA's own.
    """
    live = _torch_with_live_cuda() is not None
    names = () if live else tuple(os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"))
    return _current(index, live, names)


@cache
def _current(index: int, live: bool, names: tuple[str | None, ...]) -> Device:
    return resolve(index, os.environ, import_nvml(), _process_runtime(live))


@cache
def _say(message: str) -> None:
    log.warning(message)


@dataclass(frozen=True, slots=True)
class Chip:
    """One device as NVML or CUDA describes it. arch None and sms 0 mean that it could not say."""

    name: str
    arch: Arch | None
    sms: int
    uuid: str
    pci: str = ""
    source: str = "nvml"
    mig: bool = False  # divided into `slices`: CUDA shows those, never the whole
    slices: tuple[Chip, ...] = ()
    instance: str = ""  # of a slice: "<gpu instance>/<compute instance>"

    @property
    def complete(self) -> bool:
        return bool(self.name and self.arch and self.sms) and not self.mig

    def device(self) -> Device:
        return Device("cuda", self.name, self.arch, self.sms, self.uuid, self.source)


@dataclass(frozen=True)
class Runtime:
    """CUDA's own view.

    live: does it run in this process? Then its answer counts, whatever the environment says now.
    ask: (environment) -> the visible devices in order, or None when nothing answers.
    """

    live: bool
    ask: Callable[[Mapping[str, str]], tuple[Chip, ...] | None]


def resolve(index: int, env: Mapping[str, str], nvml: Any, runtime: Runtime) -> Device:
    """The device of CUDA ordinal `index` under the environment `env`; `nvml` is the pynvml module or None."""
    known = read_nvml(nvml)
    chips = None if runtime.live else visible(env, known)
    if chips is None or not all(chip.complete for chip in chips[index : index + 1]):
        seen = runtime.ask(env)
        if seen is None and known:
            _say(f"NVML lists {len(known)} GPU(s), but CUDA does not answer: the device is cpu")
        chips = tuple(_identify(chip, known) for chip in seen or ())
    if index == 0 and not chips:
        return Device.cpu()
    if not 0 <= index < len(chips):
        raise ValueError(f"CUDA device {index} does not exist: {len(chips)} visible")
    return chips[index].device()


def _identify(seen: Chip, known: tuple[Chip | None, ...]) -> Chip:
    """NVML's description of the device that CUDA showed, or CUDA's own where NVML has none."""
    chips = [chip for chip in known if chip]
    everything = [*chips, *(piece for chip in chips for piece in chip.slices)]
    same = [chip for chip in everything if seen.uuid and _bare(chip.uuid) == _bare(seen.uuid)]
    same = same or [chip for chip in chips if seen.pci and chip.pci == seen.pci]
    if same and same[0].complete:
        return same[0]
    why = "NVML does not describe it fully" if same else "NVML does not know it" if known else "no NVML here"
    _say(f"{seen.name}: {why}; name, arch and SM count are those that CUDA reports ({seen.source})")
    return seen


def visible(env: Mapping[str, str], known: tuple[Chip | None, ...]) -> tuple[Chip, ...] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; None when only CUDA can tell.

    As CUDA does: a unique beginning of a UUID will do, reading stops at the first invalid entry (so "" and "-1" leave
    nothing), and a GPU named twice leaves nothing.
    """
    chips = [chip for chip in known if chip]
    if len(chips) < len(known) or not chips:
        return None
    value = env.get("CUDA_VISIBLE_DEVICES")
    entries = list(map(str, range(len(chips)))) if value is None else [entry.strip() for entry in value.split(",")]
    kinds = {entry[:4] if entry.startswith(("GPU-", "MIG-")) else "index" for entry in entries}
    if len(kinds) > 1 or (kinds == {"MIG-"} and len(entries) > 1):
        return None  # undocumented, and not the same in all drivers
    found: list[Chip] = []
    for entry in entries:
        chip = _entry(entry, chips)
        if chip is None:
            break
        if chip in found:
            _say(f"CUDA_VISIBLE_DEVICES={value} names {chip.uuid or chip.name} twice; CUDA then shows no device at all")
            return ()
        found.append(chip)
    ambiguous = kinds == {"index"} and not _index_is_certain(env, chips)
    return None if found and (ambiguous or any(chip.mig for chip in found)) else tuple(found)


def _index_is_certain(env: Mapping[str, str], chips: list[Chip]) -> bool:
    """Is CUDA's ordinal the PCI order? By default the fastest comes first, which matters only among unlike GPUs."""
    if any(chip.mig for chip in chips):
        return False
    alike = len({(chip.name, chip.arch, chip.sms) for chip in chips}) == 1
    return alike or env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def _entry(entry: str, chips: list[Chip]) -> Chip | None:
    """The GPU or MIG slice that one entry of CUDA_VISIBLE_DEVICES names, or None when it is invalid."""
    if entry.startswith("GPU-"):
        return _only(chip for chip in chips if chip.uuid.startswith(entry))
    if entry.startswith("MIG-"):
        parent, _, instance = entry.removeprefix("MIG-").partition("/")
        return _only(
            piece
            for chip in chips
            for piece in chip.slices
            if piece.uuid == entry or (chip.uuid == parent and piece.instance == instance)
        )
    number = re.match(r"\+?([0-9]+)", entry)  # like strtoul, CUDA ignores what follows the digits
    return chips[int(number[1])] if number and int(number[1]) < len(chips) else None


def _only(found: Any) -> Chip | None:
    chips = list(found)
    return chips[0] if len(chips) == 1 else None


def _bare(uuid: str) -> str:
    """A UUID's digits: torch prints them without "GPU-", the driver without dashes."""
    return re.sub(r"^(gpu-|mig-)+|-", "", uuid.lower())


CORES_PER_SM: Mapping[Arch, int] = {
    (7, 0): 64,
    (7, 2): 64,
    (7, 5): 64,
    (8, 0): 64,
    (8, 6): 128,
    (8, 7): 128,
    (8, 9): 128,
    (9, 0): 128,
}


def import_nvml() -> Any:
    """The pynvml module, or None."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def driver_version(nvml: Any) -> str | None:
    """``570.86.15``, or None without NVML or a driver."""
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError):
        return None
    version = _text(_get(nvml, "nvmlSystemGetDriverVersion"))
    _get(nvml, "nvmlShutdown")
    return version or None


def read_nvml(nvml: Any) -> tuple[Chip | None, ...]:
    """Every GPU that NVML lists, in PCI order; None for one that it may not open. Empty without NVML or a driver."""
    if nvml is None:
        return ()
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError):
        return ()
    try:
        count = _get(nvml, "nvmlDeviceGetCount") or 0
        handles = [_get(nvml, "nvmlDeviceGetHandleByIndex", i) for i in range(count)]
        chips = [None if handle is None else _read_chip(nvml, handle) for handle in handles]
    finally:
        _get(nvml, "nvmlShutdown")
    return tuple(sorted(chips, key=lambda chip: chip.pci if chip else ""))


def _get(nvml: Any, name: str, *args: Any) -> Any:
    """One NVML query, or None where the driver, the GPU or an older pynvml does not offer it."""
    query = getattr(nvml, name, None)
    try:
        return None if query is None else query(*args)
    except (nvml.NVMLError, OSError, UnicodeDecodeError):  # an older pynvml decodes a name that is no text
        return None


def _read_chip(nvml: Any, handle: Any) -> Chip:
    capability = _get(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    arch = (int(capability[0]), int(capability[1])) if capability else None
    name = _text(_get(nvml, "nvmlDeviceGetName", handle))
    pci = _get(nvml, "nvmlDeviceGetPciInfo", handle)
    mode = _get(nvml, "nvmlDeviceGetMigMode", handle)
    mig = bool(mode and mode[0])
    return Chip(
        name,
        arch,
        _sm_count(arch, _get(nvml, "nvmlDeviceGetNumGpuCores", handle)),
        _text(_get(nvml, "nvmlDeviceGetUUID", handle)),
        pci=_pci(_text(pci.busId)) if pci else "",
        mig=mig,
        slices=_read_slices(nvml, handle, name, arch) if mig else (),
    )


def _sm_count(arch: Arch | None, cores: int | None) -> int:
    """SMs from CUDA cores; 0 for an arch whose SM size is not known here."""
    if arch is None or not cores:
        return 0
    per_sm = 128 if arch[0] in {10, 11, 12} else CORES_PER_SM.get(arch)
    return cores // per_sm if per_sm and cores % per_sm == 0 else 0


def _read_slices(nvml: Any, parent: Any, name: str, arch: Arch | None) -> tuple[Chip, ...]:
    count = _get(nvml, "nvmlDeviceGetMaxMigDeviceCount", parent) or 0
    handles = [_get(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", parent, i) for i in range(count)]
    return tuple(_read_slice(nvml, handle, name, arch) for handle in handles if handle is not None)


def _read_slice(nvml: Any, handle: Any, parent: str, arch: Arch | None) -> Chip:
    attributes = _get(nvml, "nvmlDeviceGetAttributes_v2", handle)
    name = _text(_get(nvml, "nvmlDeviceGetName", handle))
    instances = [_get(nvml, f"nvmlDeviceGet{kind}InstanceId", handle) for kind in ("Gpu", "Compute")]
    return Chip(
        name if " MIG " in name else f"{parent} MIG {_profile(attributes)}" if attributes else "",
        arch,
        int(attributes.multiprocessorCount) if attributes else 0,
        _text(_get(nvml, "nvmlDeviceGetUUID", handle)),
        instance="/".join(map(str, instances)),
    )


def _profile(attributes: Any) -> str:
    """``1g.5gb``, or ``1c.3g.20gb`` where a compute instance has part of its GPU instance."""
    compute, slices = attributes.computeInstanceSliceCount, attributes.gpuInstanceSliceCount
    part = "" if compute == slices else f"{compute}c."
    return f"{part}{slices}g.{-(-attributes.memorySizeMB // 1024)}gb"


def _text(value: str | bytes | None) -> str:
    """Older pynvml returns bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def _pci(bus_id: str) -> str:
    """``00000000:3B:00.0`` (NVML) and ``0000:3b:00.0`` (CUDA) -> ``00000000:3b:00``; empty for anything else."""
    parts = bus_id.lower().split(".")[0].split(":")
    return f"{parts[0]:0>8}:{parts[1]}:{parts[2]}" if len(parts) == 3 else ""


def _process_runtime(live: bool) -> Runtime:
    return Runtime(live, lambda env: _ask_torch() if live else _ask_driver(env))


def _torch_with_live_cuda() -> Any:
    """torch, if something else has imported it and initialised CUDA; this module does neither."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    initialised = getattr(cuda, "is_initialized", None)
    return sys.modules["torch"] if initialised and initialised() else None


def _ask_torch() -> tuple[Chip, ...]:
    cuda = sys.modules["torch"].cuda
    return tuple(_torch_chip(cuda.get_device_properties(i)) for i in range(cuda.device_count()))


def _torch_chip(properties: Any) -> Chip:
    place: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return Chip(
        properties.name,
        # ROCm's numbers would read as NVIDIA's: gfx942 is no sm_94
        None if getattr(properties, "gcnArchName", "") else (properties.major, properties.minor),
        properties.multi_processor_count,
        str(getattr(properties, "uuid", "")),
        pci="" if None in place else _pci("{:x}:{:02x}:{:02x}".format(*place)),
        source="torch",
    )


# cuInit creates no context, and the process ends before anything could inherit what it initialised.
DRIVER_QUESTION = """
import ctypes, json, sys
try:
    cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
except OSError:
    sys.exit(print("null"))
number = ctypes.c_int
def ask(query, *args):
    out = number()
    assert getattr(cuda, query)(ctypes.byref(out), *args) == 0
    return out.value
def text(query, size, device):
    out = ctypes.create_string_buffer(size)
    assert query(out, size, device) == 0
    return out.value.decode()
def uuid(device):
    out = (ctypes.c_ubyte * 16)()
    query = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    assert query(out, device) == 0
    return bytes(out).hex()
status = cuda.cuInit(0)
assert status in (0, 100, 101), "cuInit returned %d" % status
chips = []
for i in range(ask("cuDeviceGetCount") if status == 0 else 0):
    device = ask("cuDeviceGet", i)
    sms, major, minor = (ask("cuDeviceGetAttribute", attribute, device) for attribute in (16, 75, 76))
    name, pci = text(cuda.cuDeviceGetName, 256, device), text(cuda.cuDeviceGetPCIBusId, 32, device)
    chips.append([name, major, minor, sms, uuid(device), pci])
print(json.dumps(chips))
"""


def _ask_driver(env: Mapping[str, str]) -> tuple[Chip, ...] | None:
    """What the CUDA driver shows under `env`; None when there is none, or it gives no answer (which is logged)."""
    command = [sys.executable or "python3", "-I", "-S", "-c", DRIVER_QUESTION]
    try:
        child = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=60, check=True)
        answer = json.loads(child.stdout)
    except subprocess.CalledProcessError as error:
        _say(f"the CUDA driver did not say which devices are visible: {error.stderr.strip().rpartition(chr(10))[2]}")
        return None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        _say(f"the CUDA driver did not say which devices are visible: {error}")
        return None
    if answer is None:
        return None
    return tuple(Chip(name, (major, minor), sms, uuid, _pci(pci), "driver") for name, major, minor, sms, uuid, pci in answer)
