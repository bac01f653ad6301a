"""Trains a vision transformer on scikit-learn's handwritten digits: 8 x 8 pixels, 16 patches, a token that gathers.

Attention is full and has dropout, whose mask is a function of a key: the same key gives the same loss again, another
key another one.

Run: python examples/digits_vit.py        (about a minute on two cores)
"""

from __future__ import annotations

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from tqdm import trange

import jattn

PATCH, CLASSES = 2, 10


def patches_of(images: np.ndarray) -> np.ndarray:
    """Cuts (B, 8, 8) into (B, 16, 4), scaled to [0, 1]."""
    count = images.shape[1] // PATCH
    cut = images.reshape(-1, count, PATCH, count, PATCH).swapaxes(2, 3)
    return (cut.reshape(-1, count * count, PATCH * PATCH) / 16).astype(np.float32)


class Block(nnx.Module):
    """Attention and feed-forward, each behind a LayerNorm and around a residual."""

    def __init__(self, features: int, heads: int, dropout: float, rngs: nnx.Rngs):
        self.heads, self.dropout = heads, dropout
        self.norms = nnx.List([nnx.LayerNorm(features, rngs=rngs) for _ in range(2)])
        self.project = nnx.Linear(features, 3 * features, rngs=rngs)
        self.join = nnx.Linear(features, features, rngs=rngs)
        self.expand = nnx.Linear(features, 2 * features, rngs=rngs)
        self.contract = nnx.Linear(2 * features, features, rngs=rngs)

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        projected = self.project(self.norms[0](x)).reshape(*x.shape[:2], 3, self.heads, -1)
        query, key_, value = (projected[:, :, i] for i in range(3))
        out = jattn.dot_product_attention(
            query,
            key_,
            value,
            dropout_rate=0.0 if key is None else self.dropout,
            dropout_key=key,
        )
        x = x + self.join(out.reshape(x.shape))
        return x + self.contract(nnx.gelu(self.expand(self.norms[1](x))))


class VisionTransformer(nnx.Module):
    """Patches (B, 16, 4) to logits (B, 10)."""

    def __init__(self, features: int, heads: int, layers: int, dropout: float, rngs: nnx.Rngs):
        self.embed = nnx.Linear(PATCH * PATCH, features, rngs=rngs)
        self.positions = nnx.Param(0.1 * jax.random.normal(rngs.params(), (17, features)))
        self.blocks = nnx.List([Block(features, heads, dropout, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.out = nnx.Linear(features, CLASSES, rngs=rngs)

    def __call__(self, patches: jax.Array, key: jax.Array | None = None) -> jax.Array:
        x = jnp.pad(self.embed(patches), ((0, 0), (1, 0), (0, 0))) + self.positions[...]
        for number, block in enumerate(self.blocks):
            x = block(x, None if key is None else jax.random.fold_in(key, number))
        return self.out(self.norm(x[:, 0]))


def loss_of(
    model: VisionTransformer, patches: jax.Array, labels: jax.Array, key: jax.Array
) -> jax.Array:
    logits = model(patches, key)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main(arguments: list[str] | None = None) -> int:
    """Trains and tests; returns 0 if enough digits are read and dropout follows its key."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args(arguments)
    digits = load_digits()
    patches, labels = patches_of(digits.images), digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = order[:360], order[360:]
    batch = 64
    steps = options.epochs * (len(train) // batch)
    model = VisionTransformer(features=48, heads=4, layers=3, dropout=0.1, rngs=nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, max(1, steps // 10), max(2, steps))
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)

    @nnx.jit
    def step(
        model: VisionTransformer,
        optimizer: nnx.Optimizer,
        patches: jax.Array,
        labels: jax.Array,
        key: jax.Array,
    ) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_of)(model, patches, labels, key)
        optimizer.update(model, gradients)
        return loss

    jattn.reset_call_counters()
    rng = np.random.default_rng(1)
    for number in (bar := trange(steps, file=sys.stderr)):
        chosen = rng.choice(train, batch, replace=False)
        key = jax.random.key(number)
        loss = step(model, optimizer, patches[chosen], labels[chosen], key)
        bar.set_postfix(loss=f"{float(loss):.3f}", refresh=False)
    print(f"backends compiled in: {jattn.call_counters()}")
    found = np.asarray(model(jnp.asarray(patches[test])).argmax(axis=1))
    share = float((found == labels[test]).mean())
    judged = nnx.jit(loss_of)
    losses = [
        float(judged(model, patches[test], labels[test], jax.random.key(seed)))
        for seed in (0, 0, 1)
    ]
    claims = [
        (share > 0.93, f"digits read right: {share:.1%} of {len(test)}, more than 93 %"),
        (
            losses[0] == losses[1] != losses[2],
            f"loss with dropout by one key, by it again, by another: {losses}",
        ),
    ]
    for holds, text in claims:
        print(f"{'ok    ' if holds else 'FAILED'}  {text}")
    return 0 if all(holds for holds, _ in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
