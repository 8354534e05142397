"""The README runs."""

from __future__ import annotations

import pathlib
import re

import pytest

from kernreg import policy, registry

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", [text for language, text in BLOCKS if language == "python"])
def test_python_blocks_run(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "print(" not in code or re.fullmatch(r"(torch|triton)\.\w+(\[.*\])? 1\n", printed)


def test_the_policy_example_loads(tmp_path: pathlib.Path) -> None:
    (text,) = [text for language, text in BLOCKS if language == "yaml"]
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    loaded = policy.load(file, registry.default())
    assert [len(row.entries) for row in loaded.tiers("kda_chain_verify")[1]] == [2, 1]
    assert [pin.reason for pin in loaded.pins] == ["being bisected"]


def test_the_two_commands_are_where_ci_looks_for_them() -> None:
    for name, command in (("demo", "pip install . && kernreg demo"), ("test", "pip install '.[test]' && pytest")):
        assert f"<!-- {name} command -->\n```bash\n{command}\n```\n" in README
