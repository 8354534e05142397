"""Kimi Delta Attention, speculative: verify a chain of draft tokens, then commit the accepted prefix exactly.

Verify runs convolution, gating and the delta rule over T draft tokens and writes neither the convolution state nor the
state pool. What commit needs it leaves in one of two forms: *snapshots* of the state after each step (64 KB a head and
step), or *ring* records (raw k, raw v, gate, beta; about 1 KB) that commit replays with the same step function, so that both
give the same state bit for bit.

Sources: "Kimi Linear: An Expressive, Efficient Attention Architecture" (arXiv:2510.26692) for KDA; ring records for
chain verify as described in the pull requests for SGLang's fused KDA verify.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernreg.contract import Fact, Tensor, op
from kernreg.ops import _rows

if TYPE_CHECKING:
    import torch

ACT = ("bf16", "f16", "f32", "f64")
WIDE = ("f32", "f64")
GROUPED_HEADS = "HV % H == 0"
WINDOWS = ("chain", "ragged", "tree", "ragged_tree")


def _validate_verify(args: Mapping[str, Any]) -> None:
    name = "kda_chain_verify"
    tokens, draft = args["mixed_qkv"].shape[0], args["windows"].shape[1]
    rows = _rows.Rows(name, args, "slots", "conv_slots")
    rows.index("slots", args["state"].shape[0], unique=args["ring_k"] is not None)
    rows.index("conv_slots", args["conv_state"].shape[0])
    rows.index("window_rows", args["windows"].shape[0], unique=True)
    lengths = [draft] * len(rows.live)
    if args["cu_seqlens"] is not None:
        lengths = rows.windows("cu_seqlens", tokens, draft)
    if args["parents"] is not None:
        parents = args["parents"].tolist()
        for row, length in zip(rows.live, lengths, strict=True):
            for step, parent in enumerate(parents[row][:length]):
                if not -1 <= parent < step:
                    rows.fail("parents", row, parents[row][:length], "each parent -1 or an earlier step of the row")


def _validate_ring_commit(args: Mapping[str, Any]) -> None:
    rows = _rows.Rows("kda_ring_commit", args)
    rows.index("slots", args["state"].shape[1], unique=True)
    rows.track(args["state"].shape[1], rows.count("accept", 0, args["ring_g"].shape[3]))


def _validate_snapshot_commit(args: Mapping[str, Any]) -> None:
    rows = _rows.Rows("kda_snapshot_commit", args)
    rows.index("slots", args["state"].shape[1], unique=True)
    rows.index("window_rows", args["snapshots"].shape[1])
    rows.track(args["state"].shape[1], rows.count("accept", 0, args["snapshots"].shape[2]))


@op(
    tensors={
        "mixed_qkv": Tensor.of("N dim", "act", dense=1),
        "conv_weight": Tensor.of("dim 4", "weight", dense=2),
        "conv_state": Tensor.of("CS dim 3", "act", unit="dim"),
        "windows": Tensor.of("WR T dim 3", "act", unit="dim"),
        "a": Tensor.of("N HVK", "act", dense=1),
        "b": Tensor.of("N HV", "act", dense=1, align=False),
        "A_log": Tensor.of("HV", "gate", dense=1, align=False),
        "dt_bias": Tensor.of("HVK", "gate", dense=1),
        "state": Tensor.of("S HV V K", "gate", dense=3),
        "slots": Tensor.of("B", "index"),
        "conv_slots": Tensor.of("B", "index"),
        "window_rows": Tensor.of("B", "index"),
        "conv_bias": Tensor.of("dim", "weight", dense=1),
        "snapshots": Tensor.of("WR T HV V K", "gate", dense=3),
        "ring_k": Tensor.of("S H L K", "act", dense=3),
        "ring_v": Tensor.of("S HV L V", "act", dense=3),
        "ring_g": Tensor.of("S HV L K", "gate", dense=3),
        "ring_beta": Tensor.of("S HV L", "gate", dense=2, align=False),
        "cu_seqlens": Tensor.of("B1", "index"),
        "parents": Tensor.of("B T", "index"),
    },
    returns={"o": Tensor.of("N HV V", "act", dense=3)},
    dtypes={"act": ACT, "weight": ACT, "gate": WIDE},
    mutates=("windows", "snapshots", "ring_k", "ring_v", "ring_g", "ring_beta"),
    facts={
        "draft": Fact("dim T", doc="draft length T: the longest window"),
        "heads": Fact("heads HV H", doc="value heads / key heads on this rank"),
        "k_dim": Fact("dim K", 128),
        "v_dim": Fact("dim V", 128),
        "mode": Fact("which ring=ring_k snapshot=snapshots", "ring", ("ring", "snapshot"), "what verify leaves for commit"),
        "gate": Fact("which safe=lower_bound softplus=", "safe", ("safe", "softplus"), "which gate branch?"),
        "window": Fact("which ragged_tree=parents+cu_seqlens tree=parents ragged=cu_seqlens chain=", "chain", WINDOWS),
        "bias": Fact("has conv_bias", False),
        "state": Fact("dtype gate", "f32", WIDE, "dtype of state, gates and records g and beta"),
        "act": Fact("dtype act", "bf16", ACT),
        "weight": Fact("dtype weight", "bf16", ACT, "dtype of the convolution's weight and bias"),
        "index": Fact("index", "i32", doc="dtype of the index tensors"),
        "layout": Fact("layout", "aligned", ("aligned", "any"), "are addresses and free strides multiples of 16 bytes?"),
    },
    batch="slots",
    derived={"H": "(dim - HV * V) // (2 * K)"},
    where=(
        "H >= 1",
        "dim == 2 * H * K + HV * V",
        GROUPED_HEADS,
        "HVK == HV * K",
        "T >= 1",
        "ring_k is None or L >= T",
        "cu_seqlens is not None or N == B * T",
        "cu_seqlens is None or B1 == B + 1",
        "(ring_k is None) != (snapshots is None)",
        "parents is None or ring_k is None",
        "lower_bound is None or lower_bound < 0",
    ),
    together=(("ring_k", "ring_v", "ring_g", "ring_beta"),),
    validate=_validate_verify,
    samples="kernreg.ops.kda_samples:VERIFY",
)
def kda_chain_verify(
    mixed_qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    windows: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    conv_slots: torch.Tensor,
    window_rows: torch.Tensor,
    *,
    conv_bias: torch.Tensor | None = None,
    snapshots: torch.Tensor | None = None,
    ring_k: torch.Tensor | None = None,
    ring_v: torch.Tensor | None = None,
    ring_g: torch.Tensor | None = None,
    ring_beta: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    null_slot: int = -1,
) -> torch.Tensor:
    """Run T draft tokens a row through convolution, gates and delta rule, one layer; conv_state and state are only read.

    Row i holds tokens i*T .. i*T+T-1, or cu_seqlens[i] .. cu_seqlens[i+1]-1 (at most T). With w the weight and x the inputs
    preceded by the row's conv_state: ``y_t = SiLU(bias + sum_j w[:, j] x_{t-3+j})``, products and sums in fp32, rounded to
    the activation dtype; y is [q | k | v] by heads. With q and k divided by sqrt(sum of squares + 1e-6), q scaled,
    beta = sigmoid(b) in fp32, and per key channel g = lower_bound * sigmoid(exp(A_log) * (a + dt_bias)) (safe gate), or
    g = -exp(A_log) * softplus(a + dt_bias) (softplus linear above 20) when lower_bound is None:

        h~ = diag(exp(g_t)) h;  u = beta_t (v_t - h~^T k_t);  h = h~ + k_t u^T;  o_t = h^T q_t

    After step t, ``windows[window_rows[i], t]`` is the last 3 inputs (oldest first), and either
    ``snapshots[window_rows[i], t]`` is h, or ring position t of ``slots[i]`` holds raw k (before the norm), raw v, g and beta.

    Args:
        mixed_qkv: [N, dim] bf16, fp16 or fp32; dim = 2*H*K + HV*V, laid out q | k | v. Token stride is free.
        conv_weight: [dim, 4] bf16, fp16 or fp32; column 3 meets the current token.
        conv_state: [CS, dim, 3] activation dtype, any strides; inputs before the window, oldest first. Read only.
        windows: [WR, T, dim, 3] activation dtype, any strides, overlapping views allowed. Mutated: live rows, steps that exist.
        a: [N, HV*K], b: [N, HV]; raw gate inputs, activation dtype, token stride free.
        A_log: [HV] fp32. dt_bias: [HV*K] fp32.
        state: [S, HV, V, K] fp32; read only. Slot stride is free.
        slots, conv_slots, window_rows: [B] int32 or int64, any stride; rows of state (and ring), of conv_state, and of
            windows and snapshots.
        conv_bias: [dim], dtype of the weight.
        snapshots: [WR, T, HV, V, K] fp32. Mutated. Exactly one of snapshots and the ring is given.
        ring_k, ring_v: [S, H, L, K], [S, HV, L, V] activation dtype; L >= T, any L. Mutated.
        ring_g, ring_beta: [S, HV, L, K], [S, HV, L] fp32. Mutated.
        cu_seqlens: [B + 1] int32 or int64; ragged windows.
        parents: [B, T] int32 or int64; draft tree: step of each token's parent within its row, -1 for the root (then
            history and state come from conv_state and state). Snapshots only: a ring replays a chain.
        lower_bound: negative bound of the safe gate, or None for the softplus gate.
        scale: factor on q; None means K ** -0.5.
        null_slot: slots and conv slots up to and including this number are padding.

    Returns:
        o: [N, HV, V] activation dtype. Tokens of padded rows, and tokens that no row covers, are zero.

    A row whose slot, conv slot, window row, window or parents are out of range is padding: it writes nothing.

    Raises:
        ContractError: a shape, dtype, packing or combination of arguments breaks the contract; nothing was launched.

    Source: arXiv:2510.26692.
    """


COMMIT_FACTS: Mapping[str, Fact] = {
    "heads": Fact("heads HV H"),
    "k_dim": Fact("dim K", 128),
    "v_dim": Fact("dim V", 128),
    "state": Fact("dtype gate", "f32", WIDE, "dtype of state and of the records g and beta"),
    "track": Fact("has track_slots", False, doc="do rows take track snapshots?"),
    "index": Fact("index", "i32", doc="dtype of the index tensors"),
    "layout": Fact("layout", "aligned", ("aligned", "any"), "are addresses and free strides multiples of 16 bytes?"),
}


@op(
    tensors={
        "state": Tensor.of("NL S HV V K", "gate", dense=3),
        "ring_k": Tensor.of("NL S H L K", "act", dense=3),
        "ring_v": Tensor.of("NL S HV L V", "act", dense=3),
        "ring_g": Tensor.of("NL S HV L K", "gate", dense=3),
        "ring_beta": Tensor.of("NL S HV L", "gate", dense=2, align=False),
        "slots": Tensor.of("B", "index"),
        "accept": Tensor.of("B", "index"),
        "track_slots": Tensor.of("B", "index"),
        "track_step": Tensor.of("B", "index"),
    },
    dtypes={"act": ACT, "gate": WIDE},
    mutates=("state",),
    facts={"ring": Fact("dim L", doc="ring length L"), **COMMIT_FACTS, "act": Fact("dtype act", "bf16", ACT)},
    batch="slots",
    where=(GROUPED_HEADS, "L >= 1"),
    together=(("track_slots", "track_step"),),
    validate=_validate_ring_commit,
    samples="kernreg.ops.kda_samples:RING_COMMIT",
)
def kda_ring_commit(
    state: torch.Tensor,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    ring_g: torch.Tensor,
    ring_beta: torch.Tensor,
    slots: torch.Tensor,
    accept: torch.Tensor,
    *,
    track_slots: torch.Tensor | None = None,
    track_step: torch.Tensor | None = None,
    null_slot: int = -1,
) -> None:
    """Replay the accepted prefix of each row's ring records into its state, all layers in one call, in place.

    For every live row i the step of `kda_chain_verify` is applied to ``state[:, slots[i]]`` for records 0 .. accept[i]-1;
    the result equals verify's own snapshot bit for bit. accept = 0 leaves the state as it was. If track_step[i] >= 0 and
    track_slots[i] > null_slot, the state after record track_step[i] (< accept[i]) is written to ``state[:, track_slots[i]]``.

    Args:
        state: [NL, S, HV, V, K] fp32. Mutated. Layer and slot strides are free.
        ring_k, ring_v: [NL, S, H, L, K], [NL, S, HV, L, V] bf16, fp16 or fp32; raw k (before the norm) and raw v.
        ring_g, ring_beta: [NL, S, HV, L, K], [NL, S, HV, L] fp32.
        slots: [B] int32 or int64, any stride; ``slot <= null_slot`` marks padding.
        accept: [B] int32 or int64, any stride; accepted tokens, 0..L.
        track_slots, track_step: [B] int32 or int64; both or none.
        null_slot: slots up to and including this number are padding.

    A row whose slot, accept, track slot or track step is out of range is padding: it writes nothing.

    Raises:
        ContractError: a shape, dtype or packing breaks the contract; nothing was launched.
    """


@op(
    tensors={
        "state": Tensor.of("NL S HV V K", "gate", dense=3),
        "snapshots": Tensor.of("NL WR T HV V K", "gate", dense=3),
        "slots": Tensor.of("B", "index"),
        "window_rows": Tensor.of("B", "index"),
        "accept": Tensor.of("B", "index"),
        "track_slots": Tensor.of("B", "index"),
        "track_step": Tensor.of("B", "index"),
    },
    dtypes={"gate": WIDE},
    mutates=("state",),
    facts={
        "draft": Fact("dim T", doc="steps that verify left snapshots of"),
        "value_heads": Fact("dim HV"),
        **{name: fact for name, fact in COMMIT_FACTS.items() if name != "heads"},
    },
    batch="slots",
    together=(("track_slots", "track_step"),),
    validate=_validate_snapshot_commit,
    samples="kernreg.ops.kda_samples:SNAPSHOT_COMMIT",
)
def kda_snapshot_commit(
    state: torch.Tensor,
    snapshots: torch.Tensor,
    slots: torch.Tensor,
    window_rows: torch.Tensor,
    accept: torch.Tensor,
    *,
    track_slots: torch.Tensor | None = None,
    track_step: torch.Tensor | None = None,
    null_slot: int = -1,
) -> None:
    """Copy the snapshot of each row's last accepted step into its state, all layers in one call, in place.

    For every live row i with accept[i] > 0: ``state[:, slots[i]] = snapshots[:, window_rows[i], accept[i] - 1]``; accept = 0
    leaves the state as it was. If track_step[i] >= 0 and track_slots[i] > null_slot, snapshot track_step[i] (< accept[i])
    also goes to ``state[:, track_slots[i]]``. After a tree verify pass the accepted node's number plus one.

    Args:
        state: [NL, S, HV, V, K] fp32. Mutated. Layer and slot strides are free.
        snapshots: [NL, WR, T, HV, V, K] fp32; layer, row and step strides are free.
        slots, window_rows: [B] int32 or int64, any stride.
        accept: [B] int32 or int64, any stride; 0..T.
        track_slots, track_step: [B] int32 or int64; both or none.
        null_slot: slots up to and including this number are padding.

    A row whose slot, window row, accept, track slot or track step is out of range is padding: it writes nothing.

    Raises:
        ContractError: a shape, dtype or packing breaks the contract; nothing was launched.
    """
