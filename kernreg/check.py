"""The contract of an op held against the arguments of a call, and the static key that they make.

`facts_of` reads every dim and dtype and raises with op, argument, what came and what was wanted. The hot path asks
`kernreg.guard` first, which says the same in less time but not why.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import CodeType
from typing import Any

from kernreg.contract import DTYPES, INDEX, ContractError, Fact, FactValue, Op, Tensor

_NAMES = {f"torch.{torch_name}": name for name, torch_name in DTYPES.items()}


def dtype_name(dtype: object) -> str:
    """``torch.bfloat16`` -> ``"bf16"``; other dtypes keep torch's name."""
    text = str(dtype)
    return _NAMES.get(text, text.removeprefix("torch."))


def facts_of(op: Op, args: Mapping[str, Any]) -> dict[str, FactValue]:
    """The static key of a call.

    Args:
        args: every argument of the op by name, defaults filled in.

    Raises:
        ContractError: the first condition that does not hold.
    """
    _scalars(op, args)
    given = _given(op, args)
    dims = _dims(op, given)
    dtypes = _dtypes(op, given)
    _packed(op, given)
    _one_device(op, given)
    scope = {**args, **dims}
    for name, expression in op.derived.items():
        dims[name] = scope[name] = eval(_compiled(expression), {"__builtins__": {}}, scope)
    for expression in op.where:
        if not _holds(expression, scope):
            raise ContractError(f"{op.name}: {_values(op, expression, scope)}; wanted {expression}")
    return {name: _fact(op, fact, args, dims, dtypes) for name, fact in op.facts.items()}


def check_fact(op: Op, name: str, value: object) -> FactValue:
    """One fact as a key holds it (`heads` may come as a pair); ContractError says what it may be."""
    fact = op.facts[name]
    kind = fact.source.split()[0]
    if kind == "heads" and isinstance(value, tuple):
        value = "/".join(map(str, value))
    if kind == "heads" and not (isinstance(value, str) and re.fullmatch("[1-9][0-9]{0,8}/[1-9][0-9]{0,8}", value)):
        raise ContractError(f"{op.name}: {name} is {value!r}, wanted value heads/key heads, as in 48/16")
    if kind == "dim" and type(value) is int and value < 1:
        raise ContractError(f"{op.name}: {name} is {value}, wanted 1 or more")
    if kind == "index" and not (isinstance(value, str) and set(value.split("+")) <= set(INDEX)):
        raise ContractError(f"{op.name}: {name} is {value!r}, wanted i32, i64, or one for each index tensor as in i32+i64")
    wanted = {"dim": int, "has": bool, "heads": str, "dtype": str, "which": str, "index": str, "layout": str}
    numeric = kind == "arg" and not fact.values
    expected = int if numeric else wanted.get(kind, type(fact.values[0]) if fact.values else str)
    values = fact.values or (op.dtypes[fact.source.split()[1]] if kind == "dtype" else ())
    if type(value) is not expected or (values and value not in values):
        allowed = " or ".join(map(str, values)) or {int: "a whole number", bool: "true or false", str: "a name"}[expected]
        raise ContractError(f"{op.name}: {name} is {value!r}, wanted {allowed}")
    return value  # type: ignore[return-value]


def check_facts(op: Op, facts: Mapping[str, FactValue]) -> None:
    """The conditions of the contract that the static key alone settles; ContractError names the first that fails."""
    given = presence(op, facts)
    known: dict[str, Any] = {**known_dims(op, facts), **declared_values(op, facts)}
    known |= {name: _Given(op, name, facts) if there else None for name, there in given.items() if name in op.tensors}
    known |= {name: _Given(op, name, facts) for name in op.tensors if name not in op.optional}
    for expression in op.where:
        if expression_names(expression) <= {*known, "element_size"} and not _holds(expression, known):
            raise ContractError(f"{op.name}: {_values(op, expression, known)}; wanted {expression}")
    indices = [name for name, spec in op.tensors.items() if spec.dtype == "index" and given.get(name, True)]
    words = str(facts.get("index", "")).split("+")
    if len(words) not in (1, len(indices)):
        raise ContractError(f"{op.name}: index is {facts['index']!r}, wanted one dtype or one for each of {', '.join(indices)}")


class _Given:
    """Stands for a tensor that a static key says is there."""

    shape = ()

    def __init__(self, op: Op, name: str, facts: Mapping[str, FactValue]) -> None:
        group = op.tensors[name].dtype
        named = (str(facts[n]) for n, fact in op.facts.items() if fact.source == f"dtype {group}")
        self.bits = int(next(named, "f32").strip("bfi"))

    def element_size(self) -> int:
        return self.bits // 8


def _scalars(op: Op, args: Mapping[str, Any]) -> None:
    for name, kinds in op.scalars.items():
        value = args[name]
        allowed = (*kinds, int) if float in kinds else kinds  # a whole number will do for a float
        if type(value) not in allowed:
            wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ContractError(f"{op.name}: {name} is {value!r}, wanted {wanted}")


def _given(op: Op, args: Mapping[str, Any]) -> dict[str, Any]:
    for names in op.together:
        if len({args[name] is None for name in names}) > 1:
            absent = [name for name in names if args[name] is None]
            raise ContractError(f"{op.name}: {', '.join(names)} come together or not at all, wanted {', '.join(absent)} too")
    for name in op.tensors:
        if args[name] is None and name not in op.optional:
            raise ContractError(f"{op.name}: {name} is None, wanted a tensor [{' '.join(op.tensors[name].dims)}]")
        if args[name] is not None and not (hasattr(args[name], "shape") and hasattr(args[name], "stride")):
            raise ContractError(f"{op.name}: {name} is a {type(args[name]).__name__}, wanted a tensor")
    return {name: args[name] for name in op.tensors if args[name] is not None}


def _dims(op: Op, given: Mapping[str, Any]) -> dict[str, int]:
    dims: dict[str, int] = {}
    source: dict[str, str] = {}
    for name, tensor in given.items():
        spec, shape = op.tensors[name], tuple(tensor.shape)
        wanted = f"[{' '.join(spec.dims)}]"
        if len(shape) != len(spec.dims):
            raise ContractError(f"{op.name}: {name} has shape {list(shape)}, wanted {wanted}")
        for dim, size in zip(spec.dims, shape, strict=True):
            expected = int(dim) if dim.isdigit() else dims.setdefault(dim, size)
            if size != expected:
                why = f" (as in {source[dim]})" if dim in source else ""
                raise ContractError(f"{op.name}: {name} has shape {list(shape)}, wanted {wanted} with {dim} = {expected}{why}")
            source.setdefault(dim, name)
    return dims


def _dtypes(op: Op, given: Mapping[str, Any]) -> dict[str, str]:
    dtypes: dict[str, str] = {}
    source: dict[str, str] = {}
    for name, tensor in given.items():
        group, got = op.tensors[name].dtype, dtype_name(tensor.dtype)
        allowed = INDEX if group == "index" else op.dtypes[group]
        if got not in allowed:
            raise ContractError(f"{op.name}: {name} is {got}, wanted {' or '.join(allowed)}")
        if group != "index" and dtypes.setdefault(group, got) != got:
            raise ContractError(f"{op.name}: {name} is {got}, wanted {dtypes[group]} as {source[group]} is")
        source.setdefault(group, name)
    return dtypes


def _packed(op: Op, given: Mapping[str, Any]) -> None:
    for name, tensor in given.items():
        dense = op.tensors[name].dense
        if dense and not _is_packed(tensor.shape[-dense:], tensor.stride()[-dense:]):
            dims = " ".join(op.tensors[name].dims[-dense:])
            raise ContractError(f"{op.name}: {name} has strides {list(tensor.stride())}, wanted its last dims [{dims}] packed")


def _is_packed(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _one_device(op: Op, given: Mapping[str, Any]) -> None:
    first, *others = given.items()
    for name, tensor in others:
        if tensor.device != first[1].device:
            raise ContractError(f"{op.name}: {name} is on {tensor.device}, wanted {first[1].device} as {first[0]} is")


def _fact(op: Op, fact: Fact, args: Mapping[str, Any], dims: Mapping[str, int], dtypes: Mapping[str, str]) -> FactValue:
    kind, *words = fact.source.split()
    read: dict[str, Callable[[], FactValue]] = {
        "dim": lambda: dims[words[0]],
        "heads": lambda: f"{dims[words[0]]}/{dims[words[1]]}",
        "dtype": lambda: dtypes[words[0]],
        "has": lambda: args[words[0]] is not None,
        "arg": lambda: _declared(op, fact, words[0], args[words[0]]),
        "which": lambda: next(v for v, names in fact.choices.items() if all(args[n] is not None for n in names)),
        "index": lambda: index_fact(op, args),
        "layout": lambda: "aligned" if _aligned(op, args) else "any",
    }
    return read[kind]()


def _declared(op: Op, fact: Fact, name: str, value: Any) -> FactValue:
    if fact.values and value not in fact.values:
        raise ContractError(f"{op.name}: {name} is {value!r}, wanted {' or '.join(map(str, fact.values))}")
    if not isinstance(value, str | int):
        raise ContractError(f"{op.name}: {name} is {value!r}, wanted a number or a name")
    return value


def index_fact(op: Op, args: Mapping[str, Any]) -> str:
    """The dtypes of the index tensors given: one name where all agree, else each in signature order."""
    names = [dtype_name(args[n].dtype) for n, spec in op.tensors.items() if spec.dtype == "index" and args[n] is not None]
    return names[0] if len(set(names)) == 1 else "+".join(names)


def _aligned(op: Op, args: Mapping[str, Any]) -> bool:
    return all(_tensor_aligned(spec, args[n]) for n, spec in op.tensors.items() if spec.align and args[n] is not None)


def _tensor_aligned(spec: Tensor, tensor: Any) -> bool:
    if tensor.data_ptr() % 16:
        return False
    size, strides, shape = tensor.element_size(), tensor.stride(), tensor.shape
    return all(strides[i] == 1 if dim == spec.unit else shape[i] <= 1 or strides[i] * size % 16 == 0 for i, dim in _free(spec))


def _free(spec: Tensor) -> Iterator[tuple[int, str]]:
    """Positions and names of the dims whose strides are free."""
    return iter(list(enumerate(spec.dims))[: len(spec.dims) - spec.dense])


@cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<contract>", "eval")


def expression_names(expression: str) -> set[str]:
    """The dims and arguments that a condition of a contract speaks of."""
    return set(_compiled(expression).co_names)


def _holds(expression: str, scope: Mapping[str, Any]) -> bool:
    # dims of an absent tensor are not in scope: such an expression guards itself, as "ring_k is None or L >= T"
    try:
        return bool(eval(_compiled(expression), {"__builtins__": {}}, dict(scope)))
    except ZeroDivisionError:
        return False


def _values(op: Op, expression: str, scope: Mapping[str, Any]) -> str:
    names = dict.fromkeys(_compiled(expression).co_names)
    return ", ".join(f"{n}{_owner(op, n)} is {_brief(scope[n])}" for n in names if n in scope)


def _owner(op: Op, dim: str) -> str:
    """Which argument a dim is read from, in words."""
    owner = next((name for name, spec in op.tensors.items() if dim in spec.dims), None)
    return f" (a dim of {owner})" if owner else ""


def _brief(value: Any) -> str:
    return "given" if hasattr(value, "shape") else str(value)


def signature_source(op: Op, defaults: Mapping[str, FactValue]) -> str:
    """The op's parameter list as source, with `defaults` in place of the op's own where given."""
    parts, starred = [], False
    for name, parameter in op.signature.parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        default = defaults.get(name, parameter.default)
        parts.append(name if default is inspect.Parameter.empty else f"{name}={default!r}")
    return ", ".join(parts)


def argument_source(op: Op) -> str:
    """The op's arguments as the source of a call."""
    kinds = op.signature.parameters.items()
    return ", ".join(f"{n}={n}" if p.kind is inspect.Parameter.KEYWORD_ONLY else n for n, p in kinds)


def known_dims(op: Op, facts: Mapping[str, FactValue]) -> dict[str, int]:
    """Sizes of the dims that the static key fixes."""
    dims: dict[str, int] = {}
    for name, fact in op.facts.items():
        kind, *words = fact.source.split()
        if kind == "dim":
            dims[words[0]] = int(facts[name])
        elif kind == "heads":
            dims |= dict(zip(words, map(int, str(facts[name]).split("/")), strict=True))
    return dims


def declared_values(op: Op, facts: Mapping[str, FactValue]) -> dict[str, FactValue]:
    """Arguments that are facts themselves, with the value the key has for them."""
    return {fact.source.split()[1]: facts[name] for name, fact in op.facts.items() if fact.source.startswith("arg ")}


def presence(op: Op, facts: Mapping[str, FactValue]) -> dict[str, bool]:
    """Which optional arguments the key says are given, or not."""
    given: dict[str, bool] = {}
    for name, fact in op.facts.items():
        kind, *words = fact.source.split()
        if kind == "has":
            given[words[0]] = bool(facts[name])
        elif kind == "which":
            chosen = fact.choices[str(facts[name])]
            given |= {argument: argument in chosen for names in fact.choices.values() for argument in names}
    for names in op.together:
        for name in names:
            given |= {other: given[name] for other in names if name in given}
    return given
