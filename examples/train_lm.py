"""Trains a small byte-level language model on Python's own standard library, with attention by jattn.

Functions and methods of the library's sources are packed into rows, several to a row. The mask
(causal, and only inside one's own document) is given as a structure, a segment id per byte, so no
(T, T) array exists. The first steps are then run again, from the same seed, with Flax's own
attention under a dense mask and with jattn's reference backend; the three loss curves must agree, and
so must the three losses of the trained model on rows held out. The program fails if they do not, if
that loss is not well below the entropy of single bytes, if hiding other documents made no difference,
or if no fused backend ran.

With --dropout attention weights are dropped while training. Flax's attention would drop others, so its curve is not
compared then; the reference backend drops the same ones. With --mesh the batch and the heads are spread over devices,
which changes neither: try XLA_FLAGS=--xla_force_host_platform_device_count=4 and --mesh 2x2.

Run: python examples/train_lm.py --out out/demo        (all options: --help)
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

import jattn
import jattn.flax

VOCABULARY = 256  # bytes
PADDING = -1  # segment id of bytes that belong to no document
SHORTEST_PIECE = 16  # bytes; a shorter rest of a row is padded
HELD_OUT_EVERY = 20  # rows
# A fused backend is one with a kernel; these two are array programs that stand in where there is none.
UNFUSED_BACKENDS = {"reference", "xla"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that decides the numbers; the defaults of the size depend on the platform."""

    steps: int
    compare_steps: int
    batch: int
    seq_len: int
    layers: int
    heads: int
    head_dim: int
    learning_rate: float
    dropout: float
    dtype: str
    seed: int
    implementation: str | None
    mesh: str  # devices along the batch x devices along the heads

    @property
    def features(self) -> int:
        return self.heads * self.head_dim

    @property
    def loss_tolerance(self) -> float:
        """How far losses (nats) that differ only in who computed the attention may be apart.

        Rounding inside attention is relative 2^-24 or 2^-8 an element; training feeds it back at every step.
        """
        return 1e-4 if self.dtype == "float32" else 5e-3


# --- data -------------------------------------------------------------------------------------------------------------


def read_documents(limit_bytes: int) -> list[bytes]:
    """Reads functions, methods and heads of classes of the standard library, in the order of file names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "__pycache__",
    }
    documents: list[bytes] = []
    size_bytes = 0
    for path in sorted(root.rglob("*.py")):
        if skipped.intersection(path.relative_to(root).parts):
            continue
        for piece in re.split(
            rb"^(?=(?: {4})?(?:async )?def |class )", path.read_bytes(), flags=re.M
        ):
            if len(piece) >= SHORTEST_PIECE:
                documents.append(piece)
                size_bytes += len(piece)
        if size_bytes >= limit_bytes:
            break
    return documents


def pack(documents: list[bytes], seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs documents into rows of seq_len + 1 bytes; returns bytes and segment ids, both (rows, seq_len + 1) int32.

    A document that does not fit is cut, and its rest opens the next row. A rest of a row too short to be worth a
    document is padding.
    """
    width = seq_len + 1
    rows: list[np.ndarray] = []
    segments: list[np.ndarray] = []
    row, segment, used, number = np.zeros(width, np.int32), np.full(width, PADDING, np.int32), 0, 0
    for document in documents:
        data = np.frombuffer(document, np.uint8)
        while len(data) >= SHORTEST_PIECE:
            if width - used < SHORTEST_PIECE:
                rows.append(row)
                segments.append(segment)
                row, segment = np.zeros(width, np.int32), np.full(width, PADDING, np.int32)
                used, number = 0, 0
            piece = data[: width - used]
            row[used : used + len(piece)] = piece
            segment[used : used + len(piece)] = number
            used, number, data = used + len(piece), number + 1, data[len(piece) :]
    return np.stack(rows), np.stack(segments)


def batches(
    config: Config, rows: np.ndarray, segments: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (bytes, segment ids), both (batch, seq_len + 1), for ever; the same ones for the same seed."""
    generator = np.random.default_rng(config.seed)
    while True:
        order = generator.permutation(len(rows))
        for start in range(0, max(len(order) - config.batch, 0) + 1, config.batch):
            chosen = order[start : start + config.batch]
            yield rows[chosen], segments[chosen]


def unigram_entropy(rows: np.ndarray, segments: np.ndarray) -> float:
    """Returns the entropy (nats) of a byte drawn alone: the best loss without any context."""
    counts = np.bincount(rows[segments != PADDING], minlength=VOCABULARY).astype(np.float64)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


# --- model ------------------------------------------------------------------------------------------------------------

AttentionFn = Callable[..., jax.Array]
Mask = jax.Array | jattn.flax.StructuralMask


def structural(segment_ids: jax.Array) -> Mask:
    """Keeps every byte to its own document; causality is an option of the attention function."""
    return jattn.flax.StructuralMask(segment_ids=segment_ids)


def dense(segment_ids: jax.Array) -> Mask:
    """Spells out the mask that segment ids (B, T) and causality mean: (B, 1, T, T) bool."""
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    causal = jnp.tril(jnp.ones(same.shape[1:], bool))
    return (same & causal & (segment_ids != PADDING)[:, None, :])[:, None]


def documents_ignored(segment_ids: jax.Array) -> Mask:
    """Lets every byte see all earlier ones of its row, whatever document they belong to."""
    return jattn.flax.StructuralMask()


@dataclasses.dataclass(frozen=True)
class Attention:
    """One way to compute the model's attention."""

    name: str
    function: AttentionFn
    mask: Callable[[jax.Array], Mask]  # of the segment ids (B, T)


@functools.cache
def rotation(length: int, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns cosines and sines (length, 1, pairs) of rotary position embeddings; every layer takes the same."""
    frequencies = 10_000.0 ** -np.linspace(0.0, 1.0, pairs, endpoint=False)
    angles = np.arange(length)[:, None, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotated(
    function: AttentionFn, query: jax.Array, key: jax.Array, value: jax.Array, **options: Any
) -> jax.Array:
    """Attention with rotary position embeddings (arXiv:2104.09864), whoever computes it."""
    cos, sin = rotation(query.shape[-3], query.shape[-1] // 2)

    def rotate(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)

    return function(rotate(query), rotate(key), value, **options)


class Block(nnx.Module):
    """Attention and feed-forward, each behind a LayerNorm and around a residual."""

    def __init__(self, config: Config, attention_fn: AttentionFn, rngs: nnx.Rngs):
        features, dtype = config.features, jnp.dtype(config.dtype)
        self.attention_norm = nnx.LayerNorm(features, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=config.heads,
            in_features=features,
            use_bias=False,
            dtype=dtype,
            attention_fn=functools.partial(rotated, attention_fn),
            dropout_rate=config.dropout,
            broadcast_dropout=False,
            decode=False,
            rngs=rngs,
            keep_rngs=False,
        )
        self.feed_forward_norm = nnx.LayerNorm(features, dtype=dtype, rngs=rngs)
        self.expand = nnx.Linear(features, 4 * features, dtype=dtype, rngs=rngs)
        self.contract = nnx.Linear(4 * features, features, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, mask: Mask, dropout: nnx.Rngs | None) -> jax.Array:
        x = x + self.attention(
            self.attention_norm(x),
            mask=mask,
            deterministic=dropout is None,
            rngs=None if dropout is None else dropout.dropout,
        )
        return x + self.contract(nnx.gelu(self.expand(self.feed_forward_norm(x))))


class LanguageModel(nnx.Module):
    """Bytes (B, T) and their segment ids (B, T) to logits (B, T, 256), float32; with a key it drops weights."""

    def __init__(self, config: Config, attention: Attention, rngs: nnx.Rngs):
        self.mask = attention.mask
        dtype = jnp.dtype(config.dtype)
        normal = nnx.initializers.normal
        # A product with one-hot rows, not nnx.Embed: the gradient of a lookup scatters every byte of the batch into
        # only 256 rows, which then wait for each other; that of a product is a product.
        # Bytes begin as large as what attention adds to them, or the first steps would only go into growing them.
        self.embed = nnx.Linear(
            VOCABULARY,
            config.features,
            use_bias=False,
            dtype=dtype,
            kernel_init=normal(1.0),
            rngs=rngs,
        )
        self.blocks = nnx.List(
            [Block(config, attention.function, rngs) for _ in range(config.layers)]
        )
        self.norm = nnx.LayerNorm(config.features, dtype=dtype, rngs=rngs)
        self.logits = nnx.Linear(
            config.features, VOCABULARY, dtype=dtype, kernel_init=normal(0.02), rngs=rngs
        )

    def __call__(
        self, tokens: jax.Array, segment_ids: jax.Array, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        mask = self.mask(segment_ids)
        dropout = None if dropout_key is None else nnx.Rngs(dropout=dropout_key)
        x = self.embed(jax.nn.one_hot(tokens, VOCABULARY, dtype=self.embed.dtype))
        for block in self.blocks:
            x = block(x, mask, dropout)
        return self.logits(self.norm(x)).astype(jnp.float32)


def mean_loss(
    model: LanguageModel,
    tokens: jax.Array,
    segment_ids: jax.Array,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Returns the cross-entropy (nats) of each document's bytes after its first, averaged over the batch."""
    logits = model(tokens[:, :-1], segment_ids[:, :-1], dropout_key)
    losses = optax.softmax_cross_entropy(logits, jax.nn.one_hot(tokens[:, 1:], VOCABULARY))
    weights = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != PADDING)
    return jnp.sum(losses, where=weights) / jnp.sum(weights)


# --- training ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """What one training run left behind."""

    name: str
    losses: np.ndarray  # nats, one per step
    step_seconds: np.ndarray  # one per step, the first ones dropped
    calls: dict[str, dict[str, int]]  # backend -> pass -> call sites
    model: LanguageModel

    @property
    def steps_per_second(self) -> float:
        return 1.0 / float(np.median(self.step_seconds))

    @property
    def backends(self) -> str:
        if not self.calls:
            return "XLA (no call of jattn)"
        return ", ".join(
            f"{name} by {backend}"
            for backend, passes in self.calls.items()
            for name in sorted(passes, reverse=True)
        )


def device_mesh(config: Config) -> Mesh:
    """The devices as a grid, batch x heads."""
    batch, heads = map(int, config.mesh.split("x"))
    return Mesh(np.array(jax.devices()[: batch * heads]).reshape(batch, heads), ("batch", "heads"))


def spread(mesh: Mesh, tree: Any) -> Any:
    """Cuts the projections of attention by heads, their axis of that many entries, and keeps the rest whole.

    The projections are the arrays of rank 3: (features, heads, head dim) and, for the output, (heads, head dim,
    features). The compiler cuts what follows from them.
    """

    def place(path: Any, x: jax.Array) -> jax.Array:
        axes: tuple[str | None, ...] = ()
        if x.ndim == 3:
            axes = ("heads",) if "'out'" in jax.tree_util.keystr(path) else (None, "heads")
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

    return jax.tree_util.tree_map_with_path(place, tree)


def train(
    attention: Attention, config: Config, steps: int, data: tuple[np.ndarray, np.ndarray]
) -> Run:
    """Trains a fresh model for some steps; everything but the attention function follows from the config alone."""
    model = LanguageModel(config, attention, nnx.Rngs(config.seed))
    graph, parameters = nnx.split(model, nnx.Param)
    mesh = device_mesh(config)
    rows_sharding = NamedSharding(mesh, PartitionSpec("batch"))
    # The schedule is that of the whole run, also for a run that stops early.
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        config.learning_rate,
        min(20, config.steps),
        max(config.steps, 21),
        0.1 * config.learning_rate,
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))
    state = spread(mesh, (parameters, optimizer.init(parameters)))
    # What a step returns lies as what it was given, so the next step finds the program compiled.
    shardings = jax.tree_util.tree_map(lambda x: x.sharding, state)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None))
    def step(state, tokens, segment_ids, number):  # type: ignore[no-untyped-def]
        parameters, optimizer_state = state
        key = jax.random.fold_in(jax.random.key(config.seed), number) if config.dropout else None
        loss, gradients = jax.value_and_grad(
            lambda parameters: mean_loss(nnx.merge(graph, parameters), tokens, segment_ids, key)
        )(parameters)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
        return (optax.apply_updates(parameters, updates), optimizer_state), loss

    stream = batches(config, *data)
    jattn.reset_call_counters()
    losses: list[float] = []
    finished = [time.perf_counter()]
    with tqdm(
        total=steps, desc=f"{attention.name:<18}", unit="step", mininterval=0.5, file=sys.stderr
    ) as bar:
        before: jax.Array | None = None
        # The loss of a step is asked for once the next step is under way, so that the device never waits for the host.
        for number in range(steps + 1):
            loss, before = before, None
            if number < steps:
                tokens, segment_ids = jax.device_put(next(stream), rows_sharding)
                state, before = step(state, tokens, segment_ids, number)
            if loss is not None:
                losses.append(float(loss))  # waits for the step
                finished.append(time.perf_counter())
                bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
                bar.update()
    # From the end of one step to that of the next. The first compiles and the second may still touch fresh memory.
    seconds = np.diff(finished)
    return Run(
        attention.name,
        np.array(losses),
        seconds[2:] if steps > 2 else seconds,
        jattn.call_counters(),
        nnx.merge(graph, jax.device_put(state[0], jax.devices()[0])),
    )


def held_out_loss(
    attention: Attention,
    config: Config,
    trained: LanguageModel,
    data: tuple[np.ndarray, np.ndarray],
    num_batches: int = 8,
) -> float:
    """Returns the loss of a trained model on other rows, its attention computed in the given way."""
    shapes = nnx.eval_shape(lambda: LanguageModel(config, attention, nnx.Rngs(0)))
    graph, _ = nnx.split(shapes, nnx.Param)
    _, parameters = nnx.split(trained, nnx.Param)

    @jax.jit
    def loss(parameters, tokens, segment_ids):  # type: ignore[no-untyped-def]
        return mean_loss(nnx.merge(graph, parameters), tokens, segment_ids)

    stream = batches(config, *data)
    return float(np.mean([loss(parameters, *next(stream)) for _ in range(num_batches)]))


def generate(
    config: Config, model: LanguageModel, prompt: str, length: int, temperature: float
) -> str:
    """Continues a prompt byte by byte. Bytes not written yet are padding, so each is the same computation."""
    graph, parameters = nnx.split(model)

    @jax.jit
    def write(parameters, tokens, first, end):  # type: ignore[no-untyped-def]
        def step(count, tokens):  # type: ignore[no-untyped-def]
            segment_ids = jnp.where(jnp.arange(config.seq_len) < count, 0, PADDING)[None]
            logits = nnx.merge(graph, parameters)(tokens[None], segment_ids)[0, count - 1]
            key = jax.random.fold_in(jax.random.key(config.seed), count)
            return tokens.at[count].set(jax.random.categorical(key, logits / temperature))

        return jax.lax.fori_loop(first, end, step, tokens)

    prompt_bytes = np.frombuffer(prompt.encode(), np.uint8)[: config.seq_len]
    tokens = np.zeros(config.seq_len, np.int32)
    tokens[: len(prompt_bytes)] = prompt_bytes
    end = min(len(prompt_bytes) + length, config.seq_len)
    tokens = np.asarray(write(parameters, tokens, len(prompt_bytes), end))
    return bytes(tokens[:end].astype(np.uint8)).decode(errors="replace")


# --- report -----------------------------------------------------------------------------------------------------------


def draw(path: Path, config: Config, runs: list[Run], entropy: float) -> None:
    """Draws loss and speed over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for run, style in zip(runs, ("-", "--", ":")[: len(runs)], strict=True):
        left.plot(run.losses, style, label=run.name)
        window = min(10, len(run.step_seconds))
        smooth = np.convolve(run.step_seconds, np.ones(window) / window, "valid")
        right.plot(config.batch * config.seq_len / smooth, style, label=run.name)
    left.axhline(entropy, color="grey", linewidth=0.8, label="entropy of single bytes")
    left.set(xlabel="step", ylabel="loss, nats per byte", ylim=(0, None))
    right.set(xlabel="step", ylabel="bytes per second", ylim=(0, None))
    left.legend()
    right.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def table(config: Config, runs: list[Run], held_out: dict[str, float]) -> str:
    """Sets the runs side by side."""
    head = (
        "attention",
        "steps",
        "steps/s",
        "bytes/s",
        "first loss",
        "last loss",
        "held out, jattn's model",
        "compiled in",
    )
    lines = [head]
    for run in runs:
        speed = run.steps_per_second
        lines.append(
            (
                run.name,
                str(len(run.losses)),
                f"{speed:.2f}",
                f"{speed * config.batch * config.seq_len:,.0f}",
                f"{run.losses[0]:.4f}",
                f"{run.losses[-1]:.4f}",
                f"{held_out[run.name]:.4f}",
                run.backends,
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in (0, 7) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def check_claims(
    config: Config, runs: list[Run], held_out: dict[str, float], entropy: float
) -> list[tuple[bool, str]]:
    """Judges what the demo claims; each entry is (holds, sentence with the numbers)."""
    ours, tolerance = runs[0], config.loss_tolerance
    loss = held_out[ours.name]
    claims = [
        (
            loss < 0.8 * entropy,
            f"loss on rows held out, {loss:.4f}, is below 0.8 x {entropy:.4f}, the entropy of single bytes",
        )
    ]
    for other in runs[1:]:
        apart = float(np.abs(ours.losses[: len(other.losses)] - other.losses).max())
        claims.append(
            (
                apart <= tolerance,
                f"loss curve of {other.name!r} is within {tolerance:g} of ours over {len(other.losses)} steps:"
                f" largest difference {apart:.1e}",
            )
        )
        apart = abs(held_out[other.name] - loss)
        claims.append(
            (
                apart <= tolerance,
                f"{other.name!r} gives the trained model the same loss within {tolerance:g}: difference {apart:.1e}",
            )
        )
    apart = abs(held_out[documents_ignored.__name__] - loss)
    claims.append(
        (
            apart > tolerance,
            f"without the documents' mask it would differ by more than that: difference {apart:.1e}",
        )
    )
    if config.implementation is None:
        passes = {name for counts in ours.calls.values() for name in counts}
        claims.append(
            (
                {"forward", "backward"} <= passes and not UNFUSED_BACKENDS.intersection(ours.calls),
                f"a fused backend ran, forward and backward: {ours.backends}",
            )
        )
    return claims


def parse_arguments(arguments: list[str] | None) -> tuple[Config, argparse.Namespace]:
    """Reads the command line; sizes that it leaves out depend on the platform."""
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = functools.partial(parser.add_argument, metavar="")
    add("--steps", type=int, default=400 if on_gpu else 360, help="training steps (%(default)s)")
    add(
        "--compare-steps",
        type=int,
        default=30 if on_gpu else 25,
        help="steps of the two runs compared with (%(default)s)",
    )
    add("--batch", type=int, default=8 if on_gpu else 4, help="rows in a batch (%(default)s)")
    add("--seq-len", type=int, default=2048 if on_gpu else 512, help="bytes in a row (%(default)s)")
    add("--layers", type=int, default=8 if on_gpu else 3, help="(%(default)s)")
    add("--heads", type=int, default=8 if on_gpu else 4, help="(%(default)s)")
    add(
        "--head-dim",
        type=int,
        default=64 if on_gpu else 32,
        help="features = heads x head dim (%(default)s)",
    )
    add("--learning-rate", type=float, default=1e-3 if on_gpu else 3e-3, help="peak (%(default)s)")
    add("--dropout", type=float, default=0.0, help="rate, of attention weights (%(default)s)")
    add("--mesh", default="1x1", help="devices along the batch x along the heads (%(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="bfloat16" if on_gpu else "float32",
        help="of the computation; parameters are float32 (%(default)s)",
    )
    add("--seed", type=int, default=0, help="of parameters, batches and samples (%(default)s)")
    add(
        "--implementation",
        default=None,
        help="backend of jattn (default: the best one that serves the call)",
    )
    add("--data-bytes", type=int, default=4_000_000, help="of source text to read (%(default)s)")
    add("--sample-bytes", type=int, default=300, help="of generated text (%(default)s)")
    add("--temperature", type=float, default=0.8, help="of sampling (%(default)s)")
    add("--prompt", default="def read_lines(path", help="that the text continues (%(default)r)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/demo"),
        metavar="",
        help="folder of curves.png and result.json (%(default)s)",
    )
    options = parser.parse_args(arguments)
    names = [field.name for field in dataclasses.fields(Config)]
    config = Config(**{name: getattr(options, name) for name in names})
    if config.head_dim % 2:
        parser.error(f"--head-dim is {config.head_dim}, must be even: rotary embeddings turn pairs")
    for name in ("steps", "compare_steps", "batch", "seq_len", "layers", "heads", "head_dim"):
        if getattr(config, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} is {getattr(config, name)}, must be 1 or more"
            )
    if not 0 <= config.dropout < 1:
        parser.error(f"--dropout is {config.dropout}, must be at least 0 and below 1")
    grid = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", config.mesh)
    if grid is None or math.prod(map(int, grid.groups())) > jax.device_count():
        parser.error(
            f"--mesh is {config.mesh}, must be two numbers like 2x2 whose product is at most the number of devices,"
            f" {jax.device_count()}"
        )
    if config.batch % int(grid[1]) or config.heads % int(grid[2]):
        parser.error(
            f"--mesh is {config.mesh}, must divide --batch, {config.batch}, and --heads, {config.heads}"
        )
    if config.compare_steps > config.steps:
        parser.error(
            f"--compare-steps is {config.compare_steps}, must be at most --steps, {config.steps}"
        )
    return config, options


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns the exit status, 0 if every claim holds."""
    config, options = parse_arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    rows, segments = pack(read_documents(options.data_bytes), config.seq_len)
    held = np.arange(len(rows)) % HELD_OUT_EVERY == 0
    training_data, held_out_data = (rows[~held], segments[~held]), (rows[held], segments[held])
    entropy = unigram_entropy(rows, segments)
    documents_per_row = float((segments.max(axis=1) + 1).mean())
    device = jax.devices()[0]
    print(
        f"{device.platform} ({device.device_kind}), {config.dtype}: {config.layers} layers, {config.heads} heads of"
        f" {config.head_dim}, rows of {config.seq_len} bytes with {documents_per_row:.1f} documents each,"
        f" {config.batch} rows a step, {len(rows):,} rows",
        flush=True,
    )

    fused = jattn.flax.make_attention_fn(is_causal=True, implementation=config.implementation)
    reference = jattn.flax.make_attention_fn(is_causal=True, implementation="reference")
    ours = Attention("jattn", fused, structural)
    others = (
        Attention("jax.nn, dense mask", nnx.dot_product_attention, dense),
        Attention("jattn reference", reference, structural),
    )
    # Flax's attention has another way from a key to the weights that it drops.
    comparable = others[1:] if config.dropout else others
    runs = [train(ours, config, config.steps, training_data)]
    runs += [train(other, config, config.compare_steps, training_data) for other in comparable]
    trained = runs[0].model
    ignoring = Attention(documents_ignored.__name__, fused, documents_ignored)
    held_out = {
        attention.name: held_out_loss(attention, config, trained, held_out_data)
        for attention in (ours, *others, ignoring)
    }
    sample = generate(config, trained, options.prompt, options.sample_bytes, options.temperature)
    claims = check_claims(config, runs, held_out, entropy)
    draw(options.out / "curves.png", config, runs, entropy)
    result = {
        "config": dataclasses.asdict(config),
        "device": device.device_kind,
        "versions": {"jax": jax.__version__, "jattn": jattn.__version__},
        "unigram_entropy": entropy,
        "held_out_loss": held_out,
        "runs": {
            run.name: {
                "steps_per_second": run.steps_per_second,
                "calls": run.calls,
                "losses": run.losses.tolist(),
            }
            for run in runs
        },
        "claims": [{"holds": holds, "claim": text} for holds, text in claims],
        "sample": sample,
    }
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")

    print(f"\nA sample at temperature {options.temperature:g}:\n{'-' * 80}\n{sample}\n{'-' * 80}\n")
    print(table(config, runs, held_out))
    print(f"\nentropy of single bytes {entropy:.4f} nats; curves in {options.out / 'curves.png'}\n")
    for holds, text in claims:
        print(f"{'ok    ' if holds else 'FAILED'}  {text}")
    return 0 if all(holds for holds, _ in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
