"""tools/bounds.py without Nsight Compute: its rows become one line for each call."""

from __future__ import annotations

import pathlib
import sys

import pytest

TOOLS = pathlib.Path(__file__).parent.parent / "tools"
if not TOOLS.exists():
    pytest.skip("the tools are not installed with the package", allow_module_level=True)
sys.path.insert(0, str(TOOLS))
import bounds  # noqa: E402


def rows(number: int, kernel: str, **values: tuple[str, str]) -> list[dict[str, str]]:
    given = dict.fromkeys(bounds.METRICS, ("1", "")) | values
    return [
        {"ID": str(number), "Kernel Name": kernel, "Metric Name": bounds.METRICS[n], "Metric Value": value, "Metric Unit": unit}
        for n, (value, unit) in given.items()
    ]


def test_kernels_are_told_apart_by_the_markers() -> None:
    listed = [
        *rows(0, "void at::native::fill"),
        *rows(1, "_conv", time=("2,000", "nsecond"), read=("1", "Mbyte")),
        *rows(2, "_recurrence", time=("6", "usecond"), read=("1.5", "Mbyte"), warps=("40.5", "%"), barrier_wait=("3", "")),
        *rows(3, "void at::native::fill"),
        *rows(4, "_commit", time=("1", "msecond"), written=("2", "Gbyte")),
    ]
    first, second = bounds.calls(listed)
    assert [kernel["time"] for kernel in first] == [2.0, 6.0] and second[0]["time"] == 1000.0
    assert second[0]["written"] == 2e9
    (title, cell), *_ = bounds.cells()
    got = bounds.line(title, cell, "triton.unfused", first).split(" | ")
    assert got[0] == f"| {title}" and got[1:3] == ["`triton.unfused`", "8.0"]
    assert float(got[4]) == pytest.approx(2.5e6 / 8e-6 / 1e12, abs=0.005)
    assert got[6] == "40 %" and got[9] == "barrier (3.0) |"


def test_cells_fit_and_have_their_own_title() -> None:
    listed = list(bounds.cells())
    assert len({title for title, _ in listed}) == len(listed) > 10
    assert all(cell.work < 60e9 for _, cell in listed)
    for _, cell in listed:
        assert cell.load.get("layers", 1) in (1, bounds.LAYERS)
