"""The contract check: what is wrong is named, and the quick guard agrees with the slow path."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from kernreg import ops
from kernreg.check import check_fact, check_facts, facts_of
from kernreg.contract import ContractError, Op
from kernreg.guard import guard

ALL = [getattr(ops, name) for name in ops.__all__]


def full(op: Op, given: dict[str, Any]) -> dict[str, Any]:
    bound = op.signature.bind(**given)
    bound.apply_defaults()
    return dict(bound.arguments)


def commit(**changes: Any) -> dict[str, Any]:
    case = ops.gdn_ring_commit.samples.cases[0]
    return full(ops.gdn_ring_commit, {**ops.gdn_ring_commit.samples.make_inputs(case), **changes})


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_facts_of_a_sample_are_the_facts_it_was_made_for(op: Op) -> None:
    for case in op.samples.cases:
        args = full(op, op.samples.make_inputs(case))
        assert facts_of(op, args) == dict(case.facts), case.id
        check_facts(op, case.facts)


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_guard_accepts_exactly_its_own_key(op: Op) -> None:
    cases = op.samples.cases
    inputs = {case.id: full(op, op.samples.make_inputs(case)) for case in cases}
    for bound, called in itertools.product(cases[:12], cases):
        same = called.facts in (bound.facts, {**bound.facts, "layout": "aligned"})
        accepted = guard(op, bound.facts, -1)(**inputs[called.id])
        if accepted:
            assert same, f"bound {bound.facts}, called {called.facts}"
        elif same:  # dims of size 1 may have any stride: then the slow path decides
            assert facts_of(op, inputs[called.id]) == dict(called.facts)


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_guard_accepts_every_plain_sample(op: Op) -> None:
    accepted = [guard(op, c.facts, -1)(**full(op, op.samples.make_inputs(c))) for c in op.samples.cases]
    assert sum(accepted) >= len(accepted) * 3 // 4


def _cut(t: torch.Tensor) -> torch.Tensor:
    return t[..., :-1]


BREAKERS = {
    "a dim too many": lambda t: t.unsqueeze(0),
    "a shorter last dim": _cut,
    "a longer first dim": lambda t: torch.cat([t, t]),
    "another dtype": lambda t: t.to(torch.complex64),
    "unpacked": lambda t: torch.stack([t, t], -1)[..., 0],
    "nothing": lambda t: None,
    "not a tensor": lambda t: 3,
    "another device": lambda t: t.to("meta"),
}


@pytest.mark.parametrize("breaker", BREAKERS)
@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_a_broken_tensor_is_refused_by_both_paths_or_by_neither(op: Op, breaker: str) -> None:
    for case in op.samples.cases[:4]:
        inputs = full(op, op.samples.make_inputs(case))
        check = guard(op, case.facts, -1)
        for name in op.tensors:
            if inputs[name] is None:
                continue
            broken = {**inputs, name: BREAKERS[breaker](inputs[name])}
            try:
                same_key = facts_of(op, broken) == dict(case.facts)
            except ContractError as error:
                assert (op.name in str(error) and "wanted" in str(error)) or "together" in str(error)
                same_key = False
            if check(**broken):
                assert same_key, f"{case.id}: guard lets {name} with {breaker} pass"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": None}, r"gdn_ring_commit: state is None, wanted a tensor \[NL S HV V K\]"),
        ({"write_pos": 3}, r"write_pos is a int, wanted a tensor"),
        ({"slots": torch.zeros(1, 1, dtype=torch.int32)}, r"slots has shape \[1, 1\], wanted \[B\]"),
        ({"accept": 1}, r"accept, track_slots, track_step come together or not at all, wanted track_slots, track_step too"),
        ({"write_pos": torch.zeros(3, dtype=torch.int64)}, r"write_pos .*wanted"),
        ({"folding": "never"}, r"folding is 'never', wanted every or lazy"),
        ({"folding": None}, r"folding is None, wanted str"),
        ({"null_slot": None}, r"null_slot is None, wanted int"),
        ({"null_slot": 0.5}, r"null_slot is 0\.5, wanted int"),
        ({"null_slot": True}, r"null_slot is True, wanted int"),
        (
            {"ring_u_low": None, "ring_k_low": torch.zeros(1)},
            r"ring_u_low, ring_k_low come together or not at all, wanted ring_u_low too",
        ),
    ],
)
def test_messages_name_op_argument_what_came_and_what_was_wanted(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        facts_of(ops.gdn_ring_commit, commit(**changes))


def make(**sizes: int) -> dict[str, Any]:
    size = {"HV": 4, "H": 2, "L": 16, **sizes}
    nl, s, r, v, k = 1, 2, 2, 16, 64
    return full(
        ops.gdn_ring_commit,
        {
            "state": torch.zeros(nl, s, size["HV"], v, k),
            "ring_u": torch.zeros(nl, r, size["HV"], size["L"], v),
            "ring_k": torch.zeros(nl, r, size["H"], size["L"], k),
            "ring_g": torch.zeros(nl, r, size["HV"], size["L"]),
            "write_pos": torch.zeros(r, dtype=torch.int32),
            "base": torch.zeros(r, dtype=torch.int32),
            "fold": torch.zeros(r, dtype=torch.int8),
            "slots": torch.zeros(1, dtype=torch.int32),
            "rows": torch.zeros(1, dtype=torch.int32),
        },
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"HV": 5}, r"HV \(a dim of state\) is 5, H \(a dim of ring_k\) is 2; wanted HV % H == 0"),
        ({"L": 24}, r"L \(a dim of ring_u\) is 24; wanted L >= 16"),
        ({"L": 8}, r"L \(a dim of ring_u\) is 8; wanted L >= 16"),
    ],
)
def test_conditions_between_dims(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        facts_of(ops.gdn_ring_commit, make(**sizes))


def test_layout_is_about_addresses_and_free_strides() -> None:
    args = make()
    assert facts_of(ops.gdn_ring_commit, args)["layout"] == "aligned"
    storage = torch.zeros(4 * 16 * 64 * 2 + 1)
    args["state"] = storage[1:].view(1, 2, 4, 16, 64)
    assert facts_of(ops.gdn_ring_commit, args)["layout"] == "any"
    odd = torch.zeros(2, 4 * 16 * 64 + 1)
    args["state"] = odd[:, :-1].view(2, 4, 16, 64).unsqueeze(0)
    assert facts_of(ops.gdn_ring_commit, args)["layout"] == "any"


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_a_pool_that_is_known_is_read_again_when_it_moves_or_changes(op: Op) -> None:
    """The second call recognises the pools; another tensor, other memory or another size in one's place is read anew."""
    case = op.samples.cases[0]
    args = full(op, op.samples.make_inputs(case))
    check = guard(op, case.facts, -1)
    first = check(**args)
    assert check(**args) == first
    for name, spec in op.tensors.items():
        if args[name] is None or {"B", "B1", "N"} & set(spec.dims):
            continue
        assert not check(**{**args, name: args[name].to(torch.complex64)}), name
        kept = args[name].clone()
        swapped = {**args, name: kept}
        check(**swapped)
        if kept.ndim > 1:
            kept.transpose_(-1, -2)
            assert not check(**swapped), name
        kept.data = args[name].clone()[..., :-1]
        assert not check(**swapped), name
        assert check(**args) == first


def test_index_fact_spells_a_mixture_in_signature_order() -> None:
    args = make()
    assert facts_of(ops.gdn_ring_commit, args)["index"] == "i32"
    args["rows"] = args["rows"].long()
    assert facts_of(ops.gdn_ring_commit, args)["index"] == "i32+i64"
    assert guard(ops.gdn_ring_commit, facts_of(ops.gdn_ring_commit, args), -1)(**args)
    assert not guard(ops.gdn_ring_commit, facts_of(ops.gdn_ring_commit, make()), -1)(**args)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ring", "16", "wanted a whole number"),
        ("ring", True, "wanted a whole number"),
        ("heads", "48", "as in 48/16"),
        ("heads", "1\u0663/1", "as in 48/16"),
        ("heads", "9" * 5000 + "/1", "as in 48/16"),
        ("low", 1, "wanted true or false"),
        ("state", "fp8", "wanted bf16 or f32 or f64"),
        ("folding", "never", "wanted every or lazy"),
        ("index", "banana", "wanted i32, i64, or one for each index tensor"),
        ("k_dim", 0, "is 0, wanted 1 or more"),
    ],
)
def test_facts_are_typed(name: str, value: object, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        check_fact(ops.gdn_ring_commit, name, value)


def test_low_parts_belong_to_16_bit_rings() -> None:
    args = make()
    args |= {"ring_u_low": torch.zeros_like(args["ring_u"]), "ring_k_low": torch.zeros_like(args["ring_k"])}
    with pytest.raises(ContractError, match=r"wanted ring_u_low is None or ring_u\.element_size\(\) == 2"):
        facts_of(ops.gdn_ring_commit, args)


def test_a_mixed_qkv_without_room_for_q_and_k_is_refused() -> None:
    case = ops.kda_chain_verify.samples.cases[0]
    args = full(ops.kda_chain_verify, ops.kda_chain_verify.samples.make_inputs(case))
    width = args["state"].shape[1] * args["state"].shape[2]
    args["mixed_qkv"], args["conv_weight"] = args["mixed_qkv"][:, :width], args["conv_weight"][:width].contiguous()
    args["conv_state"], args["windows"] = args["conv_state"][:, :width], args["windows"][:, :, :width]
    with pytest.raises(ContractError, match=r"wanted H >= 1|ring_k has shape"):
        facts_of(ops.kda_chain_verify, args)


def test_impossible_keys_are_refused_before_any_tensor() -> None:
    case = ops.gdn_ring_commit.samples.cases[0]
    with pytest.raises(ContractError, match=r"L \(a dim of ring_u\) is 24; wanted"):
        check_facts(ops.gdn_ring_commit, {**case.facts, "ring": 24})
    with pytest.raises(ContractError, match=r"HV \(a dim of state\) is 5"):
        check_facts(ops.gdn_ring_commit, {**case.facts, "heads": "5/2"})
