"""What every backend offers, and how it explains itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import jax

from jattn.config import Determinism
from jattn.device import Device
from jattn.errors import Reason
from jattn.reference import Gradients
from jattn.score_program import ScoreProgram
from jattn.spec import Operands, Spec


@dataclasses.dataclass(frozen=True)
class Wants:
    """Which gradients of a backward pass are wanted.

    ``Backend.backward`` is never asked for those of sinks, and may leave those of ALiBi slopes and captures to XLA.
    ``captures`` has a flag for each, or is empty where none is wanted.
    """

    q: bool
    k: bool
    v: bool
    bias: bool
    sinks: bool = False
    alibi_slopes: bool = False
    captures: tuple[bool, ...] = ()

    @staticmethod
    def of(flags: Sequence[bool]) -> Wants:
        """From flags in the order of ``differentiable``."""
        q, k, v, bias, sinks, alibi_slopes, *captures = flags
        return Wants(q, k, v, bias, sinks, alibi_slopes, tuple(captures))

    def flags(self) -> tuple[bool, bool, bool, bool]:
        """Of the gradients that every backend computes, in the order q, k, v, bias."""
        return (self.q, self.k, self.v, self.bias)

    def all_flags(self) -> tuple[bool, ...]:
        """In the order of ``differentiable``, which may go on with captures of which none is wanted."""
        return (*self.flags(), self.sinks, self.alibi_slopes, *self.captures)

    def of_backend(self) -> Wants:
        """Those that a backend is asked for."""
        return dataclasses.replace(self, sinks=False)


@dataclasses.dataclass(frozen=True)
class Residuals:
    """What the backward pass reads beside the operands; a pytree.

    Shapes: out and dout (B, T, N, Dv), lse (B, N, T), dlse (B, N, T) or None for zero. sinks, (1 or B, 1 or N, 1) or
    None, are those of the forward pass, which lse knows already: for backends that add up the weights of a row again.
    """

    out: jax.Array
    lse: jax.Array
    dout: jax.Array
    dlse: jax.Array | None
    sinks: jax.Array | None = None


@runtime_checkable
class Backend(Protocol):
    """One way of computing attention.

    A backend refuses before it runs: ``unsupported`` is pure, reads only its arguments, returns all reasons, and must
    not depend on the batch size (``vmap`` changes that between the question and the lowering).
    """

    @property
    def name(self) -> str:
        """The name users pass as ``implementation``."""
        ...

    @property
    def understands(self) -> frozenset[str]:
        """The features of ``jattn.spec.FEATURES`` that this backend honours; a problem with another one is
        refused.
        """
        ...

    def unsupported(
        self, spec: Spec, device: Device, *, needs_grad: bool, determinism: Determinism
    ) -> tuple[Reason, ...]:
        """Returns every reason why this backend cannot run the problem; empty if it can.

        Args:
          spec: the problem; every feature it uses is among ``understands``.
          device: where it is to run.
          needs_grad: whether the backward pass must run too.
          determinism: "strict" asks for a backward pass whose bits never vary.
        """
        ...

    def for_backward(self) -> Backend:
        """The backend that runs the backward pass of problems whose forward pass this one runs; mostly itself."""
        ...

    def forward(
        self, spec: Spec, operands: Operands[jax.Array], device: Device
    ) -> tuple[jax.Array, jax.Array]:
        """Returns out (B, T, N, Dv) in the dtype of the problem and lse (B, N, T) in float32 (float64 for float64).

        Traced inside a lowering.

        Args:
          spec: the problem.
          operands: its arrays; those that it does not use are None.
          device: where it is to run.
        """
        ...

    def backward(
        self,
        spec: Spec,
        operands: Operands[jax.Array],
        residuals: Residuals,
        wants: Wants,
        device: Device,
        determinism: Determinism,
    ) -> Gradients:
        """Returns the gradients; those not wanted may hold anything. Traced inside a lowering.

        The gradient of the slopes, if it is wanted, has shape (B, N, 1) and the dtype of lse. It may be None: XLA then
        computes it tile by tile, which takes much longer. The same holds for the gradients of captures, which have the
        shapes of these.

        Args:
          spec, operands, device: as for ``forward``.
          residuals: results of the forward pass and the gradients of these.
          wants: which gradients are wanted.
          determinism: "strict" asks for the same bits every time.
        """
        ...


def missing_features(backend: Backend, spec: Spec) -> tuple[Reason, ...]:
    """One reason for each feature of the problem that the backend does not list as understood."""
    return tuple(
        Reason(
            backend.name,
            "MASK" if feature in ("mask", "bias") else "FEATURE",
            "feature",
            feature,
            f"must be one of {', '.join(sorted(backend.understands)) or 'none'}",
            "leave the choice to jattn, or name another backend",
        )
        for feature in sorted(spec.features() - backend.understands)
    )


def wrong_platform(backend: str, device: Device, platform: str) -> tuple[Reason, ...]:
    """The reason why a backend of ``platform`` cannot run on ``device``, if so."""
    if device.platform == platform:
        return ()
    where = "cuda device" if platform == "cuda" else platform
    return (
        Reason(
            backend,
            "PLATFORM",
            "device",
            device,
            f"q, k and v need to be on {where}",
            f"move the arrays to {where}, or name a backend of {device.platform}",
        ),
    )


def wrong_dtype(backend: str, spec: Spec, allowed: tuple[str, ...]) -> tuple[Reason, ...]:
    """The reason why a backend cannot run the dtype of the problem, if so."""
    if spec.dtype in allowed:
        return ()
    torch_names = {
        "float16": "Half",
        "bfloat16": "BFloat16",
        "float32": "Float",
        "float64": "Double",
    }
    named = ", ".join(torch_names[dtype] for dtype in allowed)
    return (
        Reason(
            backend,
            "DTYPE",
            "dtype",
            spec.dtype,
            f"Expected query, key and value to all be of dtype: {{{named}}}",
            f"cast q, k and v to {' or '.join(allowed)}, or pass compute_dtype",
        ),
    )


def wide_heads(
    backend: str,
    spec: Spec,
    largest: int,
    way_out: str = "split the head, or use implementation='xla'",
) -> tuple[Reason, ...]:
    """The reasons why head dims above ``largest`` cannot run."""
    return tuple(
        Reason(
            backend,
            "HEAD_DIM",
            name,
            getattr(spec, name),
            f"must be less than or equal to {largest}",
            way_out,
        )
        for name in ("head_dim", "head_dim_v")
        if isinstance(getattr(spec, name), int) and getattr(spec, name) > largest
    )


LENGTHS = ("q_len", "kv_len")
EXTENTS = (*LENGTHS, "num_heads", "num_kv_heads", "head_dim", "head_dim_v")


def symbolic_extents(
    backend: str,
    spec: Spec,
    needed: tuple[str, ...] = EXTENTS,
    rule: str = "must be a known number; only the batch may be symbolic",
) -> tuple[Reason, ...]:
    """The reasons why a backend cannot run a problem of which extents that it needs are symbolic, if so."""
    extents = dict.fromkeys((*EXTENTS, *needed))
    symbolic = [name for name in extents if not isinstance(getattr(spec, name), int)]
    elsewhere = "reference" if set(symbolic) & set(LENGTHS) else "xla"
    return tuple(
        Reason(
            backend,
            "SYMBOLIC",
            name,
            getattr(spec, name),
            rule,
            f"export with this extent fixed, or name implementation={elsewhere!r}",
        )
        for name in symbolic
        if name in needed
    )


def refused_score_mod(
    backend: str,
    spec: Spec,
    refusals: Callable[[ScoreProgram], list[tuple[str, object, str]]],
) -> tuple[Reason, ...]:
    """The reasons why a backend cannot run the score function of a problem, if it has one.

    ``refusals`` says what of a program it cannot run.
    """
    if spec.score_mod is None:
        return ()

    def way_out(code: str) -> str:
        change = "export with these fixed" if code == "SYMBOLIC" else "write it by other operations"
        return f"{change}, or use implementation='xla'"

    return tuple(
        Reason(backend, code, "score_mod", actual, f"must be {rule}", way_out(code))
        for code, actual, rule in refusals(spec.score_mod)
    )


def without_terms_of_no_keys(
    spec: Spec, operands: Operands[jax.Array]
) -> tuple[Spec, Operands[jax.Array]]:
    """Drops the bias and the mask of a problem without keys.

    XLA gives arrays without elements no address, which is how the CUDA code tells that there is none.
    """
    if spec.kv_len != 0:
        return spec, operands
    bare = operands._replace(bias=None, mask=None)
    return spec.for_operands(bare), bare
