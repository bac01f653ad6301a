"""Arrays for tests that need no case of the table."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, *shape: int, dtype: Any = "float32") -> jax.Array:
    """Standard normal numbers, drawn by numpy: for every shape JAX would compile its generator, for some seconds."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def bernoulli(seed: int, share: float, *shape: int) -> jax.Array:
    """Booleans, this share of them true."""
    return jnp.asarray(np.random.default_rng(seed).random(shape) < share)
