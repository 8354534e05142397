"""Ops and kernels by name. Backends come in through the entry-point group ``kernreg.backends``, ours like everyone's.

Registering imports no kernel code. A target is imported when it is first loaded, and only then its signature is held
against the contract and it is searched for self-tuning kernels.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from importlib.metadata import EntryPoint, entry_points
from types import CodeType, FunctionType, ModuleType
from typing import Any

from kernreg import ops as builtin_ops
from kernreg.contract import Backend, Kernel, Op, RegistrationError
from kernreg.source import kernel_digest, module_digest

GROUP = "kernreg.backends"
LIBRARIES = frozenset({"torch", "triton", "numpy", "kernreg"})  # not searched for self-tuning kernels


class UnknownError(LookupError):
    """A name that the registry does not hold; the message lists what it does hold."""

    def __str__(self) -> str:
        return str(self.args[0])


class Registry:
    """Ops, and the kernels that implement them."""

    def __init__(self) -> None:
        self.ops: dict[str, Op] = {}
        self.backends: dict[str, Backend] = {}
        self._kernels: dict[str, dict[str, Kernel]] = {}
        self._targets: dict[str, Callable[..., Any]] = {}

    def add_op(self, op: Op) -> None:
        """Register a contract; the same one again is fine, another one of that name is refused."""
        self._check_op(op)
        self.ops[op.name] = op

    def _check_op(self, op: Op) -> None:
        held = self.ops.get(op.name, op)
        if held is not op:
            raise RegistrationError(f"op {op.name!r} is defined twice: in {held.__module__} and in {op.__module__}")

    def add(self, backend: Backend) -> None:
        """Register a backend with its kernels, all of them or none.

        Raises:
            RegistrationError: a name is taken by a different row, an op is unknown, or a row contradicts itself.
        """
        held = self.backends.get(backend.name)
        if held is not None and held != backend:
            raise RegistrationError(f"backend {backend.name!r} is registered twice, with different kernels")
        known = self.ops | {op.name: op for op in backend.ops}
        seen: dict[tuple[str, str], Kernel] = {}
        for kernel in backend.kernels:
            self._check_row(backend, kernel, known)
            if seen.setdefault((kernel.op, kernel.name), kernel) != kernel:
                raise RegistrationError(f"backend {backend.name!r} lists {kernel.name} for {kernel.op} twice, differently")
        for op in backend.ops:
            self._check_op(op)
        self.ops |= {op.name: op for op in backend.ops}
        self.backends[backend.name] = backend
        for kernel in seen.values():
            self._kernels.setdefault(kernel.op, {})[kernel.name] = kernel

    @staticmethod
    def _check_row(backend: Backend, kernel: Kernel, ops: dict[str, Op]) -> None:
        where = f"backend {backend.name!r}, kernel {kernel.name!r}"
        if kernel.op not in ops:
            raise RegistrationError(f"{where}: no op {kernel.op!r} (there are {', '.join(sorted(ops))})")
        if kernel.backend != backend.name or not kernel.name.partition(".")[2]:
            raise RegistrationError(f"{where}: the name must read '{backend.name}.<kernel>'")
        if not all(kernel.target.partition(":")[::2]):
            raise RegistrationError(f"{where}: target {kernel.target!r} must read 'module:attribute'")
        if set(kernel.default) != set(kernel.config):
            raise RegistrationError(
                f"{where}: default has {sorted(kernel.default)}, the config's parameters are {sorted(kernel.config)}"
            )
        if error := kernel.config_error(kernel.default):
            raise RegistrationError(f"{where}: default: {error}")

    def op(self, name: str) -> Op:
        """The contract of that name, or UnknownError."""
        if name not in self.ops:
            raise UnknownError(f"no op {name!r} (there are {', '.join(sorted(self.ops))})")
        return self.ops[name]

    def kernels(self, op: str) -> tuple[Kernel, ...]:
        """Kernels of an op in a fixed order: by name."""
        return tuple(kernel for _, kernel in sorted(self._kernels.get(self.op(op).name, {}).items()))

    def kernel(self, op: str, name: str) -> Kernel:
        """The kernel `name` of `op`, or UnknownError."""
        kernels = self._kernels.get(self.op(op).name, {})
        if name not in kernels:
            raise UnknownError(f"{op} has no kernel {name!r} (it has {', '.join(sorted(kernels)) or f'none: {no_backends()}'})")
        return kernels[name]

    def missing(self, kernel: Kernel) -> str | None:
        """Which required module is not installed, as a reason, or None. Imports nothing."""
        for module in self.backends[kernel.backend].requires:
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed"
        return None

    def load(self, kernel: Kernel) -> Callable[..., Any]:
        """Import the kernel's target, once, and hold it against the contract.

        Raises:
            RegistrationError: no such attribute, a signature that differs from the op's, or a self-tuning kernel behind it.
        """
        key = f"{kernel.op}/{kernel.name}"
        if key not in self._targets:
            module, _, attribute = kernel.target.partition(":")
            target = getattr(importlib.import_module(module), attribute, None)
            if not callable(target):
                raise RegistrationError(f"{kernel.name} for {kernel.op}: {kernel.target} names nothing callable")
            check_signature(self.op(kernel.op), kernel, target)
            check_no_autotune(kernel, target)
            self._targets[key] = target
        return self._targets[key]

    def source_digest(self, kernel: Kernel) -> str:
        """Digest of the kernel's code; comments and docstrings do not count."""
        return kernel_digest(kernel)

    @property
    def digest(self) -> str:
        """SHA-256 over all that a choice reads here: contracts, rows, the code of their predicates, what is not installed."""
        total = hashlib.sha256()
        for name, op in sorted(self.ops.items()):
            total.update(op.fingerprint.encode())
            for kernel in self.kernels(name):
                total.update(repr((_row(kernel), self.missing(kernel))).encode())
        return total.hexdigest()


def _row(kernel: Kernel) -> tuple[object, ...]:
    """A kernel's metadata in a form that is the same in every process."""
    config = sorted((name, [repr(v) for v in values]) for name, values in kernel.config.items())
    default = sorted((name, repr(value)) for name, value in kernel.default.items())
    why_not = kernel.why_not
    names = (why_not.__module__, getattr(why_not, "__qualname__", type(why_not).__qualname__))
    return kernel.op, kernel.name, kernel.target, kernel.sources, config, default, names, _predicate_digest(names[0])


def _predicate_digest(module: str) -> str:
    try:
        return module_digest(module)
    except ModuleNotFoundError:
        return "no source"  # typed in at a prompt, or a test's module


def check_signature(op: Op, kernel: Kernel, target: Callable[..., Any]) -> None:
    """The target takes the op's parameters, then keyword-only config and facts; RegistrationError says where it differs."""

    def fail(text: str) -> None:
        raise RegistrationError(f"{kernel.name} for {op.name} ({kernel.target}): {text}")

    wanted, got = op.signature.parameters, inspect.signature(target).parameters
    for name, parameter in wanted.items():
        if name not in got:
            fail(f"argument {name!r} of the op is missing")
        if (got[name].kind, got[name].default) != (parameter.kind, parameter.default):
            fail(f"argument {name!r} reads '{_spell(got[name])}', the op has '{_spell(parameter)}'")
    if list(got)[: len(wanted)] != list(wanted):
        fail(f"arguments come as {', '.join(got)}; the op has {', '.join(wanted)}, in this order")
    for name in list(got)[len(wanted) :]:
        if got[name].kind is not inspect.Parameter.KEYWORD_ONLY:
            fail(f"argument {name!r} is not the op's, so it must be keyword-only")
        if name not in kernel.config and name not in op.facts:
            fail(f"argument {name!r} is neither an argument or fact of the op nor a parameter of the kernel's config")
    for name in kernel.config:
        if name not in got:
            fail(f"the config's parameter {name!r} is not an argument")


def _spell(parameter: inspect.Parameter) -> str:
    return f"{parameter.replace(annotation=inspect.Parameter.empty)} ({parameter.kind.description})"


def check_no_autotune(kernel: Kernel, target: Callable[..., Any]) -> None:
    """Refuse a target that reaches a kernel tuned while it serves: its first calls would run an in-place op many times."""
    for name, value in _reachable(target):
        kind = type(value)
        if kind.__name__ == "Autotuner" and kind.__module__.startswith("triton."):
            raise RegistrationError(
                f"{kernel.name} for {kernel.op} ({kernel.target}): {name} carries @triton.autotune; "
                "list its configs in the kernel's row and let the policy choose"
            )


def _reachable(target: object) -> Iterator[tuple[str, object]]:
    """Everything that a function names, directly or through other functions, kernels and containers, outside of libraries."""
    seen: set[int] = set()
    stack: list[tuple[str, object]] = [(getattr(target, "__name__", "target"), target)]
    while stack:
        name, value = stack.pop()
        if id(value) in seen or _library(value):
            continue
        seen.add(id(value))
        yield name, value
        stack.extend(_inside(name, value))


def _library(value: object) -> bool:
    if not isinstance(value, FunctionType | type | ModuleType):
        return False
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    top = (name or "").partition(".")[0]
    return top in LIBRARIES or top in sys.stdlib_module_names


def _inside(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{name}[..]", item) for item in value)
    elif isinstance(value, type):
        yield from ((f"{name}.{key}", item) for key, item in vars(value).items())
    elif isinstance(value, partial):
        yield from ((name, item) for item in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, FunctionType):
        yield from _named(value)
    else:
        inner = (vars(value).get(attribute) for attribute in ("fn", "__wrapped__") if hasattr(value, "__dict__"))
        yield from ((name, item) for item in inner if callable(item))


def _named(function: FunctionType) -> Iterator[tuple[str, object]]:
    yield from ((getattr(c, "__name__", "a closure"), c) for c in _cells(function))
    if hasattr(function, "__wrapped__"):
        yield function.__name__, function.__wrapped__
    names = set(_names(function.__code__))
    for name in names:
        value = function.__globals__.get(name)
        yield name, value
        if isinstance(value, ModuleType) and not _library(value):
            yield from ((f"{name}.{inner}", vars(value)[inner]) for inner in names if inner in vars(value))


def _cells(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def no_backends() -> str:
    """What to say when nothing is registered."""
    return "no backend is installed; in a checkout run 'pip install -e .' first"


@lru_cache(maxsize=1)
def default() -> Registry:
    """The process's registry: the built-in ops and every installed backend."""
    registry = Registry()
    for name in builtin_ops.__all__:
        registry.add_op(getattr(builtin_ops, name))
    for entry in sorted(entry_points(group=GROUP), key=lambda e: (e.name, e.value)):
        registry.add(_backend(entry))
    return registry


def _backend(entry: EntryPoint) -> Backend:
    try:
        backend = entry.load()
    except Exception as error:
        text = f"entry point {entry.name} = {entry.value} cannot be loaded: {type(error).__name__}: {error}"
        raise RegistrationError(text) from error
    if not isinstance(backend, Backend):
        raise RegistrationError(f"entry point {entry.name} = {entry.value} names {type(backend).__name__}, wanted a Backend")
    if backend.name != entry.name:
        raise RegistrationError(f"entry point {entry.name} = {entry.value} brings a backend named {backend.name!r}")
    return backend
