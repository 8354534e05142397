"""The command line over a made-up backend and policy: output, JSON, exit codes, and what it must not import."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kernreg import Backend, Device, Kernel, Registry, cli, demo, device, dispatch, doctor, ops, registry

H200 = Device.declared("NVIDIA H200", "sm_90", 132)

POLICY = """\
schema: 1
devices:
  nvidia-h200: {name: "NVIDIA H200", arch: "sm_90", sms: 132, measured: {triton: "3.6.0"}, kernels: {gdn_ring_commit: SOURCES}}
ops:
  gdn_ring_commit:
    - when: {device: nvidia-h200, ring: 16}
      class: "k7f3a91c2"
      measured: {heads: 48/16, batch: [1, 4, 64]}
      regret: 1.04
      fallback: {use: torch.reference}
      batch:
        - {upto: 2, use: fast.small, config: {BV: 16}, us: 10.0, next: 12.5, runner_up: fast.big, at: {batch: 1}}
        - {upto: rest, use: fast.big}
      classes: {k7f3a91c2: [fast.big, "fast.small[BV=16]"]}
    - otherwise: {use: torch.reference}
  gdn_ring_advance:
    - otherwise: {use: torch.reference}
pins:
  - op: gdn_ring_advance
    when: {ring: 32}
    use: fast.advance
    reason: "a person said so"
    by: "someone"
""".replace("SOURCES", '{fast.small: "1111111111111111", fast.big: "2222222222222222"}')
DIGESTS = {"fast.small": "1" * 64, "fast.big": "2" * 64}
ROW_LINE = 6


def why_not(facts: Any, device: Any, config: Any) -> str | None:
    return "needs sm_90" if device.arch != (9, 0) else "serves rings of 16" if facts["ring"] != 16 else None


FAST = Backend(
    "fast",
    (
        Kernel("gdn_ring_commit", "fast.small", "fast:small", {"BV": (16, 32)}, {"BV": 32}, why_not, doc="small tiles"),
        Kernel("gdn_ring_commit", "fast.big", "fast:big", why_not=why_not),
        Kernel("gdn_ring_commit", "fast.odd", "fast:odd", why_not=why_not),
        Kernel("gdn_ring_advance", "fast.advance", "fast:advance"),
    ),
)
TORCH = Backend(
    "torch",
    tuple(Kernel(op, "torch.reference", "torch:f") for op in ("gdn_ring_commit", "gdn_ring_advance")),
    requires=("torch",),
)


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry()
    made.add_op(ops.gdn_ring_commit)
    made.add_op(ops.gdn_ring_advance)
    made.add(FAST)
    made.add(TORCH)
    monkeypatch.setattr(registry, "default", lambda: made)
    monkeypatch.setattr(made, "source_digest", lambda kernel: DIGESTS[kernel.name])
    return made


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    file = tmp_path / "dispatch.yaml"
    file.write_text(POLICY)
    monkeypatch.setattr(dispatch, "shipped_policy", lambda: file)
    monkeypatch.chdir(tmp_path)
    return file


@pytest.fixture
def run(known: Registry, shipped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command on a machine whose device is the CPU."""
    monkeypatch.setattr(device, "current", lambda index=0: Device.cpu())
    monkeypatch.setattr(dispatch, "overrides", lambda: ())

    def call(*args: str) -> Result:
        with pytest.raises(SystemExit) as stop:
            cli.app(list(args))
        said = capsys.readouterr()
        code = stop.value.code
        return Result(code if isinstance(code, int) else 0, said.out, said.err)

    return call


class TestList:
    def test_text(self, run: Run) -> None:
        got = run("list")
        assert (got.code, got.err) == (0, "")
        assert "gdn_ring_advance" in got.out and "fast.small" in got.out
        assert "BV=32,16" in got.out  # the default comes first
        assert "ring=? heads=? k_dim=128" in got.out

    def test_json(self, run: Run) -> None:
        (op,) = run("list", "gdn_ring_commit", "--json").json["ops"]
        assert list(op) == ["op", "summary", "facts", "kernels"]
        assert op["facts"]["ring"] == {"default": None, "values": [], "doc": "ring length L"}
        assert op["kernels"][2] == {
            "kernel": "fast.small",
            "backend": "fast",
            "doc": "small tiles",
            "target": "fast:small",
            "config": {"BV": [16, 32]},
            "default": {"BV": 32},
            "requires": [],
            "missing": None,
        }

    def test_what_is_missing(self, run: Run, known: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(known, "missing", lambda kernel: "torch is not installed" if kernel.backend == "torch" else None)
        assert "torch (torch is not installed)" in run("list").out

    def test_no_backend_is_a_problem_with_a_way_out(self, run: Run, known: Registry) -> None:
        known.backends.clear()
        known._kernels.clear()
        got = run("list")
        assert got.code == 1 and "pip install -e" in got.err

    def test_an_unknown_op(self, run: Run) -> None:
        got = run("list", "gdn_ring_comit")
        assert got.code == 2
        assert "no op 'gdn_ring_comit'; did you mean gdn_ring_commit" in got.err

    @pytest.mark.parametrize("command", [["list"], ["list", "--json"]])
    def test_imports_no_torch(self, command: list[str]) -> None:
        code = (
            f"import sys; sys.argv = ['kernreg', *{command}]\n"
            "from kernreg.cli import main\n"
            "try: main()\n"
            "except SystemExit: print({'torch', 'triton', 'pynvml'} & set(sys.modules), file=sys.stderr)"
        )
        got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert got.stderr.endswith("set()\n")
        assert "gdn_ring_commit" in got.stdout


class TestExplain:
    ON_H200 = ("explain", "gdn_ring_commit", "ring=16", "heads=48/16", "device=nvidia-h200")

    def test_json(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cli, "installed_triton", lambda: "9.9.9")
        got = run(*self.ON_H200, "--json")
        assert (got.code, got.err) == (0, "")
        said = got.json
        kernels = {kernel["kernel"]: kernel["why"] for kernel in said.pop("kernels")}
        key = said.pop("key")
        assert said.pop("assumes_otherwise") == ["Triton 9.9.9 (measured: 3.6.0)"]
        assert (key["ring"], key["heads"], key["low"], key["state"]) == (16, "48/16", True, "bf16")
        assert said == {
            "op": "gdn_ring_commit",
            "batch": 1,
            "device": {
                "id": "nvidia-h200",
                "platform": "cuda",
                "name": "NVIDIA H200",
                "arch": "sm_90",
                "sms": 132,
                "uuid": "",
                "source": "declared",
            },
            "kernel": "fast.small",
            "config": {"BV": 16},
            "variant": "fast.small[BV=16]",
            "doc": "small tiles",
            "source": f"dispatch.yaml:{ROW_LINE} (ops.gdn_ring_commit[0])",
            "row": {
                "file": "dispatch.yaml",
                "line": ROW_LINE,
                "key": "ops.gdn_ring_commit[0]",
                "when": "device=nvidia-h200 ring=16",
            },
            "pin": None,
            "forced": None,
            "batches": [1, 2],
            "section": "nvidia-h200",
            "level": "exact product",
            "class": "k7f3a91c2",
            "collapsed": None,
            "bits": {},
            "stale": [],
            "us": 10.0,
            "runner_up": "fast.big",
            "next": 12.5,
            "margin": 0.25,
            "regret": 1.04,
            "at": {"batch": 1},
            "fallback": "torch.reference",
            "extrapolated": [],
        }
        assert list(kernels) == ["fast.big", "fast.odd", "fast.small", "torch.reference"]
        assert "names it for batch 3 and more" in kernels["fast.big"]

    def test_text_has_all_of_it(self, run: Run) -> None:
        got = run(*self.ON_H200)
        assert (got.code, got.err) == (0, "")
        for part in (
            "batch 1 on NVIDIA H200 (sm_90, 132 SMs), declared",
            "fast.small: small tiles",
            "BV=16",
            f"dispatch.yaml:{ROW_LINE} (ops.gdn_ring_commit[0])",
            "batches 1 to 2",
            "section nvidia-h200: exact product",
            "10 us (at batch=1)",
            "fast.big, 12.5 us, 25.0 % slower",
            "4.0 % slower than the best",
            "k7f3a91c2",
            "fast.odd",
            "not named by the matching row",
        ):
            assert part in got.out
        assert "not measured" not in got.out

    def test_batch_moves_inside_the_row(self, run: Run) -> None:
        said = run(*self.ON_H200, "batch=100", "--json").json
        assert (said["kernel"], said["batches"]) == ("fast.big", [3, None])
        assert said["extrapolated"] == ["batches above 64"]
        assert "batches of 3 and more" in run(*self.ON_H200, "batch=100").out

    def test_a_key_that_no_class_was_measured_for_shows_what_serves_until_warmup(self, run: Run) -> None:
        words = (*self.ON_H200[:3], "heads=12/4", "device=nvidia-h200", "batch=2")
        said = run(*words, "--json").json
        assert (said["kernel"], said["batch"], said["batches"], said["us"]) == ("fast.big", 2, [1, None], None)
        why = "that its variants give equal bits was not measured here: heads=12/4 (measured: 48/16)"
        assert (said["collapsed"], said["bits"]) == (why, {})
        kernels = {kernel["kernel"]: kernel["why"] for kernel in said["kernels"]}
        assert kernels["fast.small"].endswith("names it for batch 1-2, but the batch may not choose")
        text = " ".join(run(*words).out.split())
        assert f"not by batch {why}" in text and "serves every batch" in text

    def test_the_installed_triton_counts_for_this_machine_only(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cli, "installed_triton", lambda: "9.9.9")
        monkeypatch.setattr(device, "current", lambda index=0: dataclasses.replace(H200, source="nvml"))
        assert run(*self.ON_H200, "--json").json["kernel"] == "fast.small"
        here = run(*self.ON_H200[:-1], "--json").json
        assert here["kernel"] == "fast.big" and here["collapsed"].endswith("Triton 9.9.9 (measured: 3.6.0)")

    def test_an_empty_batch(self, run: Run) -> None:
        assert run(*self.ON_H200, "batch=0", "--json").json["batch"] == 0

    def test_the_product_name_names_its_section(self, run: Run) -> None:
        said = run("explain", "gdn_ring_commit", "ring=16", "heads=48/16", "device=NVIDIA H200", "--json").json
        assert said["section"] == "nvidia-h200"

    @pytest.mark.parametrize("device_words", [[], ["device=current"], ["device=cpu"]])
    def test_here(self, run: Run, device_words: list[str]) -> None:
        said = run("explain", "gdn_ring_commit", "ring=16", "heads=48/16", *device_words, "--json").json
        assert (said["kernel"], said["device"]["name"]) == ("torch.reference", "cpu")
        assert {k["why"] for k in said["kernels"] if k["kernel"] == "fast.odd"} == {"needs sm_90"}

    def test_a_pin_has_its_reason(self, run: Run) -> None:
        got = run("explain", "gdn_ring_advance", "ring=32", "--json")
        assert got.json["pin"] == {"reason": "a person said so", "by": "someone"}
        assert "a person said so (someone)" in run("explain", "gdn_ring_advance", "ring=32").out

    def test_the_measured_software_is_assumed_and_said(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cli, "installed_triton", lambda: "9.9.9")
        said = " ".join(run(*self.ON_H200).out.split())
        assert "the measured software; here it is Triton 9.9.9 (measured: 3.6.0), and one variant would serve every batch" in said
        monkeypatch.setattr(cli, "installed_triton", lambda: "3.6.0")
        assert "assumes" not in run(*self.ON_H200).out

    def test_what_is_forced_says_so(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dispatch, "overrides", lambda: dispatch.parse_force("torch"))
        said = run(*self.ON_H200, "--json").json
        assert (said["kernel"], said["forced"], said["row"]) == ("torch.reference", "torch", None)
        assert "forced: torch" in run(*self.ON_H200).out

    def test_a_wrong_override_is_named(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        dispatch._environment_overrides.cache_clear()
        monkeypatch.setattr(dispatch, "overrides", dispatch._environment_overrides)
        monkeypatch.setenv("KERNREG_FORCE", "=x")
        got = run(*self.ON_H200)
        dispatch._environment_overrides.cache_clear()
        assert got.code == 2 and got.err.startswith("kernreg: KERNREG_FORCE: cannot read the override '=x'")

    def test_another_policy(self, run: Run, tmp_path: Path) -> None:
        other = tmp_path / "other.yaml"
        other.write_text(POLICY.replace("BV: 16", "BV: 32").replace("BV=16", "BV=32"))
        assert run(*self.ON_H200, "--policy", str(other), "--json").json["variant"] == "fast.small[BV=32]"

    def test_a_declared_device_does_not_ask_what_is_installed_here(
        self, run: Run, known: Registry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(known, "missing", lambda kernel: "torch is not installed")
        assert run(*self.ON_H200, "--json").json["kernel"] == "fast.small"
        here = run("explain", "gdn_ring_commit", "ring=16", "heads=48/16", "--json")
        assert here.code == 1 and "torch.reference: " in here.json["error"]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["gdn_ring_comit", "ring=16"], "no op 'gdn_ring_comit'; did you mean gdn_ring_commit"),
            (["gdn_ring_commit", "rings=16"], "no fact of gdn_ring_commit 'rings'; did you mean ring"),
            (["gdn_ring_commit", "ring=16"], "the static key needs heads"),
            (["gdn_ring_commit", "ring", "heads=1/1"], "cannot read 'ring', wanted KEY=VALUE"),
            (["gdn_ring_commit", "ring=", "heads=1/1"], "cannot read 'ring=', wanted KEY=VALUE"),
            (["gdn_ring_commit", "ring=16", "ring=16"], "ring is given twice"),
            (["gdn_ring_commit", "ring=big", "heads=1/1"], "ring is 'big', wanted a whole number"),
            (["gdn_ring_commit", f"ring={'9' * 5000}", "heads=1/1"], "9', wanted a whole number"),
            (["gdn_ring_commit", "ring=\u0663\u0662", "heads=1/1"], "wanted a whole number"),
            (["gdn_ring_commit", "ring=16", "heads=1/1", f"batch={'9' * 5000}"], "9', wanted a whole number"),
            (["gdn_ring_commit", "ring=20", "heads=1/1"], "L (a dim of ring_u) is 20; wanted L >= 16"),
            (["gdn_ring_commit", "ring=16", "heads=48"], "heads is '48', wanted value heads/key heads"),
            (["gdn_ring_commit", "ring=16", "heads=1/1", "low=maybe"], "low is 'maybe', wanted yes or no"),
            (["gdn_ring_commit", "ring=16", "heads=1/1", "state=bf61"], "state is 'bf61', wanted bf16 or f32"),
            (["gdn_ring_commit", "ring=16", "heads=1/1", "batch=-1"], "batch is '-1', wanted a whole number"),
            (["gdn_ring_commit", "ring=16", "heads=1/1", "device=nvidia-h20"], "did you mean nvidia-h200"),
            (["gdn_ring_commit", "ring=16", "heads=1/1", "device=cuda:1"], "no CUDA device is visible here"),
            (["gdn_ring_commit", "ring=16", "heads=1/1", "device=cuda:x"], "no device 'cuda:x'; did you mean cuda:0"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_wrong_words_are_named(self, run: Run, words: list[str], message: str) -> None:
        got = run("explain", *words)
        assert (got.code, got.out) == (2, "")
        assert message in got.err
        assert message in run("explain", *words, "--json").json["error"]

    @pytest.mark.parametrize("text", ["yes", "true", "Yes", "no", "false"])
    def test_flags(self, run: Run, text: str) -> None:
        said = run("explain", "gdn_ring_commit", "ring=16", "heads=1/1", f"low={text}", "--json").json
        assert said["key"]["low"] is (text.lower() in ("yes", "true"))

    def test_a_damaged_policy(self, run: Run, shipped: Path) -> None:
        shipped.write_text(POLICY.replace("use: fast.odd", "use: fast.gone").replace("fast.small", "fast.gone"))
        got = run(*self.ON_H200)
        assert got.code == 1 and "fast.gone" in got.err and "dispatch.yaml:12" in got.err

    def test_no_policy_file(self, run: Run, shipped: Path) -> None:
        got = run(*self.ON_H200, "--policy", "nowhere.yaml")
        assert got.code == 2 and "nowhere.yaml" in got.err


class TestCheck:
    def test_ok(self, run: Run) -> None:
        got = run("check")
        assert (got.code, got.out) == (0, "dispatch.yaml: ok, 4 rows, 0 warnings\n")

    def test_json(self, run: Run) -> None:
        said = run("check", "--json").json
        assert len(said.pop("digest")) == 64
        assert said.pop("rows") == 4
        assert said == {"file": "dispatch.yaml", "errors": 0, "warnings": 0, "problems": [], "stale": [], "results": []}

    def test_a_lint_error(self, run: Run, tmp_path: Path) -> None:
        file = tmp_path / "bad.yaml"
        file.write_text(POLICY.replace("use: fast.big}", "use: fast.gone}"))
        got = run("check", str(file), "--json")
        (problem,) = got.json["problems"]
        assert (got.code, got.json["errors"], problem["severity"], problem["line"]) == (1, 1, "error", 13)
        assert "fast.gone" in problem["text"]
        text = run("check", str(file))
        assert text.code == 1 and "bad.yaml:13" in text.out and "1 errors" in text.out

    def test_a_file_that_cannot_be_read_as_a_policy(self, run: Run, tmp_path: Path) -> None:
        file = tmp_path / "bad.yaml"
        file.write_text(POLICY.replace("schema: 1", "schema: 1\nschema: 1"))
        got = run("check", str(file), "--json")
        assert got.code == 1 and "bad.yaml:2" in got.json["problems"][0]["text"]

    def test_a_warning_alone(self, run: Run, known: Registry) -> None:
        known.add_op(ops.conv_window_commit)
        got = run("check")
        assert got.code == 0 and "warning: no rows for conv_window_commit" in got.out

    def test_a_file_that_is_not_there(self, run: Run) -> None:
        assert run("check", "nowhere.yaml").code == 2


class TestDoctor:
    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device, "read_nvml", lambda nvml: ())

    def test_json(self, run: Run) -> None:
        got = run("doctor", "--json")
        said = got.json
        assert (got.code, said["problems"]) == (0, [])
        assert list(said) == [*("software", "environment", "gpus", "devices", "policy", "ops", "notes", "missing", "problems")]
        assert said["software"]["python"] == ".".join(map(str, sys.version_info[:3]))
        assert [one["name"] for one in said["devices"]] == ["cpu"]
        commit = next(op for op in said["ops"] if op["op"] == "gdn_ring_commit")
        assert commit == {
            "op": "gdn_ring_commit",
            "key": {"ring": 16, "heads": "16/16"},
            "batch": 1,
            "variant": "torch.reference",
            "source": f"{said['policy']['file']}:15 (ops.gdn_ring_commit[1])",
            "why": "otherwise, any device",
        }

    @pytest.mark.parametrize(("triton", "serves"), [("3.6.0", "fast.small[BV=16]"), ("9.9.9", "fast.big")])
    def test_it_shows_what_serves_and_not_what_the_batch_would_choose(
        self, run: Run, shipped: Path, monkeypatch: pytest.MonkeyPatch, triton: str, serves: str
    ) -> None:
        shipped.write_text(POLICY.replace("heads: 48/16", "heads: 16/16"))

        def one_gpu(index: int = 0) -> Device:
            if index:
                raise ValueError("there is one GPU")
            return dataclasses.replace(H200, source="nvml")

        monkeypatch.setattr(device, "current", one_gpu)
        monkeypatch.setattr(doctor, "installed_triton", lambda: triton)
        commit = next(op for op in run("doctor", "--json").json["ops"] if op["op"] == "gdn_ring_commit")
        assert (commit["batch"], commit["variant"]) == (1, serves)

    def test_text(self, run: Run) -> None:
        got = run("doctor")
        assert (got.code, got.err) == (0, "")
        for part in ("python", "gdn_ring_commit", "torch.reference", "ring=16 heads=16/16", "an NVIDIA driver", "All is well"):
            assert part in got.out

    def test_what_is_missing_says_how_to_get_it(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
        got = run("doctor", "--json")
        assert [line.partition(":")[0] for line in got.json["missing"]] == ["torch", "triton", "pynvml"]
        assert got.json["software"]["torch"] is None
        assert any("pip install nvidia-ml-py" in line for line in got.json["missing"])

    def test_a_broken_policy(self, run: Run, shipped: Path) -> None:
        shipped.write_text(POLICY.replace("use: fast.big}", "use: fast.gone}"))
        got = run("doctor", "--json")
        (problem,) = got.json["problems"]
        assert got.code == 1 and "dispatch.yaml:13" in problem and "fast.gone" in problem
        assert {op["variant"] for op in got.json["ops"]} == {None}

    def test_an_op_that_nothing_can_serve(self, run: Run, known: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(known, "missing", lambda kernel: "torch is not installed")
        got = run("doctor")
        assert got.code == 1 and "nothing" in got.out and "Something is broken" in got.out

    def test_a_backend_that_does_not_load(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken() -> Registry:
            raise ModuleNotFoundError("No module named 'their_kernels'")

        monkeypatch.setattr(registry, "default", broken)
        got = run("doctor", "--json")
        assert got.code == 1 and "their_kernels" in got.json["problems"][0]

    def test_every_gpu_and_what_the_log_said(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        def two(index: int = 0) -> Device:
            if index > 1:
                raise ValueError("CUDA device 2 does not exist: 2 visible")
            device.log.warning("identity from CUDA, not NVML")
            return (H200, Device.declared("NVIDIA RTX PRO 6000", "sm_120", 188))[index]

        monkeypatch.setattr(device, "current", two)
        monkeypatch.setattr(device, "read_nvml", lambda nvml: (device.Chip("NVIDIA H200", (9, 0), 132, "GPU-1"), None))
        said = run("doctor", "--json").json
        assert [one["arch"] for one in said["devices"]] == ["sm_90", "sm_120"]
        assert said["gpus"][0]["uuid"] == "GPU-1"
        assert set(said["notes"]) == {"identity from CUDA, not NVML"}
        assert "cuda:1" in run("doctor").out

    @pytest.mark.parametrize("name", ["gdn_ring_verify", "kda_chain_verify", "conv_window_commit", "kda_snapshot_commit"])
    def test_a_typical_key_keeps_the_contract(self, name: str) -> None:
        op = getattr(ops, name)
        key = doctor.typical_key(op)
        assert dispatch.complete(op, key) == key
        cli.check_facts(op, key)


class Report:
    """What `kernreg.demo.run` returns, as far as the command line looks at it."""

    def __init__(self, ok: bool) -> None:
        self.ok = ok

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "error": [1.0, float("inf"), float("nan")]}

    def renderables(self) -> list[str]:
        return ["a table", "the verdict [BV=16]"]


class TestDemo:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[demo.DemoOptions]:
        """The options that the demo was run with; it fails for seed 13."""
        options: list[demo.DemoOptions] = []

        def fake(given: demo.DemoOptions) -> Report:
            options.append(given)
            return Report(ok=given.seed != 13)

        monkeypatch.setattr(demo, "run", fake)
        return options

    def test_options_reach_it(self, run: Run, asked: list[demo.DemoOptions]) -> None:
        assert run("demo", "--rounds", "3", "--seed", "7", "--device", "cpu").code == 0
        assert run("demo").code == 0
        assert asked == [demo.DemoOptions("cpu", 3, 7), demo.DemoOptions()]

    def test_text(self, run: Run, asked: list[demo.DemoOptions]) -> None:
        assert run("demo").out == "a table\nthe verdict [BV=16]\n"

    def test_json_has_no_infinity(self, run: Run, asked: list[demo.DemoOptions]) -> None:
        got = run("demo", "--json")
        assert got.json == {"ok": True, "error": [1.0, None, None]}

    def test_a_difference_is_a_problem(self, run: Run, asked: list[demo.DemoOptions]) -> None:
        assert run("demo", "--seed", "13").code == 1
        assert run("demo", "--seed", "13", "--json").json["ok"] is False

    @pytest.mark.parametrize(("name", "message"), [("cuda", "no CUDA device is visible"), ("tpu", "wanted cpu, cuda or cuda:N")])
    def test_no_such_device(self, run: Run, asked: list[demo.DemoOptions], name: str, message: str) -> None:
        got = run("demo", "--device", name)
        assert got.code == 2 and message in got.err and not asked

    def test_no_round_is_usage(self, run: Run, asked: list[demo.DemoOptions]) -> None:
        assert run("demo", "--rounds", "0").code == 2


WITHOUT_TORCH = """
import importlib.util, sys
real, gone = importlib.util.find_spec, ("torch", "triton", "pynvml")
importlib.util.find_spec = lambda name, *more: None if name in gone else real(name, *more)
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in gone:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Gone())
from kernreg.cli import main
sys.argv[0] = "kernreg"
main()
"""


class TestWithoutTorch:
    def kernreg(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_TORCH, *args]
        return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env})

    def test_explain(self, tmp_path: Path) -> None:
        file = tmp_path / "p.yaml"
        file.write_text(
            "schema: 1\ndevices:\n  nvidia-h200: {name: NVIDIA H200, arch: sm_90, sms: 132}\n"
            "ops: {gdn_ring_advance: [{otherwise: {use: torch.reference}}]}\n"
        )
        got = self.kernreg("explain", "gdn_ring_advance", "ring=16", "device=nvidia-h200", "--policy", str(file), "--json")
        assert (got.returncode, got.stderr) == (0, "")
        assert json.loads(got.stdout)["kernel"] == "torch.reference"

    def test_demo_says_what_it_needs(self) -> None:
        got = self.kernreg("demo")
        assert (got.returncode, got.stdout) == (1, "")
        assert got.stderr.startswith("kernreg: the demo needs torch")

    def test_doctor_names_it(self) -> None:
        got = self.kernreg("doctor", "--json")
        assert got.returncode == 1
        assert "torch" in json.loads(got.stdout)["missing"][0]


class TestOutput:
    def test_a_pipe_is_wide_and_cuts_nothing(self, run: Run, shipped: Path) -> None:
        long = "a reason that goes on " * 12
        shipped.write_text(POLICY.replace("a person said so", long.strip()))
        got = run("explain", "gdn_ring_advance", "ring=32")
        assert " ".join(long.split()) in " ".join(got.out.split())
        assert max(map(len, got.out.splitlines())) <= 120 and "…" not in got.out

    @pytest.mark.parametrize("command", ["list", "explain", "check", "doctor", "demo"])
    def test_help_has_the_exit_codes(self, run: Run, command: str) -> None:
        got = run(command, "--help")
        assert got.code == 0
        assert "0 all is well, 1 a problem was found, 2 the command was used wrongly" in " ".join(got.out.split())

    def test_a_reader_that_stops_early_is_no_usage_error(self) -> None:
        program = f"{sys.executable} -m kernreg list --json"
        got = subprocess.run(f"{program} | head -c 1", shell=True, capture_output=True, text=True, check=True)
        assert (got.stdout, got.stderr) == ("{", "")

    def test_a_wrong_option_is_usage(self, run: Run) -> None:
        assert run("list", "--jsn").code == 2

    def test_version(self, run: Run) -> None:
        assert run("--version").out == "0.1.0\n"


def test_a_reader_that_has_seen_enough_is_told_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run([sys.executable, "-m", "kernreg", "list"], stdout=write, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (1, b"")
