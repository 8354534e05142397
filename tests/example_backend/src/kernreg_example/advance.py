"""gdn_ring_advance without a loop over rows."""


def vectorised(write_pos, fold, rows, slots, accept, *, ring, margin=None, null_slot=-1):
    row, count = rows.long(), accept.long()
    inside = (row >= 0) & (row < write_pos.shape[0]) & (slots > null_slot)
    history = write_pos[row.clamp(0, write_pos.shape[0] - 1)].long() + count
    live = inside & (count >= 0) & (history <= ring)
    row, history = row[live], history[live]
    write_pos[row] = history.to(write_pos.dtype)
    fold[row] = ((history > 0) if margin is None else (history + margin > ring)).to(fold.dtype)
