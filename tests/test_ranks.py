"""Ranks agree, or none starts: the comparison as a pure function, and real processes over gloo."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import rank_tasks

from kernreg import device, ranks
from kernreg.ranks import Bound, Report

PLAN = Bound("op", "ring=16", "ring=16 heads=8/8", [[1, 4, "a"], [5, None, "b"]], {"a": "11", "b": "22"})
ONE = Report(0, "p", "r", "", None, "NVIDIA H200 (sm_90, 132 SMs)", "2.11.0", "3.6.0", "580", [PLAN])


def group(**second: Any) -> list[Report]:
    return [ONE, replace(ONE, rank=1, **second)]


def test_equal_ranks_agree() -> None:
    assert ranks.differences(group()) == [] and ranks.fallbacks(group()) == {}
    assert ranks.differences(group(driver="570")) == []


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"policy": "q"}, "policy: rank 0: p; rank 1: q"),
        ({"registry": "q"}, "registry: rank 0: r; rank 1: q"),
        ({"overrides": "torch"}, "overrides: rank 0: none; rank 1: torch"),
        ({"triton": "3.9.0"}, "triton: rank 0: 3.6.0; rank 1: 3.9.0"),
        ({"torch": "2.13.0"}, "torch: rank 0: 2.11.0; rank 1: 2.13.0"),
        ({"device": "NVIDIA B200 (sm_100, 148 SMs)"}, "device: rank 0: NVIDIA H200 (sm_90, 132 SMs); rank 1: NVIDIA B200"),
        ({"section": "nvidia-h200"}, "pinned section: rank 0: None; rank 1: nvidia-h200"),
        ({"plans": []}, "bound keys: rank 0: op ring=16; rank 1: none"),
        (
            {"plans": [replace(PLAN, table=[[1, None, "b"]])]},
            "table of op ring=16 heads=8/8: rank 0: [[1, 4, 'a'], [5, None, 'b']];",
        ),
        ({"plans": [replace(PLAN, sources={"a": "11", "b": "33"})]}, "source of op b: rank 0: 22; rank 1: 33"),
        ({"plans": [replace(PLAN, bits={"a": "5f"})]}, "bits of op ring=16 heads=8/8"),
    ],
)
def test_what_differs_is_named_with_the_ranks(second: dict[str, Any], said: str) -> None:
    (found,) = ranks.differences(group(**second))
    assert said in found


def test_what_ranks_fell_back_to_is_compared_once_all_did() -> None:
    fell = replace(PLAN, table=[[1, None, "c"]], fell_back="a cannot run here", bits={"c": "5f"})
    assert ranks.differences([replace(ONE, plans=[fell]), replace(ONE, rank=1, plans=[PLAN])]) == []
    other = replace(fell, bits={"c": "60"})
    (found,) = ranks.differences([replace(ONE, plans=[fell]), replace(ONE, rank=1, plans=[other])])
    assert found == "bits of op ring=16 heads=8/8: rank 0: {'c': '5f'}; rank 1: {'c': '60'}"


def test_different_devices_may_share_a_pinned_section() -> None:
    pinned = [replace(ONE, section="nvidia-h200"), replace(ONE, rank=1, section="nvidia-h200", device="other")]
    assert ranks.differences(pinned) == []


def test_ranks_may_hold_different_heads() -> None:
    other = replace(PLAN, key="ring=16 heads=4/4", table=[[1, None, "a"]])
    assert ranks.differences(group(plans=[other])) == []


def test_a_report_has_the_driver_and_the_source_of_what_a_rank_may_fall_back_to(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimpleNamespace(nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlSystemGetDriverVersion=lambda: "580.65")
    nvml.NVMLError = OSError
    monkeypatch.setattr(device, "import_nvml", lambda: nvml)
    plan = rank_tasks.plan(rank_tasks.FALLBACK)
    report = ranks.report_of(0, [plan])
    assert report.driver == "580.65"
    assert set(report.plans[0].sources) == {"mine.breaks_on_rank_1", "torch.reference"}
    plan.fall_back("rank 1 fell back")
    assert plan.resolved() == ((1, None, "torch.reference"),)
    assert plan.fell_back == "mine.breaks_on_rank_1 gives way: rank 1 fell back"
    assert dict(plan.explain().considered)["mine.breaks_on_rank_1"].endswith(plan.fell_back)
    assert set(ranks.report_of(0, [plan]).plans[0].sources) == {"torch.reference"}


def test_a_report_survives_its_journey() -> None:
    from dataclasses import asdict

    assert Report.of_json(json.dumps(asdict(ONE))) == ONE


def test_ranks_whose_time_ends_part_way_hold_the_same_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    def exchanges(name: str) -> list[ranks._Exchange]:
        return [ranks._Exchange(store, name, [0, 1], rank, time.monotonic() + 0.2) for rank in (0, 1)]

    store = dist.HashStore()
    early, late = exchanges("late")
    early.publish("verdict", ranks.YES)
    assert early.outcome() == "no verdict from rank 1 in time"
    late.publish("verdict", ranks.YES)
    assert late.outcome() == "no verdict from rank 1 in time"  # though it sees that both said yes
    first, second = exchanges("yes")
    for one in (first, second):
        one.publish("verdict", ranks.YES)
    assert first.outcome() == ranks.YES
    second.publish("verdict", "no")
    assert second.outcome() == ranks.YES


def test_processes_agree_or_all_refuse(tmp_path: pathlib.Path) -> None:
    program = pathlib.Path(__file__).parent / "rank_tasks.py"
    processes = [
        subprocess.Popen([sys.executable, str(program), str(rank), "2", str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    ends = {name: [rank[name][0] for rank in said] for name in said[0]}
    agreed, refused = ["agreed", "agreed"], ["refused", "refused"]
    assert ends == {
        "same": agreed,
        "other_heads": agreed,
        "other_policy": refused,
        "other_override": refused,
        "other_key": refused,
        "falls_back_together": agreed,
        "falls_back_to_other_bits": refused,
        "cannot_start": refused,
        "no_plans": refused,
        "late": refused,
    }, said
    for name in ("other_policy", "other_override", "other_key", "falls_back_to_other_bits", "cannot_start", "no_plans"):
        assert said[0][name] == said[1][name], "the ranks say different things"
    assert "policy: rank 0: " in said[0]["other_policy"][1]
    assert "overrides: rank 0: gdn_ring_commit=torch; rank 1: none" in said[0]["other_override"][1]
    assert "bits of gdn_ring_commit" in said[0]["falls_back_to_other_bits"][1]
    assert "rank 1 cannot start" in said[0]["cannot_start"][1] and "out of shared memory" in said[0]["cannot_start"][1]
    assert said[0]["no_plans"][1] == "rank 0 cannot start: no plans; bind the ops first"
    for rank in said:
        assert "rank 1 fell back" in rank["falls_back_together"][1] and "torch.reference" in rank["falls_back_together"][1]
        assert "from rank 1 in time" in rank["late"][1]
