"""What holds for every op and every registered kernel, whoever wrote them."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

import kernreg
from kernreg import registry
from kernreg.check import check_fact
from kernreg.contract import Kernel, Op
from kernreg.guard import guard_source

REGISTRY = registry.default()
OPS = [REGISTRY.op(name) for name in sorted(REGISTRY.ops)]
KERNELS = [kernel for op in OPS for kernel in REGISTRY.kernels(op.name)]
PACKAGE = pathlib.Path(kernreg.__file__).parent
SPELLING = {"HVK": "HV*K", "B1": "B + 1"}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_docstring_gives_the_shape_of_every_tensor(op: Op) -> None:
    for name, spec in (*op.tensors.items(), *op.returns.items()):
        shape = "[" + ", ".join(SPELLING.get(d, d) for d in spec.dims) + "]"
        assert shape in op.__doc__, f"{name}: {shape}"
        assert re.search(rf"\b{name}\b", op.__doc__), name


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_docstring_names_errors_and_every_argument(op: Op) -> None:
    assert "Raises:" in op.__doc__
    assert "ContractError" in op.__doc__
    for name in op.signature.parameters:
        assert re.search(rf"\b{name}\b", op.__doc__), name


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_contract_is_consistent(op: Op) -> None:
    assert set(op.mutates) <= set(op.tensors)
    assert op.tensors[op.batch].dims == ("B",)
    for name, fact in op.facts.items():
        if fact.default is not None:
            assert check_fact(op, name, fact.default) == fact.default
    grouped = [name for group in op.together for name in group]
    assert set(grouped) <= op.optional


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_op_has_cases_inputs_and_a_parity_check(op: Op) -> None:
    assert op.samples.cases
    for case in op.samples.cases:
        assert "def guard(" in guard_source(op, case.facts, None)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{k.op}-{k.name}")
def test_target_keeps_the_contract(kernel: Kernel) -> None:
    if reason := REGISTRY.missing(kernel):
        pytest.skip(reason)
    assert callable(REGISTRY.load(kernel))
    assert re.fullmatch(r"[0-9a-f]{64}", REGISTRY.source_digest(kernel))
    assert kernel.doc, "a row says in one line what the kernel is"


def _imports(path: pathlib.Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_control_code_knows_no_backend(path: pathlib.Path) -> None:
    assert not {name for name in _imports(path) if name.partition(".")[0] in ("kernreg_torch", "kernreg_triton", "backends")}


@pytest.mark.parametrize("name", ["kernreg_torch", "kernreg_triton"])
def test_backends_import_the_contract_and_themselves_only(name: str) -> None:
    import importlib

    for path in pathlib.Path(importlib.import_module(name).__file__).parent.glob("*.py"):
        ours = {n for n in _imports(path) if n.partition(".")[0] == "kernreg"}
        assert ours <= {"kernreg.contract", "kernreg.device"}, path.name


def test_public_names_are_the_documented_ones() -> None:
    public = {name for name in vars(kernreg) if not name.startswith("_")}
    modules = {name for name in public if type(getattr(kernreg, name)).__name__ == "module"}
    assert public - modules == set(kernreg.__all__) - {"ops", "ranks"}
