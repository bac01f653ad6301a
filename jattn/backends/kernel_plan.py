"""What the plans of all CUDA kernels are made of: the words of kernel keys, and the scratch of what kernels share."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable

from jattn import device_code, device_gradients
from jattn.masks import UNBOUNDED_BAND, Band
from jattn.spec import Spec

# As ``Config`` spells types.
ELEMENTS = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}

SCRATCH_ALIGNMENT = 256

# From here on scores may be so far below the cap that what cheap forms of tanh miss, 2^-21 of the cap, would be seen.
_LARGEST_PLAIN_CAP = 128.0

# Score functions compute with indices up to here, padding behind lengths half as long among them, in cheaper ways.
_SMALL_INDEX = 2**20

_SEGMENT_RANGE_BYTES = 16  # of one tile: SegmentRange and PositionRange in cc/kernels/params.cuh
_POSITION_RANGE_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Plan:
    """The kernels of one call, and the scratch it needs.

    Attributes:
      kernels: kernel keys joined by ';'.
      scratch_bytes: of the call; linear in the batch, and symbolic where that is.
      program: the score function in C++, whose digest stands in the keys; empty without one.
    """

    kernels: str
    scratch_bytes: int
    program: str = ""

    def attributes(self, backend: str) -> dict[str, str]:
        """The attribute ``plan`` of the call; it names the backend for who reads the program."""
        own = {"backend": backend, "kernels": self.kernels}
        return own | ({"program": self.program} if self.program else {})


def is_number(extent: object) -> bool:
    """Whether an extent is known; a batch may be symbolic while exporting."""
    return isinstance(extent, int)


def round_up(value: int, multiple: int) -> int:
    """Returns the least multiple that is not below ``value``."""
    return -(-value // multiple) * multiple


# ---- Keys ----------------------------------------------------------------------------------------------------------


def compose_key(family: str, arch: str, **members: str | int | None) -> str:
    """Composes a kernel key out of members of ``Config``: those that are False or None stay at their default."""
    words = {"family": family, "arch": arch}
    for name, value in members.items():
        if value is not None and value is not False:
            words[name] = "1" if value is True else str(value)
    return " ".join(f"{name}={word}" for name, word in words.items())


def feature_flags(spec: Spec, captures: tuple[bool, ...] = ()) -> dict[str, str | bool | None]:
    """The members of ``Config`` that say what a problem has, in their order, and which score program it has.

    ``captures``: as for ``program_text``.
    """
    program = program_text(spec, captures)
    return {
        "band": not spec.band.unbounded,
        "lengths": spec.q_lengths or spec.kv_lengths,
        "segments": spec.segments,
        "mask": spec.mask is not None,
        "bias": spec.bias is not None,
        "softcap": spec.softcap > 0,
        "large_cap": spec.softcap > _LARGEST_PLAIN_CAP and spec.dtype != "float32",
        "positions": spec.positions,
        "sinks": spec.sinks is not None,
        "alibi": spec.alibi_slopes is not None,
        "dropout": spec.dropout is not None,
        "dropout_rows": spec.dropout is not None and spec.dropout.rows,
        "program": bool(program),
        "digest": hashlib.sha256(program.encode()).hexdigest() if program else None,
    }


def program_text(spec: Spec, captures: tuple[bool, ...] = ()) -> str:
    """The score function of a problem as kernels include it, or an empty string.

    ``captures``: of which arrays that it reads gradients are added up, if of any.
    """
    if spec.score_mod is None:
        return ""
    lengths = [n for n in (spec.q_len, spec.kv_len) if is_number(n)]
    is_small = not spec.positions and max(lengths, default=0) < _SMALL_INDEX // 2
    largest_index = _SMALL_INDEX if is_small else device_code.LARGEST_INDEX
    if any(captures):
        return device_gradients.gradient_code(
            spec.score_mod, captures, by_position=spec.positions, largest_index=largest_index
        )
    return device_code.device_code(
        spec.score_mod, by_position=spec.positions, largest_index=largest_index
    )


def has_program_slopes(spec: Spec) -> bool:
    """Whether a backward kernel keeps a slope of the score function for each score."""
    return spec.score_mod is not None and not spec.score_mod.has_unit_slope


def bias_element(spec: Spec) -> str | None:
    """How ``Config`` spells the type of the bias; None without one."""
    return None if spec.bias is None else ELEMENTS[spec.bias_dtype]


def tile_pass_keys(spec: Spec, arch: str, *, documents: bool = False) -> list[str]:
    """Keys of the passes that find out about tiles: ranges of segments and positions, and what a mask hides.

    Beside a list of documents the pass that makes the list finds the ranges of segments, too.
    """
    needed = {
        "document_tiles": documents,
        "segment_ranges": spec.segments and not documents,
        "position_ranges": _has_position_band(spec),
        "mask_tiles": spec.mask is not None,
    }
    return [compose_key(family, arch) for family, is_needed in needed.items() if is_needed]


def hot_problem(dtype: str, head_dim: int, head_dim_v: int, *, causal: bool) -> Spec:
    """A common problem, whose kernels are compiled ahead of time: self-attention without further features."""
    return Spec(
        batch=1,
        q_len=4096,
        kv_len=4096,
        num_heads=16,
        num_kv_heads=16,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        scale=head_dim**-0.5,
        band=Band(right=0) if causal else UNBOUNDED_BAND,
    )


def distinct_keys(plans: Iterable[Plan]) -> tuple[str, ...]:
    """The kernel keys of plans in order, each once."""
    return tuple(dict.fromkeys(key for plan in plans for key in plan.kernels.split(";")))


# ---- Scratch -------------------------------------------------------------------------------------------------------


def _has_position_band(spec: Spec) -> bool:
    return spec.positions and not spec.band.unbounded


def _range_bytes(spec: Spec, tile_q: int, tile_kv: int) -> int:
    """Scratch for the ranges of segments and positions of one kernel's tiles (``cc/cuda/attention_params.cc``)."""
    tiles = spec.batch * (-(-spec.q_len // tile_q) + -(-spec.kv_len // tile_kv))
    segments = tiles * _SEGMENT_RANGE_BYTES + SCRATCH_ALIGNMENT if spec.segments else 0
    positions = tiles * _POSITION_RANGE_BYTES + SCRATCH_ALIGNMENT
    return segments + (positions if _has_position_band(spec) else 0)


def _aligned(size: int) -> int:
    """The bytes of a piece of scratch; a symbolic size counts as one that fills its last block hardly at all."""
    return round_up(size, SCRATCH_ALIGNMENT) if is_number(size) else size + SCRATCH_ALIGNMENT


def _mask_tiles_bytes(shape: tuple[int, ...], tile_rows: int, tile_columns: int) -> int:
    """Returns the scratch of one packed mask (``cc/cuda/mask_tiles.cc``).

    Args:
      shape: of the mask, with the axis of the fragments' rows before that of their columns.
      tile_rows, tile_columns: of the kernel that reads it, along these axes.
    """
    batch, heads, rows, columns = shape
    row_tiles = 1 if rows == 1 else -(-rows // tile_rows)
    rows_padded = 1 if rows == 1 else row_tiles * tile_rows
    column_tiles = 1 if columns == 1 else -(-columns // tile_columns)
    tiles = batch * heads * column_tiles
    return _aligned(tiles * rows_padded * 16) + _aligned(tiles * row_tiles)


def tile_facts_bytes(spec: Spec, tile_q: int, tile_kv: int, *, owns_keys: bool = False) -> int:
    """Scratch for what the passes of ``tile_pass_keys`` say about one kernel's tiles.

    ``owns_keys``: the rows of the kernel's fragments are keys.
    """
    found = _range_bytes(spec, tile_q, tile_kv)
    if spec.mask is None:
        return found
    entries, heads, queries, keys = spec.mask
    if owns_keys:
        return found + _mask_tiles_bytes((entries, heads, keys, queries), tile_kv, tile_q)
    return found + _mask_tiles_bytes((entries, heads, queries, keys), tile_q, tile_kv)


def dbias_partials_bytes(spec: Spec, tile_q: int, tile_kv: int, wanted_blocks: int) -> int:
    """Scratch for partial sums of dbias: none where the bias alone has tiles enough for the blocks that are wanted."""
    assert spec.bias is not None
    bias_batch, bias_heads, queries, keys = spec.bias
    q_tiles, kv_tiles = -(-spec.q_len // tile_q), -(-spec.kv_len // tile_kv)
    tiles_query, tiles_key = (1 if queries == 1 else q_tiles), (1 if keys == 1 else kv_tiles)
    tiles = bias_batch * bias_heads * tiles_query * tiles_key
    if not (is_number(tiles) and is_number(spec.batch)):  # the most that any batch can need
        return 2 * wanted_blocks * tile_q * tile_kv * 4
    if tiles == 0:
        return 0
    entries, heads = spec.batch // bias_batch, spec.num_heads // bias_heads
    steps = entries * heads * (q_tiles // tiles_query) * (kv_tiles // tiles_key)
    splits = max(1, min(-(-wanted_blocks // tiles), steps))
    return splits * bias_batch * bias_heads * queries * keys * 4 if splits > 1 else 0
