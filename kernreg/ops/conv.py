"""The causal convolution's state after speculative decoding.

Source: the convolution windows of chain verify, as described in the pull requests for SGLang's fused KDA verify.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernreg.contract import Fact, Tensor, op
from kernreg.ops import _rows

if TYPE_CHECKING:
    import torch

ACT = ("bf16", "f16", "f32", "f64")


def _validate(args: Mapping[str, Any]) -> None:
    rows = _rows.Rows("conv_window_commit", args, "conv_slots")
    rows.index("conv_slots", args["conv_state"].shape[1], unique=True)
    rows.index("window_rows", args["windows"].shape[1])
    rows.track(args["conv_state"].shape[1], rows.count("accept", 0, args["windows"].shape[2]))


@op(
    tensors={
        "conv_state": Tensor.of("NL CS dim 3", "act", unit="dim"),
        "windows": Tensor.of("NL WR T dim 3", "act", unit="dim"),
        "conv_slots": Tensor.of("B", "index"),
        "window_rows": Tensor.of("B", "index"),
        "accept": Tensor.of("B", "index"),
        "track_slots": Tensor.of("B", "index"),
        "track_step": Tensor.of("B", "index"),
    },
    dtypes={"act": ACT},
    mutates=("conv_state",),
    facts={
        "draft": Fact("dim T", doc="steps that verify left windows of"),
        "dim": Fact("dim dim", doc="channels: 2*H*K + HV*V"),
        "act": Fact("dtype act", "bf16", ACT),
        "track": Fact("has track_slots", False, doc="do rows take track snapshots?"),
        "index": Fact("index", "i32", doc="dtype of the index tensors"),
        "layout": Fact("layout", "aligned", ("aligned", "any"), "are addresses and free strides multiples of 16 bytes?"),
    },
    batch="conv_slots",
    together=(("track_slots", "track_step"),),
    validate=_validate,
    samples="kernreg.ops.kda_samples:CONV_COMMIT",
)
def conv_window_commit(
    conv_state: torch.Tensor,
    windows: torch.Tensor,
    conv_slots: torch.Tensor,
    window_rows: torch.Tensor,
    accept: torch.Tensor,
    *,
    track_slots: torch.Tensor | None = None,
    track_step: torch.Tensor | None = None,
    null_slot: int = -1,
) -> None:
    """Put the window after each row's last accepted step into its convolution state, all layers in one call, in place.

    For every live row i with accept[i] > 0: ``conv_state[:, conv_slots[i]] = windows[:, window_rows[i], accept[i] - 1]``;
    accept = 0 leaves it as it was. If track_step[i] >= 0 and track_slots[i] > null_slot, window track_step[i] (< accept[i])
    also goes to ``conv_state[:, track_slots[i]]``. After a tree verify pass the accepted node's number plus one.

    Args:
        conv_state: [NL, CS, dim, 3] bf16, fp16 or fp32; any strides (dim- or width-contiguous). Mutated.
        windows: [NL, WR, T, dim, 3], same dtype; any strides, overlapping views allowed. Read only.
        conv_slots, window_rows: [B] int32 or int64, any stride.
        accept: [B] int32 or int64, any stride; 0..T.
        track_slots, track_step: [B] int32 or int64; both or none. Track slots are rows of conv_state.
        null_slot: slots up to and including this number are padding.

    A row whose slot, window row, accept, track slot or track step is out of range is padding: it writes nothing.

    Raises:
        ContractError: a shape or dtype breaks the contract; nothing was launched.
    """
