"""The contract check of the hot path: straight-line code, generated for one static key from the op's contract.

Reading shapes and strides of a dozen tensors takes longer than the look-up that it guards, so pools, the tensors that an
engine allocates once, are read once: a pool that passed is known again by its identity, address, size and strides. The
tensors of a step, those with a batch or token dim, are read in every call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from kernreg.check import declared_values, expression_names, known_dims, presence, signature_source
from kernreg.contract import DTYPES, FactValue, Op, Tensor

STEP_DIMS = frozenset({"B", "B1", "N"})
REMEMBERED = 512  # sets of pools, say one for each layer


def guard(op: Op, facts: Mapping[str, FactValue], ordinal: int | None) -> Callable[..., bool]:
    """A function of the op's arguments: True only if they keep the contract and have exactly this static key.

    It reads no tensor data. False means "ask `facts_of`": strides of dims of size 1 may be anything, and are not looked at here.

    Args:
        ordinal: number of the CUDA device that all tensors must be on (-1 for the CPU), None for any one CUDA device.
    """
    source = guard_source(op, facts, ordinal)
    scope: dict[str, Any] = {"_seen": {}, "_ref": weakref.ref}
    if "_torch" in source:
        import torch

        scope["_torch"] = torch
    exec(compile(source, f"<guard of {op.name}>", "exec"), scope)
    function: Callable[..., bool] = scope["guard"]
    return function


def guard_source(op: Op, facts: Mapping[str, FactValue], ordinal: int | None) -> str:
    """Source of `guard`, and of `pools`, which reads the pools; sizes that the key fixes are literals."""
    writer = _Writer(op, facts, "not {}.is_cpu" if ordinal == -1 else "{}.get_device() != device")
    pools = writer.pools
    body = [f"if {name} is {'None' if present else 'not None'}: return False" for name, present in writer.given.items()]
    body += [f"if {name} != {value!r}: return False" for name, value in declared_values(op, facts).items()]
    body += [f"if {_wrong_type(name, kinds)}: return False" for name, kinds in op.scalars.items()]
    body += [f"device = {f'{next(iter(op.tensors))}.get_device()' if ordinal is None else ordinal}"]
    body += ["if device < 0: return False"] if ordinal is None else []
    read = [line for name in pools for line in writer.check(name)]
    free = ", ".join(dict.fromkeys(dim for name in pools for dim in op.tensors[name].dims if dim in writer.bound))
    body += _recognise(pools, free) if pools else []
    body += [line for name in writer.steps for line in writer.check(name)]
    body.append(f"return not bits & 15 and bool({writer.conditions()})")
    known = [f"{dim} = {size}" for dim, size in writer.known.items()]
    return "\n".join(
        [
            *_function(
                f"pools({', '.join(['device', *pools])})",
                [*known, "bits = 0", *read, f"return None if bits & 15 else ({f'{free},' if free else ''})"],
            ),
            *_function(f"guard({signature_source(op, {})})", [*known, "bits = 0", *body]),
        ]
    )


def _wrong_type(name: str, kinds: tuple[type, ...]) -> str:
    named = [f"type({name}) is not {kind.__name__}" for kind in kinds if kind is not type(None)]
    return " and ".join(([f"{name} is not None"] if type(None) in kinds else []) + named)


def _function(signature: str, body: list[str]) -> list[str]:
    inner = [f"        {line}" for line in body]
    # a missing attribute, a wrong number of dims or an absent tensor's dim all mean: not this key
    caught = "    except (AttributeError, TypeError, ValueError, NameError, ZeroDivisionError): return False"
    return [f"def {signature}:", "    try:", *inner, caught]


def _recognise(pools: list[str], free: str) -> list[str]:
    """Statements that read the pools unless they are known, and bind their free dims either way."""
    traits = ("data_ptr", "numel", "stride")
    same = [
        " or ".join([f"e[{4 * i}]() is not {n}", *(f"e[{4 * i + k}] != {n}.{t}()" for k, t in enumerate(traits, 1))])
        for i, n in enumerate(pools)
    ]
    entry = ", ".join(f"_ref({name}), " + ", ".join(f"{name}.{trait}()" for trait in traits) for name in pools)
    return [
        f"e = _seen.get(id({pools[0]}))",
        f"if e is None or e[-1] != device or {' or '.join(same)}:",
        f"    dims = pools(device, {', '.join(pools)})",
        "    if not isinstance(dims, tuple): return False",
        f"    if len(_seen) >= {REMEMBERED}: _seen.clear()",
        f"    e = _seen[id({pools[0]})] = ({entry}, dims, device)",
        *([f"{free}, = e[-2]"] if free else []),
    ]


class _Writer:
    """Writes the checks of one tensor after the other, and knows which dims are bound by then."""

    def __init__(self, op: Op, facts: Mapping[str, FactValue], elsewhere: str) -> None:
        self.op = op
        self.known = known_dims(op, facts)
        self.given = presence(op, facts)
        self.tensors = [name for name in op.tensors if self.given.get(name, True)]
        self.certain = [name for name in self.tensors if name in self.given or name not in op.optional]
        self.pools = [name for name in self.certain if not STEP_DIMS & set(op.tensors[name].dims)]
        self.steps = [name for name in self.tensors if name not in self.pools]
        self.dtypes = _dtype_tests(op, facts, [*self.pools, *self.steps])
        self.elsewhere = elsewhere
        self.aligned = facts.get("layout") == "aligned"
        self.bound: dict[str, str] = {}

    def check(self, name: str) -> list[str]:
        lines = self._tensor(name, self.op.tensors[name])
        return lines if name in self.certain else [f"if {name} is not None:", *("    " + line for line in lines)]

    def _tensor(self, name: str, spec: Tensor) -> list[str]:
        lines, tests = self._shape(name, spec)
        tests += [f"{name}.dtype {self.dtypes[name]}", self.elsewhere.format(name)]
        free = len(spec.dims) - spec.dense
        if free == 0:
            tests.append(f"not {name}.is_contiguous()")
        elif spec.dense or (self.aligned and spec.align):
            lines.append(f"s = {name}.stride()")
            tests += [f"s[{i}] != {self._product(spec.dims[i + 1 :])}" for i in range(free, len(spec.dims))]
        if self.aligned and spec.align:
            tests += [f"s[{i}] != 1" for i in range(free) if spec.dims[i] == spec.unit]
            strides = [f"s[{i}]" for i in range(free) if spec.dims[i] != spec.unit]
            lines.append(f"bits |= {name}.data_ptr()" + (f" | ({' | '.join(strides)}) * {name}.itemsize" if strides else ""))
        return [*lines, f"if {' or '.join(tests)}: return False"]

    def _shape(self, name: str, spec: Tensor) -> tuple[list[str], list[str]]:
        fresh = [not dim.isdigit() and dim not in self.known and dim not in self.bound for dim in spec.dims]
        self.bound |= {dim: dim for dim, new in zip(spec.dims, fresh, strict=True) if new}
        targets = [dim if new else f"d{i}" for i, (dim, new) in enumerate(zip(spec.dims, fresh, strict=True))]
        tests = [f"{t} != {self.known.get(d, d)}" for t, d, new in zip(targets, spec.dims, fresh, strict=True) if not new]
        if len(spec.dims) == 1:  # a vector's length is cheaper to read than its shape
            return [f"{targets[0]} = {name}.numel()"], [f"{name}.ndim != 1", *tests]
        return [f"{', '.join(targets)} = {name}.shape"], tests

    def _product(self, dims: tuple[str, ...]) -> str:
        return "*".join(str(self.known.get(dim, dim)) for dim in dims) or "1"

    def conditions(self) -> str:
        """The contract's conditions that the key does not settle."""
        open_ = [f"({e})" for e in self.op.where if not expression_names(e) <= set(self.known)]
        derived = [f"({n} := {e}) is not None" for n, e in self.op.derived.items() if n not in self.known]
        return " and ".join([*derived, *open_]) or "True"


def _dtype_tests(op: Op, facts: Mapping[str, FactValue], names: list[str]) -> dict[str, str]:
    """For each tensor the rest of a test on its dtype; a group that the key does not name must agree among itself."""
    groups = {n: fact.source.split()[1] for n, fact in op.facts.items() if fact.source.startswith("dtype ")}
    fixed = {group: allowed[0] for group, allowed in op.dtypes.items() if len(allowed) == 1}
    fixed |= {group: str(facts[name]) for name, group in groups.items()}
    index = str(facts.get("index", "")).split("+")
    leaders: dict[str, str] = {}
    tests: dict[str, str] = {}
    for name in names:
        group = op.tensors[name].dtype
        if group == "index":
            tests[name] = f"is not _torch.{DTYPES[index[0] if len(index) == 1 else index.pop(0)]}"
        elif group in fixed:
            tests[name] = f"is not _torch.{DTYPES[fixed[group]]}"
        elif group in leaders:
            tests[name] = f"is not {leaders[group]}.dtype"
        else:
            leaders[group] = name
            tests[name] = f"not in ({', '.join(f'_torch.{DTYPES[d]}' for d in op.dtypes[group])},)"
    return tests
