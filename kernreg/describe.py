"""What kernreg knows, as plain data: the JSON of the command line. Keys are stable; new ones may be added."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from kernreg import policy, results
from kernreg.contract import Kernel, Op
from kernreg.device import Device
from kernreg.evidence import Stale, stale_kernels
from kernreg.policy import Decision, PolicyError, Problem
from kernreg.registry import Registry

Data: TypeAlias = dict[str, Any]


def op_data(known: Registry, op: Op) -> Data:
    """An op with its kernels, as ``list --json`` prints it."""
    return {
        "op": op.name,
        "summary": (op.__doc__ or "").strip().partition("\n")[0],
        "facts": {
            name: {"default": fact.default, "values": list(fact.values), "doc": fact.doc} for name, fact in op.facts.items()
        },
        "kernels": [_kernel_data(known, kernel) for kernel in known.kernels(op.name)],
    }


def _kernel_data(known: Registry, kernel: Kernel) -> Data:
    return {
        "kernel": kernel.name,
        "backend": kernel.backend,
        "doc": kernel.doc,
        "target": kernel.target,
        "config": {name: list(values) for name, values in kernel.config.items()},
        "default": dict(kernel.default),
        "requires": list(known.backends[kernel.backend].requires),
        "missing": known.missing(kernel),
    }


def decision_data(decision: Decision, device: Device) -> Data:
    """A decision as ``explain --json`` prints it."""
    row, entry, kernel = decision.row, decision.entry, decision.variant.kernel
    return {
        "op": decision.op,
        "key": dict(decision.facts),
        "batch": decision.batch,
        "device": device_data(device),
        "kernel": kernel.name,
        "config": dict(decision.variant.config),
        "variant": decision.variant.id,
        "doc": kernel.doc,
        "source": decision.source,
        "row": row and {"file": row.place.file, "line": row.place.line, "key": row.place.key, "when": row.when_text},
        "pin": {"reason": row.reason, "by": row.by} if row and row.kind == "pin" else None,
        "forced": str(decision.override) if decision.override else None,
        "batches": list(decision.interval),
        "section": decision.section,
        "level": decision.level,
        "class": row.numerics if row else None,
        "collapsed": decision.evidence.collapsed,
        "bits": {**decision.evidence.bits, **decision.evidence.failed},
        "stale": list(decision.evidence.stale),
        "us": decision.us,
        "runner_up": decision.runner_up,
        "next": decision.next,
        "margin": decision.margin,
        "regret": decision.regret,
        "at": dict(entry.at) if entry else {},
        "fallback": decision.fallback.id if decision.fallback else None,
        "extrapolated": list(decision.extrapolated),
        "kernels": [{"kernel": name, "why": why} for name, why in decision.considered],
    }


def device_data(device: Device) -> Data:
    """A device as every command's JSON has it."""
    return {
        "id": device.id,
        "platform": device.platform,
        "name": device.name,
        "arch": device.arch_name or None,
        "sms": device.sms,
        "uuid": device.uuid,
        "source": device.source,
    }


def policy_data(path: Path, known: Registry) -> Data:
    """What is wrong with a policy file, as ``check --json`` prints it."""
    text = path.read_bytes()
    try:
        loaded = policy.parse(text, path)
    except PolicyError as error:
        problem = {"severity": "error", "line": None, "column": None, "key": None, "text": str(error)}
        return {
            "file": str(path),
            "digest": None,
            "errors": 1,
            "warnings": 0,
            "rows": 0,
            "problems": [problem],
            "stale": [],
            "results": [],
        }
    found = policy.lint(loaded, known)
    errors = sum(problem.severity == "error" for problem in found)
    found += [] if errors else policy.staleness(loaded, known)  # a file that does not load has worse faults
    return {
        "file": str(path),
        "digest": loaded.digest,
        "errors": errors,
        "warnings": sum(problem.severity == "warning" for problem in found),
        "rows": sum(map(len, loaded.ops.values())) + len(loaded.pins),
        "problems": [_problem_data(problem) for problem in found],
        "stale": [] if errors else [_stale_data(stale) for stale in stale_kernels(loaded, known)],
        "results": [{**asdict(one), "text": str(one)} for file in results.beside(path) for one in results.outdated(file, known)],
    }


def _problem_data(problem: Problem) -> Data:
    place = problem.place
    return {
        "severity": problem.severity,
        "line": place.line,
        "column": place.column,
        "key": place.key,
        "text": str(problem),
    }


def _stale_data(stale: Stale) -> Data:
    return {
        "line": stale.row.place.line,
        "op": stale.row.op,
        "kernel": stale.kernel,
        "section": stale.section,
        "measured": stale.measured,
        "installed": stale.installed,
        "said": stale.row.stale,
    }
