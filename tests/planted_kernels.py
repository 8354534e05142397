"""Kernels with planted faults, as a backend of `gdn_ring_commit` and a registry that holds it: each must be found, or not chosen.

    planted.honest             the reference under another name
    planted.one_ulp            right but for the last bit of one class of elements (config `where`, see `WHERE`)
    planted.depends_on_batch   sums in float64 when the batch is larger than config `above`: right, with other bits
    planted.races              moves a random element of each call by its last bit
    planted.reads_past         multiplies the records past the history by zero: right, unless they hold NaN
    planted.wrong              a tenth of the decay is missing
    planted.cannot_compile     a Triton kernel that its compiler refuses
    planted.autotunes          reaches a kernel that tunes itself online: refused when it is loaded
    planted.wins_eagerly       one slow operation beside a Triton kernel: few launches, much device time
    planted.wins_in_graphs     many quick operations beside the same kernel: loses where launches are what is timed
    planted.crashes            ends its process by a segmentation fault

The last four launch Triton kernels; without a GPU they run in its interpreter. Workers find the registry by name:
``planted_kernels:registry``.
"""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from kernreg import ops
from kernreg.contract import Backend, Kernel
from kernreg.registry import Registry

OP = ops.gdn_ring_commit
WHERE = ("wrapped", "tracked", "history_9", "layer_4", "last_column", "last_key", "one_element", "large", "tiny", "null_slot")


def planted(**extra: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: the function takes the op's arguments by name as a dict, and what is in `extra` beside them."""

    def with_signature(function: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            more = {name: kwargs.pop(name) for name in extra}
            call = OP.signature.bind(*args, **kwargs)
            call.apply_defaults()
            function(dict(call.arguments), **more)

        added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in extra]
        run.__signature__ = OP.signature.replace(parameters=[*OP.signature.parameters.values(), *added])  # type: ignore[attr-defined]
        return run

    return with_signature


def reference(arguments: dict[str, Any]) -> None:
    from kernreg_torch.gdn_ring_commit import gdn_ring_commit

    gdn_ring_commit(**arguments)


def next_up(x: torch.Tensor) -> torch.Tensor:
    """The same elements, the last bit of each one higher."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return (x.view(kind) + 1).view(x.dtype)


@planted()
def honest(arguments: dict[str, Any]) -> None:
    reference(arguments)


@planted(where=None)
def one_ulp(arguments: dict[str, Any], where: str) -> None:
    before = {name: arguments[name].clone() for name in ("write_pos", "base", "fold")}
    state = arguments["state"]
    reference(arguments)
    chosen = class_of_elements(arguments, before, where)
    state[:] = torch.where(chosen, next_up(state), state)


def class_of_elements(arguments: dict[str, Any], before: dict[str, torch.Tensor], where: str) -> torch.Tensor:
    """Which elements of the committed state belong to the class."""
    state, null = arguments["state"], arguments["null_slot"]
    length, chosen = arguments["ring_g"].shape[-1], torch.zeros_like(arguments["state"], dtype=torch.bool)
    live = [
        (slot, row, i)
        for i, (slot, row) in enumerate(zip(arguments["slots"].tolist(), arguments["rows"].tolist(), strict=True))
        if null < slot < state.shape[1] and before["fold"][row] and before["write_pos"][row] > 0
    ]
    for slot, row, i in live:
        n, base = int(before["write_pos"][row]), int(before["base"][row]) % length
        match where:
            case "wrapped":
                chosen[:, slot] |= base + n > length
            case "history_9":
                chosen[:, slot] |= n == 9
            case "tracked" if int(arguments["track_step"][i]) >= 0:
                chosen[:, int(arguments["track_slots"][i])] = True
            case "layer_4" if state.shape[0] > 4:
                chosen[4, slot] = True
            case "last_column":
                chosen[:, slot, :, -1] = True
            case "last_key":
                chosen[:, slot, :, :, -1] = True
            case "one_element":
                chosen[0, slot, -1, 0, -1] = True
            case "large":
                chosen[:, slot] = state[:, slot].abs() > 100
            case "tiny":
                chosen[:, slot] = (state[:, slot].abs() < 1e-5) & (state[:, slot] != 0)
    if where == "null_slot" and null >= 0:
        chosen[:, null] = True
    return chosen


@planted(above=None)
def depends_on_batch(arguments: dict[str, Any], above: int) -> None:
    if arguments["slots"].shape[0] <= above:
        reference(arguments)
        return
    wide = {**arguments, "state": arguments["state"].double()}
    reference(wide)
    arguments["state"].copy_(wide["state"])


@planted()
def races(arguments: dict[str, Any]) -> None:
    reference(arguments)
    state = arguments["state"]
    slot = max(arguments["slots"].tolist()) % state.shape[1]
    pick = [int(torch.randint(size, ())) for size in state.shape[2:]]
    at = (0, slot, *pick)
    state[at] = next_up(state[at])


@planted()
def reads_past(arguments: dict[str, Any]) -> None:
    nothing = 0 * arguments["ring_u"].sum()
    reference(arguments)
    slots = arguments["slots"]
    live = (slots > arguments["null_slot"]) & (slots < arguments["state"].shape[1])
    arguments["state"][:, slots[live].long()] += nothing.to(arguments["state"].dtype)


@planted()
def wrong(arguments: dict[str, Any]) -> None:
    reference({**arguments, "ring_g": arguments["ring_g"] * 0.9})


@triton.jit
def broken(p_state):
    tl.static_assert(False, "no such instruction on this chip")


@planted()
def cannot_compile(arguments: dict[str, Any]) -> None:
    broken[(1,)](arguments["state"])


@triton.autotune([triton.Config({"BLOCK": size}) for size in (16, 32)], key=["n"])
@triton.jit
def tuned_online(p_state, n, BLOCK: tl.constexpr):
    pass


@planted()
def autotunes(arguments: dict[str, Any]) -> None:
    reference(arguments)
    tuned_online[(1,)](arguments["state"], arguments["state"].numel())


def _beside(arguments: dict[str, Any], layout: str, work: Callable[[torch.Tensor], object]) -> None:
    from kernreg_triton.gdn_ring_commit import sequential

    sequential(**arguments, BV=64, num_warps=4, ahead=0, layout=layout)
    state = arguments["state"]
    work(torch.empty(1 << (26 if state.is_cuda else 10), device=state.device))


@planted(layout=None)
def wins_eagerly(arguments: dict[str, Any], layout: str) -> None:
    _beside(arguments, layout, torch.sin_)


@planted(layout=None)
def wins_in_graphs(arguments: dict[str, Any], layout: str) -> None:
    _beside(arguments, layout, lambda scratch: [scratch[:1].zero_() for _ in range(64)])


@planted()
def crashes(arguments: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _kernel(name: str, **config: tuple[Any, ...]) -> Kernel:
    default = {parameter: values[0] for parameter, values in config.items()}
    triton = name.startswith("wins")
    sources = ("kernreg_triton.gdn_ring_commit",) if triton else ("kernreg_torch.gdn_ring_commit",)
    return Kernel(
        OP.name,
        f"planted.{name}",
        f"{__name__}:{name}",
        config,
        default,
        sources=sources,
        capturable=triton,
        doc="see planted_kernels",
    )


BACKEND = Backend(
    "planted",
    kernels=(
        _kernel("honest"),
        _kernel("one_ulp", where=WHERE),
        _kernel("depends_on_batch", above=(1, 8, 16, 64)),
        *map(_kernel, ("races", "reads_past", "wrong", "cannot_compile", "autotunes", "wins_eagerly", "wins_in_graphs")),
        _kernel("crashes"),
    ),
    requires=("torch", "triton"),
)


def registry(*more: Backend) -> Registry:
    """The op with its reference and the planted kernels, and other backends."""
    from kernreg_torch import BACKEND as TORCH

    made = Registry()
    made.add_op(OP)
    made.add(Backend("torch", tuple(kernel for kernel in TORCH.kernels if kernel.op == OP.name), TORCH.requires))
    for backend in (BACKEND, *more):
        made.add(backend)
    return made
