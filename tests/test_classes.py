"""Numerics classes: how a file records them, what the loader refuses, and what a plan does where they were not measured."""

from __future__ import annotations

import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernreg
from kernreg import Backend, Device, Kernel, NotWarm, Plan, PolicyError, Registry, dispatch, numerics, ops, policy
from kernreg.numerics import Fingerprint

OP = ops.gdn_ring_advance
H200 = Device.declared("NVIDIA H200", "sm_90", 132)
DIGESTS = {"fake.one": "1" * 64, "fake.two": "2" * 64, "fake.three": "3" * 64}
TRITON = "3.6.0"

TEXT = """\
schema: 1
devices:
  nvidia-h200:
    name: NVIDIA H200
    arch: sm_90
    sms: 132
    measured: {triton: "3.6.0"}
    kernels:
      gdn_ring_advance: {fake.one: "1111111111111111", fake.two: "2222222222222222", fake.three: "3333333333333333"}
ops:
  gdn_ring_advance:
    - when: {device: nvidia-h200, ring: [16, 32]}
      class: k7f3a91c2
      batch:
        - {upto: 2, use: fake.one, us: 1.0, next: 1.5}
        - {upto: 16, use: fake.one, config: {BLOCK: 8}}
        - {upto: rest, use: fake.two, us: 5.0}
      classes:
        k7f3a91c2: ["fake.one[BLOCK=4]", "fake.one[BLOCK=8]", fake.two]
        k0bb31e55: [fake.three]
      measured: {ring: 16, batch: [1, 4, 64]}
    - when: {platform: [cpu, cuda], ring: [64, 256]}
      class: k7f3a91c2
      batch:
        - {upto: 4, use: fake.one}
        - {upto: rest, use: fake.two}
      classes: {k7f3a91c2: ["fake.one[BLOCK=4]", fake.two]}
      fallback: {use: fake.three}
    - otherwise: {use: fake.three}
pins:
  - {op: gdn_ring_advance, when: {ring: 128}, use: fake.two, reason: "a person said so"}
"""
FIRST, BLOCK_8, LAST = "fake.one[BLOCK=4]", "fake.one[BLOCK=8]", "fake.two"
BY_BATCH = ((1, 2, FIRST), (3, 16, BLOCK_8), (17, None, LAST))
COLLAPSED = ((1, None, LAST),)

CALLS: list[str] = []


def one(write_pos, fold, rows, slots, accept, *, ring, margin=None, null_slot=-1, BLOCK):
    CALLS.append(f"one {BLOCK}")


def two(write_pos, fold, rows, slots, accept, *, ring, margin=None, null_slot=-1):
    CALLS.append("two")


def three(write_pos, fold, rows, slots, accept, *, ring, margin=None, null_slot=-1):
    CALLS.append("three")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    module = types.ModuleType("fake_kernels")
    module.one, module.two, module.three = one, two, three  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_kernels", module)
    made = make_registry()
    monkeypatch.setattr(made, "source_digest", lambda kernel: DIGESTS[kernel.name])
    monkeypatch.setattr(dispatch, "installed_triton", lambda: TRITON)
    CALLS.clear()
    return made


def make_registry() -> Registry:
    made = Registry()
    made.add_op(OP)
    block = {"config": {"BLOCK": (4, 8)}, "default": {"BLOCK": 4}}
    rows = [Kernel(OP.name, "fake.one", "fake_kernels:one", **block)]  # type: ignore[arg-type]
    rows += [Kernel(OP.name, f"fake.{name}", f"fake_kernels:{name}") for name in ("two", "three")]
    made.add(Backend("fake", tuple(rows)))
    return made


Bind = Callable[..., Plan]


@pytest.fixture
def bind(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Bind:
    """Binds on a declared H200, whose kernels are not run to be warmed up; or, with device="cpu", here."""
    run = Plan._try
    monkeypatch.setattr(Plan, "_try", lambda self, v, launch: None if self.device == H200 else run(self, v, launch))

    def make(text: str = TEXT, *, device: Any = H200, ring: int = 16, **given: Any) -> Plan:
        return dispatch.bind(OP, policy=policy.parse(text, "p.yaml"), registry=registry, device=device, ring=ring, **given)

    return make


def measures(**bits: str) -> Callable[..., Fingerprint]:
    """A fingerprint by kernel's name without its backend; the others have zeros. What starts with "racy" is no fingerprint."""

    def fingerprint(registry: Registry, variant: Any, facts: Any, device: str) -> Fingerprint:
        CALLS.append(f"bits of {variant.id} for ring={facts['ring']} on {device}")
        found = bits.get(variant.kernel.name.removeprefix("fake."), "0" * 16)
        return Fingerprint(verdict="racy", reason=found) if found.startswith("row") else Fingerprint(bits=found)

    return fingerprint


def inputs(batch: int, ring: int = 16) -> dict[str, Any]:
    index = torch.arange(batch, dtype=torch.int32)
    cursors = {"write_pos": torch.zeros(batch + 1, dtype=torch.int32), "fold": torch.zeros(batch + 1, dtype=torch.int8)}
    return {**cursors, "rows": index, "slots": index, "accept": index, "ring": ring}


def changed(old: str, new: str, text: str = TEXT) -> str:
    assert text.count(old) >= 1, old
    return text.replace(old, new, 1)


# --- the file


def test_classes_and_sources_are_read_as_they_stand() -> None:
    read = policy.parse(TEXT)
    row = read.ops[OP.name][0]
    assert row.classes == {"k7f3a91c2": (FIRST, BLOCK_8, LAST), "k0bb31e55": ("fake.three",)}
    assert row.kernels == ("fake.one", "fake.two")
    assert read.devices["nvidia-h200"].kernels == {OP.name: {name: digest[:16] for name, digest in DIGESTS.items()}}
    assert policy.parse(TEXT.replace("      classes: {", "      classes:   {")).ops[OP.name][1].classes.keys() == {"k7f3a91c2"}
    for mapping in (row.classes, read.devices["nvidia-h200"].kernels, read.devices["nvidia-h200"].kernels[OP.name]):
        with pytest.raises(TypeError):
            mapping["k"] = ()  # type: ignore[index]


def test_an_older_file_has_neither(registry: Registry) -> None:
    rows = "{gdn_ring_advance: [{when: {device: d}, use: fake.two}, {otherwise: {use: fake.two}}]}"
    text = f"schema: 1\ndevices: {{d: {{name: D, arch: sm_90, sms: 1}}}}\nops: {rows}\n"
    read = policy.parse(text)
    assert read.devices["d"].kernels == {} and read.ops[OP.name][0].classes == {}
    assert policy.lint(read, registry) == []


DAMAGED = [
    (
        "        k0bb31e55: [fake.three]",
        "        7: [fake.three]",
        "p.yaml:20:9: ops.gdn_ring_advance[0].classes.7: wanted a string",
    ),
    ("        k0bb31e55: [", '        "": [', "p.yaml:20:9: ops.gdn_ring_advance[0].classes.: wanted the id of a class as key"),
    ("[fake.three]", "[]", "p.yaml:20:20: ops.gdn_ring_advance[0].classes.k0bb31e55: wanted at least one variant"),
    ("[fake.three]", "fake.three", "p.yaml:20:20: ops.gdn_ring_advance[0].classes.k0bb31e55: wanted a list"),
    ("[fake.three]", "[3]", "p.yaml:20:21: ops.gdn_ring_advance[0].classes.k0bb31e55[0]: wanted a string"),
    (
        "[fake.three]",
        "[fake.two]",
        "p.yaml:20:21: ops.gdn_ring_advance[0].classes.k0bb31e55[0]: fake.two stands in class k7f3a91c2",
    ),
    (", fake.two]", ", fake.two, fake.two]", "classes.k7f3a91c2[3]: fake.two stands in class k7f3a91c2 already"),
    ("        k0bb31e55: [", "        k7f3a91c2: [", "the key 'k7f3a91c2' stands twice"),
    ("      class: k7f3a91c2\n      batch:", "      class: 7\n      batch:", "ops.gdn_ring_advance[0].class: wanted a string"),
    ("    - otherwise: {use: fake.three}", "    - otherwise: {use: fake.three, classes: {}}", "unknown key 'classes'"),
    ('use: fake.two, reason: "', 'use: fake.two, classes: {}, reason: "', "pins[0].classes: unknown key 'classes'"),
    ('"1111111111111111"', '"111111111111111"', "kernels.gdn_ring_advance.fake.one: wanted the first 16 hexadecimal digits"),
    ('"1111111111111111"', '"111111111111111G"', "p.yaml:9:36: devices.nvidia-h200.kernels.gdn_ring_advance.fake.one: wanted"),
    ('"1111111111111111"', "1111111111111111", "the first 16 hexadecimal digits of a source digest, in quotes, got the number"),
    ("gdn_ring_advance: {fake.one", 'gdn_ring_advance: ["a"]\n      b: {fake.one', "kernels.gdn_ring_advance: wanted a mapping"),
]


@pytest.mark.parametrize(("old", "new", "message"), DAMAGED, ids=[message[-40:] for _, _, message in DAMAGED])
def test_a_damaged_record_is_refused_with_place_key_and_what_was_wanted(old: str, new: str, message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        policy.parse(changed(old, new), "p.yaml")
    assert str(caught.value).startswith("p.yaml:") and message in str(caught.value)


def test_classes_without_a_class_is_refused() -> None:
    row = "{when: {ring: 16}, use: fake.two, classes: {k1: [fake.two]}}"
    with pytest.raises(PolicyError, match=r"^p.yaml:3:\d+: ops.gdn_ring_advance\[0\].classes: classes is given without class$"):
        policy.parse(
            f"schema: 1\ndevices: {{}}\nops: {{gdn_ring_advance: [{row}, {{otherwise: {{use: fake.two}}}}]}}\n", "p.yaml"
        )


# --- what the loader refuses


def refusals(text: str, registry: Registry, tmp_path: Path) -> list[str]:
    """The lines of the refusal, without the path; empty if the file loads."""
    path = tmp_path / "dispatch.yaml"
    path.write_text(text)
    try:
        policy.load(path, registry)
    except PolicyError as error:
        return [line.removeprefix(f"{path}:") for line in str(error).splitlines()]
    return []


THREE = ("{upto: rest, use: fake.two, us", "{upto: rest, use: fake.three, us")
IN, OTHER, NOT = "was measured in class k7f3a91c2", "was measured in class k0bb31e55", "was not measured (no class lists it)"
# edits, then what is said: (line, variant, the class it was measured in), and the class of the row
CLASS_BY_BATCH: dict[str, tuple[list[tuple[str, str]], list[tuple[int, str, str]], str]] = {
    "an entry takes a variant of another class": ([THREE], [(17, "fake.three", OTHER)], "k7f3a91c2"),
    "the class is edited along": (
        [THREE, ("class: k7f3a91c2", "class: k0bb31e55")],
        [(15, FIRST, IN), (16, BLOCK_8, IN)],
        "k0bb31e55",
    ),
    "a config that was not measured": ([('"fake.one[BLOCK=8]", ', "")], [(16, BLOCK_8, NOT)], "k7f3a91c2"),
    "a class that nothing was measured in": (
        [("class: k7f3a91c2", "class: kdeadbeef")],
        [(15, FIRST, IN), (16, BLOCK_8, IN), (17, LAST, IN)],
        "kdeadbeef",
    ),
    "a row without a record": (
        [('      classes: {k7f3a91c2: ["fake.one[BLOCK=4]", fake.two]}\n', "")],
        [(25, FIRST, NOT), (26, LAST, NOT)],
        "k7f3a91c2",
    ),
}


@pytest.mark.parametrize("case", CLASS_BY_BATCH)
def test_an_edit_that_switches_class_by_batch_is_refused_with_line_and_both_classes(
    case: str, registry: Registry, tmp_path: Path
) -> None:
    edits, findings, own = CLASS_BY_BATCH[case]
    text = TEXT
    for old, new in edits:
        text = changed(old, new, text)
    found = [re.sub(r":\d+: \S+ ", " ", line) for line in refusals(text, registry, tmp_path)]
    why = f"the row's class is {own}: only inside one class may the batch choose"
    assert found == [f"{line} {variant} {was}, {why}" for line, variant, was in findings]


def test_an_edit_that_lists_a_variant_under_a_second_class_is_refused(registry: Registry, tmp_path: Path) -> None:
    text = changed("[fake.three]", "[fake.three, fake.x]", changed(", fake.two]", ", fake.two, fake.three]", changed(*THREE)))
    (found,) = refusals(text, registry, tmp_path)
    assert found == "20:21: ops.gdn_ring_advance[0].classes.k0bb31e55[0]: fake.three stands in class k7f3a91c2 already"


def test_a_row_inside_one_class_loads_and_defaults_may_be_left_out(registry: Registry, tmp_path: Path) -> None:
    assert refusals(TEXT, registry, tmp_path) == []
    assert refusals(changed("use: fake.one, us", "use: fake.one, config: {BLOCK: 4}, us"), registry, tmp_path) == []
    assert (
        refusals(TEXT.replace("fallback: {use: fake.three}", "fallback: {use: fake.one, config: {BLOCK: 8}}"), registry, tmp_path)
        == []
    )


def test_one_variant_must_be_of_the_class_that_its_row_gives(registry: Registry, tmp_path: Path) -> None:
    def row(fields: str) -> str:
        rows = f"[{{when: {{ring: 16}}, use: fake.one, {fields}}}, {{otherwise: {{use: fake.two}}}}]"
        return f"schema: 1\ndevices: {{}}\nops: {{gdn_ring_advance: {rows}}}\n"

    assert refusals(row("us: 1.0"), registry, tmp_path) == []
    assert refusals(row('class: k1, classes: {k1: ["fake.one[BLOCK=4]"]}'), registry, tmp_path) == []
    (text,) = refusals(row('class: k1, classes: {k2: ["fake.one[BLOCK=4]"]}'), registry, tmp_path)
    assert text.endswith("use: fake.one[BLOCK=4] was measured in class k2, the row's class is k1")
    (text,) = refusals(row("class: k1"), registry, tmp_path)
    assert text.endswith("use: fake.one[BLOCK=4] was not measured (no class lists it), the row's class is k1")


NAMES = {FIRST: "fake.one", BLOCK_8: "fake.one, config: {BLOCK: 8}", LAST: "fake.two", "fake.three": "fake.three"}


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(list(NAMES)), min_size=1, max_size=5),
    st.dictionaries(st.sampled_from(list(NAMES)), st.sampled_from(["ka", "kb"])),
    st.sampled_from(["ka", "kb", "kc"]),
)
def test_a_file_loads_exactly_if_its_entries_are_of_the_rows_class(used: list[str], owner: dict[str, str], own: str) -> None:
    entries = [f"{{upto: {n or 'rest'}, use: {NAMES[v]}}}" for v, n in zip(used, [*range(1, len(used)), 0], strict=True)]
    listed = [f"{c}: [{', '.join(f'{v!r}' for v in owner if owner[v] == c)}]" for c in sorted({*owner.values()})]
    row = f"{{when: {{ring: 16}}, class: {own}, batch: [{', '.join(entries)}], classes: {{{', '.join(listed)}}}}}"
    text = f"schema: 1\ndevices: {{}}\nops: {{gdn_ring_advance: [{row}, {{otherwise: {{use: fake.two}}}}]}}\n"
    found = policy.lint(policy.parse(text, "p.yaml"), make_registry())
    assert [problem.place.key for problem in found] == [
        f"ops.gdn_ring_advance[0].batch[{n}].use" for n, variant in enumerate(used) if owner.get(variant) != own
    ]


# --- where a class was not measured


def test_a_row_whose_class_was_measured_here_follows_the_batch(bind: Bind) -> None:
    plan = bind().warmup(fingerprint=measures(two="ff"))
    assert plan.resolved() == BY_BATCH
    assert plan.evidence.collapsed is None and plan.evidence.doubts == ()
    assert not [call for call in CALLS if "bits" in call]


def test_a_policy_that_was_read_but_never_checked_collapses_too(bind: Bind) -> None:
    plan = bind(changed(*THREE))
    assert plan.evidence.doubts == ("fake.three in class k7f3a91c2 (not listed there)",)
    assert plan.resolved() == ((1, None, "fake.three"),)


DOUBTS: dict[str, tuple[Callable[[str], str], dict[str, Any], str]] = {
    "another Triton": (lambda text: text.replace("3.6.0", "3.5.1"), {}, "Triton 3.6.0 (measured: 3.5.1)"),
    "no Triton recorded": (
        lambda text: text.replace('{triton: "3.6.0"}', '{torch: "2.11.0"}'),
        {},
        "the Triton version (measured: not recorded)",
    ),
    "a changed kernel": (
        lambda text: text.replace("2" * 16, "f" * 16),
        {},
        "fake.two was measured as ffffffffffffffff (section nvidia-h200), installed is 2222222222222222",
    ),
    "an unrecorded kernel": (
        lambda text: text.replace(', fake.two: "2222222222222222"', ""),
        {},
        "the source of fake.two (measured: not recorded)",
    ),
    "another fact": (lambda text: text, {"ring": 32}, "ring=32 (measured: 16)"),
    "a fact that is not at its default": (lambda text: text, {"index": "i64"}, "index=i64 (measured: i32)"),
    "no areas": (
        lambda text: text.replace("      measured: {ring: 16, batch: [1, 4, 64]}\n", ""),
        {},
        "the static key (measured: not",
    ),
    "two areas, neither of which has it all": (
        lambda text: text.replace("{ring: 16, batch: [1, 4, 64]}", "[{ring: 16, batch: 1}, {ring: 32, index: i64, batch: 1}]"),
        {"index": "i64"},
        "index=i64 (measured: i32)",
    ),
    "a second device": (
        lambda text: text.replace("device: nvidia-h200, ring", "device: [nvidia-h200, nvidia-b200], ring").replace(
            "ops:\n", '  nvidia-b200: {name: "NVIDIA B200", arch: sm_100, sms: 148}\nops:\n', 1
        ),
        {},
        "which of the row's 2 devices its class was measured on (not recorded)",
    ),
    "another arch": (
        lambda text: text,
        {"device": Device.declared("NVIDIA B200", "sm_100", 148), "section": "nvidia-h200"},
        "NVIDIA B200 (sm_100, 148 SMs) (measured: NVIDIA H200 (sm_90, 132 SMs))",
    ),
}


@pytest.mark.parametrize("case", DOUBTS)
def test_a_row_whose_class_was_not_measured_here_takes_its_last_variant_for_every_batch(case: str, bind: Bind) -> None:
    edit, where, doubt = DOUBTS[case]
    plan = bind(edit(TEXT), **where)
    assert plan.resolved() == COLLAPSED
    assert [plan.variant(batch).id for batch in (0, 1, 3, 17, 4096)] == [LAST] * 5
    assert len(plan.evidence.doubts) == 1 and plan.evidence.doubts[0].startswith(doubt)


def test_another_product_of_the_arch_needs_no_new_measurement(bind: Bind) -> None:
    assert bind(device=Device.declared("NVIDIA H20", "sm_90", 78)).resolved() == BY_BATCH


def test_an_area_may_name_a_fact_that_is_not_at_its_default(bind: Bind) -> None:
    assert bind(changed("{ring: 16, batch", "{ring: 16, index: [i32, i64], batch"), index="i64").resolved() == BY_BATCH


def test_a_row_that_names_no_device_was_measured_nowhere(bind: Bind) -> None:
    for device in (Device.cpu(), Device.declared("NVIDIA B200", "sm_100", 148)):
        plan = bind(device=device, ring=64)
        assert plan.resolved() == COLLAPSED
        assert plan.evidence.doubts == ("the row names no device",)


@pytest.mark.parametrize("triton", [TRITON, "0.0.1", ""])
def test_one_variant_pins_and_force_need_no_class(triton: str, bind: Bind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "installed_triton", lambda: triton)
    batch = TEXT[TEXT.index("      batch:") : TEXT.index("      classes:")]
    assert bind(TEXT.replace(batch, "      use: fake.one\n", 1)).resolved() == ((1, None, FIRST),)
    same = batch.replace("fake.one, config: {BLOCK: 8}", "fake.one").replace("fake.two", "fake.one")
    assert bind(TEXT.replace(batch, same, 1)).resolved() == ((1, None, FIRST),)
    assert bind(ring=128).resolved() == ((1, None, LAST),)
    with monkeypatch.context() as forced:
        forced.setattr(dispatch, "overrides", lambda: (policy.Override(OP.name, "fake.three"),))
        plan = bind().warmup(fingerprint=measures(three="ff"))
        assert plan.resolved() == ((1, None, "fake.three"),)
    assert not [call for call in CALLS if "bits" in call] and plan.evidence.collapsed is None


def test_a_fake_triton_version_changes_neither_the_choice_nor_the_digest(bind: Bind, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bind()
    monkeypatch.setattr(dispatch, "installed_triton", lambda: "9.9.9")
    after = bind()
    assert [before.binding.choose(batch) for batch in (1, 3, 17)] == [after.binding.choose(batch) for batch in (1, 3, 17)]
    assert (before.resolved(), after.resolved()) == (BY_BATCH, COLLAPSED)
    digest = after.digest
    after.warmup(fingerprint=measures())
    assert after.resolved() == BY_BATCH
    assert digest == after.digest == before.digest


# --- warm-up measures


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch, registry: Registry) -> str:
    """A Triton that nothing was measured with."""
    monkeypatch.setattr(dispatch, "installed_triton", lambda: "9.9.9")
    return "9.9.9"


def said(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [text for text in (record.getMessage() for record in caplog.records) if words in text]


def test_equal_bits_at_warmup_let_the_batch_choose_again(bind: Bind, newer: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kernreg"):
        plan = bind()
        (text,) = said(caplog, "serves every batch")
        assert "gdn_ring_advance ring=16 index=i32: p.yaml:12 (ops.gdn_ring_advance[0])" in text
        assert "was not measured here: Triton 9.9.9 (measured: 3.6.0); fake.two serves every batch" in text
        plan.warmup(fingerprint=measures()).warmup(fingerprint=measures(two="f" * 16))
    assert [call for call in CALLS if "bits" in call] == [
        f"bits of {variant} for ring=16 on cuda:0" for variant in (FIRST, BLOCK_8, LAST)
    ]
    assert plan.resolved() == BY_BATCH
    assert plan.variant(1).id == FIRST and plan.explain(1).variant.id == FIRST
    assert plan.explain(1).evidence.bits == dict.fromkeys((FIRST, BLOCK_8, LAST), "0" * 16)
    assert len(said(caplog, "its variants give equal bits here, the batch chooses")) == 1
    assert len(said(caplog, "serves every batch")) == 1


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        ({"two": "f" * 16}, f"{FIRST} {'0' * 16}, {BLOCK_8} {'0' * 16}, {LAST} {'f' * 16}"),
        ({"one": "row 3 of u differs"}, f"{FIRST} racy: row 3 of u differs, {BLOCK_8} racy: row 3 of u differs, {LAST} 0"),
        ({"one": "row 3", "two": "row 3"}, f"{FIRST} racy: row 3, {BLOCK_8} racy: row 3, {LAST} racy: row 3"),
    ],
)
def test_other_bits_at_warmup_leave_one_variant_and_are_named_once(
    bits: dict[str, str], words: str, bind: Bind, newer: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = bind()
    with caplog.at_level(logging.WARNING, "kernreg"):
        plan.warmup(fingerprint=measures(**bits)).warmup(fingerprint=measures())
    assert plan.resolved() == COLLAPSED
    (text,) = said(caplog, "do not give equal bits here")
    assert words in text and text.endswith("; fake.two serves every batch")
    assert plan.explain(1).evidence.collapsed == text[text.index("its variants") : text.index("; fake.two serves")]


def test_a_variant_that_cannot_be_measured_leaves_one_variant(bind: Bind, newer: str) -> None:
    def breaks(registry: Registry, variant: Any, facts: Any, device: str) -> Fingerprint:
        if variant.id == BLOCK_8:
            raise RuntimeError("Internal Triton PTX codegen error\nand more")
        return Fingerprint(bits="0" * 16)

    plan = bind().warmup(fingerprint=breaks)
    assert plan.resolved() == COLLAPSED
    assert plan.evidence.failed == {BLOCK_8: "RuntimeError: Internal Triton PTX codegen error"}


def test_a_variant_that_races_here_does_not_serve_while_another_does_not(bind: Bind, newer: str) -> None:
    plan = bind().warmup(fingerprint=measures(two="row 3"))
    assert plan.resolved() == ((1, None, BLOCK_8),)
    decision = plan.explain(64)
    assert decision.variant.id == BLOCK_8 and dict(decision.considered)["fake.one"].startswith("chosen: ")
    assert f"{LAST} racy: row 3" in str(decision.evidence.collapsed)


def test_a_full_memory_does_not_decide_the_table(bind: Bind, newer: str) -> None:
    def full(*given: Any) -> Fingerprint:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    plan = bind()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        plan.warmup(fingerprint=full)
    assert not plan.evidence.measured_here
    assert plan.warmup(fingerprint=measures()).resolved() == BY_BATCH


def test_a_mistake_in_a_backend_is_not_taken_for_other_bits(bind: Bind, newer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fake_kernels"], "one", lambda write_pos: None)
    with pytest.raises(kernreg.RegistrationError, match="argument 'fold' of the op is missing"):
        bind().warmup(fingerprint=measures())


def test_nothing_is_measured_in_a_capture(bind: Bind, newer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bind()
    monkeypatch.setattr(dispatch, "_capturing", lambda: True)
    with pytest.raises(NotWarm, match="gdn_ring_advance: ring=16 index=i32 is to be measured and a CUDA graph is being captured"):
        plan.warmup(fingerprint=measures())
    assert CALLS == [] and plan.resolved() == COLLAPSED


@pytest.mark.parametrize("device", [H200, "cpu"])
def test_calls_measure_nothing(device: Any, bind: Bind, newer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the first one, nor in a row with a fallback, whose variants are all tried before one serves."""
    monkeypatch.setattr(dispatch, "_default_fingerprint", measures)
    for plan, ring in ((bind(device=device, ring=64), 64), (bind(device=device, ring=256), 256)):
        for batch in (1, 5, 1):
            plan.go(**inputs(batch, ring))
    assert set(CALLS) == {"two"}


def test_off_cuda_warmup_measures_only_when_it_is_told_how(bind: Bind) -> None:
    plan = bind(device="cpu", ring=64).warmup()
    assert (plan.resolved(), set(CALLS)) == (COLLAPSED, {"two"})
    plan.warmup(fingerprint=measures())
    assert plan.resolved() == ((1, 4, FIRST), (5, None, LAST))
    assert f"bits of {FIRST} for ring=64 on cpu" in CALLS


def test_on_cuda_warmup_measures_by_itself(bind: Bind, newer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "fingerprint", measures())
    monkeypatch.setattr(Plan, "_need_cuda", lambda self: None)
    assert bind().warmup().resolved() == BY_BATCH


def test_served_counts_over_the_change_and_says_why_meanwhile(bind: Bind) -> None:
    plan = bind(device="cpu", ring=64).warmup()
    for batch in (1, 9):
        plan(**inputs(batch, 64))
    (line,) = plan.served()
    assert (line.variant, line.calls) == (LAST, 2)
    assert line.note == "that its variants give equal bits was not measured here: the row names no device"
    plan.warmup(fingerprint=measures())
    for batch in (1, 9):
        plan(**inputs(batch, 64))
    assert {(s.variant, s.calls, s.note) for s in plan.served()} == {(FIRST, 1, ""), (LAST, 3, "")}


def test_a_fallback_replaces_a_collapsed_row_too(bind: Bind, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(write_pos, fold, rows, slots, accept, *, ring, margin=None, null_slot=-1):
        raise RuntimeError("no")

    monkeypatch.setattr(sys.modules["fake_kernels"], "two", breaks)
    plan = bind(device="cpu", ring=64).warmup()
    assert plan.resolved() == ((1, None, "fake.three"),)
    assert plan.warmup(fingerprint=measures()).resolved() == ((1, None, "fake.three"),)
    plan(**inputs(1, 64))
    assert [(s.variant, s.note) for s in plan.served()] == [("fake.three", "")]
    decision = plan.explain(9)
    assert (decision.variant.id, decision.us, decision.interval) == ("fake.three", None, (1, None))


def test_a_variant_that_cannot_run_after_equal_bits_brings_the_fallback(bind: Bind, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bind(device="cpu", ring=64)
    monkeypatch.setattr(plan, "_try", lambda variant, launch: RuntimeError("no") if variant.id == FIRST else None)
    assert plan.warmup(fingerprint=measures()).resolved() == ((1, None, "fake.three"),)


def test_explain_says_what_serves_and_why_not_the_others(bind: Bind, newer: str) -> None:
    plan = bind()
    decision = plan.explain(1)
    reasons = dict(decision.considered)
    assert (decision.batch, decision.variant.id, decision.us, decision.interval) == (1, LAST, 5.0, (1, None))
    assert decision.evidence is plan.evidence
    assert reasons["fake.one"].endswith("names it for batch 3-16, but the batch may not choose")
    assert reasons["fake.two"].endswith("device=nvidia-h200 ring=16|32, every batch, for the batch may not choose")
    assert decision.extrapolated == () and plan.explain(65).extrapolated == ("batches above 64",)
    assert plan.binding.choose(1).evidence == kernreg.evidence.Evidence()


# --- with the real battery


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """Kernels of the op that compute: the reference under two names, and one that is off by one in a corner."""
    from kernreg_torch.gdn_ring_advance import gdn_ring_advance as reference

    def off(write_pos, fold, rows, slots, accept, *, ring, margin=None, null_slot=-1):
        reference(write_pos, fold, rows, slots, accept, ring=ring, margin=margin, null_slot=null_slot)
        write_pos -= (write_pos == ring).to(write_pos.dtype)

    module = types.ModuleType("fake_kernels")
    module.one = module.two = reference  # type: ignore[attr-defined]
    module.three = off  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_kernels", module)
    made = Registry()
    made.add_op(OP)
    made.add(Backend("fake", tuple(Kernel(OP.name, f"fake.{n}", f"fake_kernels:{n}") for n in ("one", "two", "three"))))
    yield made


@pytest.mark.parametrize(("other", "follows"), [("fake.two", True), ("fake.three", False)])
def test_the_real_fingerprints_decide(real: Registry, other: str, follows: bool) -> None:
    rows = f"""
schema: 1
devices: {{}}
ops:
  gdn_ring_advance:
    - when: {{ring: 16}}
      class: k1
      batch: [{{upto: 4, use: fake.one}}, {{upto: rest, use: {other}}}]
      classes: {{k1: [fake.one, {other}]}}
    - otherwise: {{use: fake.one}}
"""
    plan = dispatch.bind(OP, policy=policy.parse(rows), registry=real, device="cpu", ring=16)
    assert plan.resolved() == ((1, None, other),)
    plan.warmup(fingerprint=numerics.fingerprint)
    assert plan.resolved() == (((1, 4, "fake.one"), (5, None, other)) if follows else ((1, None, other),))
