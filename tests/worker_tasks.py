"""Tasks for the worker tests: a spawned process imports them by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable


def work(task: str, note: Callable[[str], None]) -> str:
    note(f"on {task}")
    match task:
        case "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exits":
            os._exit(7)
        case "hangs":
            time.sleep(60)
        case "raises":
            raise ValueError("no")
    return f"{task} done"


def sick() -> bool:
    return False
