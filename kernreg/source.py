"""What a kernel's source says, without importing it: a digest that ignores comments, docstrings and layout."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from functools import cache
from pathlib import Path

from kernreg.contract import Kernel


def kernel_digest(kernel: Kernel) -> str:
    """SHA-256 over the code of the target's module and of `kernel.sources`, the same on every Python version."""
    total = hashlib.sha256()
    for module in sorted({kernel.target.partition(":")[0], *kernel.sources}):
        total.update(f"{module}\n{module_digest(module)}\n".encode())
    return total.hexdigest()


@cache
def module_digest(module: str) -> str:
    """SHA-256 of one module's code; its parent packages are imported, the module itself is not.

    Raises:
        ModuleNotFoundError: no such module, or it has no Python source.
    """
    origin = _origin(module)
    if not origin or not origin.endswith(".py"):
        raise ModuleNotFoundError(f"no Python source for module {module!r}", name=module)
    return text_digest(Path(origin).read_text(encoding="utf-8"))


def _origin(module: str) -> str | None:
    if module == "__main__":  # a script has a file but no spec; an interactive session has neither
        path: str | None = getattr(sys.modules[module], "__file__", None)
        return path
    spec = importlib.util.find_spec(module)
    return spec.origin if spec else None


def text_digest(text: str) -> str:
    """SHA-256 of Python source as its syntax tree, docstrings left out."""
    return hashlib.sha256(_dump(_without_docstrings(ast.parse(text))).encode()).hexdigest()


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                del node.body[0]
    return tree


def _dump(node: object) -> str:
    # ast.dump spells empty and absent fields differently from one Python version to the next; here both are left out
    if isinstance(node, ast.AST):
        fields = ((name, getattr(node, name, None)) for name in node._fields if name not in ("ctx", "kind", "type_comment"))
        inner = ",".join(f"{name}={_dump(value)}" for name, value in fields if value is not None and value != [])
        return f"{type(node).__name__}({inner})"
    if isinstance(node, list):
        return "[" + ",".join(_dump(item) for item in node) + "]"
    return repr(node)
