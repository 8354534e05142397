"""`kernreg check` says when a comparison is older than the kernels."""

from __future__ import annotations

import json
import pathlib

import pytest
from typer.testing import CliRunner

from kernreg import registry, results
from kernreg.cli import app
from kernreg.evidence import installed_source

KNOWN = registry.default()
DIGEST = installed_source(KNOWN, "gdn_ring_advance", "torch.reference")


def line(digest: str, kernel: str = "torch.reference", op: str = "gdn_ring_advance") -> str:
    return json.dumps({"section": "gdn", "variants": {op: kernel}, "digests": {op: digest}}) + "\n"


def test_only_changed_kernels_are_named(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(line(DIGEST) + '{"section": "copy"}\n' + line("0" * 16) * 2 + line("1" * 16, "triton.gone[BV=8]"))
    first, second = results.outdated(file, KNOWN)
    assert (first.kernel, first.measured, first.installed, first.lines) == ("torch.reference", "0" * 16, DIGEST, 2)
    assert (second.kernel, second.installed) == ("triton.gone", "no source")
    assert str(first).startswith(
        f"{file}: 2 results are of torch.reference (gdn_ring_advance) as 0000000000000000, installed is "
    )


@pytest.mark.parametrize(
    "bad",
    [
        b"{",
        b'{"digests": {"op": "1"}}\n',
        b"[]\n",
        b'{"digests": {"op": [1]}, "variants": {"op": "torch.reference"}}\n',
        b'{"digests": {"op": 1}, "variants": {"op": "torch.reference"}}\n',
        b'{"digests": {"op": "1"}, "variants": ["op"]}\n',
        b'{"digests": {"op": "1"}, "variants": {"op": 1}}\n',
        b"\xff\xfe\n",
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path: pathlib.Path, bad: bytes) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(line(DIGEST).encode() + bad)
    with pytest.raises(results.ResultsError, match=r"x.jsonl, line 2: not a line of a comparison"):
        results.outdated(file, KNOWN)


def test_the_copy_bandwidth_of_each_device(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / results.FOLDER
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_text('{"section": "copy", "bytes_per_second": 4210000000000}\n' + line(DIGEST))
    (folder / "b.jsonl").write_text(line(DIGEST))
    assert results.copy_bandwidths(tmp_path / "dispatch.yaml") == {"a": 4.21e12}


@pytest.mark.parametrize("rate", ["0", "-1", "true", '"4e12"', "NaN", "Infinity", "null", "1" + "0" * 400])
def test_a_copy_bandwidth_that_is_none_is_named(tmp_path: pathlib.Path, rate: str) -> None:
    folder = tmp_path / results.FOLDER
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_text(line(DIGEST) + f'{{"section": "copy", "bytes_per_second": {rate}}}\n')
    with pytest.raises(results.ResultsError, match=r"a.jsonl, line 2: not a line of a comparison"):
        results.copy_bandwidths(tmp_path / "dispatch.yaml")


def test_check_looks_beside_the_policy(tmp_path: pathlib.Path) -> None:
    policy = tmp_path / "dispatch.yaml"
    policy.write_text("schema: 1\ndevices: {}\nops: {}\n")
    folder = tmp_path / results.FOLDER
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_text(line(DIGEST))
    assert "results are of" not in CliRunner().invoke(app, ["check", str(policy)]).output
    (folder / "b.jsonl").write_text(line("0" * 16))
    said = CliRunner().invoke(app, ["check", str(policy), "--json"])
    assert json.loads(said.output)["results"][0]["measured"] == "0" * 16
    assert "b.jsonl: 1 results are of torch.reference" in CliRunner().invoke(app, ["check", str(policy)]).output


def test_check_names_a_damaged_file(tmp_path: pathlib.Path) -> None:
    policy = tmp_path / "dispatch.yaml"
    policy.write_text("schema: 1\ndevices: {}\nops: {}\n")
    (tmp_path / results.FOLDER).mkdir(parents=True)
    (tmp_path / results.FOLDER / "a.jsonl").write_text("{")
    done = CliRunner().invoke(app, ["check", str(policy)])
    assert (done.exit_code, "a.jsonl, line 1: not a line of a comparison" in done.output) == (1, True), done.output
