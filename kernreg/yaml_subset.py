"""A strict subset of YAML: text to a tree of nodes that know their place in the file.

Allowed is what JSON has (mappings with string keys, lists, strings, numbers, true, false, null), comments, and unquoted
words such as ``triton.fused`` or ``48/16``. What YAML 1.1 and 1.2 read differently, or a person might, is an error and
never a guess: PyYAML by itself reads ``on`` as true, ``017`` as 15, ``12:30`` as 750 and ``1e-5`` as text, and of two
equal keys it keeps the last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

Scalar: TypeAlias = "str | int | float | bool | None"

WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_./ -]*|[1-9][0-9]*/[1-9][0-9]*")
INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
# YAML 1.1 knows an exponent only with a sign, 1.2 and JSON with or without.
FLOAT = re.compile(r"-?(0|[1-9][0-9]*)\.[0-9]+([eE][-+][0-9]+)?")
CONSTANTS: Mapping[str, Scalar] = {"true": True, "false": False, "null": None}
SWITCHES = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})
DEEPEST = 20


class PolicyError(ValueError):
    """A policy file cannot be used; the message has file, line, column, the path of the key and what was wanted."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something stands, and the path of its key, such as ``ops.gdn_ring_commit[2].when.ring``."""

    file: str
    line: int
    column: int
    key: str

    def error(self, message: str) -> PolicyError:
        return PolicyError(f"{self}: {message}")

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" + (f": {self.key}" if self.key else "")


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its place; `named` is the place of its key, or of the value itself in a list.

    The methods return the value as what the caller wants, or raise PolicyError.
    """

    value: Scalar | tuple[Node, ...] | dict[str, Node]
    place: Place
    named: Place

    def wrong(self, wanted: str) -> PolicyError:
        return self.place.error(f"wanted {wanted}, got {_describe(self.value)}")

    def fields(self, required: Collection[str], optional: Collection[str] = ()) -> dict[str, Node]:
        """A mapping with all the required keys and no unknown ones."""
        found = self.mapping()
        known = (*required, *optional)
        for name, child in found.items():
            if name not in known:
                raise child.named.error(f"unknown key {name!r}; wanted {' or '.join(known)}")
        for name in required:
            if name not in found:
                raise self.place.error(f"the key {name!r} is missing")
        return found

    def mapping(self) -> dict[str, Node]:
        if not isinstance(self.value, dict):
            raise self.wrong("a mapping")
        return self.value

    def items(self) -> tuple[Node, ...]:
        if not isinstance(self.value, tuple):
            raise self.wrong("a list")
        return self.value

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value.strip():
            raise self.wrong("a string (quote versions, dates and ids)")
        return self.value

    def integer(self, least: int) -> int:
        if type(self.value) is not int or self.value < least:
            raise self.wrong(f"a whole number, {least} or more")
        return self.value

    def number(self, least: float) -> float:
        if type(self.value) not in (int, float) or not isinstance(self.value, int | float) or self.value < least:
            raise self.wrong(f"a number, {least:g} or more")
        return float(self.value)

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value


def _describe(value: object) -> str:
    match value:
        case dict():
            return "a mapping"
        case tuple():
            return "a list"
        case str():
            return f"the string {value!r}"
        case None:
            return "null"
        case bool():
            return str(value).lower()
    return f"the number {value}"


def read(data: bytes | str, file: str) -> Node:
    """The tree of one document.

    Raises:
        PolicyError: anything outside the subset; no other error, whatever the bytes.
    """
    text = _decode(data, file)
    return _Builder(file, text, _events(text, file)).document()


def _decode(data: bytes | str, file: str) -> str:
    if isinstance(data, str):
        text = data
    else:
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _at(data[: error.start].decode("utf-8"), file).error("not UTF-8") from error
    text = text.replace("\r\n", "\n")
    # A file for review: nothing that an editor does not show, and no line breaks that only YAML 1.1 knows.
    for index, character in enumerate(text):
        if character != "\n" and not character.isprintable():
            what = "a tab" if character == "\t" else f"the character U+{ord(character):04X}"
            raise _at(text[:index], file).error(f"{what} is not allowed")
    if found := re.search("^%", text, re.MULTILINE):
        raise _at(text[: found.start()], file).error("a directive is not allowed")
    return text


def _at(before: str, file: str) -> Place:
    """The place after the text `before`."""
    return Place(file, before.count("\n") + 1, len(before) - before.rfind("\n"), "")


def _events(text: str, file: str) -> list[Any]:
    """All events, or those up to the first that is too deep, which the builder refuses: PyYAML takes minutes over thousands."""
    found: list[Any] = []
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            found.append(event)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST + 1:
                break
        return found
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(file, mark.line + 1, mark.column + 1, "") if mark else Place(file, 1, 1, "")
        what = ", ".join(filter(None, (error.context, error.problem)))
        raise place.error(f"not YAML: {what}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the latter two: an escape past U+10FFFF
        raise Place(file, 1, 1, "").error(f"not YAML: {error}") from error


class _Builder:
    """Turns PyYAML's events into nodes and refuses what the subset does not have."""

    def __init__(self, file: str, text: str, events: list[Any]) -> None:
        self.file = file
        self.text = text
        self.events: Iterator[Any] = iter(events)

    def document(self) -> Node:
        next(self.events)
        start = next(self.events)
        if isinstance(start, yaml.StreamEndEvent):
            raise Place(self.file, 1, 1, "").error("wanted a mapping, got an empty file")
        root = self._node(next(self.events), "", None, 0)
        next(self.events)
        extra = next(self.events)
        if not isinstance(extra, yaml.StreamEndEvent):
            raise self._place(extra, "").error("a second document is not allowed")
        return root

    def _place(self, event: Any, key: str) -> Place:
        return Place(self.file, event.start_mark.line + 1, event.start_mark.column + 1, key)

    def _node(self, event: Any, key: str, named: Place | None, depth: int) -> Node:
        place = self._place(event, key)
        if isinstance(event, yaml.AliasEvent):
            raise place.error(f"an alias (*{event.anchor}) is not allowed")
        if event.anchor is not None:
            raise place.error(f"an anchor (&{event.anchor}) is not allowed")
        if event.tag is not None:
            raise place.error(f"a tag ({event.tag}) is not allowed")
        if depth > DEEPEST:
            raise place.error(f"nested more than {DEEPEST} levels deep")
        value: Scalar | tuple[Node, ...] | dict[str, Node]
        if isinstance(event, yaml.MappingStartEvent):
            value = self._mapping(event, place, depth)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = tuple(self._sequence(key, depth))
        else:
            value = scalar(event, place)
        return Node(value, place, named or place)

    def _sequence(self, key: str, depth: int) -> Iterator[Node]:
        index = 0
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            yield self._node(event, f"{key}[{index}]", None, depth + 1)
            index += 1

    def _mapping(self, start: Any, place: Place, depth: int) -> dict[str, Node]:
        if start.flow_style and self.text[start.start_mark.index] != "{":
            raise place.error("a key in a list needs its own braces")
        found: dict[str, Node] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            name, named = self._key(event, place)
            if name in found:
                raise named.error(f"the key {name!r} stands twice, first on line {found[name].named.line}")
            found[name] = self._node(next(self.events), named.key, named, depth + 1)
        return found

    def _key(self, event: Any, parent: Place) -> tuple[str, Place]:
        if not isinstance(event, yaml.ScalarEvent):
            raise self._place(event, parent.key).error("wanted a string as key")
        place = self._place(event, f"{parent.key}.{event.value}".removeprefix("."))
        node = self._node(event, place.key, None, 0)
        if not isinstance(node.value, str):
            raise node.wrong("a string as key")
        return node.value, place


def scalar(event: Any, place: Place) -> Scalar:
    """The value of a scalar event, if there is only one way to read it."""
    text: str = event.value
    if event.style in ("|", ">") or event.start_mark.line != event.end_mark.line:
        raise place.error("a string over several lines is not allowed")
    if event.style:
        if not text.isprintable():
            raise place.error("a string with characters that do not print")
        return text
    return _plain(text, place)


def _plain(text: str, place: Place) -> Scalar:
    if text in CONSTANTS:
        return CONSTANTS[text]
    if text.lower() in SWITCHES:
        raise place.error(f"{text!r} is a switch to some readers and text to others; wanted true or false, or quotes")
    if WORD.fullmatch(text):
        return text
    if INTEGER.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    if not text:
        raise place.error("the value is missing")
    raise place.error(f"{text!r} is ambiguous or not allowed; wanted quotes, or a number like 17, -3, 0.5 or 1.0e-5")
