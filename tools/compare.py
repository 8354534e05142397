"""What the policy chooses beside SGLang's public kernels, on the same tensors in one run; needs a GPU and SGLang's kernels.

    python tools/compare.py                          every section, into tools/comparisons/<device>.jsonl
    python tools/compare.py kda gdn --limit-seconds 200

Sections: `gdn` and `kda` (the keys that are quoted most), `gdn-grid` and `kda-grid` (wide grids), `step` (whole decoding
steps in one CUDA graph), `errors` (each side against float64). Times are medians of replayed CUDA graphs with a cold L2,
contestants interleaved in shuffled rounds. The limit is the bytes that must move over the copy bandwidth, which the run
measures first.
The file is replaced when a run is complete; until then the lines stand beside it. Lines of sections that were not run stay.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import public_kernels

import kernreg
from kernreg import registry
from kernreg.contract import Case, FactValue, Op, format_facts
from kernreg.device import Device, current
from kernreg.dispatch import Plan
from kernreg.evidence import installed_source
from kernreg.tuning import grids
from kernreg.tuning.cells import Cell, Grid, Pool, Rotation
from kernreg.tuning.measure import Effort, Watch, capture, elapsed_us, interleaved, percentiles, software
from kernreg.tuning.screen import Failure
from kernreg.tuning.tuner import now

FOLDER = Path(__file__).resolve().parent / "comparisons"
OURS = "kernreg"
REGISTRY = registry.default()
Runs = Mapping[str, Callable[[], None]]


# --- timing


def replayed(runs: Runs, before: Callable[[], None] | None, budget_us: float = 40_000.0) -> dict[str, list[float]]:
    """Percentiles 20, 50, 80 of each contestant's time in microseconds, without `before`, which puts cursors back."""
    graphs = {name: compiled(run) for name, run in runs.items()}
    reset = partial(elapsed_us, compiled(before)) if before else None
    replays = {name: partial(elapsed_us, graph) for name, graph in graphs.items()}
    samples = interleaved(replays, reset, Effort(5, 21, budget_us), seed=1)
    return {name: list(percentiles(values)) for name, values in samples.items()}


def compiled(run: Callable[[], None]) -> Any:
    """A CUDA graph of a run, after running it once."""
    import torch

    run()
    torch.cuda.synchronize()
    return capture(run)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large copy: the better of the driver's and of a kernel's."""
    import torch

    source = torch.empty(1 << 29, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)

    def by_driver() -> None:
        target.copy_(source)

    def by_kernel() -> None:
        torch.neg(source, out=target)

    us = min(parts[1] for parts in replayed({"driver": by_driver, "kernel": by_kernel}, None).values())
    return float(2 * source.nbytes / us * 1e6)


# --- compiling


@dataclass(frozen=True)
class Compile:
    """One contestant for one static key, in a process of its own: only the compile cache is wanted."""

    op: str
    facts: Mapping[str, FactValue]
    side: str

    def __call__(self) -> None:
        op = REGISTRY.op(self.op)
        if self.side == OURS:
            plan_of(op, self.facts).warmup()
            return
        inputs = op.samples.make_inputs(Case("compile", self.facts, 2, {"poison": 0.0}), device="cuda")
        public_kernels.variants(self.op)[self.side](**inputs)


def compile_first(keys: Iterable[tuple[str, Mapping[str, FactValue]]], processes: int = 15) -> None:
    """Fill the compile cache on all cores; what fails here fails again, and is then reported, where it is timed.

    Binaries of the public GDN kernels depend on the size of the pool: they are left out.
    """
    different = {(op, tuple(facts.items())): Compile(op, facts, OURS) for op, facts in keys}
    tasks = list(different.values())
    tasks += [replace(t, side=side) for t in tasks if t.op == "kda_chain_verify" for side in public_kernels.variants(t.op)]
    with ProcessPoolExecutor(min(processes, os.cpu_count() or 1, len(tasks)), get_context("spawn")) as pool:
        for task in [pool.submit(task) for task in tasks]:
            task.exception()


# --- what is compared


@dataclass
class Comparison:
    """One run: where its lines go, and what is the same for all."""

    device: Device
    out: Any
    limit: float
    software: Mapping[str, str]
    command: str
    bandwidth: float = 0.0
    lines: list[dict[str, Any]] = field(default_factory=list)
    stopped: bool = False

    def late(self) -> bool:
        """Asked before each comparison that is still to come."""
        self.stopped = self.stopped or time.monotonic() > self.limit
        return self.stopped

    def write(self, **line: Any) -> None:
        line |= {"device": self.device.record, "software": self.software, "command": self.command, "date": now()}
        self.lines.append(line)
        self.out.write(json.dumps(line) + "\n")
        self.out.flush()


def plan_of(op: Op | str, facts: Mapping[str, Any]) -> Plan:
    return kernreg.bind(op, device="cuda", **facts)


def measured(variants: Mapping[str, str]) -> dict[str, Any]:
    """What was timed, by op, and the digests of the sources: by these `kernreg check` says when a file is old."""
    digests = {op: installed_source(REGISTRY, op, variant.partition("[")[0]) for op, variant in variants.items()}
    return {"variants": dict(variants), "digests": digests}


def compare_cell(run: Comparison, section: str, grid: Grid, rotation: Rotation) -> None:
    """Time the plan's choice and every public variant on one cell, and write the line."""
    cell = rotation.cell
    plan = plan_of(grid.op, cell.facts)
    chosen = plan.explain(cell.batch).variant.id
    contestants: dict[str, Callable[..., Any]] = {OURS: plan, **public_kernels.variants(grid.op.name)}

    usable, failed = {}, {}
    for name, call in contestants.items():
        try:
            rotation.reset()
            call(**rotation.calls[0])
            usable[name] = partial(rotation.walk, call)
        except Exception as error:
            if name == OURS:
                raise
            failed[name] = Failure.of("launch", error).reason
    times = replayed(usable, rotation.reset if rotation.kept else None)
    us = {name: [round(part / cell.copies, 3) for part in parts] for name, parts in times.items()}
    theirs = min((name for name in us if name != OURS), key=lambda name: us[name][1], default=None)
    line = {
        "section": section,
        "op": cell.op,
        "facts": {**cell.row, **cell.shown},
        "batch": cell.batch,
        "load": dict(cell.load),
        **measured({cell.op: chosen}),
        "us": us[OURS],
        "limit_us": round(cell.work / run.bandwidth * 1e6, 3),
        "public": theirs,
        "public_us": us[theirs] if theirs else None,
        "all_public": {name: parts[1] for name, parts in us.items() if name != OURS},
        "failed": failed,
    }
    run.write(**line)
    print(_row(line), flush=True)


def _row(line: Mapping[str, Any]) -> str:
    where = format_facts([*line["facts"].items(), ("batch", line["batch"]), *line["load"].items()])
    ours, limit = line["us"][1], line["limit_us"]
    text = f"{line['op']} {where}: {ours:.2f} us, {limit / ours:.0%} of the limit {limit:.2f}"
    if line["public"]:
        text += f", public {line['public_us'][1]:.2f} ({line['public']}), {line['public_us'][1] / ours:.2f}x"
    return text + f"; {', '.join(line['variants'].values())}"


def compare_cells(run: Comparison, section: str, cells: Iterable[Cell]) -> None:
    pool = Pool("cuda")
    for cell in cells:
        if run.late():
            return
        grid = grids.grid(REGISTRY, cell.op)
        compare_cell(run, section, grid, pool.turn(grid, cell))


# --- sections


def gdn_lines() -> Iterator[Cell]:
    commit, verify = REGISTRY.op("gdn_ring_commit"), REGISTRY.op("gdn_ring_verify")

    def folded(ring: int, batch: int, history: int, **facts: FactValue) -> Cell:
        given: dict[str, FactValue] = {"ring": ring, "folding": "every", "state": "bf16", "heads": "48/16", **facts}
        return grids.commit_cell(commit, given, batch, history, False)

    yield folded(16, 128, 4)
    yield folded(16, 1, 4)
    yield folded(16, 1, 4, heads="12/4")
    yield folded(64, 64, 4)
    yield folded(128, 64, 4)
    yield folded(128, 64, 128)
    yield folded(16, 64, 4, state="f32")
    yield folded(16, 64, 4, track=True)
    for batch in (1, 8, 32, 128):
        facts: dict[str, FactValue] = {"ring": 16, "draft": 8, "state": "bf16", "heads": "48/16"}
        yield grids.gdn_verify_cell(verify, facts, batch, 4, False)


def kda_lines() -> Iterator[Cell]:
    verify, commit = REGISTRY.op("kda_chain_verify"), REGISTRY.op("kda_ring_commit")
    for draft, heads, batch in product((4, 8), ("8/8",), (1, 4, 16, 64, 128)):
        yield grids.kda_verify_cell(verify, {"mode": "ring", "draft": draft, "heads": heads}, batch, False)
    yield grids.kda_commit_cell(commit, {"ring": 4, "heads": "8/8"}, 64, 4, False)
    yield grids.kda_commit_cell(commit, {"ring": 4, "heads": "32/32"}, 1, 4, False)


def gdn_grid() -> Iterator[Cell]:
    """Every history of a ring on one pool, so that pools are made once."""
    op = REGISTRY.op("gdn_ring_commit")
    for batch, ring, state, track in product((1, 8, 32, 128), (16, 32, 64, 128), ("bf16", "f32"), (False, True)):
        for history in dict.fromkeys((4, 16, ring)):
            facts: dict[str, FactValue] = {"ring": ring, "state": state, "track": track, "heads": "48/16"}
            folding = "lazy" if state == "f32" and history == ring else "every"
            yield grids.commit_cell(op, {**facts, "folding": folding}, batch, history, False)


def kda_grid() -> Iterator[Cell]:
    op = REGISTRY.op("kda_chain_verify")
    batches = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256)
    for heads, draft, mode, batch in product(("8/8", "32/32"), (4, 8), ("ring", "snapshot"), batches):
        yield grids.kda_verify_cell(op, {"mode": mode, "draft": draft, "heads": heads}, batch, False)


SECTIONS: Mapping[str, Callable[[], Iterator[Cell]]] = {
    "kda": kda_lines,
    "gdn": gdn_lines,
    "kda-grid": kda_grid,
    "gdn-grid": gdn_grid,
}


# --- whole steps


def gdn_step(batch: int) -> tuple[dict[str, Callable[[], None]], int, dict[str, str]]:
    """48 layers of verify (8 tokens), one advance, one commit of all layers; every row accepts 4 and folds.

    Returns: the step of each side, how many steps a run holds, and what ours chose.
    """
    commit, verify = grids.grid(REGISTRY, "gdn_ring_commit"), grids.grid(REGISTRY, "gdn_ring_verify")
    facts: dict[str, FactValue] = {"ring": 16, "state": "bf16", "heads": "48/16"}
    folded = grids.commit_cell(commit.op, {**facts, "folding": "every"}, batch, 4, False)
    pools = Rotation.make(commit, folded, "cuda")
    window = grids.gdn_verify_cell(verify.op, {**facts, "draft": 8}, batch, 4, False)
    tokens = verify.op.samples.make_inputs(verify.case(window, batch), device="cuda")
    tokens = {name: value for name, value in tokens.items() if name in _GDN_TOKENS}
    accept = pools.inputs["slots"].new_full((batch,), 4)
    ours = {
        "commit": plan_of(commit.op, folded.facts),
        "verify": plan_of(verify.op, window.facts),
        "advance": plan_of("gdn_ring_advance", {"ring": 16}),
    }
    theirs: dict[str, Callable[..., Any]] = {
        "commit": public_kernels.gdn_ring_commit,
        "verify": public_kernels.gdn_ring_verify,
        "advance": public_kernels.gdn_ring_advance,
    }

    def step(side: Mapping[str, Callable[..., Any]], public: bool) -> Callable[[], None]:
        def run() -> None:
            pools.inputs["write_pos"].zero_()
            for call in pools.calls:
                for layer in range(grids.GDN_LAYERS):
                    side["verify"](**tokens, **{name: _layer(call[name], layer) for name in _GDN_POOLS})
                cursors = {name: call[name] for name in ("write_pos", "fold", "rows", "slots")}
                base = {"base": call["base"]} if public else {}
                side["advance"](**cursors, **base, accept=accept, ring=16, margin=None, null_slot=-1)
                side["commit"](**call)

        return run

    chosen = {plan.op.name: plan.explain(batch).variant.id for plan in ours.values()}
    return {OURS: step(ours, False), "public": step(theirs, True)}, folded.copies, chosen


_GDN_TOKENS = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "cu_seqlens", "draft", "scale", "null_slot")
_GDN_RINGS = ("state", "ring_u", "ring_k", "ring_g", "ring_u_low", "ring_k_low")
_GDN_POOLS = (*_GDN_RINGS, "write_pos", "base", "slots", "rows")


def _layer(value: Any, layer: int) -> Any:
    return value[layer] if value.ndim > 2 else value


def kda_step(batch: int) -> tuple[dict[str, Callable[[], None]], int, dict[str, str]]:
    """20 layers of verify (4 tokens, ring mode) and one commit of all layers; every row accepts 4."""
    commit, verify = grids.grid(REGISTRY, "kda_ring_commit"), grids.grid(REGISTRY, "kda_chain_verify")
    replayed_cell = grids.kda_commit_cell(commit.op, {"ring": 4, "heads": "8/8"}, batch, 4, False)
    pools = Rotation.make(commit, replayed_cell, "cuda")
    window = grids.kda_verify_cell(verify.op, {"mode": "ring", "draft": 4, "heads": "8/8"}, batch, False)
    tokens = Rotation.make(verify, window, "cuda")
    ours = {
        "commit": plan_of(commit.op, replayed_cell.facts),
        "verify": plan_of(verify.op, window.facts),
    }

    def step(check: Callable[..., Any], fold: Callable[..., Any]) -> Callable[[], None]:
        def run() -> None:
            for call in pools.calls:
                rings = ("state", "ring_k", "ring_v", "ring_g", "ring_beta")
                for layer in range(grids.KDA_LAYERS):
                    own = {name: call[name][layer] for name in rings}
                    check(**{**tokens.calls[layer % len(tokens.calls)], **own, "slots": call["slots"]})
                fold(**call)

        return run

    theirs = public_kernels.variants("kda_chain_verify")
    sides = {name: step(call, public_kernels.kda_ring_commit) for name, call in theirs.items()}
    chosen = {plan.op.name: plan.explain(batch).variant.id for plan in ours.values()}
    return {OURS: step(ours["verify"], ours["commit"]), **sides}, replayed_cell.copies, chosen


def compare_steps(run: Comparison) -> None:
    import torch

    steps = [("gdn_step", gdn_step, batch) for batch in (1, 32, 128)] + [("kda_step", kda_step, batch) for batch in (1, 16, 128)]
    for name, make, batch in steps:
        if run.late():
            return
        sides, copies, chosen = make(batch)
        us = {side: [round(part / copies, 3) for part in parts] for side, parts in replayed(sides, None).items()}
        theirs = min((side for side in us if side != OURS), key=lambda side: us[side][1])
        run.write(section="step", op=name, batch=batch, **measured(chosen), us=us[OURS], public=theirs, public_us=us[theirs])
        print(
            f"{name} batch {batch}: {us[OURS][1]:.1f} us, public {us[theirs][1]:.1f} ({theirs}), "
            f"{us[theirs][1] / us[OURS][1]:.2f}x; {'; '.join(chosen.values())}",
            flush=True,
        )
        del sides
        torch.cuda.empty_cache()


# --- errors


def error_cases() -> Iterator[tuple[str, Case]]:
    """Real dims, plain memory: what both sides can do."""
    for mode, draft, gate in product(("ring", "snapshot"), (4, 8), ("safe", "softplus")):
        facts: dict[str, Any] = {"mode": mode, "draft": draft, "heads": "8/8", "gate": gate}
        yield "kda_chain_verify", Case(f"{mode}_{draft}_{gate}", _whole("kda_chain_verify", facts), 8, {"poison": 0.0})
    for draft in (4, 8):
        options = {"accept": draft, "layers": 2, "poison": None}
        yield "kda_ring_commit", Case(f"ring_{draft}", _whole("kda_ring_commit", {"ring": draft, "heads": "8/8"}), 8, options)
    for ring, state in product((16, 64), ("bf16", "f32")):
        facts = {"ring": ring, "state": state, "heads": "48/16"}
        yield "gdn_ring_commit", Case(f"ring_{ring}_{state}", _whole("gdn_ring_commit", facts), 4, {"poison": None})
        facts = {"ring": ring, "state": state, "heads": "48/16", "draft": 8}
        yield "gdn_ring_verify", Case(f"ring_{ring}_{state}", _whole("gdn_ring_verify", facts), 4, {"poison": None})


def _whole(op: str, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    return REGISTRY.op(op).complete(facts)


def compare_errors(run: Comparison) -> None:
    """The largest error against float64 of each side, as a part of what the contract allows.

    broken: checks of what must be exact and is not, and of errors that are no number.
    """
    for name, case in error_cases():
        if run.late():
            return
        op = REGISTRY.op(name)
        inputs = op.samples.make_inputs(case, device="cuda")
        reference = REGISTRY.load(REGISTRY.kernel(name, "torch.reference"))
        sides = {OURS: plan_of(op, case.facts), **_to_check(public_kernels.variants(name))}
        worst: dict[str, dict[str, float]] = {}
        broken: dict[str, list[str]] = {}
        for side, call in sides.items():
            found = {c.name.partition(" of ")[0]: c.worst for c in op.samples.parity(call, reference, inputs)}
            worst[side] = {check: float(f"{error:.3g}") for check, error in found.items() if math.isfinite(error) and error}
            broken[side] = [check for check, error in found.items() if not math.isfinite(error)]
        chosen = plan_of(op, case.facts).explain(case.batch).variant.id
        line = {"section": "errors", "op": name, "case": case.id, "batch": case.batch, **measured({name: chosen})}
        run.write(**line, worst=worst, broken=broken)
        for side, errors in worst.items():
            text = format_facts((check, f"{error:.3g}") for check, error in errors.items())
            print(f"error {name} {case.id} {side}: {text}", *(f"broken: {check}" for check in broken[side]), flush=True)


def _to_check(public: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Settings of one public kernel differ in the order of sums only: a few are enough. One of them moves conv_state on."""

    def kept(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda **x: call(**{**x, **({"conv_state": x["conv_state"].clone()} if "conv_state" in x else {})})

    return {name: kept(public[name]) for name in list(public)[:3]}


# --- command line


def keys_of(sections: Iterable[str]) -> Iterator[tuple[str, Mapping[str, FactValue]]]:
    """The static keys that these sections bind; the steps' are those of `gdn` and `kda`."""
    for section in sections:
        if section == "errors":
            yield from ((op, case.facts) for op, case in error_cases())
        for name in ("gdn", "kda") if section == "step" else (section,):
            if name in SECTIONS:
                yield from ((cell.op, cell.facts) for cell in SECTIONS[name]())


def lines_of_others(path: Path, sections: Iterable[str]) -> list[str]:
    """The lines of a file that are of none of these sections."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if json.loads(line)["section"] not in sections]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="compare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*SECTIONS, "step", "errors")
    parser.add_argument("sections", nargs="*", choices=(*names, []), help=f"{', '.join(names)}; all if none is given")
    parser.add_argument("--limit-seconds", type=float, default=math.inf)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    if (device := current()).platform != "cuda":
        parser.error("needs a GPU")
    if reason := public_kernels.available():
        parser.error(reason)
    output = args.output or FOLDER / f"{device.id}.jsonl"
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(".partial")
    command = " ".join(["tools/compare.py", *(sys.argv[1:] if argv is None else argv)])
    with partial.open("w", encoding="utf-8") as out:
        out.writelines(lines_of_others(output, ("copy", *(args.sections or names))))
        versions = software(Watch(device.uuid))
        run = Comparison(device, out, time.monotonic() + args.limit_seconds, versions, command)
        run.bandwidth = copy_bandwidth()
        run.write(section="copy", bytes_per_second=round(run.bandwidth))
        print(f"copy bandwidth {run.bandwidth / 1e12:.2f} TB/s", flush=True)
        compile_first(keys_of(args.sections or names))
        for name in args.sections or names:
            if name in SECTIONS:
                compare_cells(run, name, SECTIONS[name]())
            elif name == "step":
                compare_steps(run)
            else:
                compare_errors(run)
    if run.stopped:
        print(f"stopped before the end; what there is: {partial}")
        return 3
    os.replace(partial, output)
    print(f"wrote {output}: {len(run.lines)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
