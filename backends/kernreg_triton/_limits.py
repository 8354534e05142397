"""What the Triton kernels can serve, as pure predicates; imports neither torch nor Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernreg.contract import Config, Facts

if TYPE_CHECKING:
    from kernreg.device import Device


def where(facts: Facts, device: Device) -> str | None:
    """Reasons that hold for every Triton kernel here: the device, float64, bf16 in the interpreter."""
    dtypes = {name: value for name, value in facts.items() if value in ("bf16", "f64")}
    doubles = [name for name, value in dtypes.items() if value == "f64"]
    halves = [name for name, value in dtypes.items() if value == "bf16"]
    if device.platform == "cpu":
        return "Triton needs a GPU; this device is the CPU"
    if device.platform == "cuda" and device.arch is not None and device.arch < (8, 0):
        return f"needs sm_80 or newer, this is {device.arch_name}"
    if doubles:
        return f"serves no float64, got {' '.join(f'{name}=f64' for name in doubles)}"
    if device.platform == "interpreter" and halves:
        return f"Triton's interpreter has no bf16 arithmetic, got {' '.join(f'{name}=bf16' for name in halves)}"
    return None


def keys(facts: Facts) -> str | None:
    """Key dims are a power of two, so that a row of the state is one block."""
    k = facts["k_dim"]
    if not isinstance(k, int) or k & (k - 1) or not 16 <= k <= 256:
        return f"k_dim is a power of two from 16 to 256, got {k}"
    return None


def gdn_ring_commit(facts: Facts, device: Device, config: Config) -> str | None:
    return where(facts, device) or keys(facts)


def whole_ring(facts: Facts, device: Device, config: Config) -> str | None:
    """The keys of the whole ring are one operand: they pass through the registers at once."""
    keys_of_ring = _number(facts["ring"]) * _number(facts["k_dim"])
    if keys_of_ring > 4096 * _number(config["num_warps"]):
        return f"num_warps={config['num_warps']} cannot hold ring={facts['ring']} keys of k_dim={facts['k_dim']} at once"
    return gdn_ring_commit(facts, device, config)


def tile_in_registers(facts: Facts, device: Device, config: Config) -> str | None:
    """A thread's part of a [BV, k_dim] tile: beyond 64 elements a K of 128 or less spills, and no K holds more than 128."""
    elements, most = _elements(facts, config), 64 if _number(facts["k_dim"]) <= 128 else 128
    if elements > most:
        return f"BV={config['BV']} gives a thread {elements} elements of a tile; up to {most} are sensible"
    return gdn_ring_commit(facts, device, config)


def gdn_products(facts: Facts, device: Device, config: Config) -> str | None:
    if _number(config["BV"]) > 64 and _number(config["ahead"]):
        return f"ahead={config['ahead']} keeps a tile in registers beside its sums: for BV=64 only, got BV={config['BV']}"
    return gdn_ring_commit(facts, device, config)


def _elements(facts: Facts, config: Config) -> int:
    return _number(config["BV"]) * _number(facts["k_dim"]) // (32 * _number(config["num_warps"]))


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


# (columns a tile, tiles a program, pipeline stages, registers): one tile for few rows, many for full chips
_VERIFY_SHAPES = (
    *((16, 1, 1, 255), (32, 1, 1, 255)),
    *((16, 2, 1, 168), (32, 4, 1, 168), (16, 8, 3, 168)),
)


def gdn_ring_verify(facts: Facts, device: Device, config: Config) -> str | None:
    columns, tiles, draft = config["BV"], config["tiles"], facts["draft"]
    if isinstance(draft, int) and draft > 16:
        return f"serves windows of up to 16 tokens, got draft={draft}"
    if (columns, tiles, config["stages"], config["registers"]) not in _VERIFY_SHAPES:
        return "not one of the combinations of BV, tiles, stages and registers that are built"
    if isinstance(columns, int) and isinstance(tiles, int) and (tiles - 1) * columns >= int(facts["v_dim"]):
        return f"{tiles} tiles of {columns} columns are more than v_dim={facts['v_dim']} has"
    return where(facts, device) or keys(facts)


def gdn_ring_advance(facts: Facts, device: Device, config: Config) -> str | None:
    return where(facts, device)


def kda(facts: Facts, device: Device, config: Config) -> str | None:
    return where(facts, device) or keys(facts) or _tile_in_registers(facts, config, 128)


# (columns a tile, tiles a program, next tile ahead, warps, registers): one tile for few rows, whole heads for full chips
_FUSED_SHAPES = (
    *((32, 1, False, 4, 128), (64, 1, False, 4, 168), (128, 1, False, 8, 128)),
    *((64, 2, False, 4, 128), (64, 2, True, 4, 128)),
)


def kda_fused(facts: Facts, device: Device, config: Config) -> str | None:
    columns, tiles, v = _number(config["BV"]), _number(config["tiles"]), _number(facts["v_dim"])
    if facts["window"] != "chain":
        return f"serves windows of exactly T tokens in a chain, got window={facts['window']}"
    if _number(facts["draft"]) > 16:
        return f"records of up to 16 tokens fit into shared memory, got draft={facts['draft']}"
    if (columns, tiles, config["ahead"], config["num_warps"], config["registers"]) not in _FUSED_SHAPES:
        return "not one of the combinations of BV, tiles, ahead, num_warps and registers that are built"
    if (tiles - 1) * columns >= v:
        return f"{tiles} tiles of {columns} columns are more than v_dim={v} has"
    return _gluon(device) or where(facts, device) or keys(facts) or _tile_in_registers(facts, config, 64)


def kda_shared(facts: Facts, device: Device, config: Config) -> str | None:
    return _gluon(device) or where(facts, device) or keys(facts) or _tile_in_registers(facts, config, 64)


def _gluon(device: Device) -> str | None:
    return f"Gluon needs an NVIDIA GPU, this is {device.platform}" if device.platform != "cuda" else None


def _tile_in_registers(facts: Facts, config: Config, elements: int) -> str | None:
    got = _elements(facts, config)
    return f"BV={config['BV']} gives a thread {got} elements of a tile; more than {elements} spill" if got > elements else None


def kda_copy(facts: Facts, device: Device, config: Config) -> str | None:
    """A copy does no arithmetic: any dtype will do."""
    return where({}, device)
