"""Trains an encoder on sequences of different lengths, padded with NaN: what lies beyond a length is never read.

A sequence is a list of pairs (name, value) and, in its first token, a name; the encoder says which value goes with it.
The batch is padded to its longest sequence, and the padding of query, key and value holds NaN: one read of it would
destroy the loss.

Run: python examples/encoder_padding.py        (half a minute on two cores)
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import trange

import jattn

NAMES, VALUES = 16, 8
FEATURES, HEADS, KEY_HEADS = 64, 4, 2
Parameters = dict[str, Any]


def draw_batch(rng: np.random.Generator, batch: int, longest: int) -> dict[str, np.ndarray]:
    """Names and values (batch, longest), lengths (batch,), answers (batch,)."""
    names = np.zeros((batch, longest), np.int32)
    values = np.full((batch, longest), VALUES, np.int32)  # "no value", as the first token has
    lengths = rng.integers(3, longest + 1, batch).astype(np.int32)
    answers = np.zeros(batch, np.int32)
    for row, length in enumerate(lengths):
        chosen = rng.choice(NAMES, length - 1, replace=False)
        given = rng.integers(0, VALUES, length - 1)
        asked = rng.integers(length - 1)
        names[row, 0], names[row, 1:length], values[row, 1:length] = chosen[asked], chosen, given
        answers[row] = given[asked]
    return {"names": names, "values": values, "lengths": lengths, "answers": answers}


def make_parameters(key: jax.Array, layers: int) -> Parameters:
    """Matrices with variance 1 / fan-in."""
    keys = iter(jax.random.split(key, 3 + 6 * layers))

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

    head_dim = FEATURES // HEADS
    return {
        "names": matrix(NAMES, FEATURES) * NAMES**0.5,
        "values": matrix(VALUES + 1, FEATURES) * VALUES**0.5,
        "out": matrix(FEATURES, VALUES),
        "layers": [
            {
                "query": matrix(FEATURES, HEADS * head_dim),
                "key": matrix(FEATURES, KEY_HEADS * head_dim),
                "value": matrix(FEATURES, KEY_HEADS * head_dim),
                "join": matrix(HEADS * head_dim, FEATURES),
                "expand": matrix(FEATURES, 2 * FEATURES),
                "contract": matrix(2 * FEATURES, FEATURES),
            }
            for _ in range(layers)
        ],
    }


def normalised(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def encode(parameters: Parameters, batch: dict[str, jax.Array]) -> jax.Array:
    """Logits (B, VALUES) of the answer."""
    names, values, lengths = batch["names"], batch["values"], batch["lengths"]
    real = (jnp.arange(names.shape[1]) < lengths[:, None])[:, :, None]
    x = parameters["names"][names] + parameters["values"][values]
    for layer in parameters["layers"]:
        h = normalised(x)
        query, key, value = (
            jnp.where(real, h @ layer[name], jnp.nan).reshape(*h.shape[:2], heads, -1)
            for name, heads in (("query", HEADS), ("key", KEY_HEADS), ("value", KEY_HEADS))
        )
        out = jattn.dot_product_attention(
            query, key, value, query_seq_lengths=lengths, key_value_seq_lengths=lengths
        )
        x = x + out.reshape(*x.shape[:2], -1) @ layer["join"]
        x = x + jax.nn.gelu(normalised(x) @ layer["expand"]) @ layer["contract"]
    return normalised(x[:, 0]) @ parameters["out"]


def loss_of(parameters: Parameters, batch: dict[str, jax.Array]) -> jax.Array:
    logits = encode(parameters, batch)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["answers"]).mean()


def main(arguments: list[str] | None = None) -> int:
    """Trains and tests; returns 0 if the answers are right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--longest", type=int, default=16)
    options = parser.parse_args(arguments)
    if not 3 <= options.longest <= NAMES + 1:
        parser.error(
            f"--longest is {options.longest}, must be 3 to {NAMES + 1}: names are not repeated"
        )
    rng = np.random.default_rng(0)
    parameters = make_parameters(jax.random.key(0), layers=2)
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, options.steps))
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters: Parameters, state: Any, batch: Any) -> tuple[Parameters, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, loss

    jattn.reset_call_counters()
    for _ in (bar := trange(options.steps, file=sys.stderr)):
        parameters, state, loss = step(parameters, state, draw_batch(rng, 64, options.longest))
        bar.set_postfix(loss=f"{float(loss):.3f}", refresh=False)
    print(f"backends compiled in: {jattn.call_counters()}")
    test = draw_batch(rng, 512, options.longest)
    found = jax.jit(encode)(parameters, test).argmax(axis=1)
    share = float((found == test["answers"]).mean())
    holds = share > 0.9
    print(
        f"{'ok    ' if holds else 'FAILED'}  right answers on new sequences: {share:.1%}, more than 90 %;"
        f" a guess has {1 / VALUES:.1%}"
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
