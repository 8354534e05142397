"""The policy: what a file may say, what `lint` finds, and what `choose` decides, all without a GPU or torch."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernreg.contract import Backend, ContractError, Fact, Kernel, Tensor, op
from kernreg.device import Device
from kernreg.policy import (
    Decision,
    NoKernel,
    Override,
    Policy,
    PolicyError,
    batches,
    choose,
    lint,
    load,
    parse,
    resolve,
)
from kernreg.registry import Registry, UnknownError


@op(
    tensors={"x": Tensor.of("B L HV H", "act"), "y": Tensor.of("B", "index")},
    dtypes={"act": ("f32", "f64")},
    mutates=("x",),
    facts={
        "ring": Fact("dim L"),
        "heads": Fact("heads HV H"),
        "track": Fact("has y", False),
        "mode": Fact("arg mode", "plain", ("plain", "fancy", "odd")),
        "act": Fact("dtype act", "f32"),
        "index": Fact("index", "i32"),
    },
    batch="x",
)
def toy(x: Any, *, y: Any = None, mode: str = "plain") -> None:
    """An op for these tests."""


@op(
    tensors={"x": Tensor.of("B L", "act")},
    dtypes={"act": ("f32",)},
    mutates=("x",),
    facts={"ring": Fact("dim L")},
    batch="x",
)
def other(x: Any) -> None:
    """An op that has only a reference."""


def on_cuda(facts: Any, device: Device, config: Any) -> str | None:
    return None if device.platform == "cuda" else "needs a CUDA device"


def small_ring(facts: Any, device: Device, config: Any) -> str | None:
    limit = 8 * config.get("BV", 8)
    return on_cuda(facts, device, config) or (f"needs ring <= {limit}, got {facts['ring']}" if facts["ring"] > limit else None)


TILES = {"BV": (8, 16, 32), "num_warps": (4, 8)}
KERNELS = {
    "slow": [Kernel("toy", "slow.reference", "slow:toy"), Kernel("other", "slow.reference", "slow:other")],
    "fast": [
        Kernel("toy", "fast.fused", "fast:fused", TILES, {"BV": 8, "num_warps": 4}, on_cuda),
        Kernel("toy", "fast.tiled", "fast:tiled", TILES, {"BV": 8, "num_warps": 4}, small_ring),
    ],
    "gone": [Kernel("toy", "gone.kernel", "gone:kernel")],
}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return make_registry()


def make_registry() -> Registry:
    registry = Registry()
    registry.add_op(toy)
    registry.add_op(other)
    for name, kernels in KERNELS.items():
        registry.add(Backend(name, tuple(kernels), requires=("a_module_that_is_not_there",) if name == "gone" else ()))
    return registry


H200 = Device.declared("NVIDIA H200", "sm_90", 132)
FACTS = {"ring": 16, "heads": "48/16", "track": False, "mode": "plain", "act": "f32", "index": "i32"}

TEXT = """\
schema: 1
devices:
  nvidia-h200: {name: "NVIDIA H200", arch: "sm_90", sms: 132, measured: {date: "2026-11-30", triton: "3.6.0"}}
ops:
  toy:
    - when: {device: nvidia-h200, ring: [16, 32]}
      class: "k7f3a91c2"
      batch:
        - {upto: 2, use: fast.fused, us: 9.0, next: 9.9, runner_up: "fast.tiled[BV=8,num_warps=4]"}
        - {upto: 16, use: fast.fused, config: {BV: 32}, us: 20, next: 19.0, at: {heads: 48/16, history: 4}}
        - {upto: rest, use: fast.tiled, config: {BV: 16, num_warps: 8}}
      measured: {heads: [48/16, 12/4], batch: [1, 4, 8]}
      fallback: {use: fast.tiled}
      regret: 1.03
      classes: {k7f3a91c2: ["fast.fused[BV=8,num_warps=4]", "fast.fused[BV=32,num_warps=4]", "fast.tiled[BV=16,num_warps=8]"]}
    - when: {platform: cuda, mode: fancy}
      use: gone.kernel
    - otherwise: {use: slow.reference}
  other:
    - otherwise: {use: slow.reference}
pins:
  - {op: toy, when: {ring: 32, track: true}, use: slow.reference, reason: "sums drift", by: ann}
"""


def decide(
    text: str | Policy = TEXT,
    device: Device = H200,
    batch: int = 1,
    overrides: tuple[Override, ...] = (),
    section: str | None = None,
    **facts: Any,
) -> Decision:
    policy = text if isinstance(text, Policy) else parse(text)
    return choose(policy, make_registry(), device, toy, {**FACTS, **facts}, batch, overrides, section=section)


def rows(*rows: str, devices: str = "{}", pins: str = "[]") -> str:
    """A policy with these rows for toy, one a line from line 5 on, and a catch-all."""
    lines = ["schema: 1", f"devices: {devices}", f"pins: {pins}", "ops: {toy: ["]
    return "\n".join([*lines, *(f"  {row}," for row in rows), "  {otherwise: {use: slow.reference}}]}", ""])


# --- reading


def test_a_file_is_read_as_it_stands() -> None:
    policy = parse(TEXT, "here/dispatch.yaml")
    assert policy.digest == hashlib.sha256(TEXT.encode()).hexdigest()
    section = policy.devices["nvidia-h200"]
    assert (section.name, section.arch, section.sms) == ("NVIDIA H200", (9, 0), 132)
    assert section.measured == {"date": "2026-11-30", "triton": "3.6.0"}
    row = policy.ops["toy"][0]
    assert row.source == "here/dispatch.yaml:6 (ops.toy[0])"
    assert row.when_text == "device=nvidia-h200 ring=16|32"
    assert (row.numerics, row.regret, row.stale) == ("k7f3a91c2", 1.03, False)
    assert [(e.low, e.high, e.use.kernel) for e in row.entries] == [
        (1, 2, "fast.fused"),
        (3, 16, "fast.fused"),
        (17, None, "fast.tiled"),
    ]
    assert [e.span for e in row.entries] == ["batch 1-2", "batch 3-16", "batch 17 and more"]
    assert dict(row.entries[1].at) == {"heads": "48/16", "history": 4}
    assert row.measured == ({"heads": ("48/16", "12/4"), "batch": (1, 4, 8)},)
    pin = policy.pins[0]
    assert (pin.reason, pin.by, pin.when_text) == ("sums drift", "ann", "ring=32 track=yes")
    assert policy.ops["toy"][-1].when_text == "otherwise"


def test_str_and_bytes_are_the_same_policy() -> None:
    assert parse(TEXT) == parse(TEXT.encode())


def test_the_digest_follows_every_byte() -> None:
    assert parse(TEXT + "\n").digest != parse(TEXT).digest


STRUCTURE = [
    ("schema: 1", "schema: 2", "1:9: schema: wanted 1, the only schema"),
    ("schema: 1", 'schema: "1"', "1:9: schema: wanted a whole number"),
    ("schema: 1", "schema: 1.0", "1:9: schema: wanted a whole number"),
    ("schema: 1\n", "", "1:1: the key 'schema' is missing"),
    ("pins:", "pinned:", "21:1: pinned: unknown key 'pinned'; wanted schema or devices or ops or pins"),
    ("sms: 132", "sms: many", "3:58: devices.nvidia-h200.sms: wanted a whole number"),
    ("sms: 132", "sm: 132", "3:53: devices.nvidia-h200.sm: unknown key"),
    ('"sm_90"', '"90"', "3:44: devices.nvidia-h200.arch: wanted an arch like sm_90"),
    ('"3.6.0"', "3.6", "measured.triton: wanted a string (quote versions, dates and ids), got the number 3.6"),
    ('"3.6.0"', "3.6.0", "measured.triton: '3.6.0' is ambiguous"),
    ('"2026-11-30"', "2026-11-30", "measured.date: '2026-11-30' is ambiguous"),
    ("ring: [16, 32]", "ring: []", "6:41: ops.toy[0].when.ring: wanted at least one value"),
    ("ring: [16, 32]", "ring: [16, 16]", "6:46: ops.toy[0].when.ring[1]: 16 stands twice"),
    ("ring: [16, 32]", "ring: 16.0", "6:41: ops.toy[0].when.ring: wanted a string, a whole number, true or false"),
    ("ring: [16, 32]", "ring: {a: 1}", "6:41: ops.toy[0].when.ring: wanted a string"),
    ("ring: [16, 32]", "batch: 1", "6:35: ops.toy[0].when.batch: the batch is no condition"),
    ("ring: [16, 32]", "arch: sm90", "6:41: ops.toy[0].when.arch: wanted an arch like sm_90"),
    ("platform: cuda", "platform: rocm", "16:24: ops.toy[1].when.platform: wanted cuda or cpu or interpreter"),
    ("{platform: cuda, mode: fancy}", "{}", "16:13: ops.toy[1].when: wanted at least one condition"),
    ('class: "k7f3a91c2"', "class: 7", "7:14: ops.toy[0].class: wanted a string"),
    ('      class: "k7f3a91c2"\n', "", "6:7: ops.toy[0]: the key 'class' is missing"),
    ("upto: 16", "upto: 2", "10:18: ops.toy[0].batch[1].upto: wanted a whole number, 3 or more"),
    ("upto: 16", "upto: rest", "10:18: ops.toy[0].batch[1].upto: wanted a whole number, 3 or more"),
    ("upto: 2,", "upto: 0,", "9:18: ops.toy[0].batch[0].upto: wanted a whole number, 1 or more"),
    ("upto: rest", "upto: 32", "11:18: ops.toy[0].batch[2].upto: wanted rest"),
    ("us: 9.0, ", "", "ops.toy[0].batch[0].next: next is given without us"),
    ("us: 9.0", "us: 0.0", "ops.toy[0].batch[0].us: wanted a time"),
    ("us: 9.0", "us: -1", "ops.toy[0].batch[0].us: wanted a number, 0 or more"),
    ("us: 9.0", "us: fast", "ops.toy[0].batch[0].us: wanted a number"),
    ("{BV: 32}", "{BV: 32.0}", "ops.toy[0].batch[1].config.BV: wanted a string, a whole number"),
    ("batch: [1, 4, 8]", "batch: [0, 4, 8]", "ops.toy[0].measured.batch[0]: wanted a whole number, 1 or more"),
    ("regret: 1.03", "regret: 0.9", "ops.toy[0].regret: wanted a number, 1 or more"),
    ("regret: 1.03", "stale: maybe", "ops.toy[0].stale: wanted true or false"),
    ("fallback: {use: fast.tiled}", "fallback: fast.tiled", "ops.toy[0].fallback: wanted a mapping"),
    ("use: gone.kernel", "uses: gone.kernel", "ops.toy[1].uses: unknown key 'uses'"),
    ("      use: gone.kernel\n", "", "ops.toy[1]: the key 'use' is missing"),
    ("use: gone.kernel", "use: gone.kernel\n      use: fast.fused", "ops.toy[1].use: the key 'use' stands twice"),
    ("use: gone.kernel", "otherwise: {use: gone.kernel}", "ops.toy[1].otherwise: the catch-all must be the last row"),
    ("- otherwise: {use: slow.reference}\n  other:", "- otherwise: {use: slow.reference, when: {}}\n  other:", "unknown key"),
    ("    - otherwise: {use: slow.reference}\npins", "    []\npins", "ops.other: wanted at least a catch-all row"),
    ("    - otherwise: {use: slow.reference}\npins", "    use: slow.reference\npins", "ops.other: wanted a list"),
    (', reason: "sums drift"', "", "22:5: pins[0]: the key 'reason' is missing"),
    ('"sums drift"', '""', "pins[0].reason: wanted a string"),
]


@pytest.mark.parametrize(("old", "new", "message"), STRUCTURE, ids=[f"{i}-{new}" for i, (_, new, _) in enumerate(STRUCTURE)])
def test_d16_a_damaged_file_is_refused_with_place_key_and_what_was_wanted(old: str, new: str, message: str) -> None:
    assert TEXT.count(old) >= 1
    with pytest.raises(PolicyError) as caught:
        parse(TEXT.replace(old, new, 1), "p.yaml")
    assert str(caught.value).startswith("p.yaml:")
    assert message in str(caught.value)


def test_d16_of_two_equal_rows_keys_none_wins_silently() -> None:
    with pytest.raises(PolicyError, match=r"ops.toy\[0\].when.ring: the key 'ring' stands twice, first on line 6"):
        parse(TEXT.replace("ring: [16, 32]", "ring: 16, ring: 32"))


def test_load_reads_checks_and_refuses_whole(tmp_path: Path, registry: Registry) -> None:
    path = tmp_path / "dispatch.yaml"
    path.write_text(TEXT)
    assert load(path, registry) == parse(TEXT, path)
    path.write_text(TEXT.replace("BV: 32", "BV: 33").replace("gone.kernel", "gone.kernal"))
    with pytest.raises(PolicyError) as caught:
        load(path, registry)
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{path}:10:") and "takes BV from 8, 16, 32; got 33" in first
    assert second.startswith(f"{path}:17:") and "no kernel 'gone.kernal'" in second


# --- lint


def problems(text: str, registry: Registry) -> list[str]:
    return [str(problem) for problem in lint(parse(text, "p.yaml"), registry)]


def test_the_text_of_these_tests_is_clean(registry: Registry) -> None:
    assert problems(TEXT, registry) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  toy:", "  toi:", "p.yaml:6:7: ops.toi[0]: no op 'toi'; there are toy, other"),
        ("op: toy", "op: toi", "p.yaml:22:5: pins[0]: no op 'toi'"),
        ("use: gone.kernel", "use: os.system", "p.yaml:17:12: ops.toy[1].use: toy has no kernel 'os.system'; it has fast.fused"),
        ("fallback: {use: fast.tiled", "fallback: {use: fast.til", "ops.toy[0].fallback.use: toy has no kernel 'fast.til'"),
        (
            "fallback: {use: fast.tiled",
            "fallback: {use: fast.tiled, config: {BV: 3}",
            "fast.tiled takes BV from 8, 16, 32; got 3",
        ),
        ("{BV: 32}", "{BW: 32}", "fast.fused has no launch parameter 'BW'"),
        ("{BV: 32}", '{BV: "32"}', "fast.fused takes BV from 8, 16, 32; got '32'"),
        ("{BV: 32}", "{BV: true}", "fast.fused takes BV from 8, 16, 32; got True"),
        ("device: nvidia-h200", "device: nvidia-h20", "p.yaml:6:22: ops.toy[0].when.device: no section 'nvidia-h20'"),
        ("ring: [16, 32]", "rings: 16", "p.yaml:6:42: ops.toy[0].when.rings: toy has no fact 'rings'; there are device, arch"),
        ("ring: [16, 32]", 'ring: [16, "32"]', "p.yaml:6:46: ops.toy[0].when.ring[1]: toy: ring is '32', wanted a whole number"),
        ("ring: [16, 32]", "ring: true", "toy: ring is True, wanted a whole number"),
        ("ring: [16, 32]", "track: 1", "toy: track is 1, wanted true or false"),
        ("ring: [16, 32]", "heads: 48", "toy: heads is 48, wanted value heads/key heads"),
        ("ring: [16, 32]", "mode: fanciest", "toy: mode is 'fanciest', wanted plain or fancy or odd"),
        ("ring: [16, 32]", "act: bf16", "toy: act is 'bf16', wanted f32 or f64"),
        ("ring: [16, 32]", "index: i16", "toy: index is 'i16', wanted i32, i64"),
        ("{heads: [48/16", "{head: [48/16", "ops.toy[0]: measured: toy has no fact 'head'"),
        ("{heads: [48/16", "{act: [f16", "ops.toy[0]: measured: toy: act is 'f16'"),
        ("    - otherwise: {use: slow.reference}\n  other", "  other", "p.yaml:16:7: ops.toy[1]: the last row of toy must be"),
        ("- otherwise: {use: slow.reference}", "- otherwise: {use: fast.fused}", "must run anywhere, but on a CPU fast.fused"),
        (
            "ops:",
            '  b: {name: "NVIDIA H200", arch: "sm_90", sms: 114}\nops:',
            "p.yaml:4:3: devices.b: 'NVIDIA H200' is the product",
        ),
        ("ring: 32, track: true", "ring: 32, device: here", "pins[0].when.device: no section 'here'"),
    ],
)
def test_lint_finds_what_the_registry_does_not_know(old: str, new: str, message: str, registry: Registry) -> None:
    assert old in TEXT
    found = problems(TEXT.replace(old, new, 1), registry)
    assert [text for text in found if message in text], found


def test_an_op_without_rows_is_a_warning(registry: Registry) -> None:
    text = TEXT.replace("  other:\n    - otherwise: {use: slow.reference}\n", "")
    assert problems(text, registry) == ["p.yaml:1:1: ops: warning: no rows for other"]


HIDDEN = {
    "the same": ("{when: {ring: 16}, use: fast.fused}", "{when: {ring: 16}, use: fast.tiled}"),
    "narrower": ("{when: {ring: 16}, use: fast.fused}", "{when: {ring: 16, track: true}, use: fast.tiled}"),
    "a union over values": (
        "{when: {ring: 16}, use: fast.fused}",
        "{when: {ring: 32}, use: fast.fused}",
        "{when: {ring: [16, 32]}, use: fast.tiled}",
    ),
    "a union over a finite domain": (
        "{when: {track: true}, use: fast.fused}",
        "{when: {track: false, ring: 16}, use: fast.fused}",
        "{when: {ring: 16}, use: fast.tiled}",
    ),
    "all modes": (
        "{when: {mode: [plain, odd]}, use: fast.fused}",
        "{when: {mode: fancy}, use: fast.fused}",
        "{when: {ring: 16}, use: fast.tiled}",
    ),
    "all dtypes": (
        "{when: {act: f32}, use: fast.fused}",
        "{when: {act: f64}, use: fast.fused}",
        "{when: {ring: 16}, use: fast.tiled}",
    ),
    "all platforms": (
        "{when: {platform: [cuda, cpu]}, use: fast.fused}",
        "{when: {platform: interpreter}, use: fast.fused}",
        "{when: {ring: 16}, use: fast.tiled}",
    ),
    "a section's arch": ("{when: {arch: sm_90}, use: fast.fused}", "{when: {device: h200}, use: fast.tiled}"),
    "a section takes its arch": ("{when: {device: h200}, use: fast.fused}", "{when: {arch: sm_90}, use: fast.tiled}"),
    "a section is a GPU": ("{when: {platform: cuda}, use: fast.fused}", "{when: {device: h200}, use: fast.tiled}"),
    "impossible": ("{when: {device: h200, arch: sm_100}, use: fast.tiled}",),
    "no arch on a CPU": ("{when: {platform: cpu, arch: sm_90}, use: fast.tiled}",),
}
SHOWN = {
    "another value": ("{when: {ring: 16}, use: fast.fused}", "{when: {ring: 32}, use: fast.tiled}"),
    "a wider one": ("{when: {ring: 16, track: true}, use: fast.fused}", "{when: {ring: 16}, use: fast.tiled}"),
    "other values of an open domain": (
        "{when: {ring: 16}, use: fast.fused}",
        "{when: {ring: 32}, use: fast.fused}",
        "{when: {track: false}, use: fast.tiled}",
    ),
    "a corner of a union": (
        "{when: {track: true, ring: 16}, use: fast.fused}",
        "{when: {mode: fancy}, use: fast.fused}",
        "{when: {mode: odd}, use: fast.fused}",
        "{when: {ring: 16}, use: fast.tiled}",
    ),
    "sm_103 is not sm_100": ("{when: {arch: sm_100}, use: fast.fused}", "{when: {arch: sm_103}, use: fast.tiled}"),
    "another section": ("{when: {device: h200}, use: fast.fused}", "{when: {device: h20}, use: fast.tiled}"),
    "a GPU of no section": ("{when: {device: [h200, h20]}, use: fast.fused}", "{when: {platform: cuda}, use: fast.tiled}"),
}
SECTIONS = '{h200: {name: "NVIDIA H200", arch: "sm_90", sms: 132}, h20: {name: "NVIDIA H20", arch: "sm_90", sms: 78}}'


@pytest.mark.parametrize("case", HIDDEN)
def test_lint_finds_a_row_that_no_query_reaches(case: str, registry: Registry) -> None:
    hidden = [text for text in problems(rows(*HIDDEN[case], devices=SECTIONS), registry) if "warning" not in text]
    line, index = 4 + len(HIDDEN[case]), len(HIDDEN[case]) - 1
    assert len(hidden) == 1
    assert re.match(rf"p\.yaml:{line}:3: ops\.toy\[{index}\]: no (query reaches|device meets)", hidden[0])


@pytest.mark.parametrize("case", SHOWN)
def test_lint_lets_a_reachable_row_pass(case: str, registry: Registry) -> None:
    assert problems(rows(*SHOWN[case], devices=SECTIONS), registry) == ["p.yaml:1:1: ops: warning: no rows for other"]


def test_lint_names_the_rows_that_hide_another(registry: Registry) -> None:
    text = rows(
        *HIDDEN["a union over values"][:2], "{when: {track: true}, use: fast.fused}", "{when: {ring: [16, 32]}, use: fast.tiled}"
    )
    found = [line for line in problems(text, registry) if "query" in line]
    assert found == ["p.yaml:8:3: ops.toy[3]: no query reaches this row: all that it matches goes to the row on line 5, 6, 7"]


def test_a_pin_may_hide_a_row_but_not_another_pin(registry: Registry) -> None:
    pin = "{op: toy, when: {ring: 16}, use: fast.fused, reason: r}"
    row = "{when: {ring: 16}, use: fast.tiled}"
    assert not [text for text in problems(rows(row, pins=f"[{pin}]"), registry) if "warning" not in text]
    assert [text for text in problems(rows(row, pins=f"[{pin}, {pin}]"), registry) if "pins[1]: no query" in text]


def test_lint_of_many_measured_rows_does_not_explode(registry: Registry) -> None:
    cells = itertools.product(("h200", "h20"), range(1, 41), ("true", "false"), ("plain", "fancy", "odd"))
    lines = [f"{{when: {{device: {d}, ring: {r}, track: {t}, mode: {m}}}, use: fast.fused}}" for d, r, t, m in cells]
    last = "{when: {platform: cuda, ring: 7, track: true}, use: fast.tiled}"
    assert len([text for text in problems(rows(*lines, last, devices=SECTIONS), registry) if "warning" not in text]) == 0


# --- choosing


@pytest.mark.parametrize(
    ("batch", "variant", "interval"),
    [
        (1, "fast.fused[BV=8,num_warps=4]", (1, 2)),
        (2, "fast.fused[BV=8,num_warps=4]", (1, 2)),
        (3, "fast.fused[BV=32,num_warps=4]", (3, 16)),
        (16, "fast.fused[BV=32,num_warps=4]", (3, 16)),
        (17, "fast.tiled[BV=16,num_warps=8]", (17, None)),
        (4096, "fast.tiled[BV=16,num_warps=8]", (17, None)),
    ],
)
def test_a_batch_falls_into_the_interval_that_is_written(batch: int, variant: str, interval: tuple[int, int]) -> None:
    decision = decide(batch=batch)
    assert (decision.variant.id, decision.interval) == (variant, interval)


def test_a_decision_carries_the_rows_numbers() -> None:
    first, second, third = decide(), decide(batch=3), decide(batch=17)
    assert (first.us, first.next, first.runner_up) == (9.0, 9.9, "fast.tiled[BV=8,num_warps=4]")
    assert first.margin == pytest.approx(0.1)
    assert second.margin == pytest.approx(-0.05)
    assert (third.us, third.margin, third.runner_up) == (None, None, None)
    assert first.regret == 1.03
    assert first.source == "dispatch.yaml:6 (ops.toy[0])"
    assert first.row is not None and first.row.numerics == "k7f3a91c2"
    assert (first.level, first.section) == ("exact product", "nvidia-h200")


def test_a_row_that_names_no_device_is_served_by_no_section() -> None:
    decision = decide(ring=64)
    assert (decision.variant.id, decision.level, decision.section) == ("slow.reference", "any device", None)


def test_every_kernel_of_the_op_has_a_reason() -> None:
    considered = dict(decide(batch=3).considered)
    assert considered == {
        "fast.fused": "chosen: dispatch.yaml:6 (ops.toy[0]), device=nvidia-h200 ring=16|32, batch 3-16",
        "fast.tiled": "dispatch.yaml:6 (ops.toy[0]) names it for batch 17 and more",
        "gone.kernel": "a_module_that_is_not_there is not installed",
        "slow.reference": "not named by the matching row",
    }


def test_a_row_whose_kernel_cannot_serve_is_passed_over_with_its_reason() -> None:
    decision = decide(device=Device.declared("NVIDIA B200", "sm_100", 148), mode="fancy")
    assert decision.variant.id == "slow.reference"
    considered = dict(decision.considered)
    assert considered["gone.kernel"] == (
        "dispatch.yaml:16 (ops.toy[1]) names it, but a_module_that_is_not_there is not installed"
    )
    assert considered["slow.reference"] == "chosen: dispatch.yaml:18 (ops.toy[2]), otherwise, any batch"


def test_a_row_serves_all_batches_or_none_so_that_the_batch_never_changes_the_class() -> None:
    text = TEXT.replace("ring: [16, 32]", "ring: [16, 256]")  # fast.tiled with BV=16 takes rings up to 128
    for batch in (1, 3, 17):
        decision = decide(text, batch=batch, ring=256)
        assert decision.variant.id == "slow.reference"
    considered = dict(decision.considered)
    assert considered["fast.tiled"] == "dispatch.yaml:6 (ops.toy[0]) names it, but needs ring <= 128, got 256"
    assert considered["fast.fused"] == (
        "dispatch.yaml:6 (ops.toy[0]) names it, but only together with fast.tiled, which cannot serve"
    )


def test_one_config_that_cannot_serve_is_enough_to_pass_a_row_over() -> None:
    entries = "[{upto: 4, use: fast.tiled, config: {BV: 32}}, {upto: rest, use: fast.tiled, config: {BV: 8}}]"
    text = rows(f"{{when: {{ring: 128}}, class: k, batch: {entries}}}")
    decision = decide(text, ring=128)
    assert decision.variant.id == "slow.reference"
    assert "but needs ring <= 64, got 128" in dict(decision.considered)["fast.tiled"]


def test_a_pin_comes_before_the_rows() -> None:
    decision = decide(ring=32, track=True)
    assert decision.variant.id == "slow.reference"
    assert decision.source == "dispatch.yaml:22 (pins[0])"
    assert decision.extrapolated == ("a pin (sums drift)",)
    assert decide(ring=32).variant.id == "fast.fused[BV=8,num_warps=4]"


def test_true_is_not_1() -> None:
    text = rows("{when: {ring: 1}, use: fast.fused}")
    assert decide(text, ring=1).variant.id == "fast.fused[BV=8,num_warps=4]"
    assert decide(text, ring=True).variant.id == "slow.reference"


def test_an_empty_batch_is_decided_like_one_row_and_launches_nothing() -> None:
    decision = decide(batch=0)
    assert decision.variant == decide(batch=1).variant
    assert (decision.launches, decide(batch=1).launches) == (False, True)
    assert "an empty batch launches nothing" in dict(decision.considered)["fast.fused"]


def test_when_nothing_can_serve_every_reason_is_listed() -> None:
    with pytest.raises(NoKernel) as caught:
        decide(TEXT.replace("otherwise: {use: slow.reference}", "otherwise: {use: fast.fused}"), device=Device.cpu())
    assert str(caught.value).splitlines() == [
        "toy: no row of dispatch.yaml can serve: ring=16 heads=48/16 track=no mode=plain act=f32 index=i32 on cpu",
        "  fast.fused: dispatch.yaml:18 (ops.toy[2]) names it, but needs a CUDA device",
        "  fast.tiled: needs a CUDA device",
        "  gone.kernel: a_module_that_is_not_there is not installed",
        "  slow.reference: not named by the matching row",
    ]


def test_a_query_must_be_whole(registry: Registry) -> None:
    policy = parse(TEXT)
    with pytest.raises(ContractError, match="toy: the static key lacks heads, track"):
        choose(policy, registry, H200, "toy", {"ring": 16, "mode": "plain", "act": "f32", "index": "i32"}, 1)
    with pytest.raises(ContractError, match="toy: batch is -1, wanted 0 or more"):
        choose(policy, registry, H200, "toy", FACTS, -1)
    with pytest.raises(UnknownError, match="no op 'toi'"):
        choose(policy, registry, H200, "toi", FACTS, 1)


def test_one_batch_of_each_interval_reaches_every_entry() -> None:
    policy = parse(TEXT)
    assert batches(policy, "toy") == (1, 3, 17)
    assert batches(policy, "other") == (1,)
    reached = {decide(policy, batch=batch).variant.id for batch in batches(policy, "toy")}
    assert {decide(policy, batch=batch).variant.id for batch in range(1, 200)} == reached


# --- D14: devices and batches are never matched by being close


D14 = """\
schema: 1
devices:
  h200: {name: "NVIDIA H200", arch: "sm_90", sms: 132}
  h20: {name: "NVIDIA H20", arch: "sm_90", sms: 78}
ops:
  toy:
    - {when: {device: h200}, use: fast.fused, config: {BV: 32}, measured: {ring: 16, heads: 48/16, batch: [1, 4, 8]}}
    - {when: {device: h20}, use: fast.fused, config: {BV: 16}, measured: {ring: 16, heads: 48/16, batch: [1, 4, 8]}}
    - {when: {arch: sm_100}, use: fast.tiled}
    - {otherwise: {use: slow.reference}}
"""


@pytest.mark.parametrize(
    ("device", "variant", "level", "section"),
    [
        (("NVIDIA H200", "sm_90", 132), "fast.fused[BV=32,num_warps=4]", "exact product", "h200"),
        (("NVIDIA H20", "sm_90", 78), "fast.fused[BV=16,num_warps=4]", "exact product", "h20"),
        (("NVIDIA H20-3e", "sm_90", 78), "fast.fused[BV=16,num_warps=4]", "same arch and SM count", "h20"),
        (("NVIDIA H200 NVL", "sm_90", 132), "fast.fused[BV=32,num_warps=4]", "same arch and SM count", "h200"),
        (("NVIDIA GH200 480GB", "sm_90", 114), "fast.fused[BV=32,num_warps=4]", "same arch", "h200"),
        (("nvidia h200", "sm_90", 7), "fast.fused[BV=32,num_warps=4]", "same arch", "h200"),
        (("NVIDIA B200", "sm_100", 148), "fast.tiled[BV=8,num_warps=4]", "any device", None),
        (("NVIDIA B300", "sm_103", 148), "slow.reference", "any device", None),
        (("NVIDIA RTX PRO 6000", "sm_120", 188), "slow.reference", "any device", None),
        (("NVIDIA H200", "sm_999", 132), "slow.reference", "any device", None),
    ],
)
def test_d14_a_device_is_served_by_its_product_or_arch_never_by_the_closest(
    device: tuple[str, str, int], variant: str, level: str, section: str | None
) -> None:
    decision = decide(D14, device=Device.declared(*device))
    assert (decision.variant.id, decision.level, decision.section) == (variant, level, section)
    assert (decision.extrapolated == ()) == (level == "exact product")


def test_d14_what_was_not_measured_is_said_in_words() -> None:
    nvl = Device.declared("NVIDIA H200 NVL", "sm_90", 132)
    assert decide(D14, device=nvl).extrapolated == (
        "NVIDIA H200 NVL (sm_90, 132 SMs), served by section h200 (NVIDIA H200): same arch and SM count",
    )
    assert decide(D14, device=Device.declared("NVIDIA H200", "sm_90", 60)).extrapolated == ("60 SMs (measured: 132)",)
    assert decide(D14, heads="12/4", track=True).extrapolated == ("heads=12/4 (measured: 48/16)", "track=yes (measured: no)")
    assert decide(D14, device=Device.declared("NVIDIA B300", "sm_103", 148)).extrapolated == (
        "the catch-all on NVIDIA B300 (sm_103, 148 SMs)",
    )
    assert decide(D14, device=Device.declared("NVIDIA B200", "sm_100", 148)).extrapolated == (
        "the row, which records no measurement",
    )
    assert decide(D14, device=Device.cpu()).extrapolated == ()


@pytest.mark.parametrize(
    ("batch", "extrapolated"),
    [(0, ()), (1, ()), (2, ()), (5, ()), (8, ()), (9, ("batches above 8",)), (4096, ("batches above 8",))],
)
def test_d14_a_batch_outside_the_measured_ones_says_so(batch: int, extrapolated: tuple[str, ...]) -> None:
    decision = decide(D14, batch=batch)
    assert decision.variant.id == "fast.fused[BV=32,num_warps=4]"
    assert decision.extrapolated == extrapolated


def test_d14_below_the_smallest_measured_batch_and_unrecorded_ones() -> None:
    assert decide(D14.replace("[1, 4, 8]", "[4, 8]"), batch=3).extrapolated == ("batches below 4",)
    assert decide(D14.replace(", batch: [1, 4, 8]", "")).extrapolated == ("any batch (measured: not recorded)",)
    assert decide(D14.replace("ring: 16, ", "")).extrapolated == ("ring=16 (measured: not recorded)",)
    assert decide(TEXT, ring=32).extrapolated == ()  # a fact of `when` is covered by it


def test_sections_of_one_level_are_taken_in_the_order_of_the_file() -> None:
    policy = parse(D14)
    fit = resolve(policy.devices.values(), Device.declared("NVIDIA H100 NVL", "sm_90", 114))
    assert fit is not None and (fit[0].id, fit[1]) == ("h200", "same arch")
    assert resolve(policy.devices.values(), Device.cpu()) is None
    assert resolve(policy.devices.values(), Device("interpreter", "NVIDIA H200", (9, 0), 132)) is None


def test_a_section_is_looked_for_among_those_that_the_ops_rows_name() -> None:
    text = D14.replace("    - {when: {device: h20}", "    - {when: {device: h200, ring: 7}")
    decision = decide(text, device=Device.declared("NVIDIA H20", "sm_90", 78))
    assert (decision.section, decision.level) == ("h200", "same arch")


def test_one_section_can_be_pinned_for_all_devices() -> None:
    b200 = Device.declared("NVIDIA B200", "sm_100", 148)
    decision = decide(D14, device=b200, section="h20")
    assert (decision.variant.id, decision.section) == ("fast.fused[BV=16,num_warps=4]", "h20")
    assert decision.level == "pinned section"
    assert decision.extrapolated == ("NVIDIA B200 (sm_100, 148 SMs), served by section h20 (NVIDIA H20): pinned section",)
    assert decide(D14, section="h200") == decide(D14)
    with pytest.raises(PolicyError, match=r"dispatch.yaml has no section 'b200'; it has h200, h20"):
        decide(D14, section="b200")


# --- D15: a fallback is declared, and must be able to serve


def test_d15_the_fallback_of_the_row_is_part_of_the_decision() -> None:
    decision = decide()
    assert decision.fallback is not None and decision.fallback.id == "fast.tiled[BV=8,num_warps=4]"
    assert decide(TEXT.replace("      fallback: {use: fast.tiled}\n", "")).fallback is None
    assert decide(device=Device.cpu()).fallback is None


def test_d15_a_fallback_that_cannot_serve_is_none_and_its_reason_is_given() -> None:
    text = rows("{when: {ring: 256}, use: fast.fused, fallback: {use: fast.tiled, config: {BV: 16}}}")
    decision = decide(text, ring=256)
    assert (decision.variant.kernel.name, decision.fallback) == ("fast.fused", None)
    assert dict(decision.considered)["fast.tiled"] == ("fallback of dispatch.yaml:5 (ops.toy[0]), but needs ring <= 128, got 256")


def test_d15_a_fallback_that_is_the_choice_itself_is_an_error(registry: Registry) -> None:
    text = rows("{when: {ring: 16}, use: fast.fused, fallback: {use: fast.fused, config: {BV: 8}}}")
    assert [line for line in problems(text, registry) if "the fallback is fast.fused[BV=8,num_warps=4] again" in line]


# --- overrides


def test_a_forced_kernel_wins_over_pins_and_rows() -> None:
    decision = decide(overrides=(Override(None, "fast.tiled"),), ring=32, track=True)
    assert (decision.variant.id, decision.forced, decision.level) == ("fast.tiled[BV=8,num_warps=4]", True, "forced")
    assert decision.source == "forced: fast.tiled"
    assert decision.row is None and decision.interval == (1, None)
    assert dict(decision.considered) == {
        "fast.fused": "forced away: fast.tiled",
        "fast.tiled": "chosen: forced: fast.tiled",
        "gone.kernel": "forced away: fast.tiled",
        "slow.reference": "forced away: fast.tiled",
    }


def test_a_forced_kernel_that_cannot_serve_raises_its_reason() -> None:
    with pytest.raises(NoKernel, match=r"forced: fast.tiled, which cannot serve[^\n]*ring=256(.|\n)*needs ring <= 64, got 256"):
        decide(overrides=(Override(None, "fast.tiled"),), ring=256)
    with pytest.raises(NoKernel, match=r"forced: toy=gone.kernel(.|\n)*a_module_that_is_not_there is not installed"):
        decide(overrides=(Override("toy", "gone.kernel"),))


def test_a_forced_backend_gives_its_first_kernel_that_can_serve() -> None:
    assert decide(overrides=(Override(None, "slow"),)).variant.id == "slow.reference"
    decision = decide(overrides=(Override(None, "fast"),))
    assert decision.variant.id == "fast.fused[BV=8,num_warps=4]"
    assert dict(decision.considered)["fast.tiled"] == "forced away: fast.fused comes first"
    with pytest.raises(NoKernel, match="forced: fast, which cannot serve"):
        decide(overrides=(Override(None, "fast"),), device=Device.cpu())


def test_a_forced_backend_leaves_ops_without_it_to_the_file(registry: Registry) -> None:
    decision = choose(parse(TEXT), registry, H200, "other", {"ring": 16}, 1, (Override(None, "fast"),))
    assert (decision.variant.id, decision.forced) == ("slow.reference", False)
    decision = choose(parse(TEXT), registry, H200, "other", {"ring": 16}, 1, (Override("toy", "slow"),))
    assert not decision.forced


def test_the_first_override_that_speaks_of_the_op_wins() -> None:
    inner, outer = Override("toy", "slow.reference"), Override(None, "fast.tiled")
    assert decide(overrides=(inner, outer)).variant.id == "slow.reference"
    assert decide(overrides=(outer, inner)).variant.kernel.name == "fast.tiled"
    assert decide(overrides=(Override("other", "slow"), outer)).variant.kernel.name == "fast.tiled"


@pytest.mark.parametrize("override", [Override(None, "fastt"), Override("toy", "fast.fussed"), Override(None, "slow.fused")])
def test_an_override_that_names_nothing_is_an_error(override: Override) -> None:
    with pytest.raises(PolicyError, match=r"toy has no such kernel or backend; it has fast.fused, fast.tiled, gone.kernel"):
        decide(overrides=(override,))


def test_an_override_for_one_op_must_name_a_kernel_of_it(registry: Registry) -> None:
    with pytest.raises(PolicyError, match=r"forced: other=fast: other has no such kernel or backend; it has slow.reference"):
        choose(parse(TEXT), registry, H200, "other", {"ring": 16}, 1, (Override("other", "fast"),))


# --- properties


REGISTRY = make_registry()
MORE_SECTIONS = {
    "h200": {"name": "NVIDIA H200", "arch": "sm_90", "sms": 132},
    "h20": {"name": "NVIDIA H20", "arch": "sm_90", "sms": 78},
    "b200": {"name": "NVIDIA B200", "arch": "sm_100", "sms": 148},
}
DEVICES = [
    Device.declared("NVIDIA H200", "sm_90", 132),
    Device.declared("NVIDIA H20", "sm_90", 78),
    Device.declared("NVIDIA B200", "sm_100", 148),
    Device.declared("NVIDIA H100", "sm_90", 132),
    Device.declared("NVIDIA B300", "sm_103", 148),
    Device.declared("NVIDIA L40", "sm_89", 142),
    Device.cpu(),
    Device.interpreter(),
]
KEYS = {
    "device": ["h200", "h20", "b200"],
    "arch": ["sm_90", "sm_100", "sm_103"],
    "platform": ["cuda", "cpu", "interpreter"],
    "ring": [16, 32],
    "track": [True, False],
    "mode": ["plain", "fancy", "odd"],
    "act": ["f32", "f64"],
}
WHENS = st.fixed_dictionaries(
    {}, optional={key: st.lists(st.sampled_from(values), min_size=1, unique=True) for key, values in KEYS.items()}
).filter(bool)
QUERIES = [
    (device, {**FACTS, "ring": ring, "track": track, "mode": mode, "act": act})
    for device in DEVICES
    for ring in (16, 32, 64)
    for track in (True, False)
    for mode in KEYS["mode"]
    for act in KEYS["act"]
]


def policy_of(whens: list[dict[str, Any]], use: str = "slow.reference") -> Policy:
    table = [*({"when": when, "use": use} for when in whens), {"otherwise": {"use": "slow.reference"}}]
    return parse(json.dumps({"schema": 1, "devices": MORE_SECTIONS, "ops": {"toy": table}}, indent=1))


@settings(deadline=None)
@given(st.lists(WHENS, min_size=1, max_size=6))
def test_lint_finds_exactly_the_rows_that_no_query_reaches(whens: list[dict[str, Any]]) -> None:
    policy = policy_of(whens)
    keys = [problem.place.key for problem in lint(policy, REGISTRY) if problem.severity == "error"]
    table = policy.ops["toy"][:-1]
    winners = {
        next((row.place.key for row in table if row_matches(row, device, facts, table, policy)), None)
        for device, facts in QUERIES
    }
    assert keys == [row.place.key for row in table if row.place.key not in winners]


def row_matches(row: Any, device: Device, facts: Any, table: Any, policy: Policy) -> bool:
    """A second, plain reading of the rules, for `test_lint_finds_exactly_the_rows_that_no_query_reaches`."""
    named = {value for r in table for c in r.when if c.key == "device" for value in c.values}
    same_arch = [s for s in policy.devices.values() if s.id in named and device.arch == s.arch]
    exact = [s for s in same_arch if s.name == device.name] or [s for s in same_arch if s.sms == device.sms]
    section = next((s.id for s in exact or same_arch), None)
    world = {**facts, "device": section, "arch": device.arch_name, "platform": device.platform}
    return all(world[c.key] in c.values for c in row.when)


@settings(deadline=None)
@given(st.lists(WHENS, max_size=5), st.sampled_from(QUERIES), st.integers(0, 300), st.sampled_from(["fast.tiled", "gone.kernel"]))
def test_choose_is_total_and_repeatable(whens: list[dict[str, Any]], query: Any, batch: int, use: str) -> None:
    device, facts = query
    first, second = (choose(policy_of(whens, use), REGISTRY, device, toy, facts, batch) for _ in range(2))
    assert first == second
    assert [name for name, _ in first.considered] == [kernel.name for kernel in REGISTRY.kernels("toy")]
    assert [name for name, reason in first.considered if reason.startswith("chosen")] == [first.variant.kernel.name]
    assert first.variant.kernel.why_not(facts, device, dict(first.variant.config)) is None


@settings(deadline=None)
@given(st.data())
def test_a_damaged_file_is_a_policy_error_and_nothing_else(data: st.DataObject) -> None:
    text = TEXT
    for _ in range(data.draw(st.integers(1, 3))):
        at, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 12))
        insert = data.draw(st.sampled_from(["", " ", "\n", "-", ":", "[", "}", "0", "on", "rest", "null", "&a ", "when: "]))
        text = text[:at] + insert + text[at + length :]
    try:
        policy = parse(text, "p.yaml")
    except PolicyError as refusal:
        assert str(refusal).startswith("p.yaml:")
    else:
        assert all(str(problem).startswith("p.yaml:") for problem in lint(policy, REGISTRY))


def test_a_policy_cannot_be_changed_in_place() -> None:
    policy = parse(TEXT)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.digest = ""  # type: ignore[misc]
    with pytest.raises(TypeError):
        policy.ops["toy"] = ()  # type: ignore[index]
    with pytest.raises(TypeError):
        policy.ops["toy"][0].entries[0].use.config["BV"] = 1  # type: ignore[index]


def test_a_policy_and_a_decision_go_to_another_process_whole() -> None:
    policy = parse(TEXT)
    assert pickle.loads(pickle.dumps(policy)) == policy
    decision = decide(ring=32, track=True)
    assert pickle.loads(pickle.dumps(decision)) == decision
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(policy)).ops["toy"] = ()
