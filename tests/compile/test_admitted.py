"""Whatever Python plans, the host code accepts: every kernel key parses, and scratch is as large as it asks for.

Python sizes scratch while tracing, without the native module's help; the host code checks it at run time. Here the two
meet over the product of what a problem may have.
"""

import itertools

import pytest

from jattn import _core
from jattn.backends import cuda_tiles, flash_backward_tiles, flash_tiles
from jattn.backends.mem_efficient import MemEfficientBackend
from jattn.device import Device
from jattn.masks import Band
from jattn.spec import Dropout, Spec

ARCHS = ((8, 0), (8, 6), (9, 0), (10, 0), (12, 0))
HEAD_DIMS = ((8, 8), (40, 40), (64, 64), (72, 136), (128, 128), (192, 128), (256, 256), (512, 512))
# Unaligned pieces are rounded up to this many bytes, each on its own; Python may count one more piece than there is.
SLACK_BYTES = 16 * 256


def specs() -> list[Spec]:
    """Problems with every option, in combinations that a kernel key distinguishes."""
    found = []
    options = itertools.product(
        ("bfloat16", "float16", "float32"),
        HEAD_DIMS,
        (Band(), Band(right=0)),
        ((2, 100, 130, 4, 2), (1, 1, 7, 3, 3), (3, 513, 257, 8, 1)),
        (False, True),
    )
    for dtype, (head_dim, head_dim_v), band, (
        batch,
        q_len,
        kv_len,
        num_heads,
        num_kv_heads,
    ), full in options:
        spec = Spec(
            batch,
            q_len,
            kv_len,
            num_heads,
            num_kv_heads,
            head_dim,
            head_dim_v,
            dtype,
            0.5,
            band=band,
        )
        found.append(spec)
        if full:
            for bias in (
                (batch, num_heads, q_len, kv_len),
                (1, num_heads, q_len, kv_len),
                (1, 1, 1, kv_len),
            ):
                found.append(
                    Spec(
                        **{
                            name: getattr(spec, name)
                            for name in ("batch", "q_len", "kv_len", "num_heads")
                        },
                        **{
                            name: getattr(spec, name)
                            for name in ("num_kv_heads", "head_dim", "head_dim_v")
                        },
                        dtype=dtype,
                        scale=-1.0,
                        softcap=30.0,
                        band=band,
                        bias=bias,
                        bias_dtype=dtype,
                        mask=(1, 1, q_len, kv_len),
                        kv_lengths=True,
                        segments=True,
                        positions=q_len % 2 == 1,
                        alibi_slopes=(1, num_heads),
                        dropout=Dropout((batch, num_heads), rows=q_len % 2 == 1),
                    )
                )
    return found


SPECS = specs()


def needed(
    spec: Spec, kernels: str, *, backward: bool, wants: tuple[bool, bool, bool, bool, bool]
) -> int:
    """What the host code asks for."""
    return _core.cuda_scratch_bytes(
        backward=backward,
        kernels=kernels,
        wants=wants,
        batch=spec.batch,
        q_len=spec.q_len,
        kv_len=spec.kv_len,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        dtype=spec.dtype,
        bias_shape=spec.bias or (0, 0, 0, 0),
        mask_shape=spec.mask or (0, 0, 0, 0),
        segments=spec.segments,
    )


def check(
    spec: Spec, kernels: str, scratch_bytes: int, *, backward: bool, wants: tuple[bool, ...] = ()
) -> None:
    for key in kernels.split(";"):
        _core.kernel_unit_text(key)
    want_q, want_k, want_v, want_bias, want_slopes = (*wants, *(False,) * 5)[:5]
    asked = needed(
        spec,
        kernels,
        backward=backward,
        wants=(want_q, want_k, want_v, want_bias, want_slopes),
    )
    assert asked <= scratch_bytes <= asked + SLACK_BYTES, (spec, kernels)


@pytest.mark.parametrize("arch", ARCHS)
def test_forward(arch: tuple[int, int]) -> None:
    for spec in SPECS:
        plan = cuda_tiles.plan_forward(spec, arch)
        check(spec, plan.kernels, plan.scratch_bytes, backward=False)


def is_admitted(spec: Spec, arch: tuple[int, int]) -> bool:
    reasons = MemEfficientBackend().unsupported(
        spec, Device("cuda", arch), needs_grad=True, determinism="off"
    )
    return not reasons


@pytest.mark.parametrize("arch", ARCHS)
def test_only_the_widest_float32_heads_are_refused_and_only_where_memory_is_small(
    arch: tuple[int, int],
) -> None:
    small = arch in ((8, 6), (12, 0))
    for spec in SPECS:
        widest = spec.dtype == "float32" and spec.head_dim == 512
        assert is_admitted(spec, arch) == (not (small and widest)), (spec, arch)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
def test_backward(arch: tuple[int, int], deterministic: bool) -> None:
    for spec in SPECS:
        if not is_admitted(spec, arch):
            continue
        for wants in itertools.product((False, True), repeat=4):
            if not any(wants) or (wants[3] and spec.bias is None):
                continue
            plan = cuda_tiles.plan_backward(spec, arch, wants=wants, deterministic=deterministic)
            check(spec, plan.kernels, plan.scratch_bytes, backward=True, wants=wants)


@pytest.mark.parametrize("arch", ARCHS)
def test_gradient_of_slopes(arch: tuple[int, int]) -> None:
    for spec in SPECS:
        if spec.alibi_slopes is None or not is_admitted(spec, arch):
            continue
        plan, parts = cuda_tiles.plan_slopes_gradient(spec, arch)
        wants = (False, False, False, False, True)
        check(spec, plan.kernels, plan.scratch_bytes, backward=True, wants=wants)
        assert 1 <= parts <= -(-spec.q_len // 16)


def runs_on_flash(spec: Spec) -> bool:
    return spec.dtype != "float32" and max(spec.head_dim, spec.head_dim_v) <= 256


def test_flash_forward() -> None:
    for spec in filter(runs_on_flash, SPECS):
        plan = flash_tiles.plan_forward(spec)
        check(spec, plan.kernels, plan.scratch_bytes, backward=False)


def test_flash_backward() -> None:
    for spec in filter(runs_on_flash, SPECS):
        for deterministic, *wants in itertools.product((False, True), repeat=5):
            if not any(wants) or (wants[3] and spec.bias is None):
                continue
            plan = flash_backward_tiles.plan_backward(
                spec,
                wants=(wants[0], wants[1], wants[2], wants[3]),
                deterministic=deterministic,
            )
            check(spec, plan.kernels, plan.scratch_bytes, backward=True, wants=tuple(wants))
