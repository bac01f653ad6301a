"""``jattn.explain``: what it says of passes, kernels and work, and of the call sites inside a function."""

from __future__ import annotations

import functools
import json
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zero_sizes
from flax import nnx

import jattn
import jattn.flax
from jattn import call_timing
from jattn.__main__ import main
from jattn.spec import Operands, visibility

SM90 = jattn.Device("cuda", arch=(9, 0))
Q = jax.ShapeDtypeStruct((2, 64, 4, 32), jnp.float32)
HALF = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)


def loss(q: Any, k: Any, v: Any) -> jax.Array:
    def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jattn.dot_product_attention(x, k, v, is_causal=True), None

    x, _ = jax.lax.scan(layer, q, None, length=3)
    return jattn.dot_product_attention(x, k, v).astype(jnp.float32).sum()


def test_a_call_says_kernels_work_and_scratch() -> None:
    found = jattn.explain(HALF, HALF, HALF, is_causal=True, device=SM90, needs_grad=True)
    forward, backward = found.passes
    pairs = 2 * 4 * 256 * 257 / 2
    assert (forward.name, backward.name) == ("forward", "backward")
    assert forward.flops == pairs * 4 * 64
    assert backward.flops == 2.5 * forward.flops
    assert forward.moved_bytes == 4 * 2 * 256 * 4 * 64 * 2 + 2 * 4 * 256 * 4
    assert backward.moved_bytes == 8 * 2 * 256 * 4 * 64 * 2 + 2 * 4 * 256 * 4
    assert [kernel.family for kernel in forward.kernels] == ["sm90_forward"]
    assert forward.kernels[0].choices["band"] == "1"
    assert "sm90_backward" in {kernel.family for kernel in backward.kernels}
    assert all(kernel.origin for kernel in (*forward.kernels, *backward.kernels))
    assert backward.scratch_bytes > 0
    assert not forward.data_dependent
    others = ("mem_efficient: would run", "cudnn: would run where it is named")
    for text in ("chosen: flash", "sm90_forward", "tile_q=", *others):
        assert text in str(found)


@pytest.mark.parametrize("sizes", zero_sizes.SIZES, ids=str)
@pytest.mark.parametrize("backend", ["flash", "mem_efficient"])
def test_a_gpu_has_plans_for_sizes_of_zero(backend: str, sizes: zero_sizes.Sizes) -> None:
    """A bias or mask of no elements has no address, so no kernel may be made for one."""
    batch, q_len, kv_len, heads, kv_heads = sizes
    q = jax.ShapeDtypeStruct((batch, q_len, heads, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((batch, kv_len, kv_heads, 64), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, 1, 1, kv_len), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((1, 1, q_len, kv_len), jnp.bool_)
    found = jattn.explain(q, k, k, bias, mask, device=SM90, needs_grad=True, implementation=backend)
    assert found.chosen == backend
    choices = found.passes[0].kernels[0].choices
    assert (kv_len == 0) != bool({"bias", "mask"} & set(choices))


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, 64 * 64),
        ({"is_causal": True}, 64 * 65 // 2),
        ({"local_window_size": (0, 0)}, 64),
        ({"local_window_size": (1, None), "is_causal": True}, 127),
    ],
)
def test_work_counts_the_pairs_of_the_band(options: dict[str, Any], pairs: int) -> None:
    (forward,) = jattn.explain(Q, Q, Q, **options).passes
    assert forward.flops == 2 * 4 * pairs * 4 * 32


@pytest.mark.parametrize(
    ("alignment", "pairs"), [("upper_left", 64 * 65 // 2), ("lower_right", 64 * 32 + 64 * 65 // 2)]
)
def test_work_of_fewer_queries_than_keys_goes_by_the_alignment(alignment: Any, pairs: int) -> None:
    keys = jax.ShapeDtypeStruct((2, 96, 4, 32), jnp.float32)
    found = jattn.explain(Q, keys, keys, is_causal=True, causal_alignment=alignment)
    assert found.passes[0].flops == 2 * 4 * pairs * 4 * 32


def test_what_arrays_hide_makes_the_work_a_bound() -> None:
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    found = jattn.explain(Q, Q, Q, key_value_seq_lengths=lengths)
    assert found.passes[0].data_dependent
    assert "at most" in str(found)


def test_a_function_shows_each_site_with_its_line_and_count() -> None:
    found = jattn.explain(jax.jit(jax.grad(loss, argnums=(0, 1, 2))), HALF, HALF, HALF, device=SM90)
    described = [
        (site.explanation.passes[0].name, site.count, "scan" in site.where or "layer" in site.where)
        for site in found.sites
    ]
    assert described == [
        ("forward", 3, True),
        ("forward", 1, False),
        ("backward", 1, False),
        ("backward", 3, True),
    ]
    assert all(__file__ in site.where for site in found.sites)
    assert {site.explanation.chosen for site in found.sites} == {"flash"}
    per_pair = 2 * 4 * 4 * 64
    pairs = 3 * 256 * 257 / 2 + 256 * 256
    assert found.flops == 3.5 * per_pair * pairs
    assert "3 times" in str(found)
    assert json.loads(json.dumps(found.as_dict()))["sites"][0]["count"] == 3


def test_equal_layers_are_joined_and_tangents_are_named() -> None:
    def twice(x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = jattn.dot_product_attention(x, x, x)
        return x

    assert [site.count for site in jattn.explain(twice, Q).sites] == [2]
    x = jnp.ones(Q.shape)
    found = jattn.explain(lambda x: jax.jvp(twice, (x,), (x,)), x)
    assert {site.explanation.passes[0].name for site in found.sites} == {"forward", "tangent"}
    assert str(jattn.explain(lambda x: x + 1, x)) == "no call of jattn.dot_product_attention"


def test_only_wanted_gradients_count() -> None:
    def of_query(q: Any) -> jax.Array:
        return jattn.dot_product_attention(q, jnp.ones(Q.shape), jnp.ones(Q.shape)).sum()

    one = jattn.explain(jax.grad(of_query), Q).sites[-1].explanation.passes[0]
    every = jattn.explain(Q, Q, Q, needs_grad=True).passes[1]
    assert every.moved_bytes is not None
    assert one.moved_bytes is not None
    assert every.moved_bytes - one.moved_bytes == 2 * 4 * 2 * 64 * 4 * 32


def test_a_tangent_pass_moves_what_its_primitive_takes_and_gives() -> None:
    k, sinks = jnp.ones(Q.shape), jnp.ones(4)

    def moved(function: Any, *operands: Any) -> int:
        sites = jattn.explain(lambda *x: jax.jvp(function, x, x), *operands).sites
        [tangent] = [p for s in sites for p in s.explanation.passes if p.name == "tangent"]
        assert tangent.moved_bytes is not None
        return tangent.moved_bytes

    one = 2 * 64 * 4 * 32 * 4  # bytes of q, k, v, out, and of the tangent of each
    lse, per_head = 2 * 4 * 64 * 4, 4 * 4
    attend = jattn.dot_product_attention
    # Operands, out and lse; then the tangents that are read, and those of out and lse.
    assert moved(lambda q: attend(q, k, k), Q) == 4 * one + lse + one + one + lse
    assert moved(attend, Q, Q, Q) == 4 * one + lse + 3 * one + one + lse
    with_sinks = moved(lambda q, s: attend(q, k, k, sinks=s), Q, sinks)
    assert with_sinks == 6 * one + 2 * lse + 2 * per_head


def test_the_gradient_of_sinks_is_moved_too() -> None:
    def attend(q: Any, sinks: Any) -> jax.Array:
        return jattn.dot_product_attention(q, q, q, sinks=sinks).sum()

    of_both = jattn.explain(jax.grad(attend, argnums=(0, 1)), Q, jnp.ones(4)).sites[-1]
    of_query = jattn.explain(jax.grad(attend), Q, jnp.ones(4)).sites[-1]
    moved = [site.explanation.passes[0].moved_bytes for site in (of_both, of_query)]
    assert moved[0] - moved[1] == 4 * 4  # type: ignore[operator]


def test_what_is_timed_sees_every_pair_that_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions say nothing while tracing, so all pairs are counted: those that are timed hide none."""
    timed: list[tuple[jax.Array, ...]] = []

    def measure(run: Any, arrays: Any) -> tuple[float, float]:
        timed.append(arrays)
        return 1.0, 0.0

    monkeypatch.setattr(call_timing, "_measure", measure)
    monkeypatch.setattr(call_timing, "matmul_speed", lambda *_: 1.0)
    positions, ids = jax.ShapeDtypeStruct((2, 64), jnp.int32), jax.ShapeDtypeStruct((2, 64), int)
    options: dict[str, Any] = {
        "query_positions": positions,
        "key_value_positions": positions,
        "segment_ids": ids,
        "key_value_seq_lengths": jax.ShapeDtypeStruct((2,), jnp.int32),
        "mask": jax.ShapeDtypeStruct((64, 64), bool),
    }
    for window in ((0, 0), (3, 0), (None, 5)):
        found = jattn.explain(Q, Q, Q, local_window_size=window, timed=True, **options)
        operands = Operands.unflatten(found.spec, timed[-1])
        indices = jnp.arange(64)
        assert visibility(found.spec, operands, indices, indices).all()
        assert found.passes[0].flops == 2 * 4 * 64 * 64 * 4 * 32


def test_the_matrix_product_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def measure(run: Any, arrays: Any) -> tuple[float, float]:
        sizes.append(arrays[0].shape[0])
        return 1.0, 0.0

    monkeypatch.setattr(call_timing, "_measure", measure)
    monkeypatch.setattr(call_timing, "MATMUL_SIZE", {"cpu": 4, "tpu": 8})
    call_timing.matmul_speed.cache_clear()
    try:
        cpu, tpu = (
            call_timing.matmul_speed("float32", jattn.Device(name)) for name in ("cpu", "tpu")
        )
        assert (cpu, tpu) == (2 * 4**3, 2 * 8**3)
        assert sizes == [4, 8]
    finally:
        call_timing.matmul_speed.cache_clear()


def test_times_are_measured_when_asked_for() -> None:
    found = jattn.explain(Q, Q, Q, needs_grad=True, timed=True)
    assert len(found.timings) == 2
    for timing in found.timings:
        assert timing.median_us > 0
        assert timing.flops_per_second is not None
        # Not compared with a number: pass and product are timed one after the other, on a machine that others use too.
        assert timing.matmul_fraction == timing.flops_per_second / timing.matmul_flops_per_second
        assert timing.matmul_fraction > 0
    assert "of a matrix product" in str(found)
    assert json.loads(json.dumps(found.as_dict()))["timings"][0]["median_us"] > 0


def test_a_block_mask_is_an_argument_like_others() -> None:
    blocks = jattn.create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64)
    assert jattn.select_backend(Q, Q, Q, block_mask=blocks) == "cpu"
    assert "mask (1, 1," in str(jattn.explain(Q, Q, Q, block_mask=blocks))


def test_shapes_stand_for_arrays_within_arguments_too() -> None:
    shape = jax.ShapeDtypeStruct((1, 1, 2, 2), "bool")
    blocks = jattn.BlockMask(shape, 64, 64, (32, 32), lambda b, h, q, k: q >= k)  # type: ignore[arg-type]
    table = jax.ShapeDtypeStruct((64,), "float32")

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, table: Any) -> Any:
        return score + table[k]

    options: dict[str, Any] = {"captures": (table,), "score_mod": score_mod, "block_mask": blocks}
    assert jattn.select_backend(Q, Q, Q, **options) == "cpu"
    found = jattn.explain(Q, Q, Q, **options)
    assert "mask (1, 1," in str(found)
    known = jattn.BlockMask(jnp.ones((1, 1, 2, 2), bool), 64, 64, (32, 32), blocks.mask_mod)
    arrays = options | {"captures": [jnp.ones(64)], "block_mask": known}
    assert str(jattn.explain(Q, Q, Q, **arrays)) == str(found)
    wide = jax.ShapeDtypeStruct((1, 1, 3, 2), "bool")
    wrong = jattn.BlockMask(wide, 64, 64, (32, 32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"blocks has shape \(1, 1, 3, 2\), must be"):
        jattn.explain(Q, Q, Q, block_mask=wrong)
    for captures, words in (
        (table, "must be a tuple of arrays"),
        ((1.0,), r"captures\[0\] is 1.0"),
    ):
        with pytest.raises(TypeError, match=words):
            jattn.explain(Q, Q, Q, captures=captures, score_mod=score_mod)


def test_errors_say_the_way_out() -> None:
    with pytest.raises(ValueError, match="leave device out"):
        jattn.explain(HALF, HALF, HALF, device=SM90, timed=True)
    with pytest.raises(TypeError, match=r"explain jax\.grad\(function\)"):
        jattn.explain(loss, Q, Q, Q, needs_grad=True)
    with (
        pytest.warns(UserWarning, match="flash"),
        pytest.raises(jattn.NoBackendError, match="flash"),
    ):
        jattn.explain(lambda q: jattn.dot_product_attention(q, q, q, implementation="flash"), Q)

    with pytest.raises(TypeError, match="explain: got an unexpected keyword argument 'causal'"):
        jattn.explain(Q, Q, Q, causal=True)
    with pytest.raises(TypeError, match="select_backend: missing a required argument: 'value'"):
        jattn.select_backend(Q, Q)
    for ask in (jattn.explain, jattn.select_backend):
        with pytest.raises(TypeError, match=r"device is 'cuda', must be a jattn\.Device"):
            ask(Q, Q, Q, device="cuda")
    with (
        pytest.raises(TypeError, match=r"target_device: device is 'cpu'"),
        jattn.target_device("cpu"),
    ):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="platform is 'gpu', must be 'cuda'"):
        jattn.Device("gpu")
    for arch in ("9.0", (-9, 0), (9,)):
        with pytest.raises(ValueError, match=r"arch is .*, must be \(major, minor\)"):
            jattn.Device("cuda", arch=arch)  # type: ignore[arg-type]


def attend(q: Any, is_causal: bool = False) -> jax.Array:
    return jattn.dot_product_attention(q, q, q, is_causal=is_causal)


@pytest.mark.parametrize("form", ["plain", "jitted", "by name"])
def test_static_arguments_of_a_function_stay_static(form: str) -> None:
    jitted = jax.jit(attend, static_argnames="is_causal")
    site = {
        "plain": lambda: jattn.explain(attend, Q, True),
        "jitted": lambda: jattn.explain(jitted, Q, True),
        "by name": lambda: jattn.explain(jitted, Q, is_causal=True),
    }[form]().sites[0]
    assert site.explanation.spec.band.right == 0


def test_a_site_on_an_explicit_mesh_has_its_line() -> None:
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones(Q.shape), jax.P("batch"))
        sites = jattn.explain(jax.grad(lambda x: attend(x).sum()), x).sites
    assert [__file__ in site.where for site in sites] == [True, True]


def test_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["jattn", *words])
        status = main()
        said = capsys.readouterr()
        return status, said.out + said.err

    status, said = run("explain", "--causal", "--grad", "--device", "cuda:9.0")
    assert status == 0
    assert "chosen: flash" in said
    status, said = run(
        "explain", "--q-len", "64", "--dtype", "float32", "--device", "cpu", "--json"
    )
    assert (status, json.loads(said)["chosen"]) == (0, "cpu")
    status, said = run("explain", "--heads", "3", "--kv-heads", "2")
    assert status == 2
    assert "must be a multiple of the number of key/value heads" in said
    for words, message in (
        (("--device", "gpu"), "argument --device: jattn.Device: platform is 'gpu', must be 'cuda'"),
        (("--device", "cuda:nine"), "argument --device: is 'cuda:nine', must be a platform, or"),
        (("--device", "cuda:9.x"), "argument --device: is 'cuda:9.x', must be a platform, or"),
        (("--batch", "-1"), "argument --batch: is '-1', must be an integer from 0 on"),
        (("--kv-heads", "two"), "argument --kv-heads: is 'two', must be an integer from 0 on"),
    ):
        with pytest.raises(SystemExit):
            run("explain", *words)
        assert message in capsys.readouterr().err
    for words, message in (
        (("--kv-heads", "0"), "the number of key/value heads, 0"),
        (("--value-head-dim", "0"), "the head dims must be at least 1"),
    ):
        status, said = run("explain", *words)
        assert status == 2
        assert message in said
    status, said = run("explain", "--q-len", "64", "--dtype", "float64", "--device", "cpu")
    assert status == 0
    assert "chosen: cpu" in said
    assert "float64" in said
    status, said = run("info")
    assert status == 0
    assert "backends" in said


def test_explanations_travel_to_other_processes() -> None:
    asked = jattn.explain(HALF, HALF, HALF, is_causal=True, device=SM90)
    site = jattn.explain(jax.grad(loss), HALF, HALF, HALF, device=SM90)
    for found in (asked, site, jattn.explain(Q, Q, Q)):
        there = pickle.loads(pickle.dumps(found))
        assert there == found
        assert str(there) == str(found)


def test_explaining_counts_no_call() -> None:
    jattn.reset_call_counters()
    str(jattn.explain(jax.grad(loss), Q, Q, Q))
    str(jattn.explain(Q, Q, Q, needs_grad=True))
    assert jattn.call_counters() == {}


def test_numbers_of_numpy_and_known_arrays_are_numbers() -> None:
    """What ``dot_product_attention`` takes as a number has a shape, too."""
    options: dict[str, Any] = {
        "scale": 1 / np.sqrt(8),
        "is_causal": np.bool_(True),
        "local_window_size": np.array([2, 1]),
        "logits_soft_cap": np.float32(3),
        "dropout_rate": np.float32(0.1),
        "dropout_seed": np.int64(3),
    }
    x = jnp.ones(Q.shape, Q.dtype)
    jattn.dot_product_attention(x, x, x, **options)
    assert jattn.explain(Q, Q, Q, **options).chosen == "cpu"
    assert jattn.select_backend(Q, Q, Q, scale=jnp.float32(0.3)) == "cpu"


def test_a_type_that_jax_would_not_keep_is_refused() -> None:
    x = jax.ShapeDtypeStruct((1, 4, 2, 8), "float64")
    if jax.config.jax_enable_x64:
        assert jattn.explain(x, x, x).chosen == "cpu"
    else:
        with pytest.raises(ValueError, match="float64, which JAX would make float32"):
            jattn.explain(x, x, x)


def test_a_call_that_raises_is_not_explained() -> None:
    for words in ({"return_lse": "yes"}, {"return_lse": True, "return_residual": True}):
        with pytest.raises(ValueError, match="return_lse"):
            jattn.explain(Q, Q, Q, **words)
        with pytest.raises(ValueError, match="return_lse"):
            jattn.select_backend(Q, Q, Q, **words)


def test_arrays_of_numpy_are_explained_as_they_are_called() -> None:
    x = np.ones((1, 4, 2, 8))
    assert jattn.dot_product_attention(x, x, x).dtype == jnp.float32
    assert jattn.explain(x, x, x).spec.dtype == "float32"


def test_nothing_outlives_the_trace() -> None:
    with jax.check_tracer_leaks():
        found = jattn.explain(Q, Q, Q, dropout_rate=0.1, dropout_key=jax.random.key(0))
    assert found.chosen == "cpu"


def test_forward_mode_is_said_to_have_no_kernel() -> None:
    def moved(q: jax.Array) -> Any:
        attend = functools.partial(jattn.dot_product_attention, implementation="cpu")
        return jax.jvp(lambda q: attend(q, q, q), (q,), (q,))

    forward, tangent = jattn.explain(moved, Q).sites
    assert (forward.explanation.chosen, tangent.explanation.chosen) == ("cpu", "xla")
    reasons = tangent.explanation.reasons
    assert "xla" not in reasons
    assert {r.argument for r in reasons["cpu"]} == {"pass"}
    assert all(any(r.actual == "tangent" for r in of_backend) for of_backend in reasons.values())


def test_functions_compiled_by_others_are_explained() -> None:
    """`flax.nnx.jit` has a method `trace` whose result is none of JAX's."""
    module = nnx.MultiHeadAttention(
        num_heads=4,
        in_features=32,
        decode=False,
        rngs=nnx.Rngs(0),
        attention_fn=jattn.flax.attention_fn,
    )
    step = nnx.jit(lambda module, x: module(x))
    (site,) = jattn.explain(step, module, jnp.ones((2, 8, 32))).sites
    assert site.explanation.chosen == "cpu"
