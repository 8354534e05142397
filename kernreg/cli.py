"""The command line. Every command computes plain data first; ``--json`` prints it, otherwise `kernreg.render` does."""

from __future__ import annotations

import copy
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import kernreg
from kernreg import device as devices
from kernreg import dispatch, policy, registry, render
from kernreg.check import check_facts
from kernreg.contract import ContractError, Fact, FactValue, Op, RegistrationError
from kernreg.describe import Data, decision_data, op_data, policy_data
from kernreg.device import Device
from kernreg.dispatch import WarmupError
from kernreg.evidence import installed_triton
from kernreg.policy import Policy, PolicyError
from kernreg.registry import Registry
from kernreg.results import ResultsError

NUMBER = re.compile("[0-9]{1,18}")  # longer ones are no sizes, and Python refuses to read the longest
EXIT_CODES = "Exit codes: 0 all is well, 1 a problem was found, 2 the command was used wrongly."

app = typer.Typer(
    name="kernreg",
    help="Which GPU kernel serves which call, and why.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
PolicyFile = Annotated[Path | None, typer.Option("--policy", help="A policy file; the one that kernreg ships if left out.")]


class UsageError(ValueError):
    """The command line names something that does not exist."""


def main() -> None:
    """Entry point of the command ``kernreg``."""
    app()


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(kernreg.__version__)
        raise typer.Exit


@app.command("list", epilog=EXIT_CODES)
def list_command(
    op: Annotated[str | None, typer.Argument(help="Only this op.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the ops and their kernels."""
    with _failures(as_json):
        known = registry.default()
        names = [_known("op", op, known.ops)] if op else list(known.ops)
        data = {"ops": [op_data(known, known.ops[name]) for name in names]}
        _print(data, as_json, render.ops)
    if not known.backends:
        _fail(f"no kernels ({registry.no_backends()})", as_json=False, code=1)


@app.command(epilog=EXIT_CODES)
def explain(
    op: Annotated[str, typer.Argument(help="The op, as 'kernreg list' has it.")],
    facts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Facts of the static key, as ring=16 heads=48/16 low=yes; facts with a default may be left out. "
            "Also batch=N (default 1) and device=current, cpu, cuda:N or a section of the policy.",
        ),
    ] = None,
    policy_file: PolicyFile = None,
    as_json: AsJson = False,
) -> None:
    """Say which kernel serves a call, and why.

    Shows the row of the policy that decides, its measured numbers, and each other kernel with the reason against it.
    Needs neither a GPU nor torch: the choice is a function of the policy, the key, the batch and the device. Where the batch may
    choose only once warm-up has measured the variants, it says so and shows what serves until then.
    """
    with _failures(as_json):
        known = registry.default()
        contract = known.ops[_known("op", op, known.ops)]
        given = _pairs(facts or [])
        batch = _batch(given.pop("batch", "1"))
        name = given.pop("device", "current")
        key = parse_key(contract, given)
        loaded = policy.load(_path(policy_file), known)
        device = find_device(name, loaded)
        if device.source == "declared":
            known = _as_elsewhere(known)
        binding = dispatch.Binding(contract, key, device, loaded, known, _overrides())
        here = binding.evidence(installed_triton())
        evidence = binding.evidence(None) if device.source == "declared" else here
        assumed = here.doubts if here.collapsed and not evidence.collapsed else ()
        data = decision_data(binding.serves(batch, evidence), device) | {"assumes_otherwise": list(assumed)}
        _print(data, as_json, render.decision)


@app.command(epilog=EXIT_CODES)
def check(
    file: Annotated[Path | None, typer.Argument(help="A policy file; the one that kernreg ships if left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a policy file.

    Its form, the kernels and facts it names, rows that can never match, batch rules across numerics classes; and rows whose
    kernels changed since they were measured, which are a problem unless the row says 'stale: true'. Comparisons in the checkout
    that are older than the kernels are named. Warnings and notes alone leave the exit code at 0.
    """
    with _failures(as_json):
        data = policy_data(_path(file), registry.default())
        _print(data, as_json, render.problems)
        if data["errors"] or not all(stale["said"] for stale in data["stale"]):
            raise typer.Exit(1)


@app.command(epilog=EXIT_CODES)
def doctor(
    ops: Annotated[list[str] | None, typer.Argument(metavar="OP", help="With --numerics: only these ops.")] = None,
    numerics: Annotated[bool, typer.Option("--numerics", help="Recompute what the policy records of bits, on this GPU.")] = False,
    policy_file: PolicyFile = None,
    as_json: AsJson = False,
) -> None:
    """Say what serves on this machine, and what is missing.

    Shows the software, the GPUs, and for each op the kernel that serves a typical call here. Exit code 1 if something
    is broken: the policy, a backend, or an op that nothing can serve.

    With --numerics it measures instead, for at most a minute: are the variants that the policy takes on this GPU still of the
    classes that it records? Exit code 1 if one has moved.
    """
    from kernreg.doctor import examine
    from kernreg.doctor import numerics as recomputed

    if numerics:
        with _failures(as_json):
            names = [_known("op", op, registry.default().ops) for op in ops or ()]
            data = recomputed(names, policy_file)
        _print(data, as_json, render.numerics)
        if data["moved"]:
            raise typer.Exit(1)
        return
    with _failures(as_json):
        if ops or policy_file:
            raise UsageError("an op or --policy goes with --numerics")
    data = examine()
    _print(data, as_json, render.doctor)
    if data["problems"]:
        raise typer.Exit(1)


@app.command(epilog=EXIT_CODES)
def demo(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of drafting, verifying and committing.")] = 24,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the requests and what is accepted.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU if there is one when left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Decode speculatively through the registry, and check it.

    A small stack of layers with random weights verifies and commits drafts; every accepted token is then decoded again,
    one at a time in float64, and compared. Exit code 1 if they differ. Needs torch.
    """
    with _failures(as_json):
        if device not in (None, "cpu"):
            _cuda_device(str(device))
        try:
            from kernreg import demo as demonstration
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "triton"):
                raise
            _fail(f"the demo needs {error.name}, which is not installed ('kernreg doctor' says more)", as_json, code=1)
        report = demonstration.run(demonstration.DemoOptions(device=device, rounds=rounds, seed=seed))
        _print(report.as_dict(), as_json, lambda data: render.show(*report.renderables()))
        if not report.ok:
            raise typer.Exit(1)


@app.command(epilog=EXIT_CODES)
def report(
    journals: Annotated[
        list[Path] | None,
        typer.Option("--journal", help="A file of measurements; may be repeated. Those of this checkout if left out."),
    ] = None,
    policy_file: PolicyFile = None,
    output: Annotated[Path, typer.Option("--output", help="The page to write.")] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Write one HTML page of what was measured, what the policy takes of it, and what that costs.

    For each key the times over the batch of every variant, the limit, the crossovers, the chosen variants and their class.
    Needs neither a GPU nor torch.
    """
    from kernreg.report.collect import collect
    from kernreg.report.page import MissingExtra, page
    from kernreg.results import copy_bandwidths
    from kernreg.tuning.build import write
    from kernreg.tuning.journal import JournalError, read

    with _failures(as_json):
        known = _as_elsewhere(registry.default())
        paths = [_path(path) for path in journals or _measurements()]
        try:
            results = read(*paths)
            if not results:
                raise JournalError(f"{', '.join(map(str, paths))}: no results yet ('python tools/tune.py measure' makes them)")
            file = _path(policy_file)
            found = collect(results, policy.load(file, known), known, list(map(str, paths)), copy_bandwidths(file))
            write(output, page(found, shlex.join(["kernreg", *sys.argv[1:]]), datetime.now(UTC)))
        except (JournalError, ResultsError, MissingExtra) as error:
            _fail(str(error), as_json, code=1)
        _print({"file": str(output), "bytes": output.stat().st_size, **found.as_dict()}, as_json, render.report)


def _measurements() -> list[Path]:
    """The journals beside the policy, or else of the checkout that we are in: an installed package has none."""
    folders = [root / "tools" / "measurements" for root in (dispatch.shipped_policy().parent, Path())]
    for folder in folders:
        if found := sorted(folder.glob("*.jsonl")):
            return found
    raise UsageError(f"no journal is given (--journal), and there is none in {' or '.join(map(str, folders))}")


def _path(file: Path | None) -> Path:
    """The file given or the shipped one, from here if that is shorter."""
    path = file or dispatch.shipped_policy()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _as_elsewhere(known: Registry) -> Registry:
    """The registry of a machine with everything installed: what this one lacks says nothing about a declared device."""
    elsewhere = copy.copy(known)
    elsewhere.missing = lambda kernel: None  # type: ignore[method-assign]
    return elsewhere


def _overrides() -> tuple[policy.Override, ...]:
    try:
        return dispatch.overrides()
    except ValueError as error:
        raise UsageError(str(error)) from error


def find_device(name: str, loaded: Policy) -> Device:
    """``current``, ``cuda:N``, ``cpu``, or a section of the policy by its id or product name."""
    if name == "cpu":
        return Device.cpu()
    if name == "current":
        return devices.current()
    if re.fullmatch("cuda(:[0-9]{1,9})?", name):
        return _cuda_device(name)
    by_name = {section.name: section.id for section in loaded.devices.values()}
    choices = ("current", "cpu", "cuda:0", *loaded.devices)
    section = loaded.devices[_known("device", by_name.get(name, name), choices)]
    return Device.declared(section.name, section.arch, section.sms)


def _cuda_device(name: str) -> Device:
    """The visible CUDA device ``cuda`` or ``cuda:N``."""
    if not re.fullmatch("cuda(:[0-9]{1,9})?", name):
        raise UsageError(f"device is {name!r}, wanted cpu, cuda or cuda:N")
    try:
        found = devices.current(int(name.partition(":")[2] or 0))
    except ValueError as error:
        raise UsageError(str(error)) from error
    if found.platform != "cuda":
        raise UsageError(f"device is {name!r}, but no CUDA device is visible here")
    return found


def parse_key(op: Op, given: Mapping[str, str]) -> dict[str, FactValue]:
    """The full static key from words such as ``ring=16``; ContractError or UsageError say what is wrong."""
    facts = {_known(f"fact of {op.name}", name, op.facts): text for name, text in given.items()}
    key = dispatch.complete(op, {name: parse_fact(name, op.facts[name], text) for name, text in facts.items()})
    check_facts(op, key)
    return key


def parse_fact(name: str, fact: Fact, text: str) -> FactValue:
    """One value in its fact's type: ``16``, ``yes``, ``48/16``."""
    kind = fact.source.partition(" ")[0]
    if kind == "has":
        return parse_flag(name, text)
    if fact.values:
        return next((value for value in fact.values if str(value) == text), text)
    if kind in ("dim", "arg"):
        if not NUMBER.fullmatch(text):
            raise UsageError(f"{name} is {text!r}, wanted a whole number")
        return int(text)
    return text


def parse_flag(name: str, text: str) -> bool:
    flags = {"yes": True, "true": True, "no": False, "false": False}
    if text.lower() not in flags:
        raise UsageError(f"{name} is {text!r}, wanted yes or no")
    return flags[text.lower()]


def _pairs(words: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise UsageError(f"cannot read {word!r}, wanted KEY=VALUE as in ring=16")
        if name in pairs:
            raise UsageError(f"{name} is given twice")
        pairs[name] = value
    return pairs


def _batch(text: str) -> int:
    if not NUMBER.fullmatch(text):
        raise UsageError(f"batch is {text!r}, wanted a whole number, 0 or more")
    return int(text)


def _known(what: str, name: str, known: Collection[str]) -> str:
    if name in known:
        return name
    close = get_close_matches(name, known, n=3)
    guess = f"; did you mean {' or '.join(close)}?" if close else ""
    raise UsageError(f"no {what} {name!r}{guess} (there are {', '.join(known) or 'none'})")


def _print(data: Data, as_json: bool, draw: Callable[[Data], None]) -> None:
    if as_json:
        print(json.dumps(_finite(data), indent=2))
    else:
        draw(data)


def _finite(value: object) -> object:
    """JSON knows no infinity: null stands for it."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _failures(as_json: bool) -> Iterator[None]:
    """Errors that a person can act on become a message and an exit code; anything else is a bug and shows its trace."""
    try:
        yield
    except BrokenPipeError:  # the reader has seen enough, as 'head' does: nothing to say
        raise
    except (UsageError, ContractError, OSError) as error:
        _fail(str(error), as_json, code=2)
    except (PolicyError, RegistrationError, ResultsError, WarmupError) as error:
        _fail(str(error), as_json, code=1)


def _fail(message: str, as_json: bool, code: int) -> NoReturn:
    if as_json:
        print(json.dumps({"error": message}))
    else:
        print(f"kernreg: {message}", file=sys.stderr)
    raise typer.Exit(code)
