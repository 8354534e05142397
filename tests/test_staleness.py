"""Rows whose kernels changed since they were measured: found from the sources, said by `check`, a plan and `explain`."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernreg import Backend, Device, Kernel, Registry, cli, dispatch, ops, policy, registry, source
from kernreg.evidence import stale_kernels

OP = ops.gdn_ring_advance
H200 = Device.declared("NVIDIA H200", "sm_90", 132)

# what a kernel's file holds: as measured, with other words about it, and with other code
MEASURED = '''"""A kernel."""


def launch(write_pos, fold, rows, slots, accept, *, ring, margin=None, null_slot=-1):
    """Doubles."""
    write_pos *= 2
'''
REWORDED = MEASURED.replace('"""Doubles."""', '"""Twice."""\n    # why not').replace("A kernel.", "The kernel.")
EDITED = MEASURED.replace("*= 2", "*= 3")

POLICY = """\
schema: 1
devices:
  nvidia-h200: {{name: NVIDIA H200, arch: sm_90, sms: 132, kernels: {{gdn_ring_advance: {{{kernels}}}}}}}
  nvidia-b200: {{name: NVIDIA B200, arch: sm_100, sms: 148, kernels: {{gdn_ring_advance: {{my.a: "{b200}"}}}}}}
ops:
  gdn_ring_advance:
    - when: {{device: nvidia-h200, ring: 16}}
      use: my.a
      measured: {{ring: 16, batch: [1, 4096]}}
      fallback: {{use: my.c}}
    - when: {{device: nvidia-h200, ring: 32}}
      use: my.b
      measured: {{batch: [1, 4096]}}
    - when: {{device: nvidia-b200, ring: 32}}
      use: my.a
    - when: {{platform: cuda, ring: 64}}
      use: my.a
    - otherwise: {{use: my.c}}
pins:
  - {{op: gdn_ring_advance, when: {{device: nvidia-h200, ring: 128}}, use: my.b, reason: "a person said so"}}
"""


class World:
    """Three kernels in files that a test may edit, and a policy that was measured with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "dispatch.yaml"
        for name in ("a", "b", "c"):
            self.edit(name, MEASURED)
        self.registry = Registry()
        self.registry.add_op(OP)
        rows = tuple(Kernel(OP.name, f"my.{name}", f"my_{name}:launch") for name in ("a", "b", "c"))
        self.registry.add(Backend("my", rows))
        self.digests = {k.name: self.registry.source_digest(k)[:16] for k in self.registry.kernels(OP.name)}
        kernels = ", ".join(f'{name}: "{self.digests[name]}"' for name in ("my.a", "my.b"))
        self.text = POLICY.format(kernels=kernels, b200=self.digests["my.a"])
        self.write(self.text)

    def edit(self, name: str, text: str) -> None:
        (self.folder / f"my_{name}.py").write_text(text)
        source.module_digest.cache_clear()

    def write(self, text: str) -> None:
        self.file.write_text(text)

    @property
    def policy(self) -> policy.Policy:
        return policy.load(self.file, self.registry)

    def stale(self) -> list[tuple[int, str, str]]:
        found = stale_kernels(self.policy, self.registry)
        assert all(one.installed == self.registry.source_digest(self.registry.kernel(OP.name, one.kernel))[:16] for one in found)
        return [(one.row.place.line, one.section, one.kernel) for one in found]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    made = World(tmp_path)
    monkeypatch.setattr(registry, "default", lambda: made.registry)
    monkeypatch.setattr(dispatch, "overrides", lambda: ())
    monkeypatch.chdir(tmp_path)
    dispatch._warn_once.cache_clear()
    return made


Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(world: World, capsys: pytest.CaptureFixture[str]) -> Check:
    def run(*more: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as stop:
            cli.app(["check", "dispatch.yaml", *more])
        code = stop.value.code
        return (code if isinstance(code, int) else 0), capsys.readouterr().out

    return run


def test_nothing_is_stale_as_measured_nor_with_other_comments(world: World, check: Check) -> None:
    assert world.stale() == []
    world.edit("a", REWORDED)
    assert world.stale() == []
    assert check() == (0, "dispatch.yaml: ok, 6 rows, 0 warnings\n")


def test_a_changed_kernel_makes_its_measured_rows_stale_and_no_others(world: World) -> None:
    world.edit("a", EDITED)
    assert world.stale() == [(7, "nvidia-h200", "my.a"), (14, "nvidia-b200", "my.a")]
    world.edit("a", MEASURED)
    world.edit("b", EDITED)
    assert world.stale() == [(11, "nvidia-h200", "my.b")]
    world.edit("b", MEASURED)
    world.edit("c", EDITED)  # a fallback and a catch-all: never measured
    assert world.stale() == []


def test_a_kernel_whose_file_is_gone_is_stale(world: World) -> None:
    (world.folder / "my_b.py").unlink()
    source.module_digest.cache_clear()
    importlib.invalidate_caches()
    (found,) = stale_kernels(world.policy, world.registry)
    assert (found.kernel, found.installed) == ("my.b", "no source")


def test_a_shared_module_counts(world: World) -> None:
    (world.folder / "my_step.py").write_text("x = 1\n")
    kernel = Kernel(OP.name, "your.k", "my_a:launch", sources=("my_step",))
    world.registry.add(Backend("your", (kernel,)))
    digest = world.registry.source_digest(kernel)[:16]
    text = world.text.replace("use: my.b\n", "use: your.k\n", 1).replace("my.b:", f'your.k: "{digest}", my.b:')
    world.write(text)
    assert world.stale() == []
    (world.folder / "my_step.py").write_text("x = 2\n")
    source.module_digest.cache_clear()
    assert world.stale() == [(11, "nvidia-h200", "your.k")]


def test_check_lists_line_kernel_and_both_digests_and_fails(world: World, check: Check) -> None:
    world.edit("b", EDITED)
    installed = world.registry.source_digest(world.registry.kernel(OP.name, "my.b"))[:16]
    code, out = check()
    assert code == 1
    assert out == (
        f"dispatch.yaml:11:7: ops.gdn_ring_advance[1]: stale: my.b was measured as {world.digests['my.b']} "
        f"(section nvidia-h200), installed is {installed}; measure it again, or say 'stale: true' in the row\n"
        "dispatch.yaml: ok, 6 rows, 0 warnings, 1 stale\n"
    )
    code, out = check("--json")
    said = json.loads(out)
    assert (code, said["errors"], said["warnings"], [p["severity"] for p in said["problems"]]) == (1, 0, 0, ["stale"])
    assert said["stale"] == [
        {
            "line": 11,
            "op": "gdn_ring_advance",
            "kernel": "my.b",
            "section": "nvidia-h200",
            "measured": world.digests["my.b"],
            "installed": installed,
            "said": False,
        }
    ]


def test_a_stale_row_that_says_so_is_a_note(world: World, check: Check) -> None:
    world.edit("b", EDITED)
    world.write(world.text.replace("use: my.b\n", "use: my.b\n      stale: true\n", 1))
    code, out = check()
    assert code == 0
    assert "dispatch.yaml:11:7: ops.gdn_ring_advance[1]: note: my.b was measured as" in out and "; the row says so\n" in out
    assert out.endswith("dispatch.yaml: ok, 6 rows, 0 warnings, 1 stale\n")
    world.edit("a", EDITED)  # another row, which does not say so
    assert check()[0] == 1


def test_a_row_that_says_it_is_stale_and_is_not_is_a_warning(world: World, check: Check) -> None:
    world.write(world.text.replace("use: my.b\n", "use: my.b\n      stale: true\n", 1))
    code, out = check()
    text = "warning: the row says stale: true, but none of its kernels changed since it was measured"
    assert (code, out) == (0, f"dispatch.yaml:11:7: ops.gdn_ring_advance[1]: {text}\ndispatch.yaml: ok, 6 rows, 1 warnings\n")


def test_an_older_file_without_sources_is_noted(world: World, check: Check) -> None:
    world.write(world.text.replace(f', my.b: "{world.digests["my.b"]}"', ""))
    world.edit("b", EDITED)
    code, out = check()
    text = "which source of my.b was measured for gdn_ring_advance is not recorded: whether its rows are stale is not known"
    note = f"dispatch.yaml:3:3: devices.nvidia-h200: note: {text}\n"
    assert (code, out) == (0, f"{note}dispatch.yaml: ok, 6 rows, 0 warnings\n")
    world.write(world.file.read_text().replace("use: my.b\n", "use: my.b\n      stale: true\n", 1))
    assert check() == (0, f"{note}dispatch.yaml: ok, 6 rows, 0 warnings\n")


def test_a_stale_row_still_serves_and_is_said_once_per_row_and_process(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        world.edit(name, EDITED)
    loaded = world.policy

    def bind(ring: int, **more: Any) -> dispatch.Plan:
        return dispatch.bind(OP, policy=loaded, registry=world.registry, device=H200, ring=ring, **more)

    with caplog.at_level(logging.WARNING, "kernreg"):
        plans = [bind(16), bind(16), bind(16, index="i64"), bind(32), bind(64), bind(128), bind(256)]
        dispatch.bind(OP, policy=world.policy, registry=world.registry, device=H200, ring=16)
    said = [record.getMessage() for record in caplog.records if "stale" in record.getMessage()]
    assert len(said) == 2
    assert said[0].startswith(f"{world.file}:7 (ops.gdn_ring_advance[0]) is stale: my.a was measured as {world.digests['my.a']}")
    assert said[1].startswith(f"{world.file}:11 (ops.gdn_ring_advance[1]) is stale: my.b was measured as")
    assert [plan.variant(1).id for plan in plans] == ["my.a", "my.a", "my.a", "my.b", "my.a", "my.b", "my.c"]
    assert plans[0].explain(1).evidence.stale == (said[0].partition(" is stale: ")[2],)
    assert plans[4].explain(1).evidence.stale == ()


def test_a_row_that_only_says_so_is_said_too(world: World, caplog: pytest.LogCaptureFixture) -> None:
    text = world.text.replace(f', my.b: "{world.digests["my.b"]}"', "")
    world.write(text.replace("use: my.b\n", "use: my.b\n      stale: true\n", 1))
    with caplog.at_level(logging.WARNING, "kernreg"):
        dispatch.bind(OP, policy=world.policy, registry=world.registry, device=H200, ring=32)
    assert f"{world.file}:11 (ops.gdn_ring_advance[1]) is stale: it says so" in [r.getMessage() for r in caplog.records]


def test_explain_shows_it(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    def explain(*more: str) -> str:
        with pytest.raises(SystemExit):
            cli.app(["explain", OP.name, "ring=16", "device=nvidia-h200", "--policy", "dispatch.yaml", *more])
        return capsys.readouterr().out

    assert json.loads(explain("--json"))["stale"] == [] and "stale" not in explain()
    world.edit("a", EDITED)
    (text,) = json.loads(explain("--json"))["stale"]
    assert text.startswith(f"my.a was measured as {world.digests['my.a']} (section nvidia-h200), installed is ")
    assert "stale" in explain() and world.digests["my.a"] in explain()
