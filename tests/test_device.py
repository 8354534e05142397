"""Device identity against a fake NVML and a fake CUDA: spellings of CUDA_VISIBLE_DEVICES, MIG, and what is missing."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kernreg import device
from kernreg.device import Chip, Device, Runtime, parse_arch, resolve

H200 = "GPU-1111aaaa-0000-0000-0000-000000000001"
PRO6000 = "GPU-2222bbbb-0000-0000-0000-000000000002"
SLICE = "MIG-3333cccc-0000-0000-0000-000000000003"
HOPPER = Device.declared("NVIDIA H200", "sm_90", 132)
BLACKWELL = Device.declared("NVIDIA RTX PRO 6000", "sm_120", 188)


class NVMLError(Exception):
    pass


class FakeNVML:
    """The part of pynvml that `read_nvml` asks. GPUs are dicts; a value that is missing raises NotSupported."""

    NVMLError = NVMLError

    def __init__(self, *gpus: dict[str, Any] | None, as_bytes: bool = False) -> None:
        self.gpus = gpus
        self.as_bytes = as_bytes
        self.users = 0

    def nvmlInit(self) -> None:
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        gpu = self.gpus[index]
        if gpu is None:
            raise NVMLError("Insufficient Permissions")
        return gpu

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: dict[str, Any]) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: dict[str, Any], index: int) -> dict[str, Any]:
        if index >= len(gpu["slices"]):
            raise NVMLError("Not Found")
        return gpu["slices"][index]

    def __getattr__(self, name: str) -> Any:
        """nvmlDeviceGet<Thing>: the fake GPU's own entry of that name."""
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)
        return lambda gpu: self._value(gpu, name.removeprefix("nvmlDeviceGet"))

    def _value(self, gpu: dict[str, Any], key: str) -> Any:
        if key not in gpu:
            raise NVMLError("Not Supported")
        value = gpu[key]
        return value.encode() if self.as_bytes and isinstance(value, str) else value


def gpu(name: str, uuid: str, arch: tuple[int, int], cores: int, bus: str, **more: Any) -> dict[str, Any]:
    return {
        "Name": name,
        "UUID": uuid,
        "CudaComputeCapability": list(arch),
        "NumGpuCores": cores,
        "PciInfo": SimpleNamespace(busId=f"00000000:{bus}:00.0"),
        **more,
    }


def hopper(**more: Any) -> dict[str, Any]:
    return gpu("NVIDIA H200", H200, (9, 0), 132 * 128, "1B", **more)


def blackwell(**more: Any) -> dict[str, Any]:
    return gpu("NVIDIA RTX PRO 6000", PRO6000, (12, 0), 188 * 128, "2C", **more)


def seen(name: str, uuid: str, arch: tuple[int, int] = (9, 0), sms: int = 7, pci: str = "") -> Chip:
    return Chip(name, arch, sms, uuid, pci, source="driver")


def no_question(env: object) -> tuple[Chip, ...] | None:
    raise AssertionError("CUDA was asked although the environment says it all")


def silent(*, live: bool = False) -> Runtime:
    return Runtime(live, lambda env: None)


QUIET = Runtime(False, no_question)
PCI = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
FASTEST = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    device._say.cache_clear()
    device._current.cache_clear()
    yield
    device._say.cache_clear()
    device._current.cache_clear()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, logger="kernreg")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "kernreg"]


def all_of(env: dict[str, str], nvml: Any, runtime: Runtime = QUIET) -> list[Device]:
    """Every device that CUDA would show, in order."""
    found: list[Device] = []
    try:
        while True:
            one = resolve(len(found), env, nvml, runtime)
            if one.platform == "cpu":
                return found
            found.append(one)
    except ValueError as error:
        assert "does not exist" in str(error)
        return found


class TestDevice:
    @pytest.mark.parametrize(
        ("name", "slug"),
        [
            ("NVIDIA H200", "nvidia-h200"),
            ("NVIDIA H20", "nvidia-h20"),
            ("NVIDIA H20-3e", "nvidia-h20-3e"),
            ("NVIDIA H200 NVL", "nvidia-h200-nvl"),
            ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "nvidia-a100-sxm4-40gb-mig-1g-5gb"),
        ],
    )
    def test_products_keep_their_own_id(self, name: str, slug: str) -> None:
        assert Device.declared(name, "sm_90", 1).id == slug

    @pytest.mark.parametrize(("name", "arch"), [("sm_90", (9, 0)), ("sm_103", (10, 3)), ("sm_120", (12, 0))])
    def test_arch_is_two_numbers_and_back(self, name: str, arch: tuple[int, int]) -> None:
        assert parse_arch(name) == arch
        assert Device.declared("x", arch, 1).arch_name == name

    @pytest.mark.parametrize("name", ["sm_9", "sm90", "sm_9.0", "90", "", "sm_090", "sm_90a"])
    def test_no_other_spelling_is_an_arch(self, name: str) -> None:
        with pytest.raises(ValueError, match="looks like sm_90"):
            parse_arch(name)

    def test_archs_compare_as_numbers(self) -> None:
        assert parse_arch("sm_90") < parse_arch("sm_100") < parse_arch("sm_103") < parse_arch("sm_120")

    def test_equality_is_the_product_and_not_the_board(self) -> None:
        one = Device("cuda", "NVIDIA H200", (9, 0), 132, uuid=H200, source="nvml")
        assert one == HOPPER and hash(one) == hash(HOPPER)
        assert one != Device.declared("NVIDIA H200", "sm_90", 66)

    def test_hosts(self) -> None:
        assert (Device.cpu().platform, Device.cpu().arch, Device.cpu().arch_name) == ("cpu", None, "")
        assert Device.interpreter() != Device.cpu()
        with pytest.raises(ValueError, match="platform is one of cuda, cpu, interpreter; got 'gpu'"):
            Device("gpu", "x", None, 0)


class TestVisibleDevices:
    """NVML has {0: sm_90, 1: sm_120}; the first two letters below stand for them, in CUDA's order."""

    CASES = (
        (None, "hb"),
        ("0,1", "hb"),
        ("1,0", "bh"),
        ("1", "b"),
        (" 1 , 0 ", "bh"),
        ("", ""),
        ("-1", ""),
        ("0,-1,1", "h"),
        ("0,7,1", "h"),
        ("0,,1", "h"),
        ("none", ""),
        ("0,0", ""),
        ("1,0,1", ""),
        ("1st,0", "bh"),
        (PRO6000, "b"),
        (f"{PRO6000},{H200}", "bh"),
        ("GPU-2222", "b"),
        ("GPU-2222,GPU-1", "bh"),
        ("GPU-2222,GPU-22", ""),
        ("GPU-2222,GPU-9,GPU-1", "b"),
        ("GPU-", ""),
        ("GPU-9", ""),
        ("2222bbbb", ""),
    )

    @pytest.mark.parametrize(("value", "order"), CASES, ids=[repr(value) for value, _ in CASES])
    def test_spellings(self, value: str | None, order: str) -> None:
        env = PCI | ({} if value is None else {"CUDA_VISIBLE_DEVICES": value})
        want = [{"h": HOPPER, "b": BLACKWELL}[letter] for letter in order]
        assert all_of(env, FakeNVML(hopper(), blackwell())) == want

    def test_the_board_comes_with_it(self) -> None:
        one = resolve(0, PCI | {"CUDA_VISIBLE_DEVICES": "1"}, FakeNVML(hopper(), blackwell()), QUIET)
        assert (one.uuid, one.source) == (PRO6000, "nvml")

    def test_two_devices_in_one_process_are_two_identities(self) -> None:
        nvml = FakeNVML(hopper(), blackwell())
        assert [resolve(i, PCI, nvml, QUIET) for i in (0, 1)] == [HOPPER, BLACKWELL]

    def test_pci_order_even_where_nvml_lists_otherwise(self) -> None:
        assert all_of(PCI, FakeNVML(blackwell(), hopper())) == [HOPPER, BLACKWELL]

    @pytest.mark.parametrize("env", [{}, FASTEST], ids=["unset", "FASTEST_FIRST"])
    def test_an_index_among_unlike_gpus_is_cudas_to_say(self, env: dict[str, str]) -> None:
        asked: list[dict[str, str]] = []

        def fastest_first(env: Any) -> tuple[Chip, ...]:
            asked.append(env)
            return seen("b", PRO6000), seen("h", H200)

        nvml = FakeNVML(hopper(), blackwell())
        assert resolve(0, env | {"CUDA_VISIBLE_DEVICES": "0,1"}, nvml, Runtime(False, fastest_first)) == BLACKWELL
        assert asked == [env | {"CUDA_VISIBLE_DEVICES": "0,1"}]

    @pytest.mark.parametrize("value", ["GPU-2222", "", "-1"])
    def test_what_is_no_index_needs_no_question(self, value: str) -> None:
        expected = [BLACKWELL] if value == "GPU-2222" else []
        assert all_of(FASTEST | {"CUDA_VISIBLE_DEVICES": value}, FakeNVML(hopper(), blackwell())) == expected

    def test_among_equal_gpus_an_index_is_certain(self) -> None:
        nvml = FakeNVML(hopper(), gpu("NVIDIA H200", "GPU-4", (9, 0), 132 * 128, "1C"))
        assert all_of({"CUDA_VISIBLE_DEVICES": "1,0"}, nvml) == [HOPPER, HOPPER]

    def test_indices_and_uuids_mixed_are_cudas_to_say(self) -> None:
        runtime = Runtime(False, lambda env: (seen("h", H200),))
        env = PCI | {"CUDA_VISIBLE_DEVICES": f"{H200},1"}
        assert all_of(env, FakeNVML(hopper(), blackwell()), runtime) == [HOPPER]

    def test_a_gpu_that_may_not_be_opened_makes_numbers_uncertain(self) -> None:
        runtime = Runtime(False, lambda env: (seen("h", H200),))
        env = PCI | {"CUDA_VISIBLE_DEVICES": "1"}
        assert all_of(env, FakeNVML(None, hopper(), blackwell()), runtime) == [HOPPER]

    def test_a_gpu_named_twice_is_said(self, said: Any) -> None:
        assert resolve(0, {"CUDA_VISIBLE_DEVICES": "0,0"}, FakeNVML(hopper()), QUIET) == Device.cpu()
        assert said() == [f"CUDA_VISIBLE_DEVICES=0,0 names {H200} twice; CUDA then shows no device at all"]

    @pytest.mark.parametrize("index", [1, -1])
    def test_an_ordinal_that_does_not_exist(self, index: int) -> None:
        with pytest.raises(ValueError, match=f"CUDA device {index} does not exist: 1 visible"):
            resolve(index, {}, FakeNVML(hopper()), QUIET)


class TestRuntime:
    def test_running_cuda_outweighs_the_environment(self) -> None:
        """The variable was changed after CUDA read it."""
        runtime = Runtime(True, lambda env: (seen("b", PRO6000),))
        assert resolve(0, PCI | {"CUDA_VISIBLE_DEVICES": "0"}, FakeNVML(hopper(), blackwell()), runtime) == BLACKWELL

    @pytest.mark.parametrize("uuid", [PRO6000.removeprefix("GPU-"), PRO6000.upper(), PRO6000[4:].replace("-", "")])
    def test_every_spelling_of_a_uuid_matches(self, uuid: str) -> None:
        runtime = Runtime(True, lambda env: (seen("?", uuid),))
        assert resolve(0, {}, FakeNVML(hopper(), blackwell()), runtime).uuid == PRO6000

    def test_pci_id_is_the_second_choice(self) -> None:
        properties = SimpleNamespace(
            name="?", major=1, minor=1, multi_processor_count=1, pci_domain_id=0, pci_bus_id=0x2C, pci_device_id=0
        )
        runtime = Runtime(True, lambda env: (device._torch_chip(properties),))
        assert resolve(0, {}, FakeNVML(hopper(), blackwell()), runtime) == BLACKWELL

    def test_a_device_that_nvml_does_not_know(self, said: Any) -> None:
        runtime = Runtime(True, lambda env: (seen("Elsewhere", "77", (8, 7), 16),))
        assert resolve(0, {}, FakeNVML(hopper()), runtime) == Device.declared("Elsewhere", "sm_87", 16)
        assert "NVML does not know it" in said()[0]

    def test_rocm_is_no_nvidia_arch(self) -> None:
        properties = SimpleNamespace(name="MI300", major=9, minor=4, multi_processor_count=304, gcnArchName="gfx942", uuid="")
        assert device._torch_chip(properties).device().arch is None


class TestMig:
    ATTRIBUTES = SimpleNamespace(multiprocessorCount=14, gpuInstanceSliceCount=1, computeInstanceSliceCount=1, memorySizeMB=4864)

    def parent(self, **piece: Any) -> dict[str, Any]:
        one = {"UUID": SLICE, "GpuInstanceId": 7, "ComputeInstanceId": 0, "Attributes_v2": self.ATTRIBUTES, **piece}
        return gpu("NVIDIA A100", H200, (8, 0), 108 * 64, "1B", MigMode=[1, 1], slices=[one])

    WANT = Device.declared("NVIDIA A100 MIG 1g.5gb", "sm_80", 14)

    @pytest.mark.parametrize("value", [SLICE, f"MIG-{H200}/7/0"])
    def test_a_slice_is_not_its_parent(self, value: str) -> None:
        assert all_of({"CUDA_VISIBLE_DEVICES": value}, FakeNVML(blackwell(), self.parent())) == [self.WANT]

    @pytest.mark.parametrize("value", [f"MIG-{H200}/8/0", "MIG-9"])
    def test_a_slice_that_does_not_exist(self, value: str) -> None:
        assert all_of({"CUDA_VISIBLE_DEVICES": value}, FakeNVML(self.parent())) == []

    def test_nvmls_own_name_for_a_slice(self) -> None:
        named = self.parent(Name="NVIDIA A100-X MIG 1g.5gb")
        assert resolve(0, {"CUDA_VISIBLE_DEVICES": SLICE}, FakeNVML(named), QUIET).name == "NVIDIA A100-X MIG 1g.5gb"

    def test_a_part_of_a_gpu_instance_says_so(self) -> None:
        part = SimpleNamespace(**{**vars(self.ATTRIBUTES), "gpuInstanceSliceCount": 3, "memorySizeMB": 19968})
        assert device._profile(part) == "1c.3g.20gb"

    @pytest.mark.parametrize("value", [None, "0", H200])
    def test_which_slice_an_index_or_the_parent_means_is_cudas_to_say(self, value: str | None) -> None:
        env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        runtime = Runtime(False, lambda env: (seen("?", SLICE),))
        assert all_of(env, FakeNVML(self.parent()), runtime) == [self.WANT]

    def test_a_runtime_that_only_names_the_parent_describes_the_slice_itself(self, said: Any) -> None:
        runtime = Runtime(True, lambda env: (seen("NVIDIA A100 MIG 2g.10gb", H200, (8, 0), 28),))
        one = resolve(0, {}, FakeNVML(self.parent()), runtime)
        assert one == Device.declared("NVIDIA A100 MIG 2g.10gb", "sm_80", 28)
        assert len(said()) == 1

    def test_a_slice_without_attributes_falls_back(self) -> None:
        bare = self.parent()
        del bare["slices"][0]["Attributes_v2"]
        runtime = Runtime(False, lambda env: (seen("NVIDIA A100 MIG 1g.5gb", SLICE, (8, 0), 14),))
        one = resolve(0, {"CUDA_VISIBLE_DEVICES": SLICE}, FakeNVML(bare), runtime)
        assert (one, one.source) == (self.WANT, "driver")


class TestWithoutNVML:
    RUNTIME = Runtime(False, lambda env: (seen("NVIDIA Orin", "55", (8, 7), 16),))
    ORIN = Device.declared("NVIDIA Orin", "sm_87", 16)

    def test_library_absent(self, said: Any) -> None:
        assert [resolve(0, {}, None, self.RUNTIME) for _ in range(3)] == [self.ORIN] * 3
        assert said() == ["NVIDIA Orin: no NVML here; name, arch and SM count are those that CUDA reports (driver)"]

    def test_driver_absent(self) -> None:
        nvml = FakeNVML(hopper())
        nvml.nvmlInit = lambda: (_ for _ in ()).throw(NVMLError("Driver Not Loaded"))  # type: ignore[method-assign]
        assert resolve(0, {}, nvml, self.RUNTIME) == self.ORIN

    @pytest.mark.parametrize("lost", ["Name", "CudaComputeCapability", "NumGpuCores"])
    def test_not_supported_takes_cudas_own_properties_and_says_so_once(self, lost: str, said: Any) -> None:
        poor = hopper()
        del poor[lost]
        runtime = Runtime(False, lambda env: (seen("NVIDIA H200", H200, (9, 0), 131),))
        found = [resolve(0, {}, FakeNVML(poor), runtime) for _ in range(2)]
        assert [(one.sms, one.source) for one in found] == [(131, "driver")] * 2
        assert len(said()) == 1

    def test_an_arch_of_unknown_sm_size_takes_cudas_count(self) -> None:
        future = gpu("NVIDIA Next", H200, (20, 0), 256 * 100, "1B")
        runtime = Runtime(False, lambda env: (seen("NVIDIA Next", H200, (20, 0), 100),))
        assert resolve(0, {}, FakeNVML(future), runtime) == Device.declared("NVIDIA Next", "sm_200", 100)

    def test_nothing_at_all_is_the_cpu(self, said: Any) -> None:
        assert resolve(0, {}, None, silent()) == Device.cpu()
        assert said() == []

    def test_gpus_without_cuda_are_said(self, said: Any) -> None:
        assert resolve(0, {}, FakeNVML(hopper(), blackwell()), silent()) == Device.cpu()
        assert said() == ["NVML lists 2 GPU(s), but CUDA does not answer: the device is cpu"]

    def test_older_pynvml_returns_bytes_and_offers_less(self) -> None:
        one = resolve(0, {}, FakeNVML(hopper(), as_bytes=True), QUIET)
        assert (one, one.uuid) == (HOPPER, H200)

    @pytest.mark.parametrize(
        ("arch", "cores", "sms"),
        [((7, 5), 2560, 40), ((8, 0), 6912, 108), ((8, 9), 16384, 128), ((10, 3), 18944, 148), ((9, 0), 100, 0)],
    )
    def test_sm_count(self, arch: tuple[int, int], cores: int, sms: int) -> None:
        assert device._sm_count(arch, cores) == sms

    def test_driver_version(self) -> None:
        nvml = FakeNVML()
        nvml.nvmlSystemGetDriverVersion = lambda: b"570.86.15"  # type: ignore[attr-defined]
        assert (device.driver_version(nvml), nvml.users) == ("570.86.15", 0)
        assert device.driver_version(None) is None

    def test_nvml_is_released(self) -> None:
        nvml = FakeNVML(hopper())
        resolve(0, {}, nvml, QUIET)
        assert nvml.users == 0


class TestCurrent:
    def use(self, monkeypatch: pytest.MonkeyPatch, nvml: Any) -> None:
        monkeypatch.setattr(device, "import_nvml", lambda: nvml)
        monkeypatch.setattr(device, "_ask_driver", lambda env: None)
        monkeypatch.setattr(device, "_torch_with_live_cuda", lambda: None)
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def test_cached_for_the_ordinal_and_not_the_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nvml = FakeNVML(hopper(), blackwell())
        self.use(monkeypatch, nvml)
        assert (device.current(), device.current(1)) == (HOPPER, BLACKWELL)
        nvml.gpus = ()
        assert (device.current(0), device.current(1)) == (HOPPER, BLACKWELL)

    def test_a_narrowed_environment_is_read_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(monkeypatch, FakeNVML(hopper(), blackwell()))
        assert device.current() == HOPPER
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert device.current() == BLACKWELL

    def test_once_cuda_runs_it_is_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(monkeypatch, FakeNVML(hopper(), blackwell()))
        assert device.current() == HOPPER
        properties = SimpleNamespace(name="?", major=1, minor=1, multi_processor_count=1, uuid=PRO6000)
        cuda = SimpleNamespace(device_count=lambda: 1, get_device_properties=lambda i: properties)
        monkeypatch.setattr(device, "_torch_with_live_cuda", lambda: True)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
        assert device.current() == BLACKWELL

    def test_live_means_that_torch_has_initialised_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for live in (False, True):
            torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda live=live: live))
            monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
            assert (device._torch_with_live_cuda() is torch) is live
        monkeypatch.delitem(sys.modules, "torch")
        assert device._torch_with_live_cuda() is None

    def test_a_look_imports_no_torch(self) -> None:
        code = "import sys; from kernreg import device; device.current(); sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


FAKE_DRIVER = """
#include <string.h>
#include <stdlib.h>
int cuInit(int flags) { return atoi(getenv("FAKE_CUINIT")); }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 10 + ordinal; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 16 ? 100 + device : attribute == 75 ? 9 : attribute == 76 ? 0 : -1; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strcpy(name, device == 10 ? "First" : "Second"); return 0; }
int cuDeviceGetPCIBusId(char *id, int size, int device) { strcpy(id, "0000:3B:00.0"); return 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { memset(uuid, device, 16); return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "cuda.c").write_text(FAKE_DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "cuda.c"], check=True)
    return str(folder)


@pytest.mark.skipif(not shutil.which("cc") or sys.platform != "linux", reason="needs a C compiler for the fake driver")
class TestDriverQuestion:
    def ask(self, library: str, status: int) -> tuple[Chip, ...] | None:
        return device._ask_driver({**os.environ, "LD_LIBRARY_PATH": library, "FAKE_CUINIT": str(status)})

    def test_answer(self, library: str) -> None:
        assert self.ask(library, 0) == (
            Chip("First", (9, 0), 110, "0a" * 16, "00000000:3b:00", "driver"),
            Chip("Second", (9, 0), 111, "0b" * 16, "00000000:3b:00", "driver"),
        )

    @pytest.mark.parametrize("status", [100, 101])
    def test_no_device(self, library: str, status: int) -> None:
        assert self.ask(library, status) == ()

    def test_a_broken_driver_is_said(self, library: str, said: Any) -> None:
        assert self.ask(library, 803) is None
        assert said() == ["the CUDA driver did not say which devices are visible: AssertionError: cuInit returned 803"]


def test_a_child_that_cannot_start_is_said(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert device._ask_driver({}) is None
    assert "/nowhere/python" in said()[0]


@pytest.mark.parametrize("bus", ["", "N/A", "1B", "00000000"])
def test_d13_an_odd_bus_id_is_no_crash(bus: str) -> None:
    nvml = FakeNVML({**hopper(), "PciInfo": SimpleNamespace(busId=bus)})
    assert resolve(0, {}, nvml, QUIET).name == "NVIDIA H200"


def test_d13_a_name_that_is_no_text_and_a_shutdown_that_fails_are_no_crash() -> None:
    nvml = FakeNVML({**hopper(), "Name": b"NVIDIA \xff"})
    nvml.nvmlShutdown = lambda: nvml._value({}, "Shutdown")
    assert resolve(0, {}, nvml, QUIET).name == "NVIDIA \N{REPLACEMENT CHARACTER}"
