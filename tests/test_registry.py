"""Registration: one door, conflicts refused, targets held against the contract when they are first imported."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from kernreg import Backend, Kernel, Op, RegistrationError, Registry, Tensor, UnknownError, ops
from kernreg.registry import default
from kernreg.source import text_digest


def row(**changes: Any) -> Kernel:
    return Kernel(**{"op": "gdn_ring_advance", "name": "mine.plain", "target": "fake_backend:plain", **changes})


def with_rows(*rows: Kernel) -> Registry:
    registry = Registry()
    registry.add_op(ops.gdn_ring_advance)
    registry.add(Backend("mine", rows))
    return registry


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], Registry]:
    """Puts a function into an importable module and registers it."""

    def place(function: Callable[..., Any], **changes: Any) -> Registry:
        module = types.ModuleType("fake_backend")
        module.plain = function
        monkeypatch.setitem(sys.modules, "fake_backend", module)
        return with_rows(row(**changes))

    return place


def advance(write_pos, fold, rows, slots, accept, *, ring, margin=None, null_slot=-1): ...


def test_same_row_twice_is_fine_a_different_one_is_refused() -> None:
    registry = with_rows(row(), row())
    registry.add(Backend("mine", (row(), row())))
    with pytest.raises(RegistrationError, match="'mine' is registered twice"):
        registry.add(Backend("mine", (row(target="elsewhere:f"),)))
    with pytest.raises(RegistrationError, match=r"lists mine\.plain for gdn_ring_advance twice"):
        with_rows(row(), row(target="elsewhere:f"))


def replace_name(op: Op) -> Op:
    """Another contract under the same name."""
    return Op(op.function, tensors=op.tensors, dtypes=op.dtypes, mutates=op.mutates, facts=op.facts, batch=op.batch)


def test_a_refused_backend_leaves_nothing_behind() -> None:
    registry = Registry()
    registry.add_op(ops.gdn_ring_advance)
    with pytest.raises(RegistrationError):
        registry.add(Backend("mine", (row(), row(op="no_such_op"))))
    assert registry.kernels("gdn_ring_advance") == ()
    assert registry.backends == {}
    twin = replace_name(ops.gdn_ring_advance)
    with pytest.raises(RegistrationError, match="op 'gdn_ring_advance' is defined twice"):
        registry.add(Backend("mine", (), ops=(ops.gdn_ring_verify, twin)))
    assert set(registry.ops) == {"gdn_ring_advance"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "no_such_op"}, "no op 'no_such_op'"),
        ({"name": "theirs.plain"}, "must read 'mine.<kernel>'"),
        ({"name": "mine"}, "must read 'mine.<kernel>'"),
        ({"target": "fake_backend"}, "must read 'module:attribute'"),
        ({"config": {"BV": (16, 32)}}, r"default has \[\], the config's parameters are \['BV'\]"),
        ({"config": {"BV": (16, 32)}, "default": {"BV": 64}}, "takes BV from 16, 32; got 64"),
    ],
)
def test_rows_that_contradict_themselves_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        with_rows(row(**changes))


def test_unknown_names_list_the_known_ones() -> None:
    registry = with_rows(row())
    with pytest.raises(UnknownError, match=r"no op 'gdn'.*gdn_ring_advance"):
        registry.kernels("gdn")
    with pytest.raises(UnknownError, match=r"no kernel 'mine\.fast' \(it has mine\.plain\)"):
        registry.kernel("gdn_ring_advance", "mine.fast")


def test_registering_imports_nothing_and_loading_imports_once(target: Callable[..., Registry]) -> None:
    with_rows(row(target="a_module_that_does_not_exist:f"))
    registry = target(advance)
    assert registry.load(registry.kernel("gdn_ring_advance", "mine.plain")) is advance


def missing_argument(write_pos, fold, rows, slots, *, ring, margin=None, null_slot=-1): ...
def other_default(write_pos, fold, rows, slots, accept, *, ring, margin=0, null_slot=-1): ...
def other_kind(write_pos, fold, rows, slots, accept, ring, margin=None, null_slot=-1): ...
def other_order(fold, write_pos, rows, slots, accept, *, ring, margin=None, null_slot=-1): ...
def stray_argument(write_pos, fold, rows, slots, accept, *, ring, margin=None, null_slot=-1, BLOCK=1): ...
def with_fact(write_pos, fold, rows, slots, accept, *, ring, margin=None, null_slot=-1, index): ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (missing_argument, "argument 'accept' of the op is missing"),
        (other_default, r"argument 'margin' reads 'margin=0 .*the op has 'margin=None"),
        (other_kind, "argument 'ring' reads"),
        (other_order, "in this order"),
        (stray_argument, "'BLOCK' is neither an argument or fact of the op nor a parameter"),
        (7, "names nothing callable"),
    ],
)
def test_a_target_that_breaks_the_contract_is_refused_at_first_import(
    target: Callable[..., Registry], function: Any, message: str
) -> None:
    registry = target(function)
    with pytest.raises(RegistrationError, match=message):
        registry.load(registry.kernel("gdn_ring_advance", "mine.plain"))


def test_facts_and_config_may_be_asked_for(target: Callable[..., Registry]) -> None:
    registry = target(with_fact)
    assert registry.load(registry.kernel("gdn_ring_advance", "mine.plain")) is with_fact
    registry = target(stray_argument, config={"BLOCK": (1, 2)}, default={"BLOCK": 1})
    assert registry.load(registry.kernel("gdn_ring_advance", "mine.plain")) is stray_argument
    registry = target(advance, config={"BLOCK": (1, 2)}, default={"BLOCK": 1})
    with pytest.raises(RegistrationError, match="'BLOCK' is not an argument"):
        registry.load(registry.kernel("gdn_ring_advance", "mine.plain"))


def test_a_missing_requirement_is_a_reason_and_any_other_import_error_is_raised() -> None:
    registry = Registry()
    registry.add_op(ops.gdn_ring_advance)
    registry.add(Backend("mine", (row(target="broken_module_xyz:f"),), requires=("no_such_module_xyz",)))
    kernel = registry.kernel("gdn_ring_advance", "mine.plain")
    assert registry.missing(kernel) == "no_such_module_xyz is not installed"
    with pytest.raises(ModuleNotFoundError, match="broken_module_xyz"):
        registry.load(kernel)


SELF_TUNED = """
import triton

def advance(write_pos, fold, rows, slots, accept, *, ring, margin=None, null_slot=-1):
    return helper()

def helper():
    return kernel[(1,)]()

@triton.autotune(configs=[triton.Config({"BLOCK": 1}), triton.Config({"BLOCK": 2})], key=[])
@triton.jit
def kernel(BLOCK: triton.language.constexpr):
    pass
"""


HIDDEN = {
    "in a dict": ('KERNELS["any"][(1,)]()', 'KERNELS = {"any": kernel}'),
    "in a class": ("Box.kernel[(1,)]()", "class Box:\n    kernel = kernel"),
    "in a partial": ("launch()", "import functools\nlaunch = functools.partial(print, kernel)"),
    "in a list": ("KERNELS[0][(1,)]()", "KERNELS = [kernel]"),
}


@pytest.mark.parametrize("where", HIDDEN)
def test_d17_a_hidden_kernel_that_tunes_itself_is_refused(tmp_path: Any, monkeypatch: Any, where: str) -> None:
    pytest.importorskip("triton")
    call, more = HIDDEN[where]
    name = "hidden_" + where.replace(" ", "_")
    (tmp_path / f"{name}.py").write_text(SELF_TUNED.replace("kernel[(1,)]()", call) + more + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = with_rows(row(target=f"{name}:advance"))
    with pytest.raises(RegistrationError, match=r"carries @triton\.autotune"):
        registry.load(registry.kernel("gdn_ring_advance", "mine.plain"))


@pytest.mark.parametrize("called", [True, False])
def test_d17_a_kernel_that_tunes_itself_online_is_refused(tmp_path: Any, monkeypatch: Any, called: bool) -> None:
    pytest.importorskip("triton")
    name = f"self_tuned_{called}"
    text = SELF_TUNED if called else SELF_TUNED.replace("return helper()", "return None")
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = with_rows(row(target=f"{name}:advance"))
    kernel = registry.kernel("gdn_ring_advance", "mine.plain")
    if called:
        with pytest.raises(RegistrationError, match=r"mine\.plain.*kernel carries @triton\.autotune"):
            registry.load(kernel)
    else:
        registry.load(kernel)


def test_source_digest_ignores_comments_docstrings_and_layout() -> None:
    text = 'def f(x):\n    """Doc."""\n    return x + 1  # why\n'
    same = "def f(x):\n\n    return (x +\n      1)\n"
    assert text_digest(text) == text_digest(same)
    assert text_digest(text) != text_digest(same.replace("1", "2"))
    assert text_digest("x = 'a'") != text_digest("x = 'b'")


def test_a_whole_backend_comes_in_through_its_entry_point(tmp_path: Any, monkeypatch: Any) -> None:
    """tests/example_backend, with the metadata that installing it would write."""
    source = pathlib.Path(__file__).parent / "example_backend"
    info = tmp_path / "kernreg_example-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernreg-example\nVersion: 1.0\n")
    entries = tomllib.loads((source / "pyproject.toml").read_text())["project"]["entry-points"]["kernreg.backends"]
    (info / "entry_points.txt").write_text("[kernreg.backends]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(source / "src"))
    registry = default.__wrapped__()
    kernel = registry.kernel("gdn_ring_advance", "example.vectorised")
    op = registry.op("gdn_ring_advance")
    reference = registry.load(registry.kernel(op.name, "torch.reference"))
    for case in op.samples.cases:
        checks = op.samples.parity(registry.load(kernel), reference, op.samples.make_inputs(case))
        assert all(check.ok for check in checks), case.id
    assert kernel.why_not({"ring": 128}, None, {}) == "the example serves rings of up to 64"


def test_registry_digest_follows_the_rows() -> None:
    serves_less = with_rows(row(why_not=lambda facts, device, config: "no"))
    assert with_rows(row()).digest != serves_less.digest
    assert with_rows(row()).digest == with_rows(row(), row()).digest
    assert with_rows(row()).digest != with_rows(row(target="elsewhere:f")).digest
    config = {"config": {"BV": (16, 32)}, "default": {"BV": 16}}
    assert with_rows(row(**config)).digest != with_rows(row(**{**config, "default": {"BV": 32}})).digest


def test_import_and_list_need_no_torch() -> None:
    code = "import sys, kernreg.cli, kernreg.registry as r; r.default(); assert not {'torch','triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_checkout_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import kernreg.registry as module

    monkeypatch.setattr(module, "entry_points", lambda group: [])
    registry = module.default.__wrapped__()
    with pytest.raises(UnknownError, match=r"no backend is installed; in a checkout run 'pip install -e \.' first"):
        registry.kernel("gdn_ring_commit", "torch.reference")


@pytest.mark.parametrize("value", ["no_such_module:BACKEND", "os:no_such_name", "os:path"])
def test_a_broken_entry_point_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    import kernreg.registry as module

    monkeypatch.setattr(module, "entry_points", lambda group: [EntryPoint("bad", value, group)])
    with pytest.raises(RegistrationError, match=f"entry point bad = {value}"):
        module.default.__wrapped__()


def test_a_script_may_register_kernels_of_its_own(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "from kernreg import registry\n"
        "from kernreg.contract import Backend, Kernel\n"
        "def serves(facts, device, config): return None\n"
        "r = registry.default()\n"
        "kernel = Kernel(op='gdn_ring_advance', name='mine.k', target='__main__:k', why_not=serves)\n"
        "r.add(Backend('mine', kernels=(kernel,)))\n"
        "print(r.digest, r.source_digest(kernel))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and len(done.stdout.split()) == 2, done.stderr


def test_an_annotation_that_cannot_be_checked_is_refused_with_the_op_and_the_argument() -> None:
    def clear(x: int, factor: list) -> None:  # type: ignore[type-arg]
        ...

    with pytest.raises(RegistrationError, match=r"clear: argument 'factor' is no tensor .* annotated list, wanted int, float"):
        Op(clear, tensors={"x": Tensor.of("B", "f")}, dtypes={"f": ("f32",)}, mutates=(), facts={}, batch="x")


def test_annotations_may_be_evaluated_or_text() -> None:
    def clear(x: object, n: int, flag: bool, scale: float | None = None) -> None: ...

    clear.__annotations__["n"] = int
    found = Op(clear, tensors={"x": Tensor.of("B", "f")}, dtypes={"f": ("f32",)}, mutates=(), facts={}, batch="x").scalars
    assert found == {"n": (int,), "flag": (bool,), "scale": (float, type(None))}
