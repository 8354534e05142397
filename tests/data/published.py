"""Published timings as journals: ``python tests/data/published.py`` writes gb300.jsonl, h20-3e.jsonl and b300.jsonl beside it.

The tables are those of two public pull requests; each line's `command` says which. What the tables do not tell (SM counts,
spreads, digests) is filled in. In GDN the two kernels sum in different orders and so are two classes; what the KDA kernels'
bits are is for a test to declare.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernreg.contract import FactValue
from kernreg.tuning.journal import Result

RUN = "2026-01-01T00:00:00Z"
GDN = "published table of the pull request that adds the head-group commit kernel (48 GDN layers, K = V = 128, GB300 at 2070 MHz)"
KDA = "published table of sgl-project/sglang#36821 (KDA chain verify, T = 4, H = HV = 8, K = V = 128, safe gate, one layer)"
DEVICES = {
    "gb300": {"id": "nvidia-gb300", "name": "NVIDIA GB300", "arch": "sm_103", "sms": 152},
    "h20-3e": {"id": "nvidia-h20-3e", "name": "NVIDIA H20-3e", "arch": "sm_90", "sms": 78},
    "b300": {"id": "nvidia-b300", "name": "NVIDIA B300", "arch": "sm_103", "sms": 148},
}

# heads, batch: microseconds of the per-head ("before") and of the head-group kernel ("after"); ring 16, 4 steps, bf16 state
HEADS = {
    ("48/16", 1): (39.8, 42.0),
    ("48/16", 8): (341, 253),
    ("48/16", 128): (5400, 3850),
    ("12/4", 1): (11.5, 17.9),
    ("12/4", 8): (90, 72),
    ("12/4", 128): (1350, 970),
}
# ring, steps of history: the same at batch 128 and 48/16 heads. A full ring is what a lazy fold commits.
RINGS = {
    (16, 4): (5450, 3870),
    (16, 16): (5420, 4090),
    (32, 4): (5790, 7580),
    (32, 32): (5840, 15840),
    (64, 4): (8470, 8170),
    (64, 16): (8550, 9250),
    (64, 64): (9620, 34890),
    (128, 4): (13810, 8320),
    (128, 16): (14000, 9150),
    (128, 128): (17300, 65430),
}
# batch: microseconds of unfused, unfused+ring, fused (BV=4), fused+ring (BV=4), fused+ring at its best BV, that BV
VERIFY: dict[str, dict[int, tuple[float, ...]]] = {
    "h20-3e": {
        1: (11.47, 9.56, 8.17, 7.52, 6.56, 16),
        2: (12.33, 9.73, 12.73, 12.22),
        4: (14.43, 10.18, 19.53, 19.06, 7.72, 32),
        16: (23.82, 15.06, 71.62, 67.36, 17.31, 32),
        64: (79.38, 51.49, 280.06, 289.93, 65.68, 32),
    },
    "b300": {
        1: (14.33, 10.66, 6.14, 7.14, 6.76, 16),
        2: (14.13, 10.65, 7.58, 8.58),
        4: (15.17, 11.06, 12.28, 13.93, 7.37, 16),
        16: (17.83, 12.09, 36.25, 41.23, 10.45, 32),
        64: (53.11, 28.05, 172.81, 153.47, 34.19, 32),
    },
}


def _line(op: str, device: str, us: float, use: str, **more: Any) -> Result:
    return Result(
        run=RUN,
        op=op,
        use=f"triton.{use}",
        digest="0" * 16,
        stage="full",
        us=(us, us, us),
        samples=3,
        reference="torch.reference",
        device=DEVICES[device],
        software={"source": "published table"},
        date=RUN,
        **{"facts": {}, "config": {}, **more},
    )


def _commits(ring: int, history: int, heads: str, batch: int, times: tuple[float, float]) -> Iterator[Result]:
    value_heads, key_heads = map(int, heads.split("/"))
    record = (value_heads + key_heads) * 128 * 4 + value_heads * 4  # u and k with low parts, and g
    for use, us in zip(("per_head", "head_group"), times, strict=True):
        for folding in ("every", "lazy"):
            full, one_draft = history == ring, history <= 16
            if full if folding == "lazy" else one_draft:
                yield _line(
                    "gdn_ring_commit",
                    "gb300",
                    us,
                    use,
                    row={"ring": ring, "folding": folding, "state": "bf16"},
                    facts={"heads": heads, "track": False},
                    batch=batch,
                    load={"layers": 48, "history": history},
                    work=48 * batch * (2 * value_heads * 128 * 128 * 2 + history * record),
                    command=GDN,
                )


def _two_classes(timings: list[Result]) -> Iterator[Result]:
    seen = set()
    for timing in timings:
        if (timing.use, timing.key) not in seen:
            seen.add((timing.use, timing.key))
            bits = {"triton.per_head": "1", "triton.head_group": "2"}[timing.use] * 16
            yield replace(timing, stage="bits", bits=bits, batch=0, load={}, us=None, samples=0, work=0)


def gdn_commits() -> list[Result]:
    lines = [line for (heads, batch), times in HEADS.items() for line in _commits(16, 4, heads, batch, times)]
    lines += [line for (ring, history), times in RINGS.items() for line in _commits(ring, history, "48/16", 128, times)]
    return [*_two_classes(lines), *lines]


def kda_verifies(device: str) -> list[Result]:
    lines = []
    for batch, (unfused, unfused_ring, fused, fused_ring, *best) in VERIFY[device].items():
        found = [("snapshot", "unfused", {}, unfused), ("snapshot", "fused", {"BV": 4}, fused)]
        found += [("ring", "unfused", {}, unfused_ring), ("ring", "fused", {"BV": 4}, fused_ring)]
        found += [("ring", "fused", {"BV": int(best[1])}, best[0])] if best else []
        for mode, use, config, us in found:
            row: dict[str, FactValue] = {"mode": mode, "draft": 4, "heads": "8/8"}
            more = {"row": row, "config": config, "batch": batch, "work": batch, "command": KDA}
            lines.append(_line("kda_chain_verify", device, us, use, **more))
    return lines


JOURNALS = {"gb300": gdn_commits, "h20-3e": lambda: kda_verifies("h20-3e"), "b300": lambda: kda_verifies("b300")}


def text(name: str) -> str:
    return "".join(f"{line.to_line()}\n" for line in JOURNALS[name]())


if __name__ == "__main__":
    for name in JOURNALS:
        Path(__file__).with_name(f"{name}.jsonl").write_text(text(name), encoding="utf-8")
