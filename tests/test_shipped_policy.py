"""dispatch.yaml as it ships: what a device's section says follows from the committed measurements, byte for byte."""

from __future__ import annotations

from functools import cache

import pytest
from tune_program import ROOT, tool

from kernreg import registry
from kernreg.evidence import stale_kernels
from kernreg.policy import parse
from kernreg.tuning import journal
from kernreg.tuning.build import Kept, build
from kernreg.tuning.journal import Result

POLICY = ROOT / "dispatch.yaml"
pytestmark = pytest.mark.skipif(not (ROOT / "tools").exists(), reason="not in a checkout")


@cache
def measured() -> tuple[Result, ...]:
    """The lines of all journals that tools/tune.py builds from."""
    lines = journal.read(*sorted((ROOT / "tools" / "measurements").glob("*.jsonl")))
    return tuple(line for line in lines if tool().is_offered(registry.default(), line))


def rebuilt(text: str) -> str:
    return build(measured(), previous=text, installed=tool().installed(registry.default(), measured()))


def without(text: str, device: str) -> str:
    """The file without a device's section and rows."""
    kept = Kept.of(text)
    for piece in (kept.devices[device], *(row.text for rows in kept.rows.values() for row in rows if row.device == device)):
        assert text.count(piece) == 1
        text = text.replace(piece, "")
    return text if len(kept.devices) > 1 else text.replace("\ndevices:\n", "\ndevices: {}\n")


def test_each_device_is_rebuilt_from_its_measurements() -> None:
    text = POLICY.read_text(encoding="utf-8")
    assert set(parse(text).devices) == {line.device["id"] for line in measured()}, "run tools/tune.py build"
    for device in parse(text).devices:
        cut = without(text, device)
        assert f"device: {device}" not in cut and device not in parse(cut).devices
        assert rebuilt(cut) == text, "run tools/tune.py build: dispatch.yaml does not follow from tools/measurements"


def test_nothing_is_left_to_build() -> None:
    text = POLICY.read_text(encoding="utf-8")
    assert rebuilt(text) == text
    runs = {(line.op, line.device["id"], line.run) for line in measured()}
    for device in parse(text).devices.values():
        for op in registry.default().ops.keys() & device.measured.keys():
            named = {(op, device.id, run) for run in device.measured[op].split()}
            assert named <= runs, "a run that the file names is in no journal"


def test_no_row_is_stale_without_saying_so() -> None:
    policy = parse(POLICY.read_text(encoding="utf-8"), POLICY)
    silent = [f"{stale.row.source}: {stale}" for stale in stale_kernels(policy, registry.default()) if not stale.row.stale]
    assert not silent, "measure them again, or run tools/tune.py build, which marks them"
