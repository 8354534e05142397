"""The strict YAML subset: what it accepts has one reading, what it refuses has a place."""

from __future__ import annotations

import json
import math
import re
import time
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from kernreg.yaml_subset import Node, PolicyError, read


def plain(node: Node) -> Any:
    match node.value:
        case dict():
            return {key: plain(child) for key, child in node.value.items()}
        case tuple():
            return [plain(child) for child in node.value]
    return node.value


def same(a: Any, b: Any) -> bool:
    """Equal in value and type, all the way down: 1, 1.0 and true are three values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def error(text: str | bytes) -> str:
    with pytest.raises(PolicyError) as caught:
        read(text, "p.yaml")
    return str(caught.value)


ACCEPTED = {
    "triton.head_group": "triton.head_group",
    "48/16": "48/16",
    "sm_90": "sm_90",
    "nvidia-h200": "nvidia-h200",
    "one per head": "one per head",
    "0": 0,
    "-17": -17,
    "999999999999999999": 999999999999999999,
    "4711.0": 4711.0,
    "-0.5": -0.5,
    "1.0e-5": 1.0e-5,
    "1.5E+3": 1500.0,
    "10.10": 10.1,
    "true": True,
    "false": False,
    "null": None,
    '"2.11.0"': "2.11.0",
    "'it''s'": "it's",
    '"on"': "on",
    '"\\u00e4"': "ä",
    '""': "",
}


@pytest.mark.parametrize("text", ACCEPTED)
def test_a_scalar_with_one_reading_is_accepted(text: str) -> None:
    assert same(plain(read(f"key: {text}", "p.yaml")), {"key": ACCEPTED[text]})


REFUSED = """
on off On OFF yes no Yes NO y n Y N True TRUE False FALSE Null NULL ~
017 0o17 0x1f 0b1 1_000 12:30 190:20:30 +1 00 01/2 1/0 48/ 1000000000000000000
.5 5. 1e-5 1e5 5319E7 1.0e5 1.5E3 .inf -.inf .nan .NaN 1.0e+999 1_0.5 01.5
2026-11-30 2026-11-30T10:00:00 2.11.0 1.2.3.4 3.6.0rc1
= << a#b a:b a+b a@b a,b *x &x !x %x @x ä >=1 -- -a ?
"""


@pytest.mark.parametrize("text", REFUSED.split())
def test_d16_a_scalar_with_two_readings_is_refused_with_its_place(text: str) -> None:
    assert error(f"top:\n  - key: {text}\n").startswith("p.yaml:2:")


@pytest.mark.parametrize("text", ["on", "017", "12:30", "1e-5", "1.0e5", "2026-11-30", "~", "1_000"])
def test_d16_the_message_has_the_path_of_the_key_and_the_text(text: str) -> None:
    message = error(f"ops:\n  gdn:\n    - when: {{ring: [16, {text}]}}\n")
    assert message.startswith("p.yaml:3:25: ops.gdn[0].when.ring[1]: ")
    assert repr(text) in message


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", "p.yaml:3:1: a: ", "twice, first on line 1"),
        ('{a: 1, "a": 2}', "p.yaml:1:8: a: ", "twice"),
        ("{x: {'k': 1, k: 1}}", "p.yaml:1:14: x.k: ", "twice"),
        ("1: a\n1.0: b\n", "p.yaml:1:1: 1: ", "a string as key"),
        ('{"1": a, 1: b}', "p.yaml:1:10: 1: ", "a string as key"),
        ("{true: 1}", "p.yaml:1:2: true: ", "a string as key"),
        ("{null: 1}", "p.yaml:1:2: null: ", "a string as key"),
        ("{on: 1}", "p.yaml:1:2: on: ", "a switch"),
        ("? [a, b]\n: 1\n", "p.yaml:1:3: ", "a string as key"),
        ("x: {? {a: 1} : 2}", "p.yaml:1:7: x: ", "a string as key"),
        ("a: &one 1\nb: 2\n", "p.yaml:1:4: a: ", "an anchor (&one)"),
        ("&one a: 1\n", "p.yaml:1:1: a: ", "an anchor (&one)"),
        ("b: *one\n", "p.yaml:1:4: b: ", "an alias (*one)"),
        ("a: &x {k: 1}\nb: {<<: *x, k: 2}\n", "p.yaml:1:4: a: ", "an anchor"),
        ("b: {<<: {k: 1}, k: 2}\n", "p.yaml:1:5: b.<<: ", "'<<'"),
        ("a: !!str 1\n", "p.yaml:1:4: a: ", "a tag"),
        ("a: ! 1\n", "p.yaml:1:4: a: ", "a tag"),
        ("a: !!python/object/apply:os.system [ls]\n", "p.yaml:1:4: a: ", "a tag"),
        ("a: 1\n---\nb: 2\n", "p.yaml:2:1: ", "a second document"),
        ("%YAML 1.1\n---\na: 1\n", "p.yaml:1:1: ", "a directive"),
        ("a:\n\tb: 1\n", "p.yaml:2:1: ", "a tab"),
        ("a: 1 \t# note\n", "p.yaml:1:6: ", "a tab"),
        ("a:\nb: 1\n", "p.yaml:1:3: a: ", "missing"),
        ("{a, b}", "p.yaml:1:3: a: ", "missing"),
        ("- 1\n-\n", "p.yaml:2:2: [1]: ", "missing"),
        ("a: one\n  two\n", "p.yaml:1:4: a: ", "several lines"),
        ('a: "one\n  two"\n', "p.yaml:1:4: a: ", "several lines"),
        ("a: |\n  text\n", "p.yaml:1:4: a: ", "several lines"),
        ("a: >\n  text\n", "p.yaml:1:4: a: ", "several lines"),
        ("a: |-\n", "p.yaml:1:4: a: ", "several lines"),
        ('a: "x\\ny"\n', "p.yaml:1:4: a: ", "do not print"),
        ('a: "\\ud83d"\n', "p.yaml:1:4: a: ", "do not print"),
        ('a: "\\U00110000"\n', "p.yaml:1:1: ", "not YAML"),
        ('a: "\\UFFFFFFFF"\n', "p.yaml:1:1: ", "not YAML"),
        ("x: [a: 1]\n", "p.yaml:1:5: x[0]: ", "its own braces"),
        ("\ufeffa: 1\n", "p.yaml:1:1: ", "U+FEFF"),
        ("a: 1\rb: 2\n", "p.yaml:1:5: ", "U+000D"),
        ("a: x\u2028b: 2\n", "p.yaml:1:5: ", "U+2028"),
        ("a: x\x85b: 2\n", "p.yaml:1:5: ", "U+0085"),
        ("a:\u00a01\n", "p.yaml:1:3: ", "U+00A0"),
        ("a: 'x' # \u202e\n", "p.yaml:1:10: ", "U+202E"),
        ("a: 1\n  b: 2\n", "p.yaml:2:4: ", "not YAML"),
        ("a: {b: 1\n", "p.yaml:2:1: ", "not YAML"),
        ("", "p.yaml:1:1: ", "empty file"),
        ("# only a comment\n", "p.yaml:1:1: ", "empty file"),
        ("a: " + "[" * 30 + "]" * 30, "p.yaml:1:24: ", "levels deep"),
    ],
)
def test_d16_what_the_subset_lacks_is_refused_with_its_place(text: str, place: str, words: str) -> None:
    message = error(text)
    assert message.startswith(place)
    assert words in message


@pytest.mark.parametrize("deeper", ["[", "[]", "{a: ", "[\n ", "- ", "- - "])
def test_what_is_far_too_deep_is_refused_at_once(deeper: str) -> None:
    text = "a:\n " + ("[" * 20_000 + "]" * 20_000 if deeper == "[]" else deeper * 20_000)
    began = time.process_time()
    assert "nested more than 20 levels deep" in error(text)
    assert time.process_time() - began < 5  # PyYAML alone takes minutes


def test_bytes_that_are_not_utf_8_are_refused_with_their_place() -> None:
    assert error("a: 1\nb: '\u00e4".encode() + b"\xff'\n") == "p.yaml:2:6: not UTF-8"
    assert "UTF-8" in error("a: 1".encode("utf-16"))


def test_windows_line_ends_change_nothing() -> None:
    text = "a: 1\nb: [c, d]  # note\n"
    assert read(text.replace("\n", "\r\n"), "p.yaml") == read(text, "p.yaml")


def test_a_value_knows_its_place_and_that_of_its_key() -> None:
    node = read("ops:\n  gdn:\n    - when:\n        ring: 16\n", "p.yaml")
    ring = node.mapping()["ops"].mapping()["gdn"].items()[0].mapping()["when"].mapping()["ring"]
    assert str(ring.place) == "p.yaml:4:15: ops.gdn[0].when.ring"
    assert str(ring.named) == "p.yaml:4:9: ops.gdn[0].when.ring"


@pytest.mark.parametrize(
    ("text", "take", "wanted"),
    [
        ("a: 10.10", lambda n: n.text(), "wanted a string (quote versions, dates and ids), got the number 10.1"),
        ('a: ""', lambda n: n.text(), "wanted a string (quote versions, dates and ids), got the string ''"),
        ("a: true", lambda n: n.integer(0), "wanted a whole number, 0 or more, got true"),
        ("a: 1.0", lambda n: n.integer(0), "wanted a whole number, 0 or more, got the number 1.0"),
        ("a: 0", lambda n: n.integer(1), "wanted a whole number, 1 or more, got the number 0"),
        ("a: false", lambda n: n.number(0), "wanted a number, 0 or more, got false"),
        ("a: 0.5", lambda n: n.number(1), "wanted a number, 1 or more, got the number 0.5"),
        ("a: 1", lambda n: n.flag(), "wanted true or false, got the number 1"),
        ("a: {}", lambda n: n.items(), "wanted a list, got a mapping"),
        ("a: []", lambda n: n.mapping(), "wanted a mapping, got a list"),
        ("a: null", lambda n: n.mapping(), "wanted a mapping, got null"),
        ("a: {x: 1}", lambda n: n.fields(("x", "y")), "the key 'y' is missing"),
    ],
)
def test_a_wrong_type_says_what_was_wanted(text: str, take: Any, wanted: str) -> None:
    node = read(text, "p.yaml").mapping()["a"]
    with pytest.raises(PolicyError, match=re.escape(f"p.yaml:1:4: a: {wanted}")):
        take(node)


def test_an_unknown_key_is_named_at_its_own_place() -> None:
    node = read("{a: 1, bb: 2}", "p.yaml")
    with pytest.raises(PolicyError, match=re.escape("p.yaml:1:8: bb: unknown key 'bb'; wanted a or b")):
        node.fields(("a",), ("b",))


# --- properties


YAML_12_CORE = {
    r"null|Null|NULL|~|": lambda text: None,
    r"true|True|TRUE": lambda text: True,
    r"false|False|FALSE": lambda text: False,
    r"[-+]?[0-9]+": int,
    r"0o[0-7]+": lambda text: int(text[2:], 8),
    r"0x[0-9a-fA-F]+": lambda text: int(text[2:], 16),
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?": float,
    r"[-+]?\.(inf|Inf|INF)": lambda text: math.inf,
    r"\.(nan|NaN|NAN)": lambda text: math.nan,
}


def as_yaml_12(text: str) -> Any:
    return next((value(text) for pattern, value in YAML_12_CORE.items() if re.fullmatch(pattern, text)), text)


@given(st.text("0123456789.eE+-_:/xobnyNTruefalsoNl~ ", min_size=1, max_size=9).filter(str.strip))
@example("1.0e5")
@example("0o17")
def test_an_unquoted_scalar_reads_the_same_in_yaml_1_1_and_1_2(text: str) -> None:
    try:
        value = plain(read(f"[{text}]", "p.yaml"))
    except PolicyError:
        return
    assert same(value, yaml.safe_load(f"[{text}]"))
    assert same(value, [as_yaml_12(text.strip())])


NAMES = st.text("abcXYZ_ -.:#'\"\\{}[]é19", max_size=6)
FLOATS = st.floats(-1e4, 1e4).filter(lambda x: "e" not in repr(x))
LEAVES = st.none() | st.booleans() | st.integers(-(10**17), 10**17) | FLOATS | NAMES
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))


@given(TREES, st.sampled_from([None, 1]))
def test_json_means_what_it_means_in_json(tree: Any, indent: int | None) -> None:
    text = json.dumps(tree, indent=indent, ensure_ascii=False)
    assert same(plain(read(text, "p.yaml")), tree)


SNIPPETS = st.sampled_from(
    [
        "a: 1",
        "- ",
        "\n",
        "  ",
        "{",
        "}",
        "[",
        "]",
        ",",
        ": ",
        "? ",
        "&a ",
        "*a",
        "!!int ",
        "<<",
        "|\n",
        ">-\n",
        "'",
        '"',
        "\\U00110000",
        "%YAML 1.1\n",
        "---\n",
        "...\n",
        "#",
        "\t",
        "\x00",
        "\ufeff",
        "\r",
        "\u2028",
        "é",
        "017",
        "on",
        "rest",
    ]
)


@given(st.lists(SNIPPETS, max_size=14).map("".join))
@example("!<tag:%zz> a")
@example("%TAG ! x\n---\n!a b")
def test_no_text_raises_anything_but_policy_error(text: str) -> None:
    try:
        node = read(text, "p.yaml")
    except PolicyError as refusal:
        assert re.match(r"p\.yaml:[1-9]\d*:[1-9]\d*: ", str(refusal))
    else:
        assert same(plain(node), yaml.safe_load(text))


@given(st.binary(max_size=40) | st.text(max_size=40))
def test_no_bytes_raise_anything_but_policy_error(data: bytes | str) -> None:
    try:
        read(data, "p.yaml")
    except PolicyError as refusal:
        assert str(refusal).startswith("p.yaml:")
