"""How fast one pass of a call runs here, alone, beside a matrix product of the same type."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import autodiff, device
from jattn.backends import Wants
from jattn.call_plan import Pass, operand_shapes, residual_shapes
from jattn.config import Options
from jattn.device import Device
from jattn.spec import Spec

ROUNDS = 5
SECONDS_PER_ROUND = 0.1
# Large enough to keep the machine busy, small enough for a question that is asked in passing.
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of one pass.

    Attributes:
      median_us: of one run, over several rounds.
      spread: slowest less fastest round, relative to the median.
      flops_per_second: the pass's FLOPs by that time; None if they are not known.
      matmul_flops_per_second: of a square matrix product in the same dtype on this machine.
    """

    median_us: float
    spread: float
    flops_per_second: float | None
    matmul_flops_per_second: float

    @property
    def matmul_fraction(self) -> float:
        """Speed of the pass as a fraction of the matrix product's."""
        return (self.flops_per_second or 0.0) / self.matmul_flops_per_second


def require_here(where: Device) -> None:
    """Raises ValueError if ``where`` is not this machine."""
    here = device.expected(None)
    if where != here:
        raise ValueError(
            f"jattn.explain: timed is True and the device is {where}, must be this machine's, {here}: leave device out"
        )


def time_pass(each: Pass, spec: Spec, options: Options, wants: Wants, *, has_dlse: bool) -> Timing:
    """Times one pass of a problem on random arrays that hide no pair."""
    shapes = operand_shapes(spec)
    operands = (
        *(
            _fill(n, x)
            for n, x in zip(shapes._fields, shapes.single(), strict=False)
            if x is not None
        ),
        *(_fill("captures", x) for x in shapes.captures),
    )
    common: dict[str, Any] = {"spec": spec, "options": options}
    if each.name == "forward":
        run = functools.partial(autodiff.forward_p.bind, **common, needs_grad=False)
        arrays = operands
    else:
        forward = functools.partial(autodiff.forward_p.bind, **common, needs_grad=True)
        out, lse = jax.jit(forward)(*operands)
        if each.name == "backward":
            rest = [_fill("dout", x) for x in residual_shapes(spec, has_dlse)[2:]]
            run = functools.partial(
                autodiff.backward_p.bind, **common, wants=wants, has_dlse=has_dlse
            )
        else:
            flags = zip(shapes.differentiable(), wants.all_flags(), strict=False)
            rest = [_fill("tangent", x) for x, moves in flags if moves]
            run = functools.partial(autodiff.tangent_p.bind, **common, wants=wants)
        arrays = (*operands, out, lse, *rest)
    seconds, spread = _measure(jax.jit(run), arrays)
    speed = None if each.flops is None else each.flops / seconds
    return Timing(seconds * 1e6, spread, speed, matmul_speed(spec.dtype, device.expected(None)))


def _fill(name: str, like: Any) -> jax.Array:
    """An array for an operand: normal numbers, lengths that cover everything, one segment, one position, which every
    band sees.
    """
    shape, dtype = like.shape, np.dtype(like.dtype)
    if name.endswith("_lengths"):
        return jnp.full(shape, 2**30, dtype)
    if name == "dropout_rate":
        return jnp.full(shape, 0.1, dtype)
    if dtype == np.bool_:
        return jnp.ones(shape, dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jax.random.normal(jax.random.key(len(name)), shape, jnp.float32).astype(dtype)
    return jnp.zeros(shape, dtype)


def _measure(run: Callable[..., Any], arrays: tuple[Any, ...]) -> tuple[float, float]:
    """Median seconds of one run over rounds of many, and their spread."""
    jax.block_until_ready(run(*arrays))
    begin = time.perf_counter()
    jax.block_until_ready(run(*arrays))
    once = time.perf_counter() - begin
    calls = max(1, min(1000, int(SECONDS_PER_ROUND / max(once, 1e-7))))
    rounds: list[float] = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        result = None
        for _ in range(calls):
            result = run(*arrays)
        jax.block_until_ready(result)
        rounds.append((time.perf_counter() - begin) / calls)
    median = float(np.median(rounds))
    return median, (max(rounds) - min(rounds)) / median


@functools.cache
def matmul_speed(dtype: str, where: Device) -> float:
    """FLOP/s of a square matrix product on the default device, which is ``where``: the ceiling that kernels are
    compared with.
    """
    size = MATMUL_SIZE.get(where.platform, MATMUL_SIZE["cpu"])
    matrix = jax.random.normal(jax.random.key(0), (size, size), jnp.float32).astype(dtype)
    product = jax.jit(functools.partial(jnp.matmul, precision="highest"))
    seconds, _ = _measure(product, (matrix, matrix))
    return 2.0 * size**3 / seconds
