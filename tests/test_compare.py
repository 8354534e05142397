"""tools/compare.py without a GPU: what it compares; and, where SGLang is installed, that its kernels get the right arguments."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import pytest
import torch

from kernreg import registry
from kernreg.contract import Case
from kernreg.device import Device

TOOLS = pathlib.Path(__file__).parent.parent / "tools"
if not TOOLS.exists():
    pytest.skip("the tools are not installed with the package", allow_module_level=True)
sys.path.insert(0, str(TOOLS))
import compare  # noqa: E402
import public_kernels  # noqa: E402

SMALL = {"k_dim": 64, "v_dim": 64}
GDN = {"ring": 16, "heads": "2/1", "state": "f32", "ring_dtype": "f16", **SMALL}
KDA = {"draft": 3, "heads": "2/1", "act": "f16", "weight": "f16", **SMALL}
# op, facts, options, checks that the public kernel is held to; its convolution rounds another way now and then
MAPPED: tuple[tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]], ...] = (
    ("gdn_ring_commit", {**GDN, "track": True}, {"poison": None}, ("state[0]", "cursors and all else exact")),
    (
        "gdn_ring_verify",
        {**GDN, "draft": 3, "act": "f16"},
        {"poison": None},
        ("o", "ring_u", "ring_k", "ring_g", "all else exact"),
    ),
    ("gdn_ring_advance", {"ring": 16}, {}, ("all exact",)),
    ("kda_chain_verify", KDA, {}, ("o", "ring_g", "ring_beta", "windows and all else exact")),
    ("kda_chain_verify", {**KDA, "mode": "snapshot", "gate": "softplus"}, {}, ("o", "snapshot", "windows and all else exact")),
)


@pytest.mark.parametrize(("op", "facts", "options", "held"), MAPPED)
def test_the_public_kernel_does_what_the_op_says(
    op: str, facts: dict[str, Any], options: dict[str, Any], held: tuple[str, ...], device: str
) -> None:
    if reason := public_kernels.available():
        pytest.skip(reason)
    registered = registry.default()
    contract = registered.op(op)
    public = list(public_kernels.variants(op).values())[-1]
    reference = registered.load(registered.kernel(op, "torch.reference"))
    inputs = contract.samples.make_inputs(Case("small", contract.complete(facts), 2, options), device=device)
    worst = {check.name.partition(" of ")[0]: check.worst for check in contract.samples.parity(public, reference, inputs)}
    assert {name: worst[name] for name in held if worst[name] > 1.0} == {}


@pytest.mark.parametrize("section", compare.SECTIONS)
def test_sections_hold_different_cells_that_fit(section: str) -> None:
    cells = list(compare.SECTIONS[section]())
    places = [(cell.op, *cell.facts.items(), cell.batch, *cell.load.items()) for cell in cells]
    assert len(set(places)) == len(places) > 10
    assert all(cell.work * cell.copies < 120e9 for cell in cells)


def test_it_says_what_it_lacks(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    lacks_gpu = not torch.cuda.is_available()
    if not lacks_gpu and public_kernels.available() is None:
        pytest.skip("this machine has all of it")
    with pytest.raises(SystemExit):
        compare.main(["--output", str(tmp_path / "x.jsonl")])
    assert ("needs a GPU" if lacks_gpu else "SGLang") in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_lines_of_sections_that_are_not_run_stay(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "x.jsonl"
    assert compare.lines_of_others(file, ("kda",)) == []
    file.write_text("".join(f'{{"section": "{name}"}}\n' for name in ("copy", "kda", "gdn", "kda")))
    assert compare.lines_of_others(file, ("copy", "kda")) == ['{"section": "gdn"}\n']


def test_a_run_that_ends_late_but_whole_was_not_stopped() -> None:
    run = compare.Comparison(Device.cpu(), None, limit=0.0, software={}, command="")
    assert not run.stopped
    assert run.late() and run.stopped


def test_a_line_reads_as_a_comparison() -> None:
    line = {"op": "gdn_ring_commit", "facts": {"ring": 16}, "batch": 1, "load": {"history": 4}, "us": [9.0, 10.0, 11.0]}
    line |= {
        "limit_us": 9.0,
        "public": "public",
        "public_us": [14.0, 15.0, 16.0],
        "variants": {"gdn_ring_commit": "triton.sequential[BV=64]"},
    }
    text = "gdn_ring_commit ring=16 batch=1 history=4: 10.00 us, 90% of the limit 9.00, public 15.00 (public), 1.50x; "
    assert compare._row(line) == text + "triton.sequential[BV=64]"


def test_every_key_of_a_run_is_compiled_first() -> None:
    keys = {(op, tuple(facts.items())) for op, facts in compare.keys_of(("kda", "errors", "step"))}
    wanted = {(cell.op, tuple(cell.facts.items())) for name in ("kda", "gdn") for cell in compare.SECTIONS[name]()}
    wanted |= {(op, tuple(case.facts.items())) for op, case in compare.error_cases()}
    assert keys == wanted and len(keys) > 20
