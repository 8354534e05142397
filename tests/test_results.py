"""`kernreg check` says when a comparison is older than the kernels."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest
from typer.testing import CliRunner

from kernreg import registry, results
from kernreg.cli import app
from kernreg.dispatch import shipped_policy
from kernreg.evidence import installed_source

KNOWN = registry.default()
DIGEST = installed_source(KNOWN, "gdn_ring_advance", "torch.reference")


def line(digest: str, kernel: str = "torch.reference", op: str = "gdn_ring_advance") -> str:
    return json.dumps({"section": "gdn", "variants": {op: kernel}, "digests": {op: digest}}) + "\n"


def test_only_changed_kernels_are_named(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "x.compare.jsonl"
    file.write_text(line(DIGEST) + '{"section": "copy"}\n' + line("0" * 16) * 2 + line("1" * 16, "triton.gone[BV=8]"))
    first, second = results.outdated(file, KNOWN)
    assert (first.kernel, first.measured, first.installed, first.lines) == ("torch.reference", "0" * 16, DIGEST, 2)
    assert (second.kernel, second.installed) == ("triton.gone", "no source")
    assert str(first).startswith(
        f"{file}: 2 results are of torch.reference (gdn_ring_advance) as 0000000000000000, installed is "
    )


@pytest.mark.parametrize("bad", ["{", '{"digests": {"op": "1"}}\n', "[]\n"])
def test_a_damaged_file_is_named_with_its_line(tmp_path: pathlib.Path, bad: str) -> None:
    file = tmp_path / "x.compare.jsonl"
    file.write_text(line(DIGEST) + bad)
    with pytest.raises(ValueError, match=r"x.compare.jsonl, line 2: not a line of a comparison"):
        results.outdated(file, KNOWN)


def test_check_looks_beside_the_policy(tmp_path: pathlib.Path) -> None:
    policy = tmp_path / "dispatch.yaml"
    shutil.copy(shipped_policy(), policy)
    folder = tmp_path / results.FOLDER
    folder.mkdir(parents=True)
    (folder / "a.compare.jsonl").write_text(line(DIGEST))
    assert "results are of" not in CliRunner().invoke(app, ["check", str(policy)]).output
    (folder / "b.compare.jsonl").write_text(line("0" * 16))
    said = CliRunner().invoke(app, ["check", str(policy), "--json"])
    assert json.loads(said.output)["results"][0]["measured"] == "0" * 16
    assert "b.compare.jsonl: 1 results are of torch.reference" in CliRunner().invoke(app, ["check", str(policy)]).output
