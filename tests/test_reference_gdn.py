"""The GDN references mean what the contract says, and the GDN parity checks can tell right from wrong."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernreg.contract import Case, Check
from kernreg.ops import _inputs, gdn_samples
from kernreg.ops._inputs import copy_inputs, with_dtypes
from kernreg_torch.gdn_ring_advance import gdn_ring_advance
from kernreg_torch.gdn_ring_commit import gdn_ring_commit
from kernreg_torch.gdn_ring_verify import gdn_ring_verify

Inputs = dict[str, Any]
DOUBLE = {"state": "f64", "ring_dtype": "f64", "low": False}


def commit_inputs(batch: int = 3, facts: dict[str, Any] | None = None, **options: Any) -> Inputs:
    base = {"ring": 16, "heads": "2/1", "k_dim": 64, "v_dim": 16, "state": "f32", "ring_dtype": "f16"}
    return gdn_samples.make_commit(Case("test", base | (facts or {}), batch, options))


def verify_inputs(batch: int = 2, facts: dict[str, Any] | None = None, **options: Any) -> Inputs:
    base = {"draft": 4, "ring": 16, "heads": "6/2", "k_dim": 64, "v_dim": 16, "act": "f64", **DOUBLE}
    return gdn_samples.make_verify(Case("test", base | (facts or {}), batch, options))


def committed(inputs: Inputs) -> Inputs:
    after = copy_inputs(inputs)
    gdn_ring_commit(**after)
    return after


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_inputs.bits(a), _inputs.bits(b))


def decoded(inputs: Inputs, row: int, count: int) -> torch.Tensor:
    """The row's state after its first `count` records, one step of the recurrence each, in float64: [NL, HV, V, K]."""
    slot, r = int(inputs["slots"][row]), int(inputs["rows"][row])
    group = inputs["state"].shape[2] // inputs["ring_k"].shape[2]
    s = inputs["state"][:, slot].double()
    for j in range(count):
        at = (int(inputs["base"][r]) + j) % inputs["ring_g"].shape[-1]
        u, k = (inputs[name][:, r, :, at].double() for name in ("ring_u", "ring_k"))
        if inputs["ring_u_low"] is not None:
            u, k = u + inputs["ring_u_low"][:, r, :, at].double(), k + inputs["ring_k_low"][:, r, :, at].double()
        decay = inputs["ring_g"][:, r, :, at].double().exp()
        s = decay[..., None, None] * s + torch.einsum("lhv,lhk->lhvk", u, k.repeat_interleave(group, 1))
    return s


# --- commit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("facts", [{}, DOUBLE, {"heads": "6/2"}, {"heads": "16/1"}, {"low": False}], ids=str)
def test_commit_is_the_token_loop(facts: dict[str, Any]) -> None:
    inputs = commit_inputs(5, facts, layers=2, base=(0, 13, 9, 15, 3))
    after = committed(inputs)
    tolerance = 1e-12 if facts == DOUBLE else 1e-5
    for row in range(5):
        slot, r = int(inputs["slots"][row]), int(inputs["rows"][row])
        n = int(inputs["write_pos"][r])
        torch.testing.assert_close(after["state"][:, slot].double(), decoded(inputs, row, n), rtol=0, atol=tolerance)
        assert (after["base"][r], after["write_pos"][r], after["fold"][r]) == ((inputs["base"][r] + n) % 16, 0, 0)


def test_track_is_the_token_loop_from_the_state_before_the_fold() -> None:
    inputs = commit_inputs(4, {"track": True}, history=(8, 3, 16, 4), accept=(4, 3, 2, 4), fold=(1, 0, 1, 0))
    after = committed(inputs)
    for row in range(4):
        slot, r, target = (int(inputs[name][row]) for name in ("slots", "rows", "track_slots"))
        n = int(inputs["write_pos"][r])
        count = n - int(inputs["accept"][row]) + int(inputs["track_step"][row]) + 1
        torch.testing.assert_close(after["state"][:, target].double(), decoded(inputs, row, count), rtol=0, atol=1e-5)
        if not inputs["fold"][r]:
            assert equal(after["state"][:, slot], inputs["state"][:, slot])
            assert after["write_pos"][r] == n


def test_float64_in_float64_out() -> None:
    after = committed(commit_inputs(facts=DOUBLE))
    assert after["state"].dtype == torch.float64
    inputs = verify_inputs()
    assert gdn_ring_verify(**inputs).dtype == torch.float64


# --- verify, advance, commit ----------------------------------------------------------------------------------------


def one_layer(inputs: Inputs) -> Inputs:
    """Arguments of a commit of one layer on verify's own tensors."""
    names = ("state", "ring_u", "ring_k", "ring_g", "ring_u_low", "ring_k_low")
    return {name: None if inputs[name] is None else inputs[name][None] for name in names} | {
        name: inputs[name] for name in ("write_pos", "base", "slots", "rows")
    }


def run_window(inputs: Inputs, fold: torch.Tensor, accept: list[int], margin: int | None = None) -> torch.Tensor:
    """Verify, then count and commit the accepted tokens, in place."""
    o = gdn_ring_verify(**inputs)
    cursors = {name: inputs[name] for name in ("write_pos", "rows", "slots")}
    gdn_ring_advance(**cursors, fold=fold, accept=torch.tensor(accept), ring=inputs["ring_g"].shape[-1], margin=margin)
    gdn_ring_commit(**one_layer(inputs), fold=fold)
    return o


@pytest.mark.parametrize(
    ("facts", "tolerance"),
    [
        ({}, 1e-12),
        ({"state": "f32", "ring_dtype": "f32", "act": "f32"}, 1e-5),
        ({"state": "f32", "ring_dtype": "bf16", "low": True, "act": "bf16"}, 3e-4),  # records lose 2^-16, outputs are bf16
    ],
    ids=["f64", "f32", "bf16"],
)
def test_a_window_is_as_many_decode_steps(facts: dict[str, Any], tolerance: float) -> None:
    inputs = verify_inputs(facts=facts, history=(3, 0), lengths=4)
    fold = torch.zeros_like(inputs["write_pos"], dtype=torch.int8)
    window, steps = copy_inputs(inputs), copy_inputs(inputs)
    o = run_window(window, fold.clone(), [4, 4])
    rounding = 2.0**-7 if o.dtype == torch.bfloat16 else 0.0
    for t in range(4):
        tokens = torch.tensor([t, 4 + t])
        call = {**steps, "draft": 1, "cu_seqlens": torch.arange(3)}
        call |= {name: steps[name][tokens] for name in ("q", "k", "v", "a", "b")}
        out = run_window(call, fold.clone(), [1, 1])
        torch.testing.assert_close(o[tokens].double(), out.double(), rtol=rounding, atol=tolerance)
    torch.testing.assert_close(window["state"].double(), steps["state"].double(), rtol=0, atol=10 * tolerance)


def test_lazy_folding_gives_the_same_outputs() -> None:
    inputs = verify_inputs(history=0, lengths=4)
    fold = torch.zeros_like(inputs["write_pos"], dtype=torch.int8)
    every, lazy = copy_inputs(inputs), copy_inputs(inputs)
    folds = 0
    for step in range(9):
        accept = [step % 5, 4 - step % 3]
        a = run_window(every, fold.clone(), accept)
        before = lazy["write_pos"].clone()
        b = run_window(lazy, fold.clone(), accept, margin=4)
        folds += int((lazy["write_pos"] < before).sum())
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
        assert not every["write_pos"][every["rows"].long()].any()
    assert 0 < folds < 9  # the ring did wrap, and was not folded at each step


def test_verify_reads_and_writes_nothing_else() -> None:
    inputs = verify_inputs(4, history="mixed", padding=(1,), gap=2)
    after = copy_inputs(inputs)
    o = gdn_ring_verify(**after)
    assert o.isfinite().all()
    rows = list(gdn_samples.live_rows(inputs))
    cells = {name: torch.zeros(inputs[name].shape, dtype=torch.bool) for name in ("ring_u", "ring_k", "ring_g")}
    for row in rows:
        for t in range(len(row.tokens)):
            for cell in cells.values():
                cell[row.ring_row, :, (row.base + row.history + t) % 16] = True
    assert _inputs.bytes_check("", after, inputs, cells).ok
    assert not any(after[name][cell].isnan().any() for name, cell in cells.items())
    covered = {token for row in rows for token in row.tokens}
    idle = [token for token in range(o.shape[0]) if token not in covered]
    assert idle
    assert not o[idle].any()


def test_low_parts_of_the_history_enter_records_and_outputs() -> None:
    facts = {"state": "bf16", "ring_dtype": "bf16", "low": True, "act": "f32"}
    inputs = verify_inputs(1, facts, history=12, lengths=4)
    row = next(iter(gdn_samples.live_rows(inputs)))
    truth = gdn_samples.oracle(inputs, gdn_samples._combined(inputs), row)
    with_low, without = copy_inputs(inputs), copy_inputs(inputs)
    without |= {"ring_u_low": None, "ring_k_low": None}
    errors = []
    for call in (with_low, without):
        o = gdn_ring_verify(**call)
        at = (row.base + row.history) % 16
        u = call["ring_u"][row.ring_row, :, at].double()
        u += 0 if call["ring_u_low"] is None else call["ring_u_low"][row.ring_row, :, at].double()
        errors.append((float((o[0] - truth[0].o).abs().max()), float((u - truth[0].u).abs().max())))
    assert errors[1][0] > 50 * errors[0][0]
    assert errors[1][1] > 50 * errors[0][1]


@pytest.mark.parametrize(
    ("history", "accept", "margin", "n", "fold"),
    [
        (0, 0, None, 0, 0),
        (0, 2, None, 2, 1),
        (10, 2, 4, 12, 0),
        (10, 3, 4, 13, 1),
        (16, 0, 0, 16, 0),
        (14, 3, None, 14, 7),
        (4, -1, None, 4, 7),
    ],
)
def test_advance(history: int, accept: int, margin: int | None, n: int, fold: int) -> None:
    write_pos = torch.tensor([5, history, 5], dtype=torch.int32)
    flags = torch.tensor([7, 7, 7], dtype=torch.int8)
    index = torch.tensor([1])
    gdn_ring_advance(write_pos, flags, index, index, torch.tensor([accept]), ring=16, margin=margin)
    assert write_pos.tolist() == [5, n, 5]
    assert flags.tolist() == [7, fold, 7]


# --- the parity checks can fail ---------------------------------------------------------------------------------------


def failed(checks: list[Check]) -> set[str]:
    return {check.name.partition(" of ")[0].partition("[")[0] for check in checks if not check.ok}


def wrong_commit(fault: str) -> Callable[..., None]:
    def run(**inputs: Any) -> None:
        rows, state = inputs["rows"].long(), inputs["state"]
        if fault == "reads past the history":
            inputs["write_pos"][rows] += 1
        if fault == "high parts only":
            inputs |= {"ring_u_low": None, "ring_k_low": None}
        if fault == "tracks after the fold":
            gdn_ring_commit(**{**inputs, "track_slots": None, "track_step": None, "accept": None})
        gdn_ring_commit(**inputs)
        slot = int(inputs["slots"][0])
        if fault == "does not finish":
            inputs["write_pos"][rows[0]] = 1
        if fault == "one element off":
            state[-1, slot, 0, 3, 5] *= 1 + 2.0**-10
        if fault == "writes a free slot":
            free = set(range(state.shape[1])) - set(inputs["slots"].tolist()) - set(inputs["track_slots"].tolist())
            state[0, free.pop(), 0, 0, 0] += 1
        if fault == "writes a gap":
            torch.empty(0, dtype=state.dtype).set_(state.untyped_storage())[state.stride(0) - 1] = 1.0
        if fault == "writes a ring":
            inputs["ring_g"][0, 0, 0, 0] = 0.0
        if fault == "leaves NaN":
            state[0, slot, 0, 0, 0] = math.nan

    return run


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("reads past the history", "state"),
        ("high parts only", "state"),
        ("tracks after the fold", "state"),
        ("one element off", "state"),
        ("leaves NaN", "state"),
        ("does not finish", "cursors and all else exact"),
        ("writes a free slot", "cursors and all else exact"),
        ("writes a gap", "cursors and all else exact"),
        ("writes a ring", "cursors and all else exact"),
    ],
)
def test_commit_parity_finds(fault: str, check: str) -> None:
    inputs = commit_inputs(3, {"track": True, "ring_dtype": "bf16"}, history=4, pool="padded", layers=2)
    original = copy_inputs(inputs)
    assert check in failed(gdn_samples.check_commit(wrong_commit(fault), gdn_ring_commit, inputs))
    assert _inputs.bytes_check("", inputs, original).ok  # parity works on copies


def wrong_verify(fault: str) -> Callable[..., torch.Tensor]:
    def run(**inputs: Any) -> torch.Tensor:
        r, before = int(inputs["rows"][0]), copy_inputs(inputs)
        if fault == "history's high parts only":
            o = gdn_ring_verify(**{**inputs, "ring_u_low": inputs["ring_u_low"] * 0, "ring_k_low": inputs["ring_k_low"] * 0})
        else:
            o = gdn_ring_verify(**inputs)
        at = (int(before["base"][r]) + int(before["write_pos"][r])) % 16
        if fault == "no low part":
            inputs["ring_u_low"][r, :, at] = 0
        if fault == "raw key":
            inputs["ring_k"][r, :, at] = before["k"][int(before["cu_seqlens"][0])].to(inputs["ring_k"].dtype)
        if fault == "gate in 16 bits":
            inputs["ring_g"][r, :, at] = inputs["ring_g"][r, :, at].bfloat16().float()
        if fault == "output off":
            o[1, 0, 0] += 0.05 * o[1, 0].abs().max()
        if fault == "moves a cursor":
            inputs["write_pos"][r] += 1
        if fault == "fills padding":
            o[-1] = 1
        return o

    return run


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("history's high parts only", "ring_u"),
        ("no low part", "ring_u"),
        ("raw key", "ring_k"),
        ("gate in 16 bits", "ring_g"),
        ("output off", "o"),
        ("moves a cursor", "all else exact"),
        ("fills padding", "o of padding"),
    ],
)
def test_verify_parity_finds(fault: str, check: str) -> None:
    facts = {"state": "bf16", "ring_dtype": "bf16", "low": True, "act": "bf16"}
    inputs = verify_inputs(3, facts, history=4, gap=1, lengths=4)
    checks = gdn_samples.check_verify(wrong_verify(fault), gdn_ring_verify, inputs)
    names = {c.name if c.name == "o of padding" else c.name.partition(" of ")[0] for c in checks if not c.ok}
    assert check in names


# --- inputs ---------------------------------------------------------------------------------------------------------


def test_random_bytes_are_the_same_everywhere() -> None:
    random = _inputs.Random(7, "cpu")
    parts = [random.normal("a", (999,)), random.uniform("b", (999,), -1, 2), random.unit("c", (9, 64), torch.float16)]
    digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()
    assert digest[:16] == "65e261a05085c49a"
    published = 0xE220A8397B1DCDAF - (1 << 64)  # first number of splitmix64 from seed 0
    assert _inputs._splitmix64(torch.tensor([1]), 0).tolist() == [published]


def test_random_numbers_are_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    random = _inputs.Random(0, "cpu")
    normal, uniform = random.normal("n", (200_000,), 2.0), random.uniform("u", (200_000,), -1.0, 3.0)
    assert abs(float(normal.mean())) < 0.02
    assert abs(float(normal.std()) - 2.0) < 0.02
    assert abs(float(uniform.mean()) - 1.0) < 0.01
    assert -1.0 <= float(uniform.min()) < -0.99
    assert 2.99 < float(uniform.max()) < 3.0
    torch.testing.assert_close(random.unit("k", (50, 128)).norm(dim=-1), torch.ones(50))
    assert not torch.equal(normal, _inputs.Random(1, "cpu").normal("n", (200_000,), 2.0))
    assert abs(float(torch.corrcoef(torch.stack((normal, random.normal("m", (200_000,)))))[0, 1])) < 0.01
    monkeypatch.setattr(_inputs, "_CHUNK", 1000)
    assert torch.equal(normal, random.normal("n", (200_000,), 2.0))


def test_strided_indices_lie_among_wild_numbers() -> None:
    view = _inputs.index([3, 1], torch.int64, "cpu", strided=True)
    assert view.tolist() == [3, 1]
    assert view.stride() == (3,)
    assert (view.as_strided((6,), (1,), 0) == _inputs.WILD_INDEX).sum() == 4


def test_a_case_takes_other_dtypes_and_refuses_unknown_options() -> None:
    case = with_dtypes(gdn_samples.COMMIT_CASES[0], state="bf16", ring_dtype="bf16")
    inputs = gdn_samples.make_commit(case)
    assert (inputs["state"].dtype, inputs["ring_u_low"].dtype) == (torch.bfloat16, torch.bfloat16)
    assert case.id == "plain-state_bf16-ring_dtype_bf16"
    with pytest.raises(ValueError, match="hystory"):
        commit_inputs(hystory=4)
