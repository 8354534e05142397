"""Which variants give the same bits: probe batteries, fingerprints, numerics classes.

A *battery* is a list of probes: inputs of an op at a static key's real dims, from the op's own maker, so the same bytes
everywhere. A variant's *fingerprint* is a digest over all that it writes and returns on the battery. It counts only if every
row's bytes are the same however the rows are arranged in calls: in one batch, again, in another order, alone, among many rows
of padding, and while another stream keeps the GPU busy. Variants with equal fingerprints for all static keys of a policy row
are one *class*: strong evidence that they compute the same function, not proof.

Importing this module imports no torch; `kernreg.probing` does the work.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kernreg.contract import Facts, Op, Variant
from kernreg.registry import Registry

BATCH_VARIANT, RACY = "batch-variant", "racy"


@dataclass(frozen=True)
class Probe:
    """One input of a battery: options of the op's maker, and at least how many rows they are made for."""

    name: str
    rows: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Effort:
    """How much of it is done.

    elements: what a battery writes at least, while a probe needs no more than `most_rows` rows for it.
    repeats: times that one arrangement is run again. alone: rows of each probe that are run one by one.
    crowds: batches that a probe's rows are spread over, the other rows being padding.
    """

    elements: int
    repeats: int
    alone: int
    crowds: tuple[int, ...]
    most_rows: int = 4096


FULL = Effort(elements=1_000_000, repeats=2, alone=8, crowds=(16, 64, 256))
LIGHT = Effort(elements=0, repeats=1, alone=2, crowds=(16,))  # for the CPU: its kernels are references, or interpreted


def usual(device: str) -> Effort:
    """What a fingerprint on this device is made with, unless told otherwise."""
    return FULL if device.startswith("cuda") else LIGHT


@dataclass(frozen=True)
class Fingerprint:
    """bits: 16 hex digits, or else a verdict and its reason.

    verdict: "batch-variant" or "racy". reason: the first row and tensor that differ, and when.
    rows, elements: what was compared. alone: rows that were also run one by one.
    busy: did each probe also run while another stream kept the GPU busy, from its beginning to its end?
    """

    bits: str = ""
    verdict: str = ""
    reason: str = ""
    rows: int = 0
    elements: int = 0
    alone: int = 0
    busy: bool = False

    @property
    def ok(self) -> bool:
        return not self.verdict

    @property
    def coverage(self) -> str:
        """What it rests on, in words."""
        busy = "also beside a busy stream" if self.busy else "not throughout beside a busy stream"
        return f"{self.elements} elements of {self.rows} rows, {self.alone} rows alone, {busy}"

    def __str__(self) -> str:
        return self.bits or f"{self.verdict}: {self.reason}"


def fingerprint(registry: Registry, variant: Variant, facts: Facts, device: str, effort: Effort | None = None) -> Fingerprint:
    """The variant's fingerprint for a static key; facts left out have their defaults.

    Equal for equal bits on one kind of device. A fingerprint made with another `effort` is another fingerprint. What the
    variant raises on a probe is raised.
    """
    from kernreg.dispatch import launcher

    op = registry.op(variant.kernel.op)
    key = op.complete(facts)
    return fingerprint_of(op, launcher(registry, variant, key), key, device, effort)


def fingerprint_of(op: Op, run: Callable[..., Any], facts: Facts, device: str, effort: Effort | None = None) -> Fingerprint:
    """The same for any callable with the op's signature, such as a kernel that is not registered."""
    from kernreg.probing import examine

    key = op.complete(facts)
    return examine(op, run, key, battery(op, key), device, effort or usual(device))


def facts_key(facts: Facts) -> str:
    """One spelling of a static key. Which facts it names is the caller's choice: those that a policy row and its areas name."""
    return json.dumps(dict(facts), sort_keys=True)


def class_id(bits: Mapping[str, str]) -> str:
    """The class of a variant with these fingerprints, by `facts_key`; their order does not matter."""
    return f"k{hashlib.sha256(json.dumps(dict(bits), sort_keys=True).encode()).hexdigest()[:8]}"


def classes(of: Mapping[str, Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    """From each variant's fingerprints (by `facts_key`) to class id -> variant ids; in a fixed order, whatever order is given."""
    found: dict[str, list[str]] = {}
    for variant in sorted(of):
        found.setdefault(class_id(of[variant]), []).append(variant)
    return {name: tuple(found[name]) for name in sorted(found)}


# --- batteries: the options are those of kernreg/ops/*_samples.py


def battery(op: Op, facts: Facts) -> tuple[Probe, ...]:
    """The probes of a static key; the first is given as many rows as the elements need. An op without a battery of its own
    has its maker's default inputs, three times."""
    own = BATTERIES.get(op.name)
    return tuple(own(facts)) if own else tuple(Probe(f"default_{n}", 8) for n in range(3))


# Scales are no powers of two, which would leave every mantissa as it is. LARGE saturates gates and drowns small terms; TINY
# goes below what 16-bit floats hold in full. Slot 0 is live or not, indices are strided or not, a row is out of range.
LARGE: Mapping[str, Any] = {"scale": 90.0, "null": 0, "padding": (1,)}
TINY: Mapping[str, Any] = {"scale": 1.1e-4, "strided": True, "bad": {2: "slot"}}


def _number(facts: Facts, name: str) -> int:
    return int(facts[name])


def _histories(length: int) -> tuple[int, ...]:
    """History lengths at which kernels change what they do: none, a draft, chunks of 8, 16 and 32, all but a few, all."""
    numbers = (4, length, 9, 0, length // 2, 1, length - 1, 8, 17, 3, length - 4, 33, 2)
    return tuple(n for n in numbers if 0 <= n <= length)


def _bases(length: int) -> tuple[int, ...]:
    """Ring positions of the first record: most histories wrap around, some bases are yet to be taken modulo the ring."""
    return (0, length - 3, 5, length - 1, -2, 1, length // 2)


def _gdn_ring_commit(facts: Facts) -> Iterable[Probe]:
    length = _number(facts, "ring")
    history = {"history": _histories(length), "base": _bases(length)}
    wrapped = {"history": length, "base": (length - 3, length // 2)}
    folds = {"fold": (1, 1, 1, 1, 1, 0), "track": "mixed"}
    yield Probe("mixed", 9, {**history, **folds, "padding": (3,), "pool": "padded"})
    yield Probe("cancel", 2, {**wrapped, "layers": 5, "cancel": True, "decay": 0.01})
    yield Probe("large", 4, {**history, **LARGE, "decay": 30.0})
    yield Probe("tiny", 4, {**history, **TINY, "decay": 1e-3})


def _gdn_ring_verify(facts: Facts) -> Iterable[Probe]:
    length = _number(facts, "ring")
    history = {"history": _histories(length), "base": _bases(length)}
    yield Probe("mixed", 9, {**history, "gap": 2, "padding": (5,), "packed_qkv": True, "pool": "padded"})
    yield Probe("cancel", 5, {**history, "history": length, "lengths": "full", "cancel": True, "decay": 0.01})
    yield Probe("large", 5, {**history, **LARGE, "gates": 30.0, "decay": 20.0, "lengths": "full"})
    yield Probe("tiny", 5, {**history, **TINY, "gates": 0.1})


def _gdn_ring_advance(facts: Facts) -> Iterable[Probe]:
    """Every history with every count up to 16: a row is two numbers, and more rows would tell nothing new."""
    length = _number(facts, "ring")
    every = {
        "history": tuple(n for n in range(length + 1) for _ in range(17)),
        "accept": tuple(range(17)) * (length + 1),
    }
    bad = {4: "row", 5: "row_negative", 6: "accept_negative", 7: "overrun"}
    yield Probe("every", (length + 1) * 17, {**every, "padding": (3,), "bad": bad})
    yield Probe("lazy", (length + 1) * 17, {**every, "margin": 4, "null": 0, "padding": (1, 2), "strided": True})


def _kda_chain_verify(facts: Facts) -> Iterable[Probe]:
    window = str(facts["window"])
    ragged, tree = "ragged" in window, "tree" in window
    ring = {"ring": _number(facts, "draft") + 3} if facts["mode"] == "ring" else {}
    memory = {"pool": "padded", "conv": "padded", "packed_gates": True}
    yield Probe("mixed", 8, {**ring, **memory, "padding": (1,), "conv_padding": (4,), "gap": 2 if ragged else 0})
    # the windows of a chain may share memory; those of a tree would overwrite each other
    yield Probe("cancel", 5, {"cancel": True, "lengths": "full", "conv": "dim" if tree else "overlap"})
    yield Probe("large", 5, {**ring, **LARGE, "gates": 30.0, "lengths": "full"})
    yield Probe("tiny", 5, {**TINY, "gates": 0.1, "lower_bound": -2.0})


def _kda_ring_commit(facts: Facts) -> Iterable[Probe]:
    length = _number(facts, "ring")
    accept = {"accept": (length, 1, 0, max(length - 1, 0), length // 2, 2)}
    yield Probe("mixed", 8, {**accept, "layers": 2, "track": "mixed", "padding": (1,), "pool": "padded"})
    yield Probe("cancel", 4, {"accept": length, "cancel": True, "decay": 0.1})
    yield Probe("large", 4, {**accept, **LARGE, "decay": 60.0})
    yield Probe("tiny", 4, {**accept, **TINY, "decay": 1e-3})


def _kda_snapshot_commit(facts: Facts) -> Iterable[Probe]:
    yield Probe("mixed", 8, {"layers": 2, "track": "mixed", "padding": (1,), "pool": "padded"})
    yield Probe("large", 5, {**LARGE, "layers": 2, "pool": "layer_inner"})
    yield Probe("tiny", 5, {**TINY, "pool": "alternate"})


def _conv_window_commit(facts: Facts) -> Iterable[Probe]:
    yield Probe("mixed", 8, {"layers": 2, "track": "mixed", "padding": (1,), "conv": "padded"})
    yield Probe("large", 5, {**LARGE, "layers": 2, "conv": "overlap"})
    yield Probe("tiny", 5, {**TINY, "conv": "alternate"})


BATTERIES: Mapping[str, Callable[[Facts], Iterable[Probe]]] = {
    "gdn_ring_commit": _gdn_ring_commit,
    "gdn_ring_verify": _gdn_ring_verify,
    "gdn_ring_advance": _gdn_ring_advance,
    "kda_chain_verify": _kda_chain_verify,
    "kda_ring_commit": _kda_ring_commit,
    "kda_snapshot_commit": _kda_snapshot_commit,
    "conv_window_commit": _conv_window_commit,
}
