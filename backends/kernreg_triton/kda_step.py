"""The arithmetic of Kimi Delta Attention, written once: verify and commit must give the same bits.

A row of K numbers is held as *pieces*, a tuple of tiles [.., C] that each cover C consecutive channels. Where the compiler
puts a tile is its own affair, so no result may depend on it:

- sums over K follow channel numbers alone: with the state, a chain of `tl.fma` over the pieces, then adjacent pairs inside
  the piece (`dot`); within a row, pieces by halves, then the same pairs (`sums`). Each level is a sum of two, and that has
  only one order;
- launchers compile with ``enable_fp_fusion=False``: what is fused is written as `tl.fma`.

With C = 16 a thread holds K / 4 channels of a column of the state, so that a column's sum takes two shuffles.
"""

from __future__ import annotations

import triton
import triton.language as tl

try:
    from triton.experimental.gluon.language import convert_layout
except ImportError:  # then no caller has layouts to give
    convert_layout = None

EPS = tl.constexpr(1e-6)


def piece_width(K: int) -> int:
    """C: decides the order of all sums over K, so it may depend on nothing but K."""
    return max(16, K // 8)


# --- sums over K ------------------------------------------------------------------------------------------------------


@triton.jit
def pairs(b_x, R: tl.constexpr, N: tl.constexpr):
    """Sum [R, N] over N (a power of two) by adjacent pairs: [R]."""
    if N == 1:
        b_sum = tl.reshape(b_x, [R])
    else:
        b_sum = pairs(tl.sum(tl.reshape(b_x, [R, N // 2, 2]), axis=2), R, N // 2)
    return b_sum


@triton.jit
def place(b_x, LAYOUT: tl.constexpr):
    """b_x where a kernel in Gluon wants it; in Triton (None) the compiler decides."""
    return b_x if LAYOUT is None else convert_layout(b_x, LAYOUT)


@triton.jit
def dot(x, y, R: tl.constexpr, C: tl.constexpr, LAYOUT: tl.constexpr = None):
    """Sum over K of x * y, for pieces that broadcast to [R, C]: [R]."""
    b_sum = x[0] * y[0]
    for j in tl.static_range(1, len(x)):
        b_sum = tl.fma(x[j], y[j], b_sum)
    return place(pairs(b_sum, R, C), LAYOUT)


@triton.jit
def sums(b_x, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
    """Sum whole rows [R, K] over K: [R]. By halves down to the width of a piece, then by adjacent pairs."""
    if K == C:
        b_sum = pairs(b_x, R, C)
    else:
        b_sum = sums(tl.sum(tl.reshape(b_x, [R, 2, K // 2]), axis=1), R, K // 2, C)
    return b_sum


@triton.jit
def sums_of_pieces(x, R: tl.constexpr, C: tl.constexpr):
    """`sums` of rows held as pieces [R, C], by the same tree."""
    if len(x) == 1:
        b_sum = pairs(x[0], R, C)
    else:
        half = ()
        for j in tl.static_range(len(x) // 2):
            half = half + (x[j] + x[j + len(x) // 2],)
        b_sum = sums_of_pieces(half, R, C)
    return b_sum


@triton.jit
def inverse_norm(b_squares):
    """What l2 normalisation multiplies by, from the sum of squares."""
    return tl.math.rsqrt(b_squares + EPS)


# --- activations and gates --------------------------------------------------------------------------------------------


@triton.jit
def exp_of_minus(b_x):
    """exp(-x), limited where it would overflow; NaN stays NaN."""
    return tl.exp(tl.minimum(-b_x, 87.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def sigmoid(b_x):
    return 1.0 / (1.0 + exp_of_minus(b_x))


@triton.jit
def softplus(b_x):
    """log(1 + exp(x)); above 20 this form is x to the last bit."""
    return tl.maximum(b_x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(b_x)))


@triton.jit
def convolve(taps, weights, b_bias):
    """SiLU of the causal convolution [T, C], rounded to the dtype of the inputs.

    taps: inputs [T, C] of each step and of 1, 2 and 3 before. weights: four columns [C]. b_bias: [1, C] or None.
    """
    b_y = weights[0].to(tl.float32)[None, :]
    if b_bias is None:
        b_y = b_y * taps[3].to(tl.float32)
    else:
        b_y = tl.fma(b_y, taps[3].to(tl.float32), b_bias)
    for j in tl.static_range(1, 4):
        b_y = tl.fma(weights[j].to(tl.float32)[None, :], taps[3 - j].to(tl.float32), b_y)
    return (b_y / (1.0 + exp_of_minus(b_y))).to(taps[0].dtype)


@triton.jit
def log_decay(b_a, b_dt_bias, A_log, lower_bound, SAFE: tl.constexpr):
    """g: the gate of each key channel, all fp32."""
    b_x = b_a + b_dt_bias
    if SAFE:
        b_g = lower_bound * sigmoid(tl.exp(A_log) * b_x)
    else:
        b_g = -tl.exp(A_log) * softplus(b_x)
    return b_g


@triton.jit
def decay(b_g):
    """What the gate multiplies the state by."""
    return tl.exp(b_g)


# --- the state and its step -------------------------------------------------------------------------------------------


@triton.jit
def load_row(p, C: tl.constexpr, J: tl.constexpr):
    """J pieces [1, C] fp32 of one row."""
    o_c = tl.arange(0, C)
    x = ()
    for j in tl.static_range(J):
        x = x + (tl.load(p + j * C + o_c)[None, :].to(tl.float32),)
    return x


@triton.jit
def load_state(p, o_v, m_v, K: tl.constexpr, C: tl.constexpr):
    """Pieces [BV, C] of rows o_v of a head's state [V, K]; zero where masked."""
    p_rows = p + (o_v * K)[:, None] + tl.arange(0, C)[None, :]
    h = ()
    for j in tl.static_range(K // C):
        h = h + (tl.load(p_rows + j * C, mask=m_v[:, None], other=0.0),)
    return h


@triton.jit
def store_state(p, h, o_v, m_v, K: tl.constexpr, C: tl.constexpr):
    p_rows = p + (o_v * K)[:, None] + tl.arange(0, C)[None, :]
    for j in tl.static_range(K // C):
        tl.store(p_rows + j * C, h[j], mask=m_v[:, None])


@triton.jit
def step(h, b_decay, k, b_v, beta, BV: tl.constexpr, C: tl.constexpr, LAYOUT: tl.constexpr = None):
    """h~ = diag(decay) h;  u = beta (v - h~^T k);  h = h~ + k u^T.  Returns h, h~ and u.

    Pieces: h [BV, C]; decay and normalised k [1, C]. b_v, u [BV].
    """
    decayed = ()
    for j in tl.static_range(len(h)):
        decayed = decayed + (h[j] * b_decay[j],)
    b_u = beta * (b_v - dot(decayed, k, BV, C, LAYOUT))
    updated = ()
    for j in tl.static_range(len(h)):
        updated = updated + (tl.fma(k[j], b_u[:, None], decayed[j]),)
    return updated, decayed, b_u


@triton.jit
def output(decayed, b_u, q, kq, BV: tl.constexpr, C: tl.constexpr, LAYOUT: tl.constexpr = None):
    """h^T q as h~^T q + (k . q) u, which need not wait for h."""
    return tl.fma(b_u, kq, dot(decayed, q, BV, C, LAYOUT))
