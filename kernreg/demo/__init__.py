"""`kernreg demo`: speculative decoding of a small random-weight stack through the registry, held against plain decoding.

Each round drafts T tokens a request: its true next tokens for a random prefix, then wrong ones. All layers verify the
window through bound plans, the prefix is accepted and committed, and the next round goes on from there. Requests come,
finish and hand their slots on; batches carry padded rows. Beside it an oracle decodes every accepted token again, one at a
time in float64.

stack.py is the model and its pools, engine.py the loop, oracle.py the check, report.py what is said at the end.
"""

from kernreg.demo.engine import DemoOptions, run
from kernreg.demo.report import Report

__all__ = ["DemoOptions", "Report", "run"]
