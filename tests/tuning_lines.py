"""Made-up journal lines for tests of tuning."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kernreg import ops
from kernreg.contract import FactValue
from kernreg.policy_file import Row, parse
from kernreg.tuning.journal import Result

OP = ops.gdn_ring_commit
RUN, LATER = "2026-11-30T10:00:00Z", "2026-12-01T10:00:00Z"
H200 = {"id": "nvidia-h200", "name": "NVIDIA H200", "arch": "sm_90", "sms": 132}
ROW: Mapping[str, FactValue] = {"ring": 16, "folding": "every"}
DIGEST, OTHER_DIGEST = "d1" * 8, "d2" * 8


def line(variant: str, us: float, batch: int = 8, **more: Any) -> Result:
    """One result; `variant` is a kernel's name, or name:BV."""
    use, _, width = variant.partition(":")
    spread = more.pop("spread", 0.001)
    made = Result(
        run=RUN,
        op=OP.name,
        row=ROW,
        facts={"heads": "48/16"},
        batch=batch,
        load={"layers": 48, "history": 4},
        use=f"triton.{use}",
        config={"BV": int(width)} if width else {},
        digest=DIGEST,
        stage="full",
        us=(us * (1 - spread), us, us * (1 + spread)),
        samples=7,
        work=batch * 1000,
        reference="torch.reference",
        device=H200,
        software={"torch": "2.11.0", "triton": "3.6.0"},
        date=RUN,
    )
    return replace(made, **more)


def _untimed(variant: str, **more: Any) -> Result:
    return replace(line(variant, 1.0, batch=0, load={}), **{"us": None, "samples": 0, "work": 0, **more})


def failed(variant: str, **more: Any) -> Result:
    return _untimed(variant, **{"stage": "failed", "step": "parity", "reason": "state: 9 times", **more})


def bits(variant: str, family: object, **more: Any) -> Result:
    """A fingerprint: the same for the same family and static key."""
    made = _untimed(variant, stage="bits", bits="0" * 16, **more)
    return replace(made, bits=hashlib.sha256(repr((family, made.key)).encode()).hexdigest()[:16])


def rows(text: str) -> list[Row]:
    """The measured rows of a built file, of the one op."""
    return [row for row in parse(text).ops[OP.name] if row.devices]


def chosen(text: str, row: int = 0) -> str:
    """What a row takes: kernel and config of each entry, with the last batch of all but the last."""
    entries = rows(text)[row].entries
    return " ".join(
        ":".join([entry.use.kernel, *map(str, entry.use.config.values())]) + (f"<={entry.high}" if entry.high else "")
        for entry in entries
    )


def timings(results: Iterable[Result]) -> Counter[tuple[str, str, str, str]]:
    """How often each variant was timed, screened or out, by stage, row and cell."""
    return Counter((r.stage, r.row_key, r.cell_key, r.variant) for r in results)


def nothing_twice(results: Iterable[Result]) -> bool:
    """Nothing but what was timed again on purpose stands there twice."""
    return all(count == 1 or stage == "again" for (stage, *_), count in timings(results).items())
