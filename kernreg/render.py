"""The command line's data as text: tables that lose nothing when they are piped into a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from kernreg.contract import format_facts

Data: TypeAlias = Mapping[str, Any]

PIPE_WIDTH = 120


def show(*blocks: RenderableType) -> None:
    """Print to standard output; 120 columns wide when nobody watches. No markup: a variant's id has brackets of its own."""
    out = Console(markup=False, highlight=False, emoji=False)
    if not out.is_terminal:
        out.width = PIPE_WIDTH
    with out.capture() as text:
        for block in blocks:
            out.print(block)
    out.file.writelines(f"{line.rstrip()}\n" for line in text.get().splitlines())


def table(*headers: str) -> Table:
    """A plain table whose cells fold instead of being cut."""
    drawn = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for header in headers:
        drawn.add_column(header, overflow="fold")
    return drawn


def fields(pairs: Iterable[tuple[str, object]]) -> Table:
    """Names and values in two columns; values that are None are left out."""
    drawn = Table.grid(padding=(0, 2, 0, 0))
    drawn.add_column(style="bold", no_wrap=True)
    drawn.add_column(overflow="fold")
    for name, value in pairs:
        if value is not None:
            drawn.add_row(name, str(value))
    return drawn


def ops(data: Data) -> None:
    for number, op in enumerate(data["ops"]):
        drawn = table("kernel", "config (default first)", "needs", "what it is")
        for kernel in op["kernels"]:
            drawn.add_row(kernel["kernel"], _config(kernel), _needs(kernel), kernel["doc"])
        key = f"key: {' '.join(_fact(name, fact) for name, fact in op['facts'].items())}"
        heading = Text(op["op"], style="bold")
        show(*[""] * bool(number), heading, op["summary"], key, drawn if op["kernels"] else "no kernels")


def _fact(name: str, fact: Data) -> str:
    """``ring=?`` must be given; ``low=yes`` may be left out."""
    return f"{name}=?" if fact["default"] is None else format_facts([(name, fact["default"])])


def _config(kernel: Data) -> str:
    parts = []
    for name, values in kernel["config"].items():
        default = kernel["default"][name]
        parts.append(f"{name}={','.join(map(str, [default, *(v for v in values if v != default)]))}")
    return " ".join(parts) or "-"


def _needs(kernel: Data) -> str:
    return ", ".join(kernel["requires"]) + (f" ({kernel['missing']})" if kernel["missing"] else "")


def decision(data: Data) -> None:
    others = [kernel for kernel in data["kernels"] if kernel["kernel"] != data["kernel"]]
    drawn = table("other kernels", "why not")
    for kernel in others:
        drawn.add_row(kernel["kernel"], kernel["why"])
    heading = Text.assemble((data["op"], "bold"), " ", format_facts(data["key"].items()))
    where = f"batch {data['batch']} on {device(data['device'])}"
    show(heading, where, "", fields(_choice(data)), "", drawn if others else "There is no other kernel of this op.")


def _choice(data: Data) -> Iterable[tuple[str, object]]:
    yield "kernel", data["kernel"] + (f": {data['doc']}" if data["doc"] else "")
    yield "config", format_facts(data["config"].items()) or "none"
    yield "decided by", data["source"]
    if data["row"]:
        yield "row matches", data["row"]["when"]
        yield "serves", _batches(*data["batches"])
    if data["pin"]:
        yield "pinned", data["pin"]["reason"] + (f" ({data['pin']['by']})" if data["pin"]["by"] else "")
    yield "device", f"section {data['section']}: {data['level']}" if data["section"] else data["level"]
    yield "time", _time(data)
    yield "runner-up", _runner_up(data)
    if data["regret"] is not None:
        yield "regret", f"at worst {_percent(data['regret'] - 1)} slower than the best variant of a measured batch"
    yield "numerics class", data["class"]
    yield "not by batch", data["collapsed"]
    if data["assumes_otherwise"]:
        doubts = "; ".join(data["assumes_otherwise"])
        yield "assumes", f"the measured software; here it is {doubts}, and one variant would serve every batch until warm-up"
    yield "bits here", None if data["collapsed"] else ", ".join(f"{v} {bits}" for v, bits in data["bits"].items()) or None
    yield "stale", "; ".join(data["stale"]) or None
    yield "fallback", data["fallback"]
    for number, text in enumerate(data["extrapolated"]):
        yield "" if number else "not measured", text


def _batches(low: int, high: int | None) -> str:
    if high is None:
        return "every batch" if low == 1 else f"batches of {low} and more"
    return f"batch {low}" if low == high else f"batches {low} to {high}"


def _time(data: Data) -> str:
    if data["us"] is None:
        return "not recorded"
    return f"{data['us']:g} us" + (f" (at {format_facts(data['at'].items())})" if data["at"] else "")


def _runner_up(data: Data) -> str | None:
    if data["next"] is None:
        return None if data["runner_up"] is None else str(data["runner_up"])
    name = f"{data['runner_up']}, " if data["runner_up"] else ""
    if data["margin"] < 0:
        return f"{name}{data['next']:g} us, {_percent(-data['margin'])} faster: within the noise"
    return f"{name}{data['next']:g} us, {_percent(data['margin'])} slower"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def device(data: Data) -> str:
    """``NVIDIA H200 (sm_90, 132 SMs), declared``."""
    text = f"{data['name']} ({data['arch']}, {data['sms']} SMs)" if data["arch"] else data["name"]
    return f"{text}, {data['source']}" if data["source"] else str(text)


def problems(data: Data) -> None:
    # one problem a line, however long: editors and grep read these
    for problem in data["problems"]:
        print(problem["text"])
    for outdated in data["results"]:
        print(outdated["text"])
    found = f"{data['errors']} errors" if data["errors"] else f"ok, {data['rows']} rows"
    stale = len({one["line"] for one in data["stale"]})
    print(f"{data['file']}: {found}, {data['warnings']} warnings" + (f", {stale} stale" if stale else ""))


def doctor(data: Data) -> None:
    drawn = table("op", "typical key", "served by", "because of")
    for op in data["ops"]:
        source = f"{op['source']}: " if op["source"] else ""
        drawn.add_row(op["op"], format_facts(op["key"].items()), op["variant"] or "nothing", source + op["why"])
    show(fields(data["software"].items()), "", fields(_machine(data)), "", drawn)
    for title, lines in (("Notes", data["notes"]), ("Missing", data["missing"]), ("Broken", data["problems"])):
        if lines:
            show("", Text(title, style="bold"), *(f"- {line}" for line in lines))
    show("", "Something is broken." if data["problems"] else "All is well.")


def numerics(data: Data) -> None:
    if data["nothing"]:
        show(data["nothing"])
        return
    drawn = table("op", "row", "class", "now", "recomputed")
    for row in data["rows"]:
        keys = f"{row['keys']} of {row['measured']} keys"
        drawn.add_row(row["op"], f"line {row['row']['line']}: {row['row']['when']}", row["class"], row["state"], keys)
    lines = [f"- line {row['row']['line']}, {row['op']}: {text}" for row in data["rows"] for text in row["why"]]
    count = {state: sum(row["state"] == state for row in data["rows"]) for state in ("same", "moved", "sampled", "not reached")}
    total = ", ".join(f"{number} {state}" for state, number in count.items() if number)
    show(drawn, "", *lines, f"{data['policy']}: {total}, in {data['seconds']} s on {data['device']['name']}")


def report(data: Data) -> None:
    drawn = table("op", "device", "keys", "cells", "regret: median", "worst")
    for place in data["places"]:
        regrets = ("-" if place[name] is None else _percent(place[name] - 1) for name in ("median", "worst"))
        drawn.add_row(place["op"], place["device"], str(place["keys"]), f"{place['compared']} of {place['cells']}", *regrets)
    show(drawn, "", f"wrote {data['file']} ({data['bytes'] / 1e6:.1f} MB) from {data['results']} results")


def _machine(data: Data) -> Iterable[tuple[str, object]]:
    for gpu in data["gpus"]:
        yield "GPU (NVML)", f"{gpu['name'] or 'a GPU that may not be opened'} {gpu['uuid']} {gpu['pci']}".strip()
    for number, found in enumerate(data["devices"]):
        name = f"cuda:{number}" if found["platform"] == "cuda" else "device"
        yield name, f"{device(found)} {found['uuid']}".strip()
    for name, value in data["environment"].items():
        yield name, value
    yield "policy", f"{data['policy']['file']} ({data['policy']['rows']} rows)"
