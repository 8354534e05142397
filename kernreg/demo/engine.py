"""The loop of the demo: requests that come and go, draft windows, accepted prefixes, and the check beside them."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from kernreg.contract import ContractError
from kernreg.demo.oracle import Oracle, Tally, oracle
from kernreg.demo.report import Report, memory_lines, served_lines
from kernreg.demo.stack import CPU_SIZES, GPU_SIZES, NULL, Maker, Pass, Rows, Stack

FAULTS = ("accept", "reuse", "padding")


@dataclass(frozen=True)
class DemoOptions:
    """What to run.

    device: "cpu", "cuda", "cuda:N", or None for a GPU if there is one.
    rounds: windows that each request may get; whoever is left then is finished.
    fault: one of `FAULTS`, planted on purpose so that tests see it found.
    """

    device: str | None = None
    rounds: int = 24
    seed: int = 0
    fault: str | None = None


def run(options: DemoOptions | None = None) -> Report:
    """Decode, check, report.

    Raises:
        ContractError: an option is wrong, or this machine has no such device.
    """
    options = options or DemoOptions()
    device = _checked(options)
    started = time.perf_counter()
    with _one_thread():
        engine = Engine(Stack(CPU_SIZES if device == "cpu" else GPU_SIZES, Maker(device, options.seed)), options)
        for number in range(options.rounds):
            engine.round(last=number == options.rounds - 1)
        return engine.report(time.perf_counter() - started)


def _checked(options: DemoOptions) -> str:
    if options.rounds < 1:
        raise ContractError(f"rounds is {options.rounds}, wanted 1 or more")
    if options.fault not in (None, *FAULTS):
        raise ContractError(f"fault is {options.fault!r}, wanted one of {', '.join(FAULTS)}")
    gpus = ["cuda", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    here = [*(gpus if torch.cuda.is_available() else []), "cpu"]
    if options.device not in (None, *here):
        raise ContractError(f"device is {options.device!r}, wanted one of {', '.join(here)}")
    return options.device or here[0]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors are so small here that several threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(eq=False)
class Request:
    """Its true tokens, how many are committed, where its states are, and an oracle for each layer."""

    number: int
    tokens: list[int]
    slot: int
    ring_row: int
    oracles: list[Oracle]
    done: int = 0

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done


@dataclass
class Counts:
    """What the report counts."""

    requests: Counter[int] = field(default_factory=Counter)  # of each slot
    accepted: Counter[int] = field(default_factory=Counter)  # windows by accepted length
    batches: Counter[int] = field(default_factory=Counter)  # rounds by batch size


class Engine:
    """Continuous batching around the stack."""

    def __init__(self, stack: Stack, options: DemoOptions) -> None:
        self.stack, self.sizes, self.fault = stack, stack.sizes, options.fault
        self.random, self.tally, self.counts = random.Random(options.seed), Tally(), Counts()
        self.slots = deque(range(NULL + 1, self.sizes.slots - 1))
        self.ring_rows = deque(reversed(self.slots))
        self.live: list[Request] = []

    @property
    def rounds(self) -> int:
        return self.counts.batches.total()

    def round(self, *, last: bool) -> None:
        """Verify a window of each request, accept a prefix, commit it, check; the last round finishes every request."""
        self._admit()
        batch = self._place()
        accepted = [self.random.randint(0, min(self.sizes.draft, r.left)) if r else 0 for r in batch]
        finished = [r for r, n in zip(batch, accepted, strict=True) if r and (last or r.left == n)]
        rows = self._rows(batch)
        passes = self.stack.verify(self._drafts(batch, accepted), rows)
        told = self.stack.make.index(self._told(batch, accepted))
        self.stack.commit(rows, told, [request.ring_row for request in finished])

        self._check_padding(batch, passes)
        for row, (request, n) in enumerate(zip(batch, accepted, strict=True)):
            if request:
                self._check(request, row, n, passes)
        self._retire(finished)
        self.counts.batches[len(batch)] += 1

    def _admit(self) -> None:
        """New requests take free slots: half of the places at first, more now and then."""
        for _ in range(len(self.slots)):
            if len(self.live) < self.sizes.requests // 2 or self.random.random() < 0.5:
                slot, ring_row = self.slots.popleft(), self.ring_rows.popleft()
                if not (self.fault == "reuse" and self.counts.requests[slot]):
                    self.stack.start(slot, ring_row)
                tokens = [self._any_token() for _ in range(self.random.randint(6, 24))]
                names = enumerate(self.stack.order)
                oracles = [oracle(self._name(i), group, layer, self.tally) for i, (group, layer) in names]
                self.live.append(Request(self.counts.requests.total(), tokens, slot, ring_row, oracles))
                self.counts.requests[slot] += 1

    def _name(self, number: int) -> str:
        return f"{number} {self.stack.order[number][0].name}"

    def _any_token(self) -> int:
        return self.random.randrange(self.sizes.vocabulary)

    def _place(self) -> list[Request | None]:
        """The live requests and padded rows of a step, in any order."""
        size = self.sizes.batch(len(self.live))
        batch = [*self.live, *[None] * (size - len(self.live))]
        self.random.shuffle(batch)
        return batch

    def _rows(self, batch: Sequence[Request | None]) -> Rows:
        padded = (self.sizes.slots - 1,) * 2 if self.fault == "padding" else None
        return self.stack.rows([(r.slot, r.ring_row) if r else padded for r in batch])

    def _drafts(self, batch: Sequence[Request | None], accepted: Sequence[int]) -> torch.Tensor:
        """[B * T] tokens: a right prefix, then a wrong one and anything; padded rows hold anything."""
        drafts: list[int] = []
        for request, n in zip(batch, accepted, strict=True):
            window = [self._any_token() for _ in range(self.sizes.draft)]
            true = request.tokens[request.done : request.done + n + 1] if request else []
            window[:n] = true[:n]
            if n < len(window) and true[n:] == [window[n]]:
                window[n] = (window[n] + 1) % self.sizes.vocabulary
            drafts += window
        return self.stack.make.index(drafts)

    def _told(self, batch: Sequence[Request | None], accepted: Sequence[int]) -> list[int]:
        """What the commit is told was accepted: the truth, unless a fault is planted."""
        told = list(accepted)
        if self.fault == "accept" and self.rounds == 2:
            told[told.index(max(told))] -= 1
        if self.fault == "padding":
            told = [n if r else 1 for r, n in zip(batch, accepted, strict=True)]
        return told

    def _check_padding(self, batch: Sequence[Request | None], passes: Sequence[Pass]) -> None:
        self.tally.where = f"round {self.rounds}"
        padded = [row for row, request in enumerate(batch) if request is None]
        for number, at in enumerate(passes):
            output = at.o.unflatten(0, (len(batch), -1))[padded]
            self.tally.count(self._name(number), "padding", int((output != 0).sum()))

    def _check(self, request: Request, row: int, n: int, passes: Sequence[Pass]) -> None:
        self.tally.where = f"request {request.number} at token {request.done + n}"
        window = slice(row * self.sizes.draft, row * self.sizes.draft + n)
        batch = len(passes[0].o) // self.sizes.draft
        for at, layer in zip(passes, request.oracles, strict=True):
            if n:
                accepted = Pass({name: x[window] for name, x in at.inputs.items()}, at.o[window])
                layer.tokens(accepted, request.slot, batch)
            if not layer.layers.pending(request.ring_row):
                layer.state(request.slot)
        request.done += n
        self.counts.accepted[n] += 1

    def _retire(self, finished: Sequence[Request]) -> None:
        for request in finished:
            self.tally.where = f"request {request.number} at its end"
            for layer in request.oracles:
                self.tally.count(layer.name, "nothing pending", int(layer.layers.pending(request.ring_row)))
            self.live.remove(request)
            self.slots.append(request.slot)
            self.ring_rows.append(request.ring_row)

    def report(self, seconds: float) -> Report:
        """What there is to say after the last round."""
        self.tally.where = "after the last round"
        for group in self.stack.groups:
            self.tally.count("all layers", "unused slots", group.touched())
        counts = self.counts
        return Report(
            device=str(self.stack.groups[0].plans[0].device),
            rounds=self.rounds,
            requests=counts.requests.total(),
            reused_slots=sum(owners > 1 for owners in counts.requests.values()),
            windows=tuple(counts.accepted[n] for n in range(self.sizes.draft + 1)),
            served=served_lines(self.stack, sorted(counts.batches)),
            checks=tuple(self.tally.worst.values()),
            memory=memory_lines(self.stack),
            seconds=seconds,
        )
