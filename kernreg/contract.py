"""The words of kernreg as data: op, kernel, variant, backend. Imports no torch and no backend.

An *op* is a contract: a documented signature, the dims and dtypes of its tensors, what it mutates, and the static facts
that a kernel may be chosen by. A *kernel* is one implementation of an op, described by metadata only. A *variant* is a
kernel with one launch config. A *backend* is a package that ships kernels.
"""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from kernreg.device import Device

FactValue: TypeAlias = "str | int | bool"
Facts: TypeAlias = Mapping[str, "str | int | bool"]
Config: TypeAlias = Mapping[str, "str | int | bool"]
WhyNot: TypeAlias = "Callable[[Facts, Device, Config], str | None]"

# Names of dtypes in keys, files and messages, and the attribute of torch that each stands for.
DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "bf16": "bfloat16",
        "f16": "float16",
        "f32": "float32",
        "f64": "float64",
        "i8": "int8",
        "i32": "int32",
        "i64": "int64",
    }
)
INDEX = ("i32", "i64")


def _read_only(found: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(found)


# Python pickles no read-only mappings, and policies and decisions, which hold them, go from process to process.
copyreg.pickle(MappingProxyType, lambda mapping: (_read_only, (dict(mapping),)))


class ContractError(ValueError):
    """An argument breaks the contract of its op; the message has op, argument, what came and what was wanted."""


class RegistrationError(ValueError):
    """A backend offers something that contradicts the contract or another backend; the message names the culprit."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor argument: dim names, dtype and layout.

    dims: names separated by blanks, e.g. ``"NL S HV V K"``; a number stands for itself.
    dtype: a name from the op's `dtypes`, or "index" for int32/int64 of any stride.
    dense: how many trailing dims must be packed (contiguous among themselves); the others may have any stride.
    unit: for a tensor of any strides, the dim whose stride is 1 under the fact ``layout=aligned``.
    align: does it count for that fact? Then its address and free strides are multiples of 16 bytes. False for tensors of
        scalars, which no kernel loads in vectors; index tensors never count.
    """

    dims: tuple[str, ...]
    dtype: str
    dense: int = 0
    unit: str = ""
    align: bool = True

    @staticmethod
    def of(dims: str, dtype: str, dense: int = 0, unit: str = "", align: bool = True) -> Tensor:
        return Tensor(tuple(dims.split()), dtype, dense, unit, align and dtype != "index")


@dataclass(frozen=True, slots=True)
class Fact:
    """One field of the static key and where its value comes from.

    source: ``"dim L"``, ``"heads HV H"``, ``"dtype state"``, ``"has NAME"`` (is that optional argument given?),
        ``"arg NAME"`` (the argument's own value), ``"which x=NAME y=NAME+NAME z="`` (the first whose arguments are all
        given; none need be for an empty name), ``"index"`` (dtype of the index tensors given: "i32", "i64", or each in the
        order of the signature, as "i32+i64+i32") or ``"layout"`` ("aligned" or "any", see `Tensor`).
    default: the value `bind` assumes; None means that it must be given.
    values: what it may be; empty means any value of the source's type.
    """

    source: str
    default: FactValue | None = None
    values: tuple[FactValue, ...] = ()
    doc: str = ""

    @property
    def choices(self) -> dict[str, tuple[str, ...]]:
        """Of a ``which`` source: each value in order, and the arguments that must be given for it; of any other, nothing."""
        kind, *words = self.source.split()
        split = (word.partition("=") for word in words if kind == "which")
        return {value: tuple(filter(None, names.split("+"))) for value, _, names in split}


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison of a parity check: `worst` is the largest error divided by what is allowed; 1 or less passes."""

    name: str
    worst: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.worst <= 1.0


@dataclass(frozen=True)
class Case:
    """One small input of an op for parity, probes and benchmarks: facts of the key, a batch and options of the input maker."""

    id: str
    facts: Facts
    batch: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Samples:
    """What an op offers beside its contract: cases, the maker of their inputs, and the parity check with its tolerance.

    cases: small, readable cases that together cover the contract; facts left out have their defaults.
    make_inputs: (case, device, seed) -> keyword arguments of the op; the same bytes everywhere.
    parity: (run, reference, inputs) -> checks; `run` and `reference` are callables with the op's signature and are given
        copies, so `inputs` stays as it was.
    """

    cases: tuple[Case, ...]
    make_inputs: Callable[..., dict[str, Any]]
    parity: Callable[..., list[Check]]


class Op:
    """A contract. Calling it dispatches: key from the arguments, variant from the policy, launch."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        tensors: Mapping[str, Tensor],
        dtypes: Mapping[str, tuple[str, ...]],
        mutates: tuple[str, ...],
        facts: Mapping[str, Fact],
        batch: str,
        returns: Mapping[str, Tensor] | None = None,
        derived: Mapping[str, str] | None = None,
        where: tuple[str, ...] = (),
        together: tuple[tuple[str, ...], ...] = (),
        validate: Callable[[Mapping[str, Any]], None] | None = None,
        samples: str = "",
    ) -> None:
        self.function = function
        self.name = function.__name__
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__
        self.signature = inspect.signature(function)
        self.__signature__ = self.signature
        self.tensors = MappingProxyType(dict(tensors))
        self.dtypes = MappingProxyType(dict(dtypes))
        self.mutates = mutates
        self.facts = MappingProxyType(dict(facts))
        self.batch = batch
        self.returns = MappingProxyType(dict(returns or {}))
        self.derived = MappingProxyType(dict(derived or {}))
        self.where = where
        self.together = together
        self.validate = validate
        self._samples = samples
        self._call: Callable[..., Any] | None = None
        self._check_itself()

    def _check_itself(self) -> None:
        parameters = self.signature.parameters
        for name in (*self.tensors, *self.mutates, self.batch):
            if name not in parameters:
                raise RegistrationError(f"{self.name}: {name!r} is not an argument of the op")
        _ = self.scalars  # an annotation that nobody can check is found here, not in the first call
        for name, spec in (*self.tensors.items(), *self.returns.items()):
            if spec.dtype != "index" and spec.dtype not in self.dtypes:
                raise RegistrationError(f"{self.name}: tensor {name!r} names the unknown dtype {spec.dtype!r}")

    @cached_property
    def fingerprint(self) -> str:
        """The contract as text: two processes with the same one agree on keys and checks."""
        parts = (self.tensors, self.dtypes, self.facts, self.returns, self.derived)
        rest = (self.mutates, self.batch, self.where, self.together)
        return f"{self.name}{self.signature} {[dict(part) for part in parts]} {rest}"

    @cached_property
    def scalars(self) -> dict[str, tuple[type, ...]]:
        """Arguments that are no tensors, with the types that their annotations allow."""
        parameters = self.signature.parameters
        return {name: self._scalar_types(name, p.annotation) for name, p in parameters.items() if name not in self.tensors}

    def _scalar_types(self, name: str, annotation: Any) -> tuple[type, ...]:
        kinds = {"int": int, "float": float, "bool": bool, "str": str, "None": type(None)}
        text = annotation.__name__ if isinstance(annotation, type) else str(annotation)  # as text, or evaluated
        words = [word.strip() for word in text.split("|")]
        if unknown := [word for word in words if word not in kinds]:
            raise RegistrationError(
                f"{self.name}: argument {name!r} is no tensor of the contract and is annotated {' | '.join(unknown)}, "
                f"wanted {', '.join(kinds)} or several of them"
            )
        return tuple(kinds[word] for word in words)

    @cached_property
    def optional(self) -> frozenset[str]:
        """Tensor arguments that may be None."""
        return frozenset(n for n in self.tensors if self.signature.parameters[n].default is None)

    @cached_property
    def samples(self) -> Samples:
        """Cases, input maker and parity check; imports torch."""
        import importlib

        module, _, attribute = self._samples.partition(":")
        samples: Samples = getattr(importlib.import_module(module), attribute)
        return replace(samples, cases=tuple(replace(case, facts=self.complete(case.facts)) for case in samples.cases))

    def complete(self, facts: Facts) -> dict[str, FactValue]:
        """The whole static key, in the contract's order: what is not given has its default.

        Raises:
            ContractError: a fact that the op does not have, or one without default that is not given.
        """
        if unknown := sorted(set(facts) - set(self.facts)):
            known = ", ".join(self.facts)
            raise ContractError(f"{self.name}: no fact {', '.join(unknown)} in its static key (there are {known})")
        key: dict[str, FactValue] = {}
        for name, fact in self.facts.items():
            value = facts.get(name, fact.default)
            if value is None:
                raise ContractError(f"{self.name}: the static key needs {name}{f' ({fact.doc})' if fact.doc else ''}")
            key[name] = value
        return key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._call is None:
            from kernreg.dispatch import unbound

            self._call = unbound(self)
        return self._call(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<op {self.name}>"


def op(**contract: Any) -> Callable[[Callable[..., Any]], Op]:
    """Decorator: the function's signature and docstring become an `Op` with the given contract (see `Op`)."""
    return lambda function: Op(function, **contract)


def _always(facts: Facts, device: Device, config: Config) -> str | None:
    return None


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op, as metadata: nothing heavy is imported until it is chosen.

    op: the op's name.
    name: ``"<backend>.<kernel>"``, e.g. ``"triton.per_head"``.
    target: ``"module:attribute"`` of a callable with the op's signature plus keyword-only arguments: the config's parameters,
        and any facts of the static key that the launcher asks for by name (e.g. ``layout``).
    config: each launch parameter and the values it may take.
    default: one value for each parameter of `config`.
    why_not: (facts, device, config) -> None when the kernel can serve them, else the reason. Pure; imports nothing heavy.
    sources: further modules whose code decides the kernel's bits (shared steps); the target's own is always among them.
    capturable: may it run while a CUDA graph is captured? False for one that reads values back to the host.
    doc: one line for `kernreg list`.
    """

    op: str
    name: str
    target: str
    config: Mapping[str, tuple[FactValue, ...]] = field(default_factory=dict)
    default: Config = field(default_factory=dict)
    why_not: WhyNot = _always
    sources: tuple[str, ...] = ()
    capturable: bool = True
    doc: str = ""

    @property
    def backend(self) -> str:
        return self.name.partition(".")[0]

    def variant(self, config: Config | None = None) -> Variant:
        """The kernel with `config` over its default."""
        merged = {**self.default, **(config or {})}
        return Variant(self, tuple((name, merged[name]) for name in self.config))

    def config_error(self, config: Config) -> str | None:
        """Why `config` is not one of this kernel's, or None."""
        for name, value in config.items():
            if name not in self.config:
                return f"{self.name} has no launch parameter {name!r} (it has {', '.join(self.config) or 'none'})"
            # bool is an int in Python: 1 must not pass for True
            if not any(value == v and type(value) is type(v) for v in self.config[name]):
                allowed = ", ".join(map(str, self.config[name]))
                return f"{self.name} takes {name} from {allowed}; got {value!r}"
        return None


def variant_id(kernel: str, config: Config) -> str:
    """How a variant is spelled in files, logs and messages: ``triton.per_head[BV=32,num_warps=4]``."""
    return kernel + (f"[{','.join(f'{k}={v}' for k, v in config.items())}]" if config else "")


@dataclass(frozen=True)
class Variant:
    """A kernel with one launch config."""

    kernel: Kernel
    config: tuple[tuple[str, FactValue], ...] = ()

    @property
    def id(self) -> str:
        """``triton.per_head[BV=32,num_warps=4]``."""
        return variant_id(self.kernel.name, dict(self.config))

    def __repr__(self) -> str:
        return f"<variant {self.id}>"


@dataclass(frozen=True)
class Backend:
    """What an entry point of the group ``kernreg.backends`` names: a name, its kernels, and what they need to import.

    requires: top-level modules without which the kernels cannot run; a missing one is a reason, not an error.
    ops: contracts that the backend brings along; most bring none.
    """

    name: str
    kernels: tuple[Kernel, ...]
    requires: tuple[str, ...] = ()
    ops: tuple[Op, ...] = ()


def format_facts(facts: Iterable[tuple[str, object]]) -> str:
    """``ring=16 heads=48/16 low=yes``: one spelling of a key for messages, logs and tables."""
    return " ".join(f"{k}={_format(v)}" for k, v in facts)


def _format(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
