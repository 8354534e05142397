"""Gated DeltaNet with a ReplaySSM ring: verify a draft window, advance the cursors, commit the history.

Instead of a state snapshot per draft token, each request keeps a ring of L small records (update u, normalised key k,
log decay g) beside its checkpoint S. With P_j the inclusive sum of g over the first j records, the state after n is

    S' = S * exp(P_n) + sum_{j<=n} exp(P_n - P_j) * u_j k_j^T

Logical record j (from 0) sits at ring position (base + j) mod L. A 16-bit ring may carry low parts: value = high + low.

Sources: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (arXiv:2412.06464) for the recurrence; the ReplaySSM ring and
its circular commit as described in the pull requests for SGLang's linear-attention speculative decoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernreg.contract import Fact, Tensor, op
from kernreg.ops import _rows

if TYPE_CHECKING:
    import torch

FLOAT = ("bf16", "f32", "f64")
RING = ("bf16", "f16", "f32", "f64")
WIDE = ("f32", "f64")
POWER_OF_TWO_RING = "L >= 16 and L & (L - 1) == 0"
LOW_PARTS_OF_16_BITS = "ring_u_low is None or ring_u.element_size() == 2"
GROUPED_HEADS = "HV % H == 0"

RING_FACTS: Mapping[str, Fact] = {
    "ring": Fact("dim L", doc="ring length L"),
    "heads": Fact("heads HV H", doc="value heads / key heads on this rank"),
    "k_dim": Fact("dim K", 128),
    "v_dim": Fact("dim V", 128),
    "state": Fact("dtype state", "bf16", FLOAT, "dtype of the checkpoint"),
    "ring_dtype": Fact("dtype ring", "bf16", RING, "dtype of the records u and k"),
    "decay": Fact("dtype gate", "f32", WIDE, "dtype of the records g"),
    "low": Fact("has ring_u_low", True, doc="do the records carry low parts?"),
    "folding": Fact("arg folding", "every", ("every", "lazy"), "does every commit fold, or only a nearly full ring?"),
    "index": Fact("index", "i32", doc="dtype of the index tensors"),
    "layout": Fact("layout", "aligned", ("aligned", "any"), "are addresses and free strides multiples of 16 bytes?"),
}


def _validate_commit(args: Mapping[str, Any]) -> None:
    rows = _rows.Rows("gdn_ring_commit", args)
    rows.index("slots", args["state"].shape[1], unique=True)
    rows.index("rows", args["ring_g"].shape[1], unique=True)
    length = args["ring_g"].shape[3]
    history = rows.gather("write_pos", "rows", low=0, high=length)
    if args["track_slots"] is not None:
        accepted = rows.count("accept", low=0, high=history)
        rows.track(args["state"].shape[1], accepted)


@op(
    tensors={
        "state": Tensor.of("NL S HV V K", "state", dense=3),
        "ring_u": Tensor.of("NL R HV L V", "ring", dense=3),
        "ring_k": Tensor.of("NL R H L K", "ring", dense=3),
        "ring_g": Tensor.of("NL R HV L", "gate", dense=2, align=False),
        "write_pos": Tensor.of("R", "cursor", dense=1, align=False),
        "base": Tensor.of("R", "cursor", dense=1, align=False),
        "fold": Tensor.of("R", "flag", dense=1, align=False),
        "slots": Tensor.of("B", "index"),
        "rows": Tensor.of("B", "index"),
        "ring_u_low": Tensor.of("NL R HV L V", "ring", dense=3),
        "ring_k_low": Tensor.of("NL R H L K", "ring", dense=3),
        "accept": Tensor.of("B", "index"),
        "track_slots": Tensor.of("B", "index"),
        "track_step": Tensor.of("B", "index"),
    },
    dtypes={"state": FLOAT, "ring": RING, "gate": WIDE, "cursor": ("i32",), "flag": ("i8",)},
    mutates=("state", "write_pos", "base", "fold"),
    facts={**RING_FACTS, "track": Fact("has track_slots", False, doc="do rows take track snapshots?")},
    batch="slots",
    where=(GROUPED_HEADS, POWER_OF_TWO_RING, LOW_PARTS_OF_16_BITS),
    together=(("ring_u_low", "ring_k_low"), ("accept", "track_slots", "track_step")),
    validate=_validate_commit,
    samples="kernreg.ops.gdn_samples:COMMIT",
)
def gdn_ring_commit(
    state: torch.Tensor,
    ring_u: torch.Tensor,
    ring_k: torch.Tensor,
    ring_g: torch.Tensor,
    write_pos: torch.Tensor,
    base: torch.Tensor,
    fold: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    *,
    ring_u_low: torch.Tensor | None = None,
    ring_k_low: torch.Tensor | None = None,
    accept: torch.Tensor | None = None,
    track_slots: torch.Tensor | None = None,
    track_step: torch.Tensor | None = None,
    null_slot: int = -1,
    folding: str = "every",
) -> None:
    """Fold each request's ring history into its checkpoint, for all layers in one call, in place.

    For every batch row i with slot = slots[i], r = rows[i], n = write_pos[r], and S the checkpoint before the call:

    - fold (fold[r] != 0): ``state[:, slot] = S * exp(P_n) + sum_{j<n} exp(P_n - P_j) u_j k_j^T``;
    - track (track_step[i] >= 0 and track_slots[i] > null_slot): the same from S with
      ``n_t = n - accept[i] + track_step[i] + 1`` records, written to ``state[:, track_slots[i]]``, whether or not the row folds;
    - finish (fold[r] != 0): ``base[r] = (base[r] + n) mod L``, ``write_pos[r] = 0``, ``fold[r] = 0``.

    Nothing else moves. Sums are taken in fp32 (float64 when given float64) and rounded once to the state's dtype. Records at
    or past n, and for a snapshot at or past n_t, never enter arithmetic and may hold NaN. A folded row with n = 0 keeps its
    state bit for bit.

    This call is what materialises pending records: a checkpoint that is copied, moved or offloaded while its row has
    write_pos > 0 is behind by those records until a fold.

    Args:
        state: [NL, S, HV, V, K] bf16 or fp32; checkpoints of all layers. Mutated. Layer and slot strides are free.
        ring_u: [NL, R, HV, L, V] bf16, fp16 or fp32; delta-rule updates u.
        ring_k: [NL, R, H, L, K], same dtype; normalised keys. Value head hv reads key head hv // (HV / H).
        ring_g: [NL, R, HV, L] fp32; log decay of each record (natural log, <= 0).
        write_pos: [R] int32; history length n, counting this step's accepted tokens, 0..L. Mutated.
        base: [R] int32; ring position of record 0, taken mod L. Mutated.
        fold: [R] int8; fold this row? Mutated.
        slots: [B] int32 or int64, any stride; state slot of each row. ``slot <= null_slot`` marks padding.
        rows: [B] int32 or int64, any stride; ring row of each batch row.
        ring_u_low, ring_k_low: low parts of ring_u and ring_k, same shape and dtype, both or none; 16-bit rings only.
        accept: [B] int32 or int64; tokens accepted in this step, counted in write_pos. Given exactly when tracking.
        track_slots: [B] int32 or int64; slot that receives the row's snapshot, ``<= null_slot`` for none.
        track_step: [B] int32 or int64; 0-based accepted step to snapshot after, negative for none.
        null_slot: slots up to and including this number are padding.
        folding: "every" or "lazy", how the engine sets fold (see `gdn_ring_advance`). A fact for choosing the kernel: it
            tells which history lengths to expect and changes no result.

    A row whose slot, ring row, track slot, write_pos, accept (0..n) or track_step (< accept) is out of range is padding.
    Two rows with one slot, or a track slot that is also live, leave that slot undefined; every other slot is right.

    Raises:
        ContractError: shape, dtype, packing, head ratio or ring length breaks the contract; nothing was launched.

    Source: design of the ReplaySSM circular ring, see the module docstring.
    """


def _validate_advance(args: Mapping[str, Any]) -> None:
    rows = _rows.Rows("gdn_ring_advance", args)
    rows.index("rows", args["write_pos"].shape[0], unique=True)
    history = rows.gather("write_pos", "rows", low=0, high=args["ring"])
    rows.count("accept", low=0, high=[args["ring"] - n for n in history])


@op(
    tensors={
        "write_pos": Tensor.of("R", "cursor", dense=1, align=False),
        "fold": Tensor.of("R", "flag", dense=1, align=False),
        "rows": Tensor.of("B", "index"),
        "slots": Tensor.of("B", "index"),
        "accept": Tensor.of("B", "index"),
    },
    dtypes={"cursor": ("i32",), "flag": ("i8",)},
    mutates=("write_pos", "fold"),
    facts={"ring": Fact("arg ring"), "index": Fact("index", "i32")},
    batch="slots",
    where=("ring >= 16 and ring & (ring - 1) == 0",),
    validate=_validate_advance,
    samples="kernreg.ops.gdn_samples:ADVANCE",
)
def gdn_ring_advance(
    write_pos: torch.Tensor,
    fold: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    accept: torch.Tensor,
    *,
    ring: int,
    margin: int | None = None,
    null_slot: int = -1,
) -> None:
    """Count each row's accepted tokens into its history and decide whether the next commit folds it, in place.

    For every live row i with r = rows[i]: ``n = write_pos[r] + accept[i]``; ``write_pos[r] = n``; and
    ``fold[r] = n > 0`` when margin is None (every commit folds) else ``fold[r] = n + margin > ring`` (lazy).

    With lazy folding the next window must still fit behind the history, so margin is the longest window, T.

    Args:
        write_pos: [R] int32; history length of each ring row. Mutated.
        fold: [R] int8. Mutated.
        rows: [B] int32 or int64, any stride; ring row of each batch row.
        slots: [B] int32 or int64, any stride; state slots, only to know padding (``slot <= null_slot``).
        accept: [B] int32 or int64, any stride; accepted tokens of this step.
        ring: ring length L.
        margin: free records that the next step needs, or None to fold at every commit.
        null_slot: slots up to and including this number are padding.

    A row whose ring row is out of range, or whose accepted count is negative or would overrun the ring, is padding: its
    cursors stay as they were.

    Raises:
        ContractError: a shape or dtype breaks the contract.
    """


def _validate_verify(args: Mapping[str, Any]) -> None:
    rows = _rows.Rows("gdn_ring_verify", args)
    rows.index("slots", args["state"].shape[0])
    rows.index("rows", args["ring_g"].shape[0], unique=True)
    length = args["ring_g"].shape[2]
    lengths = rows.windows("cu_seqlens", args["q"].shape[0], args["draft"])
    rows.gather("write_pos", "rows", low=0, high=[length - t for t in lengths])


@op(
    tensors={
        "q": Tensor.of("N H K", "act", dense=1),
        "k": Tensor.of("N H K", "act", dense=1),
        "v": Tensor.of("N HV V", "act", dense=1),
        "a": Tensor.of("N HV", "act", dense=1, align=False),
        "b": Tensor.of("N HV", "act", dense=1, align=False),
        "A_log": Tensor.of("HV", "gate", dense=1, align=False),
        "dt_bias": Tensor.of("HV", "gate", dense=1, align=False),
        "state": Tensor.of("S HV V K", "state", dense=3),
        "ring_u": Tensor.of("R HV L V", "ring", dense=3),
        "ring_k": Tensor.of("R H L K", "ring", dense=3),
        "ring_g": Tensor.of("R HV L", "gate", dense=2, align=False),
        "write_pos": Tensor.of("R", "cursor", dense=1, align=False),
        "base": Tensor.of("R", "cursor", dense=1, align=False),
        "slots": Tensor.of("B", "index"),
        "rows": Tensor.of("B", "index"),
        "cu_seqlens": Tensor.of("B1", "index"),
        "ring_u_low": Tensor.of("R HV L V", "ring", dense=3),
        "ring_k_low": Tensor.of("R H L K", "ring", dense=3),
    },
    returns={"o": Tensor.of("N HV V", "act", dense=3)},
    dtypes={
        "act": ("bf16", "f16", "f32", "f64"),
        "state": FLOAT,
        "ring": RING,
        "gate": WIDE,
        "cursor": ("i32",),
    },
    mutates=("ring_u", "ring_k", "ring_g", "ring_u_low", "ring_k_low"),
    facts={
        "draft": Fact("arg draft", doc="longest window T"),
        **{name: fact for name, fact in RING_FACTS.items() if name != "folding"},
        "act": Fact("dtype act", "bf16"),
    },
    batch="slots",
    where=(GROUPED_HEADS, POWER_OF_TWO_RING, LOW_PARTS_OF_16_BITS, "B1 == B + 1", "1 <= draft <= L"),
    together=(("ring_u_low", "ring_k_low"),),
    validate=_validate_verify,
    samples="kernreg.ops.gdn_samples:VERIFY",
)
def gdn_ring_verify(
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
) -> torch.Tensor:
    """Run a window of draft tokens on top of checkpoint and history, one layer; append its records; write no state.

    Row i covers tokens cu_seqlens[i] .. cu_seqlens[i+1] - 1, at most `draft` of them. S_0 is the row's checkpoint folded
    with its n = write_pos[r] records (low parts included, in u and in o alike). For each token t, with q and k divided by
    sqrt(sum of squares + 1e-6), g = -exp(A_log) * softplus(a + dt_bias) (softplus linear above 20), beta = sigmoid(b):

        S~ = exp(g_t) S_{t-1};  u_t = beta_t (v_t - S~ k_t);  S_t = S~ + u_t k_t^T;  o_t = scale * S_t q_t

    Token t's record (u_t, normalised k_t, g_t, and the low parts) is stored at ring position (base + n + t) mod L. The cursors
    stay: `gdn_ring_advance` moves them once it is known how many tokens were accepted.

    Args:
        q, k: [N, H, K] bf16, fp16 or fp32; after the convolution, before normalisation. Token and head strides are free.
        v: [N, HV, V], same dtype; token and head strides are free.
        a, b: [N, HV], same dtype; raw gate inputs, token stride free.
        A_log, dt_bias: [HV] fp32.
        state: [S, HV, V, K] bf16 or fp32; checkpoints, read only. Slot stride is free.
        ring_u, ring_k, ring_g: [R, HV, L, V], [R, H, L, K], [R, HV, L]; records as in `gdn_ring_commit`. Mutated.
        write_pos, base: [R] int32 cursors, read only.
        slots, rows: [B] int32 or int64, any stride.
        cu_seqlens: [B + 1] int32 or int64; token offsets, non-decreasing.
        draft: longest window T, 1..L.
        ring_u_low, ring_k_low: low parts, both or none. Mutated.
        scale: factor of the output; None means K ** -0.5.
        null_slot: slots up to and including this number are padding.

    Returns:
        o: [N, HV, V] in q's dtype. Tokens of padded rows, and tokens that no row covers, are zero.

    A row whose slot, ring row or window (longer than draft, outside 0..N, or overrunning the ring) is out of range is padding:
    it writes nothing.

    Raises:
        ContractError: a shape, dtype or packing breaks the contract; nothing was launched.

    Source: Yang et al., arXiv:2412.06464; public kernels use the history's high parts only in u, this contract uses both.
    """
