"""Problems with random features whose operands are cut over the devices of a mesh as chance has it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import composition
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jattn
from jattn.testing import inputs
from jattn.testing.cases import Case

# B, T, S, N, K: more and fewer heads than devices, numbers that these divide and not.
SHAPES = (
    (4, 32, 64, 4, 4),
    (6, 8, 24, 12, 6),
    (3, 16, 16, 6, 2),
    (4, 8, 8, 12, 3),
    (2, 40, 24, 4, 2),
    (4, 16, 128, 4, 1),
    (2, 16, 16, 8, 2),
)
MESHES = ((2, 2), (4, 1), (1, 4))
DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks", "alibi_slopes")


@dataclasses.dataclass(frozen=True)
class Cut:
    """A problem, its mesh of four devices, and how each of its arrays is cut."""

    case: Case
    mesh: Mesh
    specs: dict[str, PartitionSpec]
    arrays: dict[str, Any]
    options: dict[str, Any]

    @classmethod
    def draw(cls, seed: int, kind: AxisType, dtype: str) -> "Cut":
        def problem(rng: np.random.Generator) -> Case:
            used = frozenset(
                name
                for name, tenths in composition.FEATURES.items()
                if name != "dropout_rows" and rng.integers(10) < 0.6 * tenths
            )
            return composition.problem(
                lambda choices: choices[rng.integers(len(choices))],
                used,
                dtype,
                f"cut-{seed}",
                SHAPES,
            )

        case, rng = composition.redrawn(problem, seed), inputs.generator(f"cut-{seed}")
        mesh = jax.make_mesh(MESHES[rng.integers(3)], ("x", "y"), axis_types=(kind, kind))

        def spec_of(x: Any) -> PartitionSpec:
            axes: list[str | None] = [None] * x.ndim
            for name in rng.permutation(mesh.axis_names):
                fits = [
                    axis
                    for axis, extent in enumerate(x.shape)
                    if axes[axis] is None and extent > 1 and extent % mesh.shape[name] == 0
                ]
                if fits and rng.integers(3):
                    axes[fits[rng.integers(len(fits))]] = str(name)
            return PartitionSpec(*axes)

        (query, key, value), keywords = inputs.call_arguments(case, inputs.make(case))
        keywords |= {"query": query, "key": key, "value": value}
        arrays = {name: x for name, x in keywords.items() if isinstance(x, np.ndarray)}
        options = {name: x for name, x in keywords.items() if name not in arrays}
        return cls(case, mesh, {name: spec_of(x) for name, x in arrays.items()}, arrays, options)

    def program(self, backend: str) -> Callable[..., Any]:
        """out, lse and the gradients of the operands that have one, for cotangents of ones."""

        def run(arrays: dict[str, Any]) -> Any:
            moving = {name: arrays[name] for name in DIFFERENTIABLE if name in arrays}

            def attend(moving: dict[str, Any]) -> Any:
                operands = {**arrays, **moving}
                q, k, v = (operands.pop(name) for name in ("query", "key", "value"))
                return jattn.dot_product_attention(
                    q, k, v, return_lse=True, implementation=backend, **operands, **self.options
                )

            results, pullback = jax.vjp(attend, moving)
            return results, pullback(jax.tree.map(jnp.ones_like, results))

        return run

    def check(self, backend: str) -> None:
        """Raises AssertionError if cut arrays give other results than whole ones."""
        run = jax.jit(self.program(backend))
        cut = {
            name: jax.device_put(x, NamedSharding(self.mesh, self.specs[name]))
            for name, x in self.arrays.items()
        }
        want = jax.tree_util.tree_leaves_with_path(run(jax.tree.map(jnp.asarray, self.arrays)))
        got = jax.tree.leaves(run(cut))
        for (path, w), g in zip(want, got, strict=True):
            # Sums over devices have another order, and are rounded to 16 bits on each. Gradients in float32 of such a
            # problem (sinks, slopes, bias) are made of rounded results, too; lse is not.
            is_lse = [key.idx for key in path[:2] if hasattr(key, "idx")] == [0, 1]
            exact = is_lse or self.case.dtype == "float32"
            tolerance = 3e-5 if exact else 4 * float(jnp.finfo(self.case.dtype).eps)
            a, b = (np.asarray(x, np.float32) for x in (g, w))
            largest = float(np.abs(b, where=np.isfinite(b), out=np.zeros_like(b)).max(initial=0.0))
            np.testing.assert_allclose(
                a, b, rtol=0, atol=tolerance * max(largest, 1e-6), err_msg=f"{path}, {self}"
            )
