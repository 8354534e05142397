"""List the numerics classes of an op: for each static key, every variant that can serve, its fingerprint and its class.

    python tools/classes.py --op kda_chain_verify --facts heads=8/8 draft=4 mode=ring
    python tools/classes.py --op kda_chain_verify --facts heads=8/8,32/32 draft=4,8 --op kda_ring_commit --facts ring=4 heads=8/8

Facts with a default may be left out; values with commas stand for every combination; an op may have several --facts. Several
keys of an op also get the classes of variants that agree on all of them. Variants run in processes of their own, as many as
there are cores, but no more than 16. Exit status: 0, 1 when a variant has no fingerprint (it fails, races, or depends on its
batch), 2 when a name or value on the command line is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernreg import device as devices
from kernreg.cli import UsageError, parse_key
from kernreg.contract import ContractError, FactValue, Op, Variant, format_facts
from kernreg.device import Device
from kernreg.evidence import installed_triton
from kernreg.numerics import class_id, classes, facts_key
from kernreg.registry import Registry, UnknownError
from kernreg.render import show, table
from kernreg.tuning.fingerprints import Found, Task, fingerprints, registry_named
from kernreg.tuning.screen import Failure

Data = dict[str, Any]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="classes.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action=_Key, nargs=1, required=True, metavar="OP", help="an op; the --facts after it are its own")
    parser.add_argument("--facts", action=_Key, nargs="*", metavar="NAME=VALUE", help="a static key, or several with commas")
    parser.add_argument("--kernel", action="append", metavar="NAME", help="only this kernel; may be repeated")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (in Triton's interpreter under TRITON_INTERPRET=1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was found")
    parser.add_argument("--processes", type=int, help="as many as there are cores, but no more than 16, if left out")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one variant, compiling included")
    parser.add_argument("--registry", default="", metavar="MODULE:FUNCTION", help="makes the registry to use")
    return parser.parse_args(argv)


class _Key(argparse.Action):
    """Collects ``keys``: pairs of an op and the words of each of its --facts."""

    def __call__(
        self, parser: argparse.ArgumentParser, space: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        space.keys = getattr(space, "keys", [])
        if option == "--op":
            space.op = values[0]
            space.keys.append((values[0], []))
        elif not space.keys:
            parser.error("--facts comes after the --op that they belong to")
        else:
            space.keys[-1][1].append(values)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    began = time.monotonic()
    try:
        registry = registry_named(args.registry)
        here = device_of(args.device)
        keys = [(registry.op(name), key) for name, groups in args.keys for key in given_keys(registry.op(name), groups or [[]])]
    except (UsageError, ContractError, UnknownError, ValueError) as error:
        print(f"classes.py: {error}", file=sys.stderr)
        return 2
    tasks = [
        Task.of(v, key, args.device, args.registry) for op, key in keys for v in serving(registry, here, op, key, args.kernel)
    ]
    found: dict[tuple[str, str, str], Found] = {}
    for number, (task, value) in enumerate(fingerprints(tasks, args.processes, args.timeout), 1):
        found[task.op, facts_key(task.facts), task.variant] = value
        if sys.stderr.isatty():
            print(f"\r{number} of {len(tasks)}", end="" if number < len(tasks) else "\n", file=sys.stderr)
    data = collect(here, keys, found)
    data |= {"software": software(), "seconds": round(time.monotonic() - began, 1)}
    draw(data)
    if args.json:
        args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 1 if any(isinstance(value, Failure) or not value.ok for value in found.values()) else 0


def device_of(name: str) -> Device:
    if name == "cpu":
        return Device.interpreter() if os.environ.get("TRITON_INTERPRET") == "1" else Device.cpu()
    kind, _, ordinal = name.partition(":")
    here = devices.current(int(ordinal or 0)) if kind == "cuda" else None
    if here is None or here.platform != "cuda":
        raise UsageError(f"device is {name!r}, but no such GPU is visible here")
    return here


def given_keys(op: Op, groups: Sequence[Sequence[str]]) -> Iterator[dict[str, FactValue]]:
    """The static keys that the command line names, each with the facts that it names."""
    for words in groups:
        pairs = [(name, text.split(",")) for name, _, text in (word.partition("=") for word in words)]
        for values in itertools.product(*(choices for _, choices in pairs)):
            given = dict(zip((name for name, _ in pairs), values, strict=True))
            key = parse_key(op, given)
            yield {name: key[name] for name in given}


def serving(
    registry: Registry, here: Device, op: Op, given: Mapping[str, FactValue], only: Sequence[str] | None
) -> Iterator[Variant]:
    """Every variant that says it can serve the key here, in a fixed order."""
    facts = op.complete(given)
    for kernel in registry.kernels(op.name):
        if registry.missing(kernel) or (only and kernel.name not in only):
            continue
        for values in itertools.product(*kernel.config.values()):
            variant = kernel.variant(dict(zip(kernel.config, values, strict=True)))
            if kernel.why_not(facts, here, dict(variant.config)) is None:
                yield variant


def software() -> dict[str, str]:
    from importlib.metadata import version

    return {"torch": version("torch"), "triton": installed_triton() or "not installed"}


def collect(
    here: Device, keys: Sequence[tuple[Op, Mapping[str, FactValue]]], found: Mapping[tuple[str, str, str], Found]
) -> Data:
    ops: dict[str, Data] = {}
    for op, key in keys:
        text = facts_key(key)
        values = {variant: value for (name, facts, variant), value in found.items() if (name, facts) == (op.name, text)}
        bits = {v: value.bits for v, value in sorted(values.items()) if not isinstance(value, Failure) and value.ok}
        data = ops.setdefault(op.name, {"op": op.name, "keys": [], "classes": {}})
        data["keys"].append(
            {
                "facts": dict(key),
                "classes": {name: list(of) for name, of in classes({v: {text: b} for v, b in bits.items()}).items()},
                "variants": [_variant(v, value, text) for v, value in sorted(values.items())],
            }
        )
    for name, data in ops.items():
        data["classes"] = {k: list(of) for k, of in classes(_on_all_keys(name, data["keys"], found)).items()}
    return {"device": here.record, "ops": list(ops.values())}


def _variant(variant: str, value: Found, text: str) -> Data:
    if isinstance(value, Failure) or not value.ok:
        return {"variant": variant, "bits": None, "class": None, "reason": _reason(value), "coverage": None}
    return {
        "variant": variant,
        "bits": value.bits,
        "class": class_id({text: value.bits}),
        "reason": None,
        "coverage": value.coverage,
    }


def _reason(value: Found) -> str:
    return f"{value.step}: {value.reason}" if isinstance(value, Failure) else str(value)


def _on_all_keys(op: str, keys: Sequence[Data], found: Mapping[tuple[str, str, str], Found]) -> dict[str, dict[str, str]]:
    """Fingerprints of the variants that have one for every key."""
    texts = [facts_key(key["facts"]) for key in keys]
    names = dict.fromkeys(variant for name, _, variant in found if name == op)
    whole: dict[str, dict[str, str]] = {}
    for variant in names:
        values = [found.get((op, text, variant)) for text in texts]
        bits = [value.bits for value in values if value is not None and not isinstance(value, Failure) and value.ok]
        if len(bits) == len(texts):
            whole[variant] = dict(zip(texts, bits, strict=True))
    return whole


def draw(data: Data) -> None:
    device, versions = data["device"], data["software"]
    what = f"{device['name']} {device['arch']}".strip()
    for op in data["ops"]:
        for key in op["keys"]:
            drawn = table("variant", "fingerprint", "class")
            for one in sorted(key["variants"], key=lambda v: (str(v["class"]), v["variant"])):
                drawn.add_row(one["variant"], one["bits"] or one["reason"], one["class"] or "-")
            counts = ", ".join(f"{name} {len(of)}" for name, of in key["classes"].items()) or "none"
            title = f"{op['op']} {format_facts(key['facts'].items())} on {what}"
            coverage = next((one["coverage"] for one in key["variants"] if one["coverage"]), "nothing")
            show(title, drawn, f"{len(key['classes'])} classes ({counts}), over {coverage}", "")
        if len(op["keys"]) > 1:
            counts = ", ".join(f"{name} {len(of)}" for name, of in op["classes"].items()) or "none"
            show(f"{op['op']}: {len(op['classes'])} classes over all {len(op['keys'])} keys ({counts})", "")
    show(f"{data['seconds']} s, {', '.join(f'{name} {version}' for name, version in versions.items())}")


if __name__ == "__main__":
    sys.exit(main())
