"""The demo passes, says what it should, and finds planted faults of many kinds: a demo that cannot fail shows nothing."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

from kernreg import ContractError, demo, registry
from kernreg.demo import DemoOptions, Report
from kernreg.demo.oracle import Tally
from kernreg_torch import _shared

SHORT = 6


@pytest.fixture(scope="module")
def report() -> Report:
    """Long enough that every slot changes hands."""
    return demo.run(DemoOptions("cpu"))


def short(**options: Any) -> Report:
    return demo.run(DemoOptions("cpu", **{"rounds": SHORT, **options}))


def wrong(report: Report) -> set[tuple[str, str]]:
    """Kind of layer and check of everything that failed."""
    return {(check.layer.lstrip("0123456789 "), check.what) for check in report.checks if not check.ok}


class TestOk:
    def test_all_is_well(self, report: Report) -> None:
        assert report.ok
        assert report.verdict == (
            f"OK: {report.accepted} accepted tokens of {report.requests} requests agree with plain decoding in every layer"
        )

    def test_every_layer_is_compared_often(self, report: Report) -> None:
        compared = {(check.layer, check.what): check.compared for check in report.checks}
        layers = {layer for layer, _ in compared if layer != "all layers"}
        assert len(layers) == 6
        for layer in layers:
            assert compared[layer, "output"] == report.accepted
            assert compared[layer, "padding"] == report.rounds
            assert compared[layer, "nothing pending"] == report.requests
            often = report.requests if "lazy" in layer else sum(report.windows)
            assert compared[layer, "state"] >= often
            assert ("kda" in layer) == ((layer, "k, v") in compared) == ((layer, "conv state") in compared)

    def test_lazy_rings_keep_tokens_pending_between_rounds(self, report: Report) -> None:
        compared = {check.layer: check.compared for check in report.checks if check.what == "state"}
        lazy = next(count for layer, count in compared.items() if "lazy" in layer)
        assert report.requests < lazy < sum(report.windows), "folds when a ring is full and at the end, not at every commit"

    def test_windows_are_accepted_in_every_length_and_slots_are_reused(self, report: Report) -> None:
        assert len(report.windows) == 5
        assert all(report.windows)
        assert 0 < report.accepted < report.drafted
        assert report.reused_slots == 6

    def test_every_op_served_with_a_kernel_and_a_reason(self, report: Report) -> None:
        known = registry.default()
        assert {line.op for line in report.served} == set(known.ops)
        for line in report.served:
            assert line.calls > 0
            assert line.batches
            row, *rest = line.why
            assert row.startswith("dispatch.yaml:")
            others = {kernel.name for kernel in known.kernels(line.op)} - {line.variant.partition("[")[0]}
            assert all(any(name in reason.partition(": ")[0] for reason in rest) for name in others)

    def test_calls_are_counted_by_static_key(self, report: Report) -> None:
        calls = {(line.op, line.key): line.calls for line in report.served}
        two_layers = two_groups = 2 * report.rounds
        assert calls["kda_chain_verify", "draft=4 heads=2/2 k_dim=64 v_dim=64"] == two_layers
        assert calls["gdn_ring_commit", "ring=16 heads=6/2 k_dim=64 v_dim=64"] == report.rounds, "all layers in one call"
        assert calls["conv_window_commit", "draft=4 dim=384"] == two_groups

    def test_memory_is_that_of_the_tensors(self, report: Report) -> None:
        lines = {line.layers: line for line in report.memory}
        state, keys, values = 64 * 64, 2 * 64, 6 * 64
        kda = 4 * (2 * keys * 2 + keys * 4 + 2 * 4)  # k, v in bf16; g and beta in fp32
        gdn = 16 * (2 * values * 2 + 2 * keys * 2 + 6 * 4)  # u, k in two bf16 parts; g in fp32
        assert (lines["kda ring"].ring, lines["kda ring"].snapshots) == (kda, 4 * 2 * state * 4)
        assert (lines["kda snapshot"].ring, lines["kda snapshot"].snapshots) == (kda, 4 * 2 * state * 4)
        assert (lines["gdn bf16 every"].ring, lines["gdn bf16 every"].snapshots) == (gdn, 4 * 6 * state * 2)
        assert (lines["gdn f32 lazy"].ring, lines["gdn f32 lazy"].snapshots) == (gdn, 4 * 6 * state * 4)
        assert report.total.ring == 3 * kda + 3 * gdn
        assert report.total.count == 6

    def test_as_dict_is_plain_data(self, report: Report) -> None:
        data = json.loads(json.dumps(report.as_dict()))
        assert data["ok"] is True
        assert data["memory"][-1]["layers"] == "all layers"
        assert len(data["checks"]) == len(report.checks)
        assert all(check["ok"] for check in data["checks"])

    def test_it_is_shown_with_the_verdict_last(self, report: Report) -> None:
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(*report.renderables(), sep="\n")
        lines = console.export_text().strip().splitlines()
        assert lines[-1].startswith("OK: ")
        assert all(any(name in line for line in lines) for name in registry.default().ops)
        assert not any("WRONG" in line for line in lines)


class TestFaults:
    def test_one_token_too_few(self) -> None:
        found = short(fault="accept")
        assert {kind for kind, what in wrong(found) if what == "state"} == {
            "kda ring",
            "kda snapshot",
            "gdn bf16 every",
            "gdn f32 lazy",
        }
        assert ("kda ring", "conv state") in wrong(found)
        assert found.verdict.startswith("FAILED: ")
        assert "request " in found.verdict

    def test_a_slot_that_keeps_its_last_owner(self) -> None:
        assert ("gdn bf16 every", "state") in wrong(short(fault="reuse", rounds=16))

    def test_padding_that_writes(self) -> None:
        assert {("all layers", "unused slots"), ("kda ring", "padding")} <= wrong(short(fault="padding"))

    @pytest.mark.parametrize(
        ("name", "broken", "where"),
        [
            pytest.param(
                "kda_gates",
                lambda gates: lambda *args: (gates(*args)[0], gates(*args)[1].bfloat16().float()),
                {"kda ring", "kda snapshot"},
                id="d07-beta-rounded",
            ),
            pytest.param(
                "kda_gates",
                lambda gates: lambda a, b, A_log, dt_bias, lower_bound: gates(a, b, A_log, dt_bias, None),
                {"kda ring"},
                id="d08-softplus-for-the-safe-gate",
            ),
            pytest.param(
                "per_value_head",
                lambda per: lambda x, heads, dim: torch.cat([x] * (heads // x.shape[dim]), dim),
                {"gdn bf16 every", "gdn f32 lazy"},
                id="d09-heads-paired-wrong",
            ),
            pytest.param("l2_normalised", lambda norm: lambda x: x, {"kda ring", "gdn bf16 every"}, id="k-not-normalised"),
        ],
    )
    def test_a_wrong_kernel(
        self, name: str, broken: Callable[..., Any], where: set[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_shared, name, broken(getattr(_shared, name)))
        assert where <= {kind for kind, what in wrong(short()) if what == "state"}

    def test_lost_low_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        load = _shared.Ring._load
        monkeypatch.setattr(_shared.Ring, "_load", lambda ring, high, low, at: load(ring, high, None, at))
        assert ("gdn f32 lazy", "state") in wrong(short())

    def test_records_past_the_history(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fold = _shared.Ring.fold
        monkeypatch.setattr(_shared.Ring, "fold", lambda ring, state, count: fold(ring, state, min(count + 1, 16)))
        found = short()
        assert {"gdn bf16 every", "gdn f32 lazy"} <= {kind for kind, what in wrong(found) if what == "state"}
        assert any(check.error == math.inf for check in found.checks), "pools start as NaN"


class TestTally:
    def test_keeps_the_worst_and_where(self) -> None:
        tally, zero, one = Tally(), torch.zeros(2).double(), torch.ones(2).double()
        for place, got in (("a", [0.0, 0.5]), ("b", [0.75, 0.0]), ("c", [0.25, 0.25])):
            tally.where = place
            tally.close("0", "state", torch.tensor(got).double(), zero, one)
        worst = tally.worst["0", "state"]
        assert (worst.error, worst.where, worst.compared, worst.ok) == (0.75, "b", 3, True)

    @pytest.mark.parametrize("allowed", [1e30, math.nan, math.inf])
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_what_is_not_finite_is_wrong_and_stays_so(self, bad: float, allowed: float) -> None:
        tally, zero = Tally(), torch.zeros(2).double()
        for got, bound in (([0.0, 0.5], 1.0), ([0.0, bad], allowed), ([0.0, 0.75], 1.0)):
            tally.close("0", "state", torch.tensor(got), zero, torch.full((2,), bound).double())
        assert not tally.worst["0", "state"].ok

    def test_bits(self) -> None:
        tally, nan = Tally(), torch.tensor([math.nan, 0.0])
        tally.same("0", "slots", nan, nan.clone())
        assert tally.worst["0", "slots"].ok
        tally.same("0", "slots", nan, torch.tensor([math.nan, -0.0]))
        assert tally.worst["0", "slots"].error == 1


def test_one_seed_gives_one_result() -> None:
    first, second, other = (short(seed=seed).as_dict() for seed in (3, 3, 4))
    for data in (first, second, other):
        del data["seconds"]
    assert first == second != other


def test_the_number_of_threads_is_left_as_it_was() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        short(rounds=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds is 0, wanted 1 or more"),
        ({"device": "tpu"}, "device is 'tpu', wanted one of .*cpu"),
        ({"device": "cuda:99"}, "device is 'cuda:99', wanted one of .*cpu"),
        ({"fault": "luck"}, "fault is 'luck', wanted one of accept, reuse, padding"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        demo.run(DemoOptions(**options))


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    report = demo.run(DemoOptions("cuda"))
    assert report.ok, report.verdict
    assert "cpu" not in report.device
    commits = [line for line in report.served if line.op == "gdn_ring_commit"]
    assert all(line.variant.startswith("triton.") for line in commits)
