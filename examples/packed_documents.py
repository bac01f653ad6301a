"""Trains on packed documents, and shows that packing changes nothing: no document sees another.

A document repeats a random word. Whoever looks back one word knows the next letter, so the loss falls far below that of
a guess; but only inside the document, because its neighbours in the row repeat other words. At the end the losses of
packed rows are compared with those of the same documents one by one.

Run: python examples/packed_documents.py        (half a minute on two cores)
"""

from __future__ import annotations

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import trange

import jattn
import jattn.flax

LETTERS, WORD = 16, 6  # size of the alphabet, letters in a word
PADDING = -1  # segment id


def draw_row(rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs documents of 2 to 4 words into one row: letters and segment ids, both (length,)."""
    letters, segments = np.zeros(length, np.int32), np.full(length, PADDING, np.int32)
    start = number = 0
    while start + 2 * WORD <= length:
        count = WORD * int(rng.integers(2, 5))
        stop = min(start + count, length)
        letters[start:stop] = np.resize(rng.integers(0, LETTERS, WORD), count)[: stop - start]
        segments[start:stop] = number
        start, number = stop, number + 1
    return letters, segments


def draw_batch(rng: np.random.Generator, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Letters and segment ids of some rows, both (batch, length)."""
    rows = [draw_row(rng, length) for _ in range(batch)]
    return np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows])


def positions_in_documents(segments: jax.Array) -> jax.Array:
    """Counts from 0 in each run of equal ids."""
    index = jnp.arange(segments.shape[1])
    begins = jnp.concatenate(
        [jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1
    )
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


class Model(nnx.Module):
    """Two layers of attention over letters and positions inside the document."""

    def __init__(self, features: int, heads: int, length: int, rngs: nnx.Rngs):
        self.letters = nnx.Embed(LETTERS, features, rngs=rngs)
        self.positions = nnx.Embed(length, features, rngs=rngs)
        attention_fn = jattn.flax.make_attention_fn(is_causal=True)
        self.layers = nnx.List(
            [
                nnx.MultiHeadAttention(
                    heads, features, decode=False, attention_fn=attention_fn, rngs=rngs
                )
                for _ in range(2)
            ]
        )
        self.norms = nnx.List([nnx.LayerNorm(features, rngs=rngs) for _ in range(3)])
        self.out = nnx.Linear(features, LETTERS, rngs=rngs)

    def __call__(self, letters: jax.Array, segments: jax.Array) -> jax.Array:
        x = self.letters(letters) + self.positions(positions_in_documents(segments))
        mask = jattn.flax.StructuralMask(segment_ids=segments)
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = x + layer(norm(x), mask=mask)
        return self.out(self.norms[-1](x))


def token_losses(
    model: Model, letters: jax.Array, segments: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Losses (nats) of letters that a document's earlier word gives away, and where they are, both (B, T - 1)."""
    logits = model(letters, segments)[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, letters[:, 1:])
    repeated = positions_in_documents(segments)[:, 1:] >= WORD
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != PADDING)
    return losses, same & repeated


def loss_of(model: Model, letters: jax.Array, segments: jax.Array) -> jax.Array:
    losses, counted = token_losses(model, letters, segments)
    return jnp.mean(losses, where=counted)


def one_by_one(model: Model, letters: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """The losses of the packed rows again, every document in a row of its own."""
    found = []
    for row, ids in zip(letters, segments, strict=True):
        for number in range(ids.max() + 1):
            document = row[ids == number]
            alone = np.zeros_like(row)[None]
            alone[0, : len(document)] = document
            borders = np.where(np.arange(len(row)) < len(document), 0, PADDING)[None]
            losses, counted = _jitted_losses(model, jnp.asarray(alone), jnp.asarray(borders))
            found.append(np.asarray(losses)[np.asarray(counted)])
    return np.concatenate(found)


_jitted_losses = nnx.jit(token_losses)


def main(arguments: list[str] | None = None) -> int:
    """Trains and compares; returns 0 if everything that is claimed holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    model = Model(features=64, heads=4, length=options.length, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(
        model: Model, optimizer: nnx.Optimizer, letters: jax.Array, segments: jax.Array
    ) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_of)(model, letters, segments)
        optimizer.update(model, gradients)
        return loss

    jattn.reset_call_counters()
    loss = jnp.inf
    for _ in (bar := trange(options.steps, file=sys.stderr)):
        loss = step(model, optimizer, *map(jnp.asarray, draw_batch(rng, 16, options.length)))
        bar.set_postfix(loss=f"{float(loss):.3f}", refresh=False)
    print(f"backends compiled in: {jattn.call_counters()}")

    letters, segments = draw_batch(rng, 4, options.length)
    losses, counted = _jitted_losses(model, jnp.asarray(letters), jnp.asarray(segments))
    packed = np.asarray(losses)[np.asarray(counted)]
    apart = float(np.abs(packed - one_by_one(model, letters, segments)).max())
    guess = float(np.log(LETTERS))
    claims = [
        (
            float(loss) < 0.5 * guess,
            f"loss {float(loss):.3f} nats is below half of a guess, {guess:.3f}",
        ),
        (apart < 1e-3, f"packed and one by one are within 1e-3: largest difference {apart:.1e}"),
    ]
    for holds, text in claims:
        print(f"{'ok    ' if holds else 'FAILED'}  {text}")
    return 0 if all(holds for holds, _ in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
