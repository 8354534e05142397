"""Batteries, fingerprints and classes on the CPU: what a battery covers, what it tells apart, and which verdicts it gives."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import planted_kernels
import pytest
import torch
import tune_program
from typer.testing import CliRunner

from kernreg import cli, doctor, ops, registry
from kernreg import policy as policies
from kernreg.contract import Case, Op
from kernreg.device import Device
from kernreg.dispatch import launcher
from kernreg.numerics import (
    BATCH_VARIANT,
    FULL,
    LIGHT,
    RACY,
    Effort,
    Fingerprint,
    battery,
    class_id,
    classes,
    facts_key,
    fingerprint,
    fingerprint_of,
)
from kernreg.ops._inputs import Inputs
from kernreg.probing import pick
from kernreg.tuning import journal
from kernreg.tuning.fingerprints import Found, Task, fingerprints
from kernreg.tuning.screen import Failure, screen

REGISTRY, PLANTED = registry.default(), planted_kernels.registry()
COMMIT = ops.gdn_ring_commit
ONCE = Effort(elements=0, repeats=0, alone=0, crowds=())  # bits only
SMALL = {"heads": "2/1", "k_dim": 16, "v_dim": 16}
F16 = {"ring_dtype": "f16", "state": "f32"}
KEYS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "gdn_ring_commit": [
        {**SMALL, **F16, "ring": 16, "track": True},
        {**SMALL, "ring": 64},
        {**SMALL, "ring": 16, "layout": "any"},
    ],
    "gdn_ring_verify": [{**SMALL, **F16, "ring": 16, "draft": 4, "act": "f16"}, {**SMALL, "ring": 32, "draft": 1, "low": False}],
    "gdn_ring_advance": [{"ring": 16}, {"ring": 32, "index": "i64"}],
    "kda_chain_verify": [
        {**SMALL, "draft": 3},
        {**SMALL, "draft": 3, "window": "ragged", "bias": True},
        {**SMALL, "draft": 3, "mode": "snapshot", "window": "ragged_tree", "gate": "softplus"},
        {**SMALL, "draft": 1, "mode": "snapshot", "layout": "any"},
    ],
    "kda_ring_commit": [{**SMALL, "ring": 4, "track": True}, {**SMALL, "ring": 1}],
    "kda_snapshot_commit": [{"draft": 3, "value_heads": 2, "k_dim": 16, "v_dim": 16, "track": True}],
    "conv_window_commit": [{"draft": 3, "dim": 48, "track": True}, {"draft": 3, "dim": 48, "layout": "any"}],
}
CASES = [pytest.param(op, key, id=f"{op}-{n}") for op, keys in KEYS.items() for n, key in enumerate(keys)]


def inputs_of(op: Op, facts: Mapping[str, Any], name: str) -> Inputs:
    key = op.complete(facts)
    probe = next(probe for probe in battery(op, key) if probe.name == name)
    return op.samples.make_inputs(Case(name, key, probe.rows, probe.options), device="cpu", seed=1)


def reference(op: str, facts: Mapping[str, Any]) -> Callable[..., Any]:
    run: Callable[..., Any] = launcher(
        REGISTRY, REGISTRY.kernel(op, "torch.reference").variant(), REGISTRY.op(op).complete(facts)
    )
    return run


# --- what a battery covers


def test_every_op_has_keys_here() -> None:
    assert set(KEYS) == set(REGISTRY.ops)


@pytest.mark.parametrize(("op", "facts"), CASES)
def test_the_reference_has_a_fingerprint_whatever_the_arrangement(op: str, facts: Mapping[str, Any]) -> None:
    variant = REGISTRY.kernel(op, "torch.reference").variant()
    found = fingerprint(REGISTRY, variant, facts, "cpu", replace(LIGHT, crowds=(16, 64)))
    assert found.ok and len(found.bits) == 16 and int(found.bits, 16) >= 0, found
    assert found.rows >= 18 and found.alone >= 4 and found.elements > 1000
    assert not found.busy and "not throughout beside a busy stream" in found.coverage
    assert fingerprint(REGISTRY, variant, facts, "cpu").bits == found.bits, "arrangements are no part of the bits"


@pytest.mark.parametrize(("op", "facts"), CASES)
def test_every_probe_matters(op: str, facts: Mapping[str, Any]) -> None:
    contract = REGISTRY.op(op)
    key = contract.complete(facts)
    probes = battery(contract, key)
    assert len({probe.name for probe in probes}) == len(probes) >= 2
    for probe in probes:
        args = contract.samples.make_inputs(Case(probe.name, key, probe.rows, probe.options), device="cpu")
        assert args[contract.batch].shape[0] == probe.rows
    padded = [inputs_of(contract, facts, probe.name) for probe in probes]
    assert any((args[contract.batch] <= args["null_slot"]).any() for args in padded)
    assert {args["null_slot"] for args in padded} == {-1, 0}


def test_a_gdn_battery_wraps_around_poisons_and_reaches_the_corners_of_a_ring() -> None:
    args = inputs_of(COMMIT, KEYS[COMMIT.name][0], "mixed")
    rows = args["rows"][args["slots"] >= 0].long()
    history, base = args["write_pos"][rows], args["base"][rows] % 16
    assert {1, 4, 8, 9, 15, 16} <= set(history.tolist())
    assert 0 in inputs_of(COMMIT, KEYS[COMMIT.name][0], "large")["write_pos"]
    assert int(((base + history > 16) & (history > 0)).sum()) >= 2
    assert args["fold"][rows].unique().numel() == 2 and (args["track_step"] < 0).any() and (args["track_step"] >= 0).any()
    assert all(args[name].isnan().any() for name in ("ring_u", "ring_k", "ring_g", "ring_u_low", "ring_k_low"))
    assert inputs_of(COMMIT, KEYS[COMMIT.name][0], "cancel")["state"].shape[0] == 5
    sizes = [inputs_of(COMMIT, KEYS[COMMIT.name][0], name)["state"].abs().max() for name in ("tiny", "large")]
    assert sizes[0] < 1e-3 and sizes[1] > 100


def test_ragged_windows_have_every_length_and_tokens_of_no_row() -> None:
    for op, facts in (("kda_chain_verify", KEYS["kda_chain_verify"][1]), ("gdn_ring_verify", KEYS["gdn_ring_verify"][0])):
        offsets = inputs_of(REGISTRY.op(op), facts, "mixed")["cu_seqlens"]
        draft = int(facts["draft"])
        assert {0, 1, draft - 1, draft} <= set(offsets.diff().tolist()) and offsets[0] == 2


def test_sums_cancel() -> None:
    for op, key in (("kda_chain_verify", "mixed_qkv"), ("gdn_ring_verify", "k")):
        args = inputs_of(REGISTRY.op(op), KEYS[op][0], "cancel")
        state = args["state"].double()
        assert state.sum(-1).abs().mean() < 0.2 * state.abs().sum(-1).mean() / 4
        keys = args[key][..., :16]
        assert torch.equal(keys[..., :8].nan_to_num(), keys[..., 8:].nan_to_num())


@pytest.mark.parametrize("op", ["kda_chain_verify", "gdn_ring_commit"])
def test_real_dims_give_a_million_elements(op: str) -> None:
    key = {"kda_chain_verify": {"draft": 4, "heads": "4/4"}, "gdn_ring_commit": {"ring": 16, "heads": "6/2", "state": "f32"}}[op]
    found = fingerprint_of(REGISTRY.op(op), reference(op, key), key, "cpu", replace(ONCE, elements=FULL.elements))
    assert FULL.elements <= found.elements < 8 * FULL.elements


def test_a_row_of_two_numbers_takes_every_combination_and_no_more() -> None:
    args = inputs_of(ops.gdn_ring_advance, {"ring": 16}, "every")
    pairs = zip(args["write_pos"][args["rows"].clamp(0, 290).long()].tolist(), args["accept"].tolist(), strict=True)
    assert len({(n, accept) for n, accept in pairs}) > 130
    found = fingerprint(REGISTRY, REGISTRY.kernel("gdn_ring_advance", "torch.reference").variant(), {"ring": 16}, "cpu", FULL)
    assert found.ok and found.rows <= 2 * FULL.most_rows


def test_batteries_stay_as_they_are() -> None:
    """Recorded classes rest on these bytes: when they change, every class moves and everything is to be measured again."""
    total = hashlib.sha256()
    for op, keys in KEYS.items():
        contract = REGISTRY.op(op)
        for key in map(contract.complete, keys):
            for number, probe in enumerate(battery(contract, key)):
                case = Case(probe.name, key, probe.rows, probe.options)
                for name, value in contract.samples.make_inputs(case, device="cpu", seed=1 + number).items():
                    total.update(f"{op} {probe.name} {name} ".encode())
                    plain = value.double().nan_to_num(nan=7.0).tolist() if isinstance(value, torch.Tensor) else value
                    total.update(json.dumps(plain).encode())
    assert total.hexdigest()[:16] == "2c00e2a69f399eb6"


# --- what it tells apart


@pytest.fixture(scope="module")
def honest() -> str:
    return commit_bits("honest")


def commit_bits(name: str, **config: Any) -> str:
    variant = PLANTED.kernel(COMMIT.name, f"planted.{name}").variant(config)
    found = fingerprint(PLANTED, variant, KEYS[COMMIT.name][0], "cpu", ONCE)
    assert found.ok, found
    return found.bits


def test_another_name_is_the_same_class(honest: str) -> None:
    variant = PLANTED.kernel(COMMIT.name, "torch.reference").variant()
    assert fingerprint(PLANTED, variant, KEYS[COMMIT.name][0], "cpu", ONCE).bits == honest


@pytest.mark.parametrize("where", planted_kernels.WHERE)
def test_one_ulp_in_one_class_of_elements_is_another_class(where: str, honest: str) -> None:
    assert commit_bits("one_ulp", where=where) != honest


def test_one_ulp_in_one_output_or_record_is_another_class() -> None:
    op, facts = REGISTRY.op("kda_chain_verify"), KEYS["kda_chain_verify"][1]
    run = reference(op.name, facts)
    seen = {fingerprint_of(op, run, facts, "cpu", ONCE).bits}
    for name in ("o", "windows", "ring_k", "ring_v", "ring_g", "ring_beta"):
        seen.add(fingerprint_of(op, off_by_one(run, name), facts, "cpu", ONCE).bits)
    assert len(seen) == 7


def off_by_one(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The last bit of one element that is no NaN, in what a call returns ("o") or writes."""

    def wrong(**arguments: Any) -> Any:
        o = run(**arguments)
        tensor = o if name == "o" else arguments[name]
        at = tuple(int(i) for i in (tensor.isfinite() & (tensor != 0)).nonzero()[-1])
        tensor[at] = planted_kernels.next_up(tensor[at])
        return o

    return wrong


def test_per_head_and_head_group_are_two_classes(device: str) -> None:
    facts = {**F16, "ring": 16, "heads": "2/1", "k_dim": 64, "v_dim": 16}
    bits = [
        fingerprint(REGISTRY, REGISTRY.kernel(COMMIT.name, f"triton.{name}").variant(), facts, device, ONCE).bits
        for name in ("per_head", "head_group")
    ]
    assert all(bits) and bits[0] != bits[1]


def test_tiles_and_launches_are_one_class(device: str) -> None:
    facts = {"draft": 2, "heads": "1/1", "k_dim": 16, "v_dim": 32, "act": "f16", "weight": "f16"}
    chosen = [("unfused", {"BV": 16}), ("unfused", {"BV": 32})]
    chosen += [("fused", {})] if device == "cuda" else []
    bits = {
        fingerprint(REGISTRY, REGISTRY.kernel("kda_chain_verify", f"triton.{name}").variant(config), facts, device, ONCE).bits
        for name, config in chosen
    }
    assert len(bits) == 1


# --- verdicts


@pytest.mark.parametrize(("above", "how"), [(1, "when alone"), (16, "in a batch of 64 with padding"), (64, "in a batch of 256")])
def test_a_kernel_that_depends_on_its_batch_is_named(above: int, how: str) -> None:
    variant = PLANTED.kernel(COMMIT.name, "planted.depends_on_batch").variant({"above": above})
    found = fingerprint(PLANTED, variant, KEYS[COMMIT.name][0], "cpu", replace(FULL, elements=0))
    assert (found.verdict, found.bits) == (BATCH_VARIANT, "")
    assert found.reason.startswith("probe mixed, row 0: state[0, ") and how in found.reason


def test_a_kernel_that_races_is_named() -> None:
    variant = PLANTED.kernel(COMMIT.name, "planted.races").variant()
    found = fingerprint(PLANTED, variant, KEYS[COMMIT.name][0], "cpu")
    assert found.verdict == RACY and "row " in found.reason and "state[0, " in found.reason
    assert found.reason.endswith("when repeated") and str(found).startswith("racy: probe mixed, row ")


def test_a_race_that_needs_another_arrangement_is_a_race() -> None:
    op, facts = ops.gdn_ring_advance, {"ring": 16}
    run, calls = reference(op.name, facts), iter(range(1000))

    def races_when_few(**arguments: Any) -> None:
        run(**arguments)
        if arguments["slots"].shape[0] < 5:
            arguments["write_pos"][0] += next(calls)

    found = fingerprint_of(op, races_when_few, facts, "cpu")
    assert found.verdict == RACY and "write_pos" in found.reason and "when alone" in found.reason


@pytest.mark.parametrize("row", [0, 2, 6])
def test_the_first_row_that_differs_is_named(row: int) -> None:
    op, facts = REGISTRY.op("gdn_ring_verify"), KEYS["gdn_ring_verify"][0]
    run, first = reference(op.name, facts), iter([True])

    def wrong_at_first(**arguments: Any) -> torch.Tensor:
        o: torch.Tensor = run(**arguments)
        if next(first, False):
            for late in (8, row):
                begin, end = arguments["cu_seqlens"][late : late + 2].tolist()
                o[begin:end, 0, 1] = 2.5
                arguments["ring_g"][int(arguments["rows"][8]), 0, 0] = -3.0
        return o

    found = fingerprint_of(op, wrong_at_first, facts, "cpu", replace(LIGHT, repeats=0))
    begin = int(inputs_of(op, facts, "mixed")["cu_seqlens"][row])
    assert found.verdict == BATCH_VARIANT
    assert f"row {row}: o[{begin}, 0, 1] is " in found.reason and "was 2.5" in found.reason


def test_one_buffer_for_every_result_hides_nothing() -> None:
    op, facts = REGISTRY.op("kda_chain_verify"), KEYS["kda_chain_verify"][0]
    run, buffer, calls = reference(op.name, facts), torch.empty(0), iter(range(1000))

    def keeps_its_output(**arguments: Any) -> torch.Tensor:
        nonlocal buffer
        o = run(**arguments)
        buffer = buffer if buffer.shape == o.shape else o
        buffer.copy_(o)
        buffer[0] += next(calls)
        return buffer

    assert fingerprint_of(op, keeps_its_output, facts, "cpu").verdict == RACY


def test_output_rows_of_padding_are_held_to_zero() -> None:
    op, facts = REGISTRY.op("kda_chain_verify"), KEYS["kda_chain_verify"][0]
    run = reference(op.name, facts)

    def leaves_padding(**arguments: Any) -> torch.Tensor:
        o: torch.Tensor = run(**arguments)
        if arguments["slots"].shape[0] == 16:
            o[:3] = 1.0
        return o

    found = fingerprint_of(op, leaves_padding, facts, "cpu")
    assert found.verdict == BATCH_VARIANT and "row of padding" in found.reason and "batch of 16" in found.reason


def test_what_a_variant_raises_is_raised() -> None:
    with pytest.raises(Exception, match="no such instruction"):
        fingerprint(PLANTED, PLANTED.kernel(COMMIT.name, "planted.cannot_compile").variant(), KEYS[COMMIT.name][0], "cpu")


@pytest.mark.parametrize(
    ("name", "step", "reason"),
    [
        ("honest", "", ""),
        ("wrong", "parity", "times what is allowed"),
        ("reads_past", "parity", "nan"),
        ("depends_on_batch", "bits", "batch-variant: probe mixed, row 0: state"),
        ("races", "bits", "racy: probe mixed, row "),
        ("cannot_compile", "launch", "no such instruction on this chip"),
        ("autotunes", "load", "tuned_online carries @triton.autotune"),
    ],
)
def test_a_bad_candidate_is_found_and_named(name: str, step: str, reason: str) -> None:
    variant = PLANTED.kernel(COMMIT.name, f"planted.{name}").variant()
    found = screen(PLANTED, "torch.reference", variant, COMMIT.complete(KEYS[COMMIT.name][0]), "cpu")
    if name == "honest":
        assert isinstance(found, Fingerprint) and found == fingerprint(PLANTED, variant, KEYS[COMMIT.name][0], "cpu")
    else:
        assert isinstance(found, Failure) and found.step == step and reason in found.reason, found


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("at 2:4:\ndef broken(p):\n    tl.static_assert(False)\n    ^\nno such thing", "no such thing (at 2:4)"),
        ("at 7:4:\n    x = y\n    ^\n", "x = y (at 7:4)"),
        ("out of resource: shared memory, Required: 9\nmore", "out of resource: shared memory, Required: 9"),
        ("", ""),
    ],
)
def test_a_failure_keeps_the_line_that_says_what_is_wrong(text: str, line: str) -> None:
    assert Failure.of("launch", ValueError(text)) == Failure("launch", f"ValueError: {line}")


# --- rows of a call


def test_rows_of_a_call_with_ragged_windows() -> None:
    op = ops.gdn_ring_verify
    inputs: Inputs = dict.fromkeys(op.signature.parameters)
    inputs |= {"q": torch.arange(6), "slots": torch.arange(3), "cu_seqlens": torch.tensor([0, 1, 1, 4]), "null_slot": -1}
    cut, tokens = pick(op, inputs, [2])
    assert cut["q"].tolist() == tokens == [1, 2, 3]
    assert cut["slots"].tolist() == [2] and cut["cu_seqlens"].tolist() == [0, 3]
    cut, tokens = pick(op, inputs, [2, None, 0])
    assert cut["q"].tolist() == tokens == [1, 2, 3, 0]
    assert cut["slots"].tolist() == [2, -1, 0] and cut["cu_seqlens"].tolist() == [0, 3, 3, 4]
    assert inputs["slots"].tolist() == [0, 1, 2], "the call's own arguments stay"


def test_rows_of_a_call_with_equal_shares() -> None:
    op = ops.kda_chain_verify
    inputs: Inputs = dict.fromkeys(op.signature.parameters)
    inputs |= {"mixed_qkv": torch.arange(6), "slots": torch.arange(3), "null_slot": 0}
    cut, tokens = pick(op, inputs, [1, None])
    assert (cut["mixed_qkv"].tolist(), tokens) == ([2, 3, 0, 1], [2, 3, -1, -1])
    assert cut["slots"].tolist() == [1, 0]


# --- classes


def test_a_class_is_a_function_of_the_bits_alone() -> None:
    one, other = {"a": "1" * 16, "b": "2" * 16}, {"b": "2" * 16, "a": "1" * 16}
    assert class_id(one) == class_id(other) and class_id(one)[0] == "k" and len(class_id(one)) == 9
    assert class_id({"a": "2" * 16, "b": "1" * 16}) != class_id(one) != class_id({"a": "1" * 16})
    found = classes({"z": one, "a": other, "m": {"a": "3" * 16, "b": "2" * 16}})
    assert found == {class_id(one): ("a", "z"), class_id({"a": "3" * 16, "b": "2" * 16}): ("m",)}
    assert facts_key({"ring": 16, "heads": "6/2"}) == facts_key({"heads": "6/2", "ring": 16})


# --- many at once, and the tool


def test_a_crash_costs_its_own_task_only() -> None:
    facts = KEYS[COMMIT.name][0]
    kernels = [PLANTED.kernel(COMMIT.name, f"planted.{name}") for name in ("honest", "crashes", "cannot_compile")]
    tasks = [Task.of(kernel.variant(), facts, "cpu", "planted_kernels:registry") for kernel in kernels]
    found = {task.use: value for task, value in fingerprints(tasks, processes=2)}
    assert found["planted.honest"] == fingerprint(PLANTED, kernels[0].variant(), facts, "cpu")
    crashed, broken = found["planted.crashes"], found["planted.cannot_compile"]
    assert isinstance(crashed, Failure) and "killed by signal 11" in crashed.reason
    assert isinstance(broken, Failure) and broken.step == "launch" and "no such instruction" in broken.reason


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/classes.py, with its work done in this process."""
    path = Path(__file__).parents[1] / "tools" / "classes.py"
    if not path.exists():
        pytest.skip("the tools are in a checkout only")
    spec = importlib.util.spec_from_file_location("classes_tool", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "fingerprints", in_this_process)
    return module


def in_this_process(tasks: Sequence[Task], *_: Any) -> Generator[tuple[Task, Found], None, None]:
    from kernreg.tuning.fingerprints import measure

    for task in tasks:
        yield task, measure(task, lambda text: None)


def test_the_tool_lists_classes(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = [
        "--kernel=planted.honest",
        "--kernel=planted.races",
        "--kernel=torch.reference",
        "--registry=planted_kernels:registry",
    ]
    facts = ["--facts", "heads=2/1", "k_dim=16", "v_dim=16", "ring=16,32", "state=f32"]
    path = tmp_path / "classes.json"
    code = tool.main(["--device", "cpu", *wanted, "--json", str(path), "--op", "gdn_ring_commit", *facts])
    said, data = capsys.readouterr().out, json.loads(path.read_text())
    assert code == 1, "one variant has no fingerprint"
    (op,) = data["ops"]
    assert [key["facts"]["ring"] for key in op["keys"]] == [16, 32]
    for key in op["keys"]:
        assert list(key["classes"].values()) == [["planted.honest", "torch.reference"]]
        by_name = {one["variant"]: one for one in key["variants"]}
        assert by_name["planted.races"]["bits"] is None and by_name["planted.races"]["reason"].startswith("racy: ")
        assert class_id({facts_key(key["facts"]): by_name["planted.honest"]["bits"]}) in key["classes"]
    assert list(op["classes"].values()) == [["planted.honest", "torch.reference"]]
    assert "racy: probe mixed" in said and "1 classes over all 2 keys" in said


def test_the_tool_names_what_it_does_not_know(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        (["--op", "gdn_ring_comit"], "no op 'gdn_ring_comit'"),
        (["--op", "gdn_ring_commit"], "the static key needs ring"),
        (["--op", "gdn_ring_advance", "--facts", "ring=16", "rung=2"], "'rung'"),
        (["--op", "gdn_ring_advance", "--facts", "ring=9"], "ring is 9"),
    ):
        assert tool.main(["--device", "cpu", *words]) == 2
        assert text in capsys.readouterr().err


# --- kernreg doctor --numerics

H200 = Device.declared("NVIDIA H200", "sm_90", 132)
ULP, HONEST = "planted.one_ulp[where=large]", "planted.honest"
RINGS = {16: "a" * 16, 32: "b" * 16}


def policy_with(numerics: str, heads: str = "[2/1]") -> policies.Policy:
    text = f"""
schema: 1
devices:
  nvidia-h200: {{name: "NVIDIA H200", arch: "sm_90", sms: 132}}
ops:
  gdn_ring_commit:
    - when: {{device: nvidia-h200, ring: [16, 32]}}
      class: {numerics}
      batch:
        - {{upto: 2, use: planted.honest}}
        - {{upto: rest, use: planted.one_ulp, config: {{where: large}}}}
      classes: {{{numerics}: ["{HONEST}", "{ULP}"]}}
      measured: {{heads: {heads}, batch: [1, 8]}}
    - when: {{device: nvidia-h200}}
      use: planted.honest
    - otherwise: {{use: torch.reference}}
"""
    return policies.parse(text)


def recomputed(numerics: str, answer: Callable[[Task], Found], heads: str = "[2/1]", **more: Any) -> dict[str, Any]:
    def measure(tasks: Sequence[Task]) -> Generator[tuple[Task, Found], None, None]:
        assert {task.device for task in tasks} == {"cuda:0"}
        yield from ((task, answer(task)) for task in tasks)

    return doctor.recompute(policy_with(numerics, heads), PLANTED, H200, more.pop("names", ()), measure, **more)


def bits_by_ring(task: Task) -> Found:
    return Fingerprint(RINGS[int(task.facts["ring"])])


RECORDED = class_id({facts_key({"ring": ring, "heads": "2/1"}): bits for ring, bits in RINGS.items()})


def test_a_row_that_holds() -> None:
    data = recomputed(RECORDED, bits_by_ring)
    (row,) = data["rows"]
    assert (row["state"], row["keys"], row["measured"], row["why"], data["moved"]) == ("same", 2, 2, [], 0)
    assert row["class"] == RECORDED and row["variants"] == [HONEST, ULP] and row["row"]["line"] == 7


def test_a_row_whose_variants_moved_together_or_apart() -> None:
    data = recomputed("k00000000", bits_by_ring)
    assert data["moved"] == 1 and data["rows"][0]["why"] == [f"{v} is now of class {RECORDED}" for v in (HONEST, ULP)]

    def apart(task: Task) -> Found:
        return Fingerprint("c" * 16) if task.variant == ULP and task.facts["ring"] == 32 else bits_by_ring(task)

    (row,) = recomputed(RECORDED, apart)["rows"]
    assert row["state"] == "moved" and row["why"][0].startswith(f"{ULP} is now of class k")
    assert row["why"][1] == f"other bits for ring=32 heads=2/1: {HONEST} {'b' * 16}, {ULP} {'c' * 16}"


def test_a_variant_that_lost_its_fingerprint_has_moved() -> None:
    def broken(task: Task) -> Found:
        if task.variant == HONEST:
            return bits_by_ring(task)
        return Failure("launch", "out of resource") if task.facts["ring"] == 16 else Fingerprint(verdict=RACY, reason="row 3: o")

    (row,) = recomputed(RECORDED, broken)["rows"]
    assert row["state"] == "moved"
    assert row["why"] == [
        f"{ULP} cannot run for ring=16 heads=2/1: launch: out of resource",
        f"{ULP} for ring=32 heads=2/1 is racy: row 3: o",
    ]


def test_what_a_tuning_run_records_holds_for_the_same_bits(tmp_path: Path) -> None:
    known = tune_program.fake_registry()
    if not (tune_program.ROOT / "tools").exists():
        pytest.skip("the tools are in a checkout only")
    assert tune_program.tool().main(["all", *tune_program.options(tmp_path)], known) == 0
    bits = {(r.variant, r.key): r.bits for r in journal.read(tmp_path / "j.jsonl") if r.stage == "bits"}

    def measure(tasks: Sequence[Task]) -> Generator[tuple[Task, Found], None, None]:
        yield from ((task, Fingerprint(bits[task.variant, facts_key(task.facts)])) for task in tasks)

    here = Device.declared("Fake GPU", "sm_90", 132)
    rows = doctor.recompute(policies.load(tmp_path / "p.yaml", known), known, here, (), measure)["rows"]
    assert rows and {row["state"] for row in rows} == {"same"}, rows


def test_many_keys_are_sampled_and_it_says_so() -> None:
    heads = "[" + ", ".join(f"{n}/1" for n in range(1, 21)) + "]"
    (row,) = recomputed(RECORDED, bits_by_ring, heads)["rows"]
    assert (row["state"], row["keys"], row["measured"]) == ("sampled", doctor.KEYS_PER_ROW, 40)


def test_time_that_runs_out_is_said() -> None:
    ticks = iter([0.0, 1.0, doctor.SECONDS + 1, doctor.SECONDS + 1])
    (row,) = recomputed(RECORDED, bits_by_ring, clock=lambda: next(ticks))["rows"]
    assert row["state"] == "not reached"


def test_a_row_without_measured_keys_has_not_moved() -> None:
    loaded = policy_with("k00000000")
    (row,) = loaded.ops["gdn_ring_commit"][:1]
    loaded = replace(loaded, ops={"gdn_ring_commit": (replace(row, measured=()),)})
    data = doctor.recompute(loaded, PLANTED, H200, (), lambda tasks: (task for task in ()))
    assert [(found["state"], found["keys"], found["why"]) for found in data["rows"]] == [("not reached", 0, [])]
    assert data["moved"] == 0


def test_nothing_to_recompute() -> None:
    assert "no row of" in recomputed(RECORDED, bits_by_ring, names=("kda_chain_verify",))["nothing"]
    loaded = policy_with(RECORDED)
    data = doctor.recompute(loaded, PLANTED, Device.cpu(), (), lambda tasks: pytest.fail("measured"))
    assert "no GPU" in data["nothing"] and data["moved"] == 0


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"same": RECORDED, "moved": "k00000000"}
    for state, numerics in answers.items():
        data = recomputed(numerics, bits_by_ring)
        monkeypatch.setattr(doctor, "numerics", lambda names, file, data=data: data)
        got = CliRunner().invoke(cli.app, ["doctor", "--numerics"])
        assert got.exit_code == (state == "moved") and state in got.stdout and "2 of 2 keys" in got.stdout
        got = CliRunner().invoke(cli.app, ["doctor", "--numerics", "--json"])
        assert got.exit_code == (state == "moved") and json.loads(got.stdout)["rows"][0]["state"] == state
    got = CliRunner().invoke(cli.app, ["doctor", "--numerics", "gdn_ring_comit"])
    assert got.exit_code == 2
    assert CliRunner().invoke(cli.app, ["doctor", "gdn_ring_commit"]).exit_code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_command_without_a_gpu() -> None:
    got = CliRunner().invoke(cli.app, ["doctor", "--numerics"])
    assert got.exit_code == 0 and "nothing to recompute" in got.stdout
