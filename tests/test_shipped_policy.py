"""dispatch.yaml as it ships: what a device's section says follows from the committed measurements, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from tune_program import ROOT, tool

from kernreg import registry
from kernreg.evidence import stale_kernels
from kernreg.policy import parse
from kernreg.tuning import journal
from kernreg.tuning.build import Kept, build

POLICY = ROOT / "dispatch.yaml"
JOURNALS = sorted((ROOT / "tools" / "measurements").glob("*.jsonl"))
pytestmark = pytest.mark.skipif(not (ROOT / "tools").exists(), reason="not in a checkout")


def rebuilt(text: str) -> str:
    results = journal.read(*JOURNALS)
    return build(results, previous=text, installed=tool().installed(registry.default(), results))


def without(text: str, device: str) -> str:
    """The file without a device's section and rows."""
    kept = Kept.of(text)
    for piece in (kept.devices[device], *(row.text for rows in kept.rows.values() for row in rows if row.device == device)):
        assert text.count(piece) == 1
        text = text.replace(piece, "")
    return text if len(kept.devices) > 1 else text.replace("\ndevices:\n", "\ndevices: {}\n")


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: path.stem)
def test_a_device_is_rebuilt_from_its_journal(path: Path) -> None:
    text, device = POLICY.read_text(encoding="utf-8"), path.stem
    cut = without(text, device)
    assert device in text and f"device: {device}" not in cut and device not in parse(cut).devices
    assert rebuilt(cut) == text, "run tools/tune.py build: dispatch.yaml does not follow from tools/measurements"


def test_nothing_is_left_to_build() -> None:
    text = POLICY.read_text(encoding="utf-8")
    assert rebuilt(text) == text
    measured = {(r.op, r.device["id"], r.run) for r in journal.read(*JOURNALS)}
    for device in parse(text).devices.values():
        for op in registry.default().ops.keys() & device.measured.keys():
            runs = {(op, device.id, run) for run in device.measured[op].split()}
            assert runs <= measured, "a run that the file names is in no journal"


def test_no_row_is_stale_without_saying_so() -> None:
    policy = parse(POLICY.read_text(encoding="utf-8"), POLICY)
    silent = [f"{stale.row.source}: {stale}" for stale in stale_kernels(policy, registry.default()) if not stale.row.stale]
    assert not silent, "measure them again, or run tools/tune.py build, which marks them"
