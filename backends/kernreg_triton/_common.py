"""What all launchers and kernels here share: how kernels are compiled, strides, index loads, splits into 16-bit parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl


def jit(
    *, vectors: Sequence[str] = (), compiler: Callable[..., Any] = triton.jit
) -> Callable[[Callable[..., None]], Mapping[str, Any]]:
    """Decorator: a kernel as {"aligned": ..., "any": ...}, one binary for a static key whatever the arguments are.

    Triton compiles anew when an integer becomes 1 or a multiple of 16, or a pointer leaves a 16-byte boundary, and the new
    binary may round differently. Here nothing that may differ between two calls of one plan is specialised:

    - integers are annotated, ``tl.int64`` for strides and sizes, so that their type does not follow their value;
    - pointers begin with ``p_``. Those in `vectors` lie on 16 bytes under the fact layout=aligned, and "aligned" relies on
      it; "any" relies on nothing. All others (indices, cursors, scalars) are never relied on;
    - strides of `vectors` come divided by 16 bytes under "aligned" (see `stride_unit`) and the kernel multiplies them back,
      which is how the compiler learns that they are whole vectors.

    `compiler` is Triton's or Gluon's. Pick by the fact: ``kernel[layout][grid](...)``.
    """

    def compile_both(function: Callable[..., None]) -> Mapping[str, Any]:
        parameters = inspect.signature(function).parameters
        pointers = [name for name in parameters if name.startswith("p_")]
        integers = [name for name, p in parameters.items() if str(p.annotation).removeprefix("tl.").startswith("int")]
        if not set(vectors) <= set(pointers):
            raise TypeError(f"{function.__name__}: no pointers named {sorted(set(vectors) - set(pointers))}")
        return {
            layout: compiler(
                do_not_specialize=integers,
                do_not_specialize_on_alignment=[name for name in pointers if layout == "any" or name not in vectors],
            )(function)
            for layout in ("aligned", "any")
        }

    return compile_both


def stride_unit(layout: str, tensor: torch.Tensor) -> int:
    """Elements that strides are counted in: one 16-byte vector when the pools are aligned, else one element."""
    return 16 // tensor.element_size() if layout == "aligned" else 1


def strides(tensor: torch.Tensor | None, dims: int, unit: int = 1) -> tuple[int, ...]:
    """The first `dims` strides in `unit`s; zeros for an argument that is absent."""
    return (0,) * dims if tensor is None else tuple(s // unit for s in tensor.stride()[:dims])


@triton.jit
def load_index(p, i, stride):
    """Element i of a strided int32 or int64 tensor, as int64."""
    return tl.load(p + i.to(tl.int64) * stride).to(tl.int64)


@triton.jit
def load_wide(p, p_low, o, m, LOW: tl.constexpr):
    """high + low as fp32, or just the value of a tensor without low parts; zero, and not read, where masked."""
    b_x = tl.load(p + o, mask=m, other=0.0).to(tl.float32)
    if LOW:
        b_x += tl.load(p_low + o, mask=m, other=0.0).to(tl.float32)
    return b_x


@triton.jit
def split(b_x, DTYPE: tl.constexpr):
    """fp32 b_x ~ high + low, both DTYPE: two bf16 parts keep 17 bits."""
    b_high = b_x.to(DTYPE)
    return b_high, (b_x - b_high.to(tl.float32)).to(DTYPE)


@triton.jit
def load_parts(p, p_low, o, m, LOW: tl.constexpr, DTYPE: tl.constexpr):
    """The same value as (high, low) operands of a product: the stored parts if they are DTYPE already, else split anew."""
    if p.dtype.element_ty == DTYPE:
        b_high = tl.load(p + o, mask=m, other=0.0)
        b_low = tl.load(p_low + o, mask=m, other=0.0) if LOW else b_high
    else:
        b_high, b_low = split(load_wide(p, p_low, o, m, LOW), DTYPE)
    return b_high, b_low


# What operands of a product are split into; the interpreter has no bf16 arithmetic, and fp32 leaves the low part empty.
DOT = tl.bfloat16 if isinstance(split, triton.JITFunction) else tl.float32
