"""Triton kernel of `kernreg.ops.gdn_ring_verify`: all tokens of a window at once, by the chunked delta rule.

With S the checkpoint, H the log decay of the whole history, h_j of the records behind record j and P_t of the window's tokens
up to t, what the window's own updates leave alone decays to

    X_t = exp(P_t) S_0 = exp(P_t) (exp(H) S + sum_j exp(h_j) u_j k_j^T)

and is never built: it is only multiplied with keys and queries. The window's updates solve a small unit triangular system,
and the outputs read them:

    u_t + beta_t sum_{s<t} exp(P_t - P_s) (k_s . k_t) u_s = beta_t (v_t - X_t k_t)
    o_t = scale (X_t q_t + sum_{s<=t} exp(P_t - P_s) (k_s . q_t) u_s)

Keys and queries x are stacked, so that one product with S serves both and both lines are one elimination. Products run on the
tensor cores in bf16. Raw keys and queries, the state and the records' parts are exact there, norms are divided out afterwards;
whatever else is multiplied is split into a high and a low part. A program is one warp and owns whole columns of a value head,
and M, the rows of all products, does not depend on the config: every variant adds in the same order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernreg_triton._common import DOT, jit, load_index, split, stride_unit, strides

VECTORS = ("p_q", "p_k", "p_v", "p_state", "p_ring_u", "p_ring_k", "p_ring_u_low", "p_ring_k_low", "p_o")
EPS = tl.constexpr(1e-6)
CHUNK = tl.constexpr(16)  # records of the history in one product: the least that tensor cores sum over


class History(NamedTuple):
    """The records of one value head: how many, the ring position of the first, and where the ring lies."""

    n: Any
    base: Any
    p_k: Any
    p_k_low: Any
    p_u: Any
    p_u_low: Any
    p_g: Any


# --- operands and products


@triton.jit
def _parts(b_x, DOT: tl.constexpr):
    """b_x as operands: itself, or high and low part."""
    if b_x.dtype == DOT:
        return (b_x,)
    else:
        return split(b_x.to(tl.float32), DOT)


@triton.jit
def _load_parts(p, p_low, o, m, LOW: tl.constexpr, DOT: tl.constexpr):
    """Values with or without stored low parts, as operands; zero, and not read, where masked."""
    b_high = tl.load(p + o, mask=m, other=0.0)
    if not LOW:
        return _parts(b_high, DOT)
    else:
        b_low = tl.load(p_low + o, mask=m, other=0.0)
        if b_high.dtype == DOT:
            return b_high, b_low
        else:
            return split(b_high.to(tl.float32) + b_low.to(tl.float32), DOT)


@triton.jit
def _store_parts(p, p_low, o, b_x, m, LOW: tl.constexpr):
    """Store fp32 b_x as one value, or as high and low part."""
    b_high = b_x.to(p.dtype.element_ty)
    tl.store(p + o, b_high, mask=m)
    if LOW:
        tl.store(p_low + o, (b_x - b_high.to(tl.float32)).to(p.dtype.element_ty), mask=m)


@triton.jit
def _product(x, y, b_sum, TRANS: tl.constexpr = False):
    """b_sum + x @ y, or x @ y^T, for operands in parts; low times low is below fp32's rounding and left out."""
    for i in tl.static_range(len(x)):
        for j in tl.static_range(len(y)):
            if i + j < 2:
                b_sum = tl.dot(x[i], tl.trans(y[j]) if TRANS else y[j], b_sum)
    return b_sum


@triton.jit
def _halves(b_x, R: tl.constexpr, C: tl.constexpr):
    """[2 R, C] -> upper and lower half."""
    return tl.split(tl.permute(tl.reshape(b_x, [2, R, C]), (1, 2, 0)))


@triton.jit
def _stacked(b_upper, b_lower, R: tl.constexpr, C: tl.constexpr):
    """Two [R, C] -> [2 R, C]."""
    return tl.reshape(tl.permute(tl.join(b_upper, b_lower), (2, 0, 1)), [2 * R, C])


@triton.jit
def _left_half(b_x, R: tl.constexpr, C: tl.constexpr):
    """[R, 2 C] -> [R, C]."""
    b_left, _ = tl.split(tl.permute(tl.reshape(b_x, [R, 2, C]), (0, 2, 1)))
    return b_left


@triton.jit
def _twice(b_x, R: tl.constexpr, C: tl.constexpr):
    """[R, C] -> [R, 2 C]: the same columns again."""
    return tl.reshape(tl.permute(tl.join(b_x, b_x), (0, 2, 1)), [R, 2 * C])


@triton.jit
def _pair(b_x, C: tl.constexpr):
    """[2 C] -> its halves."""
    return tl.split(tl.permute(tl.reshape(b_x, [2, C]), (1, 0)))


# --- gates


@triton.jit
def _log1p(b_x):
    """log(1 + x) for x in 0..1 as 2 atanh(x / (2 + x)): small results keep their digits, as a decay near none needs."""
    b_r = b_x / (2.0 + b_x)
    b_s = b_r * b_r
    b_y = tl.full(b_x.shape, 1.0 / 15, tl.float32)
    for i in tl.static_range(6):
        b_y = tl.fma(b_y, b_s, 1.0 / (13 - 2 * i))
    return 2.0 * tl.fma(b_y * b_s, b_r, b_r)


@triton.jit
def _softplus(b_x):
    """log(1 + exp(x)); above 20 this form is x to the last bit."""
    return tl.maximum(b_x, 0.0) + _log1p(tl.exp(-tl.abs(b_x)))


@triton.jit
def _sigmoid(b_x):
    b_e = tl.exp(-tl.abs(b_x))
    return tl.where(b_x < 0, b_e, 1.0) / (1.0 + b_e)


@triton.jit
def _decays(b_a, m_t, is_key, A_log, dt_bias):
    """g of tokens that stand twice in [2 BT], and P in fp64: a strong decay must not cost the differences behind it digits."""
    b_g = tl.where(m_t, -tl.exp(A_log) * _softplus(b_a + dt_bias), 0.0)
    b_wide = b_g.to(tl.float64)
    return b_g, tl.cumsum(b_wide, 0) - tl.where(is_key, 0.0, tl.sum(tl.where(is_key, b_wide, 0.0), 0))


# --- history


@triton.jit
def _history_products(
    history, i_j, x, M: tl.constexpr, L: tl.constexpr, K: tl.constexpr, LOW: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """k_j . x [M, CHUNK] for the records before the newest i_j, newest first."""
    o_j, o_k = history.n - 1 - i_j - tl.arange(0, CHUNK), tl.arange(0, K)
    o_r = ((history.base + o_j) & (L - 1))[:, None] * K + o_k[None, :]
    y = _load_parts(history.p_k, history.p_k_low, o_r, (o_j >= 0)[:, None], LOW, DOT)
    return _product(x, y, tl.zeros([M, CHUNK], tl.float32), TRANS=True)


@triton.jit
def _history_weights(
    history, i_j, behind, x, M: tl.constexpr, L: tl.constexpr, K: tl.constexpr, LOW: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """exp(h_j) k_j . x of the same records as operands, and the sum of g behind the ones before them."""
    b_h, behind = _history_decays(history, i_j, behind, L)
    b_w = _history_products(history, i_j, x, M, L, K, LOW, DOT)
    return split(b_w * b_h[None, :], DOT), behind


@triton.jit
def _history_decays(history, i_j, behind, L: tl.constexpr):
    """exp(h_j) for the same records, and the sum of g behind the ones before them; `behind` is theirs. Sums are fp64."""
    o_j = history.n - 1 - i_j - tl.arange(0, CHUNK)
    b_g = tl.load(history.p_g + ((history.base + o_j) & (L - 1)), mask=o_j >= 0, other=0.0).to(tl.float64)
    b_h = tl.cumsum(b_g, 0) - b_g + behind
    return tl.exp(b_h.to(tl.float32)), behind + tl.sum(b_g, 0)


@triton.jit
def _history_updates(
    history, i_j, v, o_v, m_v, L: tl.constexpr, V: tl.constexpr, LOW: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """u_j [CHUNK, BV] of the same records from column v, as operands."""
    p_u, p_u_low = history.p_u + v, history.p_u_low
    if LOW:
        p_u_low += v
    o_j = history.n - 1 - i_j - tl.arange(0, CHUNK)
    o_r = ((history.base + o_j) & (L - 1))[:, None] * V + o_v[None, :]
    return _load_parts(p_u, p_u_low, o_r, (o_j >= 0)[:, None] & m_v[None, :], LOW, DOT)


@triton.jit
def _history_decay(history, L: tl.constexpr):
    """exp(H)."""
    o_l = tl.arange(0, L)
    m_l = ((o_l - history.base) & (L - 1)) < history.n
    return tl.exp(tl.sum(tl.load(history.p_g + o_l, mask=m_l, other=0.0), 0))


# --- the triangular system


@triton.jit
def _eliminate(b_n, length, o_m, o_c):
    """Z with I + Z = (I + b_n)^-1 for strictly lower triangular b_n [M, BT] whose columns from `length` on are zero."""
    b_z = tl.zeros_like(b_n)
    for s in range(0, length, 2):  # two columns a turn, because reading a row out takes a chain of shuffles
        b_row_0 = tl.sum(tl.where((o_m == s)[:, None], b_z, 0.0), 0) + tl.where(o_c == s, 1.0, 0.0)
        b_row_1 = tl.sum(tl.where((o_m == s + 1)[:, None], b_z, 0.0), 0) + tl.where(o_c == s + 1, 1.0, 0.0)
        b_column_0 = tl.sum(tl.where((o_c == s)[None, :], b_n, 0.0), 1)
        b_column_1 = tl.sum(tl.where((o_c == s + 1)[None, :], b_n, 0.0), 1)
        b_row_1 = tl.fma(-tl.sum(tl.where(o_m == s + 1, b_column_0, 0.0), 0), b_row_0, b_row_1)
        b_z = tl.fma(-b_column_1[:, None], b_row_1[None, :], tl.fma(-b_column_0[:, None], b_row_0[None, :], b_z))
    return b_z


@triton.jit
def _left_operands(b_z, BT: tl.constexpr, DOT: tl.constexpr):
    """Z [2 BT, BT] in parts, for `_solve`."""
    b_high, b_low = split(b_z, DOT)
    if BT == 8:
        return _twice(b_high, 2 * BT, BT), _twice(b_low, 2 * BT, BT)
    else:
        return b_high, b_low


@triton.jit
def _solve(z, b_keys, b_queries, BT: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr):
    """Right-hand sides [BT, BV] of keys and queries -> u and o: the sides, plus Z times those of the keys."""
    b_high, b_low = split(b_keys, DOT)
    b_sum = _stacked(b_keys, b_queries, BT, BV)
    if BT == 8:  # both parts together fill the 16 steps that a product sums over
        b_sum = _product(z, (_stacked(b_high, b_low, BT, BV),), b_sum)
    else:
        b_sum = _product(z, (b_high, b_low), b_sum)
    return _halves(b_sum, BT, BV)


# --- memory


@triton.jit
def _prefetch(p):
    """Bring the cache lines of p into L2."""
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [p.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _prefetch_rows(p_x, K: tl.constexpr, ASM: tl.constexpr):
    """Rows of K elements from p_x on."""
    if ASM:
        LINE: tl.constexpr = 1024 // p_x.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = (K + LINE - 1) // LINE
        _prefetch(p_x[:, None] + (tl.arange(0, LINES) * LINE)[None, :])


@triton.jit
def _prefetch_keys(history, L: tl.constexpr, K: tl.constexpr, LOW: tl.constexpr, ASM: tl.constexpr):
    """k_j of the newest CHUNK records; the first record's where there are none."""
    if ASM:
        o_r = ((history.base + tl.maximum(history.n - 1 - tl.arange(0, CHUNK), 0)) & (L - 1)) * K
        _prefetch_rows(history.p_k + o_r, K, ASM)
        if LOW:
            _prefetch_rows(history.p_k_low + o_r, K, ASM)


@triton.jit
def _prefetch_state(
    i_v, last, p_s, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, TILES: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """The state of TILES tiles from i_v on, none past tile last - 1."""
    if ASM:
        LINE: tl.constexpr = 1024 // p_s.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = (TILES * BV * K + LINE - 1) // LINE
        end = tl.minimum(last * (BV * K), V * K) - 1
        _prefetch(p_s + tl.minimum(i_v * (BV * K) + tl.arange(0, LINES) * LINE, end))


@triton.jit
def _prefetch_values(
    i_v, p_v, stride_v, length, V: tl.constexpr, BT: tl.constexpr, COLUMNS: tl.constexpr, BV: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """The window's values in COLUMNS columns from tile i_v on."""
    if ASM:
        p_t = p_v + tl.minimum(tl.arange(0, BT), length - 1) * stride_v + tl.minimum(i_v * BV, V - 1)
        _prefetch_rows(p_t, COLUMNS if COLUMNS < V else V, ASM)


@triton.jit
def _prefetch_updates(
    i_v, i_j, history, L: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, BV: tl.constexpr, LOW: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """u_j of the CHUNK records before the newest i_j in COLUMNS columns from tile i_v on; the first record's where there are none."""
    if ASM:
        o_j = tl.maximum(history.n - 1 - i_j - tl.arange(0, CHUNK), 0)
        o_r = ((history.base + o_j) & (L - 1)) * V + tl.minimum(i_v * BV, V - 1)
        _prefetch_rows(history.p_u + o_r, COLUMNS if COLUMNS < V else V, ASM)
        if LOW:
            _prefetch_rows(history.p_u_low + o_r, COLUMNS if COLUMNS < V else V, ASM)


@triton.jit
def _columns(i_v, o_v, V: tl.constexpr, BV: tl.constexpr):
    """Which columns of tile i_v there are; known to the compiler where all are."""
    if V % BV == 0:
        return tl.full([BV], True, tl.int1)
    else:
        return o_v < V - i_v * BV


@triton.jit
def _load_state(i_v, p_s, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Rows [BV, K] of the state in tile i_v."""
    o_v, o_k = tl.arange(0, BV), tl.arange(0, K)
    p = p_s + i_v * (BV * K) + o_v[:, None] * K + o_k[None, :]
    return tl.load(p, mask=_columns(i_v, o_v, V, BV)[:, None], other=0.0)


@triton.jit
def _zero_tokens(p_o, first, last, step, o_v, HV: tl.constexpr, V: tl.constexpr):
    for i_n in range(first, last, step):
        tl.store(p_o + i_n * (HV * V) + o_v, tl.zeros_like(o_v).to(p_o.dtype.element_ty), mask=o_v < V)


# --- kernel


@triton.jit
def _tile(
    i_v, b_s, x, w, z, h, factors, behind, history, p_v, stride_v, p_o, length, records,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    LOW: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Outputs and records u of tile i_v. w: weights of the newest records, CHUNK by CHUNK; older ones are weighed anew."""
    o_v, o_t = tl.arange(0, BV), tl.arange(0, BT)
    m_v = _columns(i_v, o_v, V, BV)
    b_x = h * _product(x, _parts(b_s, DOT), tl.zeros([2 * BT, BV], tl.float32), TRANS=True)
    for i in tl.static_range(len(w)):
        b_x = _product(w[i], _history_updates(history, i * CHUNK, i_v * BV, o_v, m_v, L, V, LOW, DOT), b_x)
    if (len(w) > 1) and (len(w) * CHUNK < L):
        for i_j in range(len(w) * CHUNK, history.n, CHUNK):
            w_j, behind = _history_weights(history, i_j, behind, x, 2 * BT, L, K, LOW, DOT)
            b_x = _product(w_j, _history_updates(history, i_j, i_v * BV, o_v, m_v, L, V, LOW, DOT), b_x)

    m_o = (o_t < length)[:, None] & m_v[None, :]
    b_v = tl.load(p_v + i_v * BV + o_t[:, None] * stride_v + o_v[None, :], mask=m_o, other=0.0).to(tl.float32)
    b_keys, b_queries = _halves(b_x, BT, BV)
    b_keys = tl.fma(b_keys, factors[0][:, None], b_v * factors[2][:, None])
    b_u, b_o = _solve(z, b_keys, b_queries * factors[1][:, None], BT, BV, DOT)

    m_r = (o_t < records)[:, None] & m_v[None, :]
    b_o = tl.where(m_r, b_o, 0.0).to(p_o.dtype.element_ty)
    tl.store(p_o + i_v * BV + o_t[:, None] * (HV * V) + o_v[None, :], b_o, mask=m_o)
    o_r = ((history.base + history.n + o_t) & (L - 1))[:, None] * V + i_v * BV + o_v[None, :]
    _store_parts(history.p_u, history.p_u_low, o_r, b_u, m_r, LOW)


@jit(vectors=VECTORS)
def _chunked(
    p_q, p_k, p_v, p_a, p_b, p_A_log, p_dt_bias, p_state, p_ring_u, p_ring_k, p_ring_g, p_ring_u_low, p_ring_k_low,
    p_write_pos, p_base, p_slots, p_rows, p_cu, p_o,
    scale, B: tl.int64, N: tl.int64, S: tl.int64, R: tl.int64, null_slot: tl.int64,
    stride_q_n: tl.int64, stride_q_h: tl.int64, stride_k_n: tl.int64, stride_k_h: tl.int64,
    stride_v_n: tl.int64, stride_v_h: tl.int64, stride_a_n: tl.int64, stride_b_n: tl.int64, stride_state: tl.int64,
    stride_u: tl.int64, stride_ring_k: tl.int64, stride_g: tl.int64, stride_u_low: tl.int64, stride_k_low: tl.int64,
    stride_slots: tl.int64, stride_rows: tl.int64, stride_cu: tl.int64,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, DRAFT: tl.constexpr,
    LOW: tl.constexpr, UNIT_ACT: tl.constexpr, UNIT_STATE: tl.constexpr, UNIT_RING: tl.constexpr,
    BT: tl.constexpr, BV: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A program verifies a row's window in TILES tiles of BV columns of a value head; grid (B * HV * blocks of tiles)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    NS: tl.constexpr = (NV + TILES - 1) // TILES
    M: tl.constexpr = 2 * BT  # keys, then queries
    ASM: tl.constexpr = DOT == tl.bfloat16  # the interpreter has neither
    i_s = tl.program_id(0) % NS
    i_hv = tl.program_id(0) // NS % HV
    i_h = i_hv // (HV // H)
    i_b = tl.program_id(0) // (NS * HV)

    slot, row = load_index(p_slots, i_b, stride_slots), load_index(p_rows, i_b, stride_rows)
    begin, end = load_index(p_cu, i_b, stride_cu), load_index(p_cu, i_b + 1, stride_cu)
    first_token, last_token = load_index(p_cu, i_b * 0, stride_cu), load_index(p_cu, B, stride_cu)
    live = (slot > null_slot) & (slot >= 0) & (slot < S) & (row >= 0) & (row < R)
    live = live & (begin >= 0) & (begin <= end) & (end <= N) & (end - begin <= DRAFT)
    # tokens outside of all windows are shared among the rows; a padding row has its own to clear
    p_o += i_hv * V
    o_z = i_s * (TILES * BV) + tl.arange(0, TILES * BV)
    _zero_tokens(p_o, i_b.to(tl.int64), tl.minimum(first_token, N), B, o_z, HV, V)
    _zero_tokens(p_o, tl.maximum(last_token, 0) + i_b, N, B, o_z, HV, V)
    if not live:
        _zero_tokens(p_o, tl.maximum(begin, 0), tl.minimum(end, N), 1, o_z, HV, V)
    if not live or begin == end:
        return

    # what lies in memory is on its way to L2 before anything waits for it: first what needs the row alone, then the history
    length = (end - begin).to(tl.int32)
    p_s = p_state + slot * (stride_state * UNIT_STATE) + i_hv * (V * K)
    _prefetch_state(i_s * TILES, i_s * TILES + TILES, p_s, K, V, BV, AHEAD, ASM)
    n, base = tl.load(p_write_pos + row), tl.load(p_base + row)
    o_m, o_k, o_c = tl.arange(0, M), tl.arange(0, K), tl.arange(0, BT)
    o_t = o_m & (BT - 1)
    is_key = o_m < BT
    m_t = o_t < length
    p_x = tl.where(is_key, p_k + i_h * (stride_k_h * UNIT_ACT), p_q + i_h * (stride_q_h * UNIT_ACT))
    p_x += (begin + tl.minimum(o_t, length - 1)) * (tl.where(is_key, stride_k_n, stride_q_n) * UNIT_ACT)
    _prefetch_rows(p_x, K, ASM)
    b_a = tl.load(p_a + (begin + o_t) * stride_a_n + i_hv, mask=m_t, other=0.0).to(tl.float32)
    b_b = tl.load(p_b + (begin + o_t) * stride_b_n + i_hv, mask=m_t, other=0.0).to(tl.float32)
    A_log, dt_bias = tl.load(p_A_log + i_hv), tl.load(p_dt_bias + i_hv)
    stride_v = stride_v_n * UNIT_ACT
    p_v += begin * stride_v + i_hv * (stride_v_h * UNIT_ACT)
    _prefetch_values(i_s * TILES, p_v, stride_v, length, V, BT, TILES * BV, BV, ASM)

    # a row whose history leaves no room for its window writes zeros and no records
    fits = (n >= 0) & (n <= L - length)
    n = tl.where(fits, n, 0)
    records = tl.where(fits, length, 0)
    p_u_low, p_k_low = p_ring_u_low, p_ring_k_low
    if LOW:
        p_u_low += row * (stride_u_low * UNIT_RING) + i_hv * (L * V)
        p_k_low += row * (stride_k_low * UNIT_RING) + i_h * (L * K)
    history = History(
        n,
        base,
        p_ring_k + row * (stride_ring_k * UNIT_RING) + i_h * (L * K),
        p_k_low,
        p_ring_u + row * (stride_u * UNIT_RING) + i_hv * (L * V),
        p_u_low,
        p_ring_g + row * stride_g + i_hv * L,
    )
    _prefetch_keys(history, L, K, LOW, ASM)
    _prefetch_updates(i_s * TILES, 0, history, L, V, TILES * BV, BV, LOW, ASM)
    b_h, behind = _history_decays(history, 0, tl.zeros([], tl.float64), L)
    h = _history_decay(history, L)
    b_g, b_p = _decays(b_a, m_t, is_key, A_log, dt_bias)
    b_beta = _sigmoid(b_b)

    b_raw = tl.load(p_x[:, None] + o_k[None, :], mask=m_t[:, None], other=0.0)
    x = _parts(b_raw, DOT)
    w_0 = split(_history_products(history, 0, x, M, L, K, LOW, DOT) * b_h[None, :], DOT)
    w = (w_0,)

    b_gram = _product(x, x, tl.zeros([M, M], tl.float32), TRANS=True)
    b_norm = 1.0 / tl.sqrt(tl.sum(tl.where(o_m[:, None] == o_m[None, :], b_gram, 0.0), 1) + EPS)
    b_factor = tl.where(is_key, -b_beta, scale) * b_norm
    m_n = o_c[None, :] < tl.where(is_key, o_t, o_t + 1)[:, None]
    b_between = tl.where(m_n, (b_p[:, None] - _pair(b_p, BT)[0][None, :]).to(tl.float32), 0.0)
    b_n = -b_factor[:, None] * _pair(b_norm, BT)[0][None, :] * _left_half(b_gram, M, BT) * tl.exp(b_between)
    z = _left_operands(_eliminate(tl.where(m_n, b_n, 0.0), length, o_m, o_c), BT, DOT)
    b_factor *= tl.exp(b_p.to(tl.float32))
    factors = _pair(b_factor, BT) + (_pair(b_beta, BT)[0],)

    # records that columns have in common: g, and a share of k among the programs that have this key head
    o_r = (base + n + o_t) & (L - 1)
    m_r = is_key & (o_t < records)
    if i_s == 0:
        tl.store(history.p_g + o_r, b_g, mask=m_r)
    SHARE: tl.constexpr = 32 if K > 32 else K
    for i_k in range((i_hv % (HV // H) * NS + i_s) * SHARE, K, HV // H * NS * SHARE):
        o_p = i_k + tl.arange(0, SHARE)
        b_k = tl.load(p_x[:, None] + o_p[None, :], mask=m_r[:, None], other=0.0).to(tl.float32) * b_norm[:, None]
        _store_parts(history.p_k, history.p_k_low, o_r[:, None] * K + o_p[None, :], b_k, m_r[:, None], LOW)

    p_o += begin * (HV * V)
    first, last = i_s * TILES, tl.minimum(i_s * TILES + TILES, NV)
    if L > CHUNK and n > CHUNK:
        for i_j in range(CHUNK, n, CHUNK):
            _prefetch_updates(i_s * TILES, i_j, history, L, V, TILES * BV, BV, LOW, ASM)
        w_1, behind = _history_weights(history, CHUNK, behind, x, M, L, K, LOW, DOT)
        w_long = (w_0, w_1)
        if L > 2 * CHUNK:
            w_2, behind = _history_weights(history, 2 * CHUNK, behind, x, M, L, K, LOW, DOT)
            w_3, behind = _history_weights(history, 3 * CHUNK, behind, x, M, L, K, LOW, DOT)
            w_long = (w_0, w_1, w_2, w_3)
        for i_v in range(first, last):
            if AHEAD < TILES:
                _prefetch_state(i_v + AHEAD, last, p_s, K, V, BV, 1, ASM)
            b_s = _load_state(i_v, p_s, K, V, BV)
            _tile(
                i_v, b_s, x, w_long, z, h, factors, behind, history, p_v, stride_v, p_o, length, records,
                HV, K, V, L, BT, BV, LOW, DOT,
            )  # fmt: skip
    else:
        for i_v in tl.range(first, last, num_stages=STAGES):
            if AHEAD < TILES:
                _prefetch_state(i_v + AHEAD, last, p_s, K, V, BV, 1, ASM)
            b_s = _load_state(i_v, p_s, K, V, BV)
            _tile(
                i_v, b_s, x, w, z, h, factors, behind, history, p_v, stride_v, p_o, length, records,
                HV, K, V, L, BT, BV, LOW, DOT,
            )  # fmt: skip


# --- launcher


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    ring_u: torch.Tensor,
    ring_k: torch.Tensor,
    ring_g: torch.Tensor,
    write_pos: torch.Tensor,
    base: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    draft: int,
    ring_u_low: torch.Tensor | None = None,
    ring_k_low: torch.Tensor | None = None,
    scale: float | None = None,
    null_slot: int = -1,
    BV: int,
    tiles: int,
    stages: int,
    registers: int,
    layout: str,
) -> torch.Tensor:
    """`kernreg.ops.gdn_ring_verify`, one warp per row, value head and `tiles` tiles of BV columns.

    stages: of the loop over tiles, or 1 to ask for the state of all of them at the start. registers: at most so many a thread.
    """
    slots_in_pool, heads, columns, K = state.shape
    batch, ring_rows, L = slots.shape[0], ring_g.shape[0], ring_g.shape[2]
    if batch == 0:
        return q.new_zeros(v.shape)
    o = q.new_empty(v.shape)
    act, wide, ring = (stride_unit(layout, t) for t in (q, state, ring_u))
    _chunked[layout][(batch * heads * triton.cdiv(columns, BV * tiles),)](
        *(q, k, v, a, b, A_log, dt_bias, state, ring_u, ring_k, ring_g, ring_u_low, ring_k_low),
        *(write_pos, base, slots, rows, cu_seqlens, o),
        *(float(K**-0.5 if scale is None else scale), batch, q.shape[0], slots_in_pool, ring_rows, null_slot),
        *(*strides(q, 2, act), *strides(k, 2, act), *strides(v, 2, act), a.stride(0), b.stride(0)),
        *(*strides(state, 1, wide), *strides(ring_u, 1, ring), *strides(ring_k, 1, ring), ring_g.stride(0)),
        *(*strides(ring_u_low, 1, ring), *strides(ring_k_low, 1, ring)),
        *(slots.stride(0), rows.stride(0), cu_seqlens.stride(0)),
        *(q.shape[1], heads, K, columns, L, draft, ring_u_low is not None, act, wide, ring),
        BT=8 if draft <= 8 else 16,
        BV=BV,
        TILES=tiles,
        STAGES=stages,
        AHEAD=tiles if stages == 1 else 1,
        DOT=DOT,
        num_warps=1,
        num_stages=1,
        maxnreg=registers,
        enable_fp_fusion=False,
    )
    return o
