"""Learns where to look: a bias by relative position, trained through attention.

Every token must name the token three places before it, and one five places before it. There are no position embeddings,
so only the bias can know distances: one number for each head and distance, added to the scores. Its gradient comes out
of the attention kernel in the shape of the bias. After training each head's largest number stands at one of the two
distances.

Run: python examples/relative_bias.py        (half a minute on two cores)
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

SYMBOLS, FEATURES, HEADS, REACH = 12, 32, 2, 16
DISTANCES = (3, 5)
Parameters = dict[str, jax.Array]


def make_parameters(key: jax.Array) -> Parameters:
    """Embedding, projections, and the table of biases (heads, 2 * reach + 1), which starts at 0."""
    embed, value, out = jax.random.split(key, 3)
    scale = FEATURES**-0.5
    return {
        "embed": jax.random.normal(embed, (SYMBOLS, FEATURES)),
        "value": jax.random.normal(value, (FEATURES, HEADS * FEATURES)) * scale,
        "out": jax.random.normal(out, (HEADS, FEATURES, len(DISTANCES), SYMBOLS)) * scale,
        "table": jnp.zeros((HEADS, 2 * REACH + 1)),
    }


def bias_of(table: jax.Array, length: int) -> jax.Array:
    """Spreads the table over pairs: (1, heads, T, S), the same for the whole batch."""
    index = jnp.arange(length)
    distance = jnp.clip(index[:, None] - index[None], -REACH, REACH)
    return table[:, distance + REACH][None]


def predict(parameters: Parameters, symbols: jax.Array) -> jax.Array:
    """Logits (B, T, 2, SYMBOLS) of the symbols three and five places before."""
    x = parameters["embed"][symbols]
    value = (x @ parameters["value"]).reshape(*x.shape[:2], HEADS, FEATURES)
    # Scores are the bias alone: query and key are zeros.
    nothing = jnp.zeros_like(value)
    bias = bias_of(parameters["table"], symbols.shape[1])
    out = jattn.dot_product_attention(nothing, nothing, value, bias, is_causal=True)
    return jnp.einsum("btnd,ndks->btks", out, parameters["out"])


def loss_of(parameters: Parameters, symbols: jax.Array) -> jax.Array:
    logits = predict(parameters, symbols)
    losses = [
        optax.softmax_cross_entropy_with_integer_labels(
            logits[:, distance:, number], symbols[:, :-distance]
        ).mean()
        for number, distance in enumerate(DISTANCES)
    ]
    return sum(losses, jnp.zeros(())) / len(losses)


def main(arguments: list[str] | None = None) -> int:
    """Trains; returns 0 if the table found both distances."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    parameters = make_parameters(jax.random.key(0))
    optimizer = optax.adam(3e-2)
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters: Parameters, state: Any, symbols: Any) -> tuple[Parameters, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(parameters, symbols)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, loss

    symbols = rng.integers(0, SYMBOLS, (8, options.length))
    print(jattn.explain(step, parameters, state, symbols))
    loss = jnp.inf
    for _ in (bar := trange(options.steps, file=sys.stderr)):
        symbols = rng.integers(0, SYMBOLS, (8, options.length))
        parameters, state, loss = step(parameters, state, symbols)
        bar.set_postfix(loss=f"{float(loss):.3f}", refresh=False)
    found = (parameters["table"][:, REACH:].argmax(axis=1)).tolist()
    claims = [
        (
            float(loss) < 0.5,
            f"loss {float(loss):.3f} nats is below 0.5; a guess has {np.log(SYMBOLS):.3f}",
        ),
        (
            sorted(found) == sorted(DISTANCES),
            f"each head looks back by {found}; asked for were {list(DISTANCES)}",
        ),
    ]
    for holds, text in claims:
        print(f"{'ok    ' if holds else 'FAILED'}  {text}")
    return 0 if all(holds for holds, _ in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
