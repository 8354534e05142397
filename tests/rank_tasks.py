"""What the processes of test_ranks.py run: one rank each, all scenarios in order."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import kernreg
from kernreg import policy, ranks, registry
from kernreg.contract import Backend, Kernel
from kernreg.device import Device

FACTS: dict[str, Any] = {"ring": 16, "heads": "2/1", "k_dim": 16, "v_dim": 16, "state": "f32", "ring_dtype": "f32", "low": False}
OTHERWISE = "    - otherwise: {use: torch.reference}\n"
BROKEN = """\
    - when: {ring: 16}
      use: mine.breaks_on_rank_1
"""
FALLBACK = BROKEN + "      fallback: {use: torch.reference}\n"


def text(rows: str = "") -> str:
    return f"schema: 1\ndevices: {{}}\nops:\n  gdn_ring_commit:\n{rows}{OTHERWISE}"


def breaks_on_rank_1(
    state, ring_u, ring_k, ring_g, write_pos, base, fold, slots, rows, *, ring_u_low=None, ring_k_low=None, accept=None,
    track_slots=None, track_step=None, null_slot=-1, folding="every",
):  # fmt: skip
    if dist.get_rank() == 1:
        raise RuntimeError("out of shared memory")


def differs_by_rank(
    state, ring_u, ring_k, ring_g, write_pos, base, fold, slots, rows, *, ring_u_low=None, ring_k_low=None, accept=None,
    track_slots=None, track_step=None, null_slot=-1, folding="every",
):  # fmt: skip
    state.add_(1 + dist.get_rank())


def kernels() -> registry.Registry:
    made = registry.Registry()
    for op in registry.default().ops.values():
        made.add_op(op)
    for backend in registry.default().backends.values():
        made.add(backend)
    rows = (
        Kernel(op="gdn_ring_commit", name=f"mine.{n}", target=f"rank_tasks:{n}") for n in ("breaks_on_rank_1", "differs_by_rank")
    )
    made.add(Backend("mine", kernels=tuple(rows)))
    return made


def plan(rows: str = "", **facts: Any) -> kernreg.Plan:
    made = kernels()
    read = policy.parse(text(rows), "test.yaml")
    return kernreg.bind("gdn_ring_commit", device=Device.cpu(), policy=read, registry=made, **(FACTS | facts))


def same(rank: int, group: Any) -> Any:
    return ranks.agree([plan()], group, timeout=60)


def other_heads(rank: int, group: Any) -> Any:
    return ranks.agree([plan(heads=f"{2 + 2 * rank}/1")], group, timeout=60)


def other_policy(rank: int, group: Any) -> Any:
    return ranks.agree([plan("    - when: {ring: 64}\n      use: torch.reference\n" if rank == 1 else "")], group, timeout=60)


def other_override(rank: int, group: Any) -> Any:
    with kernreg.force(**({"gdn_ring_commit": "torch"} if rank == 0 else {})):
        return ranks.agree([plan()], group, timeout=60)


def other_key(rank: int, group: Any) -> Any:
    return ranks.agree([plan(ring=32 if rank == 1 else 16)], group, timeout=60)


def falls_back_together(rank: int, group: Any) -> Any:
    bound = plan(FALLBACK)
    found = ranks.agree([bound], group, timeout=60)
    return [list(found.fallbacks), bound.resolved()]


def falls_back_to_other_bits(rank: int, group: Any) -> Any:
    return ranks.agree([plan(BROKEN + "      fallback: {use: mine.differs_by_rank}\n")], group, timeout=60, fingerprints=True)


def cannot_start(rank: int, group: Any) -> Any:
    return ranks.agree([plan(BROKEN)], group, timeout=60)


def no_plans(rank: int, group: Any) -> Any:
    return ranks.agree([plan()] if rank else [], group, timeout=60)


def late(rank: int, group: Any) -> Any:
    if rank == 1:
        time.sleep(2.5)
    return ranks.agree([plan()], group, timeout=1.0)


SCENARIOS = (
    same, other_heads, other_policy, other_override, other_key, falls_back_together, falls_back_to_other_bits, cannot_start,
    no_plans, late,
)  # fmt: skip


def main(rank: int, size: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    part = dist.new_group([0, 1])
    said = {}
    for scenario in SCENARIOS:
        try:
            said[scenario.__name__] = ["agreed", str(scenario(rank, part if scenario is same else None))]
        except ranks.RanksDisagree as error:
            said[scenario.__name__] = ["refused", str(error)]
        dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
