"""Bind, warm up, call, explain, force: on a small registry whose kernels only note that they were called."""

from __future__ import annotations

import copy
import logging
import pickle
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest
import torch

import kernreg
from kernreg import Backend, ContractError, Device, Kernel, NotWarm, Registry, WarmupError, dispatch, ops, policy
from kernreg.dispatch import Override, launcher, parse_force
from kernreg.evidence import Evidence

CALLS: list[str] = []
H200 = Device.declared("NVIDIA H200", "sm_90", 132)
FACTS = {"ring": 16}

POLICY = """
schema: 1
devices:
  nvidia-h200: {name: "NVIDIA H200", arch: "sm_90", sms: 132}
ops:
  gdn_ring_advance:
    - when: {device: nvidia-h200, ring: 16}
      class: "k1"
      batch:
        - {upto: 2, use: fake.small, us: 1.0, next: 1.5}
        - {upto: 16, use: fake.large, config: {BLOCK: 4}}
        - {upto: rest, use: fake.large, config: {BLOCK: 8}}
    - when: {platform: cpu, ring: 32}
      use: fake.breaks
      fallback: {use: fake.small}
    - when: {platform: cpu, ring: 64}
      use: fake.breaks
    - when: {platform: cpu, ring: 128}
      class: "k3"
      batch:
        - {upto: 4, use: fake.small}
        - {upto: rest, use: fake.breaks}
      fallback: {use: fake.other}
    - when: {platform: cpu, ring: 16}
      class: "k2"
      batch:
        - {upto: 2, use: fake.small}
        - {upto: 8, use: fake.large, config: {BLOCK: 4}}
        - {upto: rest, use: fake.large, config: {BLOCK: 8}}
    - when: {ring: 256}
      use: fake.reads_back
    - otherwise: {use: fake.small}
"""


def small(write_pos, fold, rows, slots, accept, *, ring, margin=None, null_slot=-1):
    CALLS.append("small")


def large(write_pos, fold, rows, slots, accept, *, ring, margin=None, null_slot=-1, BLOCK, index):
    CALLS.append(f"large {BLOCK} {index}")


def other(write_pos, fold, rows, slots, accept, *, ring, margin=None, null_slot=-1):
    CALLS.append("other")


def breaks(write_pos, fold, rows, slots, accept, *, ring, margin=None, null_slot=-1):
    CALLS.append("breaks")
    write_pos += 1
    fold += 1
    raise getattr(sys.modules["fake_kernels"], "ERROR", RuntimeError("Internal Triton PTX codegen error\nand more"))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    module = types.ModuleType("fake_kernels")
    module.small, module.large, module.breaks, module.other = small, large, breaks, other
    monkeypatch.setitem(sys.modules, "fake_kernels", module)
    made = Registry()
    made.add_op(ops.gdn_ring_advance)
    only_16 = lambda facts, device, config: None if facts["ring"] == 16 else f"serves ring 16, not {facts['ring']}"  # noqa: E731
    block = {"config": {"BLOCK": (4, 8)}, "default": {"BLOCK": 4}}
    rows = (
        Kernel("gdn_ring_advance", "fake.small", "fake_kernels:small"),
        Kernel("gdn_ring_advance", "fake.large", "fake_kernels:large", why_not=only_16, **block),
        Kernel("gdn_ring_advance", "fake.breaks", "fake_kernels:breaks"),
        Kernel("gdn_ring_advance", "fake.other", "fake_kernels:other"),
        Kernel("gdn_ring_advance", "fake.reads_back", "fake_kernels:other", capturable=False),
    )
    made.add(Backend("fake", rows))
    CALLS.clear()
    return made


@pytest.fixture
def bind(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Binds as if every class had been measured here; tests/test_classes.py is about what happens where it was not."""
    monkeypatch.setattr(dispatch, "evidence_for", lambda *given: Evidence())
    loaded = policy.parse(POLICY, "test.yaml")
    return lambda **given: dispatch.bind("gdn_ring_advance", policy=loaded, registry=registry, **{"device": "cpu", **given})


def inputs(batch: int, ring: int = 16) -> dict[str, Any]:
    index = torch.arange(batch, dtype=torch.int32)
    return {
        "write_pos": torch.zeros(batch + 1, dtype=torch.int32),
        "fold": torch.zeros(batch + 1, dtype=torch.int8),
        "rows": index,
        "slots": index,
        "accept": index,
        "ring": ring,
    }


def test_the_batch_picks_the_variant_and_served_counts(bind: Any) -> None:
    plan = bind(**FACTS).warmup()
    CALLS.clear()
    for batch in (1, 2, 3, 8, 9, 500, 2, 0):
        plan(**inputs(batch))
    assert CALLS == ["small", "small", "large 4 i32", "large 4 i32", "large 8 i32", "large 8 i32", "small", "small"]
    assert {s.variant: s.calls for s in plan.served()} == {
        "fake.small": 4,
        "fake.large[BLOCK=4]": 2,
        "fake.large[BLOCK=8]": 2,
    }
    assert {s.variant for s in kernreg.served() if s.op == "gdn_ring_advance"} >= {"fake.small"}


def test_arguments_may_come_by_position(bind: Any) -> None:
    given = inputs(3)
    ring = given.pop("ring")
    bind(**FACTS)(*given.values(), ring=ring)
    assert CALLS[-1] == "large 4 i32"


def test_a_declared_fact_need_not_be_repeated_and_may_not_be_contradicted(bind: Any) -> None:
    plan = bind(**FACTS)
    given = inputs(1)
    del given["ring"]
    plan(**given)
    with pytest.raises(ContractError, match="this call has ring=32, the plan was bound with ring=16"):
        plan(**inputs(1, ring=32))


def test_warmup_reaches_every_variant_of_the_table_once(bind: Any) -> None:
    plan = bind(**FACTS).warmup().warmup()
    assert CALLS == ["small", "large 4 i32", "large 8 i32"]
    assert plan.served() == ()


def test_d15_a_variant_that_cannot_be_compiled_gives_way_to_its_fallback_once(
    bind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kernreg"):
        plan = bind(ring=32).warmup()
        CALLS.clear()
        for _ in range(3):
            plan(**inputs(2, ring=32))
    assert CALLS == ["small"] * 3
    text = [r.getMessage() for r in caplog.records if "fallback" in r.getMessage()]
    assert len(text) == 1
    assert "fake.breaks" in text[0] and "test.yaml:" in text[0] and "Internal Triton PTX codegen error" in text[0]
    assert [s.variant for s in plan.served()] == ["fake.small"]
    assert plan.variant(2).id == "fake.small"


@pytest.mark.parametrize("warm", [True, False])
def test_d15_a_fallback_serves_every_batch_of_its_row(bind: Any, warm: bool) -> None:
    """The variant that would serve small batches is fine, but of another class than the fallback."""
    plan = bind(ring=128)
    if warm:
        plan.warmup()
    for batch in (2, 8, 2):
        CALLS.clear()
        plan(**inputs(batch, ring=128))
        assert CALLS[-1] == "other"
    assert {s.variant for s in plan.served()} == {"fake.other"}


def test_threads_that_call_a_cold_plan_at_once_fall_back_once(bind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(write_pos, fold, rows, slots, accept, *, ring, margin=None, null_slot=-1):
        CALLS.append("slow")
        time.sleep(0.05)
        raise RuntimeError("out of resources")

    monkeypatch.setattr(sys.modules["fake_kernels"], "breaks", slow)
    plan = bind(ring=32)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: plan(**inputs(3, ring=32)), range(8)))
    assert CALLS.count("slow") == 1
    assert CALLS.count("small") == 1 + 8
    assert [(line.variant, line.calls) for line in plan.served()] == [("fake.small", 8)]
    assert dict(plan.explain().considered)["fake.small"].startswith("chosen: the fallback")


def test_d15_without_a_fallback_warmup_refuses_and_names_the_row(bind: Any) -> None:
    plan = bind(ring=64)
    with pytest.raises(WarmupError, match=r"fake\.breaks of test\.yaml:\d+ .*for ring=64.*PTX codegen error"):
        plan.warmup()
    given = inputs(2, ring=64)
    before = {name: given[name].clone() for name in ("write_pos", "fold")}
    with pytest.raises(WarmupError):
        plan(**given)
    for name, tensor in before.items():  # the kernel had written both before it failed, in made-up inputs
        assert torch.equal(given[name], tensor), name
    assert plan.served() == ()


def test_d15_out_of_resources_takes_the_fallback_too(bind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    error = errors.OutOfResources(262144, 232448, "shared memory")
    monkeypatch.setattr(sys.modules["fake_kernels"], "ERROR", error, raising=False)
    plan = bind(ring=32).warmup()
    decision = plan.explain(2)
    assert decision.variant.id == plan.variant(2).id == "fake.small"
    assert "out of resource: shared memory" in dict(decision.considered)["fake.breaks"]
    assert "fallback" in dict(decision.considered)["fake.small"]


def test_a_full_memory_is_no_reason_to_fall_back(bind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fake_kernels"], "ERROR", torch.cuda.OutOfMemoryError("CUDA out of memory"), raising=False)
    with pytest.raises(torch.cuda.OutOfMemoryError) as raised:
        bind(ring=32).warmup()
    assert "warm plans up before pools" in raised.value.__notes__[0]


def test_a_mistake_in_a_backend_is_not_taken_for_a_compile_error(bind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fake_kernels"], "breaks", lambda write_pos: None)
    with pytest.raises(kernreg.RegistrationError, match="argument 'fold' of the op is missing"):
        bind(ring=32).warmup()


def test_what_was_passed_over_or_not_measured_is_said_once_at_bind(
    bind: Any, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    row = """schema: 1
devices: {}
ops:
  gdn_ring_advance:
    - {when: {ring: 16}, use: fake.small, measured: {batch: [1, 8]}}
    - otherwise: {use: fake.small}
pins:
  - {op: gdn_ring_advance, when: {ring: 32}, use: fake.large, reason: "it was faster"}
"""
    loaded = policy.parse(row, "test.yaml")
    with caplog.at_level(logging.INFO, "kernreg"):
        plan = dispatch.bind("gdn_ring_advance", policy=loaded, registry=registry, device="cpu", ring=16)
        plan.variant(500)
        plan.variant(501)
        dispatch.bind("gdn_ring_advance", policy=loaded, registry=registry, device="cpu", ring=32)
    said = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert [level for level, text in said if "batches above 8" in text] == [logging.INFO]
    wanted = [level for level, text in said if "passed over fake.large" in text and "serves ring 16, not 32" in text]
    assert wanted == [logging.WARNING]


def test_a_new_batch_asks_no_policy(bind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bind(**FACTS).warmup()
    monkeypatch.setattr(policy, "choose", None)
    assert [plan.variant(batch).id for batch in (0, 2, 3, 8, 9, 10**6)] == [
        "fake.small",
        "fake.small",
        "fake.large[BLOCK=4]",
        "fake.large[BLOCK=4]",
        "fake.large[BLOCK=8]",
        "fake.large[BLOCK=8]",
    ]


def test_a_kernel_that_reads_back_says_so_in_a_capture(bind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bind(ring=256)
    monkeypatch.setattr(plan, "device", H200)
    monkeypatch.setattr(plan, "_try", lambda variant, launch: None)
    plan(**inputs(1, ring=256))
    monkeypatch.setattr(dispatch, "_capturing", lambda: True)
    with pytest.raises(kernreg.NotCapturable, match=r"fake\.reads_back for ring=256 .*cannot capture"):
        plan(**inputs(1, ring=256))
    assert [s.calls for s in plan.served()] == [1]


def test_the_first_call_compiles_on_made_up_inputs(bind: Any) -> None:
    bind(**FACTS)(**inputs(1))
    assert CALLS == ["small", "small"]


def test_d17_a_miss_during_capture_raises_and_names_the_key(bind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bind(**FACTS)
    monkeypatch.setattr(plan, "device", H200)
    monkeypatch.setattr(dispatch, "_capturing", lambda: True)
    with pytest.raises(NotWarm, match=r"gdn_ring_advance: fake\.small for ring=16 index=i32 .*plan\.warmup\(\)"):
        plan(**inputs(1))
    assert CALLS == []
    monkeypatch.setattr(plan, "device", Device.cpu())
    plan.warmup()
    monkeypatch.setattr(plan, "device", H200)
    plan(**inputs(1))


def test_explain_gives_every_kernel_a_reason(bind: Any) -> None:
    plan = bind(device=H200, ring=16)
    decision = plan.explain(2)
    reasons = dict(decision.considered)
    assert decision.variant.id == "fake.small"
    assert set(reasons) == {kernel.name for kernel in plan.binding.registry.kernels("gdn_ring_advance")}
    assert all(reasons.values())
    assert (decision.us, decision.next, decision.margin) == (1.0, 1.5, 0.5)
    refused = dict(bind(device=H200, ring=32).explain(2).considered)
    assert "serves ring 16, not 32" in refused["fake.large"]


def test_the_digest_is_of_the_policy_and_not_of_the_key(bind: Any, registry: Registry) -> None:
    assert bind(ring=16).digest == bind(ring=32).digest == bind(device=H200, ring=16).digest
    changed = policy.parse(POLICY.replace("upto: 8", "upto: 9"), "test.yaml")
    other = dispatch.bind("gdn_ring_advance", policy=changed, registry=registry, device="cpu", ring=16)
    assert other.digest != bind(ring=16).digest


def test_ranks_with_different_heads_have_one_digest() -> None:
    plans = [kernreg.bind("gdn_ring_commit", device=H200, ring=16, heads=heads) for heads in ("48/16", "24/8", "12/4")]
    assert len({plan.digest for plan in plans}) == 1
    assert len({plan.key for plan in plans}) == 3


def test_the_digest_covers_what_decides(bind: Any, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bind(**FACTS).digest
    monkeypatch.setattr(registry, "missing", lambda kernel: "triton is not installed" if kernel.name == "fake.other" else None)
    assert bind(**FACTS).digest != before


def test_force_is_scoped_part_of_the_digest_and_leaves_bound_plans_alone(bind: Any) -> None:
    free = bind(**FACTS)
    with kernreg.force(gdn_ring_advance="fake.large"):
        forced = bind(**FACTS)
        assert forced.variant(1).id == "fake.large[BLOCK=4]"
        assert free.variant(1).id == "fake.small"
        with kernreg.force("fake"):
            assert dispatch.overrides()[0] == Override(None, "fake")
    assert forced.digest != free.digest == bind(**FACTS).digest
    assert dispatch.overrides() == ()


def test_force_holds_in_its_thread_and_where_its_context_is_copied(bind: Any) -> None:
    with ThreadPoolExecutor(1) as pool, kernreg.force(gdn_ring_advance="fake.large"):
        assert pool.submit(lambda: bind(**FACTS).variant(1).id).result() == "fake.small"
        assert pool.submit(copy_context().run, lambda: bind(**FACTS).variant(1).id).result() == "fake.large[BLOCK=4]"


def test_a_plan_is_shared_by_copies_and_stays_in_its_process(bind: Any) -> None:
    plan = bind(ring=16)
    assert copy.copy(plan) is plan and copy.deepcopy({"plan": plan})["plan"] is plan
    with pytest.raises(TypeError, match=r"gdn_ring_advance: a plan .*cannot be pickled; bind ring=16"):
        pickle.dumps(plan)


def test_forcing_what_cannot_serve_raises_instead_of_serving_something_else(bind: Any) -> None:
    with kernreg.force(gdn_ring_advance="fake.large"), pytest.raises(kernreg.PolicyError, match="serves ring 16, not 32"):
        bind(ring=32)
    with pytest.raises(kernreg.UnknownError, match="no op 'no_such_op'"), kernreg.force(no_such_op="torch"):
        pass


def test_the_variable_reads_as_force_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_force("torch") == (Override(None, "torch"),)
    assert parse_force("gdn_ring_commit=triton.per_head, torch") == (
        Override("gdn_ring_commit", "triton.per_head"),
        Override(None, "torch"),
    )
    assert parse_force("gdn_ring_commit = torch") == (Override("gdn_ring_commit", "torch"),)
    for bad in ("=torch", "gdn_ring_commit="):
        with pytest.raises(ValueError, match="wanted NAME or OP=NAME"):
            parse_force(bad)
    dispatch._environment_overrides.cache_clear()
    monkeypatch.setenv("KERNREG_FORCE", "torch")
    assert dispatch.overrides() == (Override(None, "torch"),)
    for wrong in ("gdn_ring_comit=torch", "=x"):
        dispatch._environment_overrides.cache_clear()
        monkeypatch.setenv("KERNREG_FORCE", wrong)
        with pytest.raises(kernreg.PolicyError, match="KERNREG_FORCE: "):
            dispatch.overrides()
    dispatch._environment_overrides.cache_clear()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "the static key needs ring"),
        ({"ring": 16, "rnig": 16}, "no fact rnig in its static key"),
        ({"ring": "16"}, "ring is '16', wanted a whole number"),
    ],
)
def test_a_key_that_is_not_whole_is_refused(bind: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        bind(**given)


def test_devices_by_name(bind: Any) -> None:
    with pytest.raises(ContractError, match=r"wanted 'cpu', 'cuda', 'cuda:N', N, a torch\.device or a Device"):
        bind(device="tpu", **FACTS)
    with pytest.raises(ContractError, match="device is True"):
        bind(device=True, **FACTS)
    assert bind(device=torch.device("cpu"), **FACTS).device == Device.cpu()
    if not torch.cuda.is_available():
        with pytest.raises(ContractError, match="no such CUDA device"):
            bind(device="cuda", **FACTS)


def test_a_plan_for_a_gpu_refuses_cpu_tensors(bind: Any) -> None:
    plan = bind(device=H200, **FACTS)
    with pytest.raises(ContractError, match="write_pos is on cpu, the plan was bound for cuda"):
        plan(**inputs(1))


def test_debug_mode_names_the_row(bind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNREG_CHECK", "1")
    plan = bind(**FACTS)
    plan(**inputs(3))
    bad = inputs(3)
    bad["accept"] = torch.tensor([0, 17, 0], dtype=torch.int32)
    with pytest.raises(ContractError, match=r"gdn_ring_advance: accept\[1\] is 17, wanted 0\.\.16"):
        plan(**bad)
    bad = inputs(3)
    bad["rows"] = torch.tensor([0, 1, 1], dtype=torch.int32)
    with pytest.raises(ContractError, match=r"rows\[2\] is 1, wanted one row for it; row 1 has it too"):
        plan(**bad)


# --- with the installed backends


def commit_case() -> tuple[Any, dict[str, Any]]:
    op = ops.gdn_ring_commit
    return op, op.samples.make_inputs(op.samples.cases[0])


def test_the_unbound_call_equals_the_direct_call_bit_for_bit() -> None:
    op, given = commit_case()
    bound, direct = op.samples.make_inputs(op.samples.cases[0]), op.samples.make_inputs(op.samples.cases[0])
    with kernreg.force("torch"):
        kernreg.ops.gdn_ring_commit(**given)
        plan = kernreg.bind(op, device="cpu", **op.samples.cases[0].facts)
        plan(**bound)
    registry = kernreg.registry.default()
    launcher(registry, registry.kernel(op.name, "torch.reference").variant(), op.samples.cases[0].facts)(**direct)
    for name in op.mutates:
        assert torch.equal(given[name], direct[name]), name
        assert torch.equal(bound[name], direct[name]), name


def test_unbound_calls_share_one_plan_for_one_key() -> None:
    op = ops.gdn_ring_advance
    before = {(line.op, line.key) for line in kernreg.served()}  # not a count: plans of other tests may die any moment
    for batch in (1, 2, 3):
        op(**inputs(batch, ring=1024))
    new = [line for line in kernreg.served() if (line.op, line.key) not in before]
    assert [(line.op, line.calls) for line in new] == [(op.name, 3)]
    assert "ring=1024" in new[0].key


def test_an_unbound_call_that_breaks_the_contract_says_so() -> None:
    _, given = commit_case()
    given["slots"] = given["slots"].float()
    with pytest.raises(ContractError, match="gdn_ring_commit: slots is f32, wanted i32 or i64"):
        kernreg.ops.gdn_ring_commit(**given)


@pytest.mark.parametrize("op", [getattr(ops, name) for name in ops.__all__], ids=lambda op: op.name)
def test_every_op_can_be_called_without_a_plan(op: kernreg.Op) -> None:
    for case in op.samples.cases:
        op(**op.samples.make_inputs(case))


@pytest.mark.parametrize("wrong", [None, 3, [1], "x"])
def test_an_unbound_call_with_something_else_for_a_tensor_says_so(wrong: object) -> None:
    _, given = commit_case()
    for name in ("state", "slots"):
        with pytest.raises(ContractError, match=f"gdn_ring_commit: {name} is .*wanted a tensor"):
            kernreg.ops.gdn_ring_commit(**{**given, name: wrong})


def test_parameters_that_require_grad_leave_no_graph_behind() -> None:
    op = ops.kda_chain_verify
    given = op.samples.make_inputs(op.samples.cases[0])
    given["A_log"].requires_grad_(True)
    assert not op(**given).requires_grad
    assert not given["ring_g"].requires_grad


@pytest.mark.parametrize(
    ("op", "facts", "message"),
    [
        ("gdn_ring_commit", {"ring": 16, "heads": "1/1", "ring_dtype": "f32", "low": True}, "element_size"),
        ("kda_chain_verify", {"draft": 4, "heads": "1/1", "window": "tree", "mode": "ring"}, "parents is None or ring_k is None"),
        ("gdn_ring_commit", {"ring": 16, "heads": "1/1", "index": "i32+i64+i32"}, "one for each of slots, rows"),
    ],
)
def test_a_key_that_no_call_can_have_is_refused(op: str, facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        kernreg.bind(op, device="cpu", **facts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_plan_for_a_gpu_elsewhere_explains_but_does_not_warm_up() -> None:
    plan = dispatch.bind("kda_chain_verify", device=H200, draft=4, heads="8/8")
    assert plan.explain(1).variant.kernel.backend == "triton"
    with pytest.raises(dispatch.WarmupError, match=r"kda_chain_verify: the plan was bound for NVIDIA H200 .* no CUDA device"):
        plan.warmup()
    with pytest.raises(ContractError, match=r"device is 'nvidia-h200', wanted .* Device\.declared\(name, arch, sms\)"):
        dispatch.bind("kda_chain_verify", device="nvidia-h200", draft=4, heads="8/8")
