"""Measure the kernels of this GPU and write what follows into dispatch.yaml.

    python tools/tune.py measure    time candidates into tools/measurements/<device>.jsonl; goes on where it was stopped
    python tools/tune.py build      dispatch.yaml from the journals; needs no GPU
    python tools/tune.py all        both
    python tools/tune.py compare A B    what two policies (.yaml) or the policies of two journals (.jsonl, or .jsonl@RUN for one
                                    run of it) differ in and what that costs, beside a plain arg-min of each cell

Exit status: 0 when all is done, 1 when something could not be done, 3 when --limit-seconds ended the measuring; then the same
command goes on.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kernreg import device as devices
from kernreg import registry as registries
from kernreg.device import Device
from kernreg.evidence import installed_source
from kernreg.policy import Policy, PolicyError, lint, parse
from kernreg.registry import Registry
from kernreg.tuning.build import build, incumbents, write
from kernreg.tuning.cells import shard
from kernreg.tuning.grids import GRIDS, grid
from kernreg.tuning.journal import Journal, JournalError, Result, read
from kernreg.tuning.measure import Bench, FakeBench, GpuBench, Watch, interrupted, software
from kernreg.tuning.prices import Difference, differences, flips, prices, rows
from kernreg.tuning.tuner import Tuner, last_run, now

ROOT = Path(__file__).resolve().parent.parent
DONE, FAILED, STOPPED = 0, 1, 3
BUDGET = 540.0  # of a GPU's time, for all ops together
FAKE = Device.declared("Fake GPU", "sm_90", 132)

console = Console(stderr=True, soft_wrap=True)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tune.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "build", "all", "compare"))
    parser.add_argument("sides", nargs="*", metavar="A B", help="compare: two policies or journals")
    parser.add_argument("--op", action="append", choices=sorted(GRIDS), help="only this op; may be repeated")
    parser.add_argument("--device", help="measure: refuse any other GPU; build: only this section, by its id as nvidia-h200")
    parser.add_argument("--gpu", type=int, default=0, help="CUDA ordinal of the GPU to measure")
    parser.add_argument("--journal", type=Path, action="append", help="journal file; build reads several (shards)")
    parser.add_argument("--policy", type=Path, default=ROOT / "dispatch.yaml", help="the file to write")
    parser.add_argument("--limit-seconds", type=float, help="stop after the measurement under way when so much time is gone")
    parser.add_argument("--budget-seconds", type=float, default=BUDGET, help="timings are shortened to keep it (%(default)g)")
    parser.add_argument("--again", action="store_true", help="begin a new run, though the last one is complete")
    parser.add_argument("--run", help="name of the run, a time such as 2026-11-30T10:00:00Z; shards of one run share it")
    parser.add_argument("--shard", default="1/1", help="measure only rows 2, 5, 8, ... with 2/3: one process and GPU each")
    parser.add_argument("--dry-run", action="store_true", help="print what would be measured or written, and do neither")
    parser.add_argument("--fake-timer", type=int, metavar="SEED", help="invented times on an invented GPU: for tests")
    parser.add_argument("--fake-pause", type=float, default=0.0, metavar="SECONDS", help="how long an invented measurement takes")
    args = parser.parse_args(argv)
    if len(args.sides) != (2 if args.command == "compare" else 0):
        parser.error("compare takes two policies or journals, the other commands none")
    if args.fake_timer is not None and not (args.journal and args.policy != ROOT / "dispatch.yaml"):
        parser.error("--fake-timer needs --journal and --policy: invented times have no place beside measured ones")
    return args


def main(argv: Sequence[str] | None = None, registry: Registry | None = None) -> int:
    args = arguments(argv)
    args.told = list(sys.argv[1:] if argv is None else argv)
    registry = registry or registries.default()
    status = DONE
    try:
        if args.command in ("measure", "all"):
            status = measure(args, registry)
        if args.command == "compare":
            compare(args)
        if args.command in ("build", "all") and not (args.command == "all" and args.dry_run):
            status = rebuild(args, registry) or status
    except (JournalError, PolicyError, LookupError, ValueError, OSError) as error:
        console.print(f"[red]{type(error).__name__}[/]: {error}", highlight=False)
        return FAILED
    return status


# --- measure


def measure(args: argparse.Namespace, registry: Registry) -> int:
    began = time.monotonic()
    deadline = None if args.limit_seconds is None else began + args.limit_seconds
    device = FAKE if args.fake_timer is not None else devices.current(args.gpu)
    if device.platform != "cuda":
        raise ValueError("there is no GPU here to measure")
    if args.device not in (None, device.id):
        raise ValueError(f"this GPU is {device.id}, not {args.device}")
    versions = {"timer": "fake"} if args.fake_timer is not None else software(Watch(device.uuid))
    bench, policy = bench_of(args, device), present(args.policy)
    status = DONE
    with Journal(journals(args, device.id)[0]) as journal:
        tuners = [
            Tuner(
                registry,
                device,
                shard(grid(registry, op), args.shard),
                journal,
                bench,
                run_of(args, journal, op, device.id, versions),
                versions,
                " ".join(["tools/tune.py", *args.told]),
                incumbents(policy, op, device.id),
                interrupted(deadline),
            )
            for op in args.op or sorted(GRIDS)
        ]
        try:
            for number, tuner in enumerate(tuners):
                left = args.budget_seconds - (time.monotonic() - began)
                tuner.budget = max(left, 0.0) * tuner.weight / sum(later.weight for later in tuners[number:])
                status = max(status, report_plan(tuner) if args.dry_run else tune(tuner))
        finally:
            bench.close()
    if not args.dry_run:
        report_time(tuners, time.monotonic() - began)
    return status


def run_of(args: argparse.Namespace, journal: Journal, op: str, device: str, versions: Mapping[str, str]) -> str:
    """The run that is measured: the one asked for, a new one, or the last one, which goes on if the software is the same."""
    fresh: str = args.run or now()
    return fresh if args.again or args.run else last_run(journal.results, op, device, versions) or fresh


def bench_of(args: argparse.Namespace, device: Device) -> Bench:
    if args.fake_timer is not None:
        return FakeBench(args.fake_timer, args.fake_pause)
    return GpuBench(args.gpu, device.uuid)


def journals(args: argparse.Namespace, device: str | None) -> list[Path]:
    folder = ROOT / "tools" / "measurements"
    if args.journal:
        return list(args.journal)
    return [folder / f"{device}.jsonl"] if device else sorted(folder.glob("*.jsonl"))


def present(policy: Path) -> Policy | None:
    return parse(policy.read_text(encoding="utf-8"), policy) if policy.exists() else None


def tune(tuner: Tuner) -> int:
    began, before = time.monotonic(), len(tuner.journal.results)
    with Show() as show:
        tuner.show = show
        complete = tuner.tune()
    lines = tuner.journal.results[before:]
    seconds = time.monotonic() - began
    console.print(f"{tuner.grid.op.name} on {tuner.device}, run {tuner.run}: {len(lines)} results in {seconds:.0f} s")
    console.print("  " + ", ".join(f"{what} {took:.0f} s" for what, took in tuner.spent.items()), highlight=False)
    report_failures(lines)
    report_conditions(lines, tuner.disturbed)
    for text in tuner.skipped:
        console.print(f"[red]skipped[/] {text}", highlight=False)
    if not complete:
        console.print("stopped before the end; the same command goes on")
    return FAILED if tuner.skipped else DONE if complete else STOPPED


def report_plan(tuner: Tuner) -> int:
    anchors = [cell for cell in tuner.grid.cells if cell.anchor]
    trials = sum(len(tuner.candidates(cell)) for cell in anchors)
    cells = f"{len(tuner.grid.cells)} cells, {len(anchors)} of them anchors"
    print(f"{tuner.grid.op.name} on {tuner.device}: {cells}, {trials} quick timings")
    return DONE


def report_time(tuners: Sequence[Tuner], seconds: float) -> None:
    names = dict.fromkeys(what for tuner in tuners for what in tuner.spent)
    spent = {what: sum(tuner.spent.get(what, 0.0) for tuner in tuners) for what in names}
    cells = sum(len(tuner.grid.cells) for tuner in tuners)
    stages = ", ".join(f"{what} {took:.0f} s" for what, took in spent.items())
    console.print(f"{len(tuners)} ops, {cells} cells in {seconds:.0f} s: {stages}", highlight=False)


def report_failures(lines: Sequence[Result]) -> None:
    failures = Counter((line.variant, line.step, line.reason) for line in lines if line.stage == "failed")
    for (variant, step, reason), count in sorted(failures.items()):
        console.print(f"out: {variant} at {step} ({count} keys or cells): {reason}", highlight=False, markup=False)


def report_conditions(lines: Sequence[Result], left: int) -> None:
    """left: timings of the run that were disturbed and have no undisturbed one beside them."""
    throttled = Counter(reason for line in lines for reason in line.conditions.get("throttle", ()))
    foreign = sum(1 for line in lines if line.conditions.get("foreign"))
    for reason, count in sorted(throttled.items()):
        console.print(f"[yellow]{count} results under throttling: {reason}[/]")
    if foreign:
        console.print(f"[yellow]{foreign} results beside foreign processes on the GPU[/]")
    if throttled or foreign:
        console.print(f"[yellow]{left} timings of this run stay disturbed; the others were done again[/]")


class Show:
    """A bar with the time left on a terminal; elsewhere a line now and then."""

    EVERY = 20.0

    def __init__(self) -> None:
        text = TextColumn("{task.description}")
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self.progress = Progress(text, *columns, console=console, disable=not console.is_terminal)
        self.tasks: dict[str, TaskID] = {}
        self.began: dict[str, float] = {}
        self.said = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self.tasks:
            self.tasks[what] = self.progress.add_task(what, total=total)
            self.began[what] = time.monotonic()
        self.progress.update(self.tasks[what], completed=done, total=total)
        passed = time.monotonic() - self.began[what]
        if not console.is_terminal and (time.monotonic() - self.said > self.EVERY or done == total):
            self.said = time.monotonic()
            left = f", about {passed / done * (total - done):.0f} s left" if done else ""
            console.print(f"{what}: {done} of {total} in {passed:.0f} s{left}", highlight=False)

    def __enter__(self) -> Show:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()


# --- build


def rebuild(args: argparse.Namespace, registry: Registry) -> int:
    device = FAKE.id if args.fake_timer is not None else args.device
    paths = [path for path in journals(args, device) if path.exists()]
    wanted = [r for r in read(*paths) if (not args.op or r.op in args.op) and device in (None, r.device["id"])]
    results = [r for r in wanted if is_offered(registry, r)]
    if left := sorted({r.variant for r in wanted} - {r.variant for r in results}):
        text = f"{left[0]}{f' and {len(left) - 1} other variants' if len(left) > 1 else ''}"
        console.print(f"left out: results of {text}, which no backend offers any more", highlight=False, markup=False)
    if not results:
        raise ValueError(f"no results of present kernels in {', '.join(map(str, paths)) or 'any journal'}")
    previous = args.policy.read_text(encoding="utf-8") if args.policy.exists() else None
    text = build(results, previous=previous, installed=installed(registry, results))
    problems = [p for p in lint(parse(text, args.policy), registry) if p.severity == "error"]
    sys.stdout.writelines(
        difflib.unified_diff(
            (previous or "").splitlines(keepends=True), text.splitlines(keepends=True), str(args.policy), "built"
        )
    )
    for problem in problems:
        console.print(f"[red]error[/] {problem}", highlight=False)
    if problems:
        return FAILED
    console.print(f"price of determinism: {price(parse(text, args.policy), results)}", highlight=False, markup=False)
    if previous == text:
        console.print(f"{args.policy} is up to date", highlight=False)
    elif not args.dry_run:
        write(args.policy, text)
        console.print(f"wrote {args.policy}", highlight=False)
    return DONE


def is_offered(registry: Registry, result: Result) -> bool:
    """Is the variant still one that could be chosen?"""
    kernels = {kernel.name: kernel for kernel in registry.kernels(result.op)} if result.op in registry.ops else {}
    return result.use in kernels and kernels[result.use].config_error(result.config) is None


def installed(registry: Registry, results: Sequence[Result]) -> dict[str, dict[str, str]]:
    """Digests of the present sources of the kernels that were measured."""
    known = {(op, kernel.name) for op in {r.op for r in results} & registry.ops.keys() for kernel in registry.kernels(op)}
    found: dict[str, dict[str, str]] = {}
    for op, use in sorted({(r.op, r.use) for r in results} & known):
        found.setdefault(op, {})[use] = installed_source(registry, op, use)
    return found


# --- compare


def price(policy: Policy, results: Sequence[Result]) -> str:
    """What the policy's choice costs against the fastest variant of each cell, in words."""
    found = prices(results, policy)
    worst = found.worst
    text = f", median {found.median:.3f}, worst {worst.regret:.3f} ({worst.op} {worst})" if worst else ""
    return f"{len(found.priced)} of {found.cells} cells{text}"


def compare(args: argparse.Namespace) -> None:
    """Print what two policies or two journals differ in."""
    measured = [results_of(side) for side in args.sides]
    one, other = policies = [policy_of(side, results) for side, results in zip(args.sides, measured, strict=True)]
    known = [r for part in measured for r in part] or read(*(path for path in journals(args, args.device) if path.exists()))
    say_differences("from nothing" if any(measured) else "as they are", one, other, known)
    if all(measured):
        first, second = measured
        text = build(first)
        say_differences("with the first in place", parse(text, "A"), parse(build(second, previous=text), "B"), known)
        plain = flips(first, second)
        print(f"plain arg-min: the winner flips in {plain.flipped} of {plain.cells} cells{percent(plain.flipped, plain.cells)}")
    for side, policy, results in zip(args.sides, policies, measured, strict=True):
        print(f"price of determinism in {side}: {price(policy, results or known)}")


def results_of(side: str) -> list[Result]:
    """The lines of a journal, or of one run of it; none for a policy."""
    path, _, run = side.partition("@")
    return [] if path.endswith((".yaml", ".yml")) else [r for r in read(path) if run in ("", r.run)]


def policy_of(side: str, results: Sequence[Result]) -> Policy:
    return parse(build(results), side) if results else parse(Path(side).read_text(encoding="utf-8"), side)


def say_differences(what: str, one: Policy, other: Policy, results: Sequence[Result]) -> None:
    found = differences(one, other, results)
    count = max(rows(one), rows(other))
    print(f"{what}: {len(found)} of {count} rows differ{percent(len(found), count)}")
    for difference in found:
        print(f"  {difference.op} {difference.device} {difference.row}: {difference.before} -> {difference.after}")
        print(f"    {cost(difference)}")


def cost(difference: Difference) -> str:
    if difference.cost is None or difference.most is None:
        return "what it costs was not measured"
    return f"worst regret {difference.cost:+.2%}, a cell's time by up to {difference.most:.2%}"


def percent(part: int, whole: int) -> str:
    return f" ({part / whole:.1%})" if whole else ""


if __name__ == "__main__":
    sys.exit(main())
