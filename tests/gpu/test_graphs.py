"""Calls inside captured command buffers: the same bits as outside, run after run (sdpa.md S100, S101)."""

import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import jax, jax.numpy as jnp, numpy as np
    import jattn
    from jattn import _core

    rng = np.random.default_rng(0)
    q, k, v, dout = (jnp.asarray(rng.normal(size=(2, 256, 4, 64)), jnp.bfloat16) for _ in range(4))

    def step(q, k, v, dout):
        attend = lambda *a: jattn.dot_product_attention(*a, is_causal=True, implementation={backend!r})
        out, pullback = jax.vjp(attend, q * 1.5, k + 0.25, v)
        return out, pullback(dout)

    with jattn.deterministic("strict"):
        jitted = jax.jit(step)
        first = jax.device_get(jitted(q, k, v, dout))
        before = _core.cuda_executions()
        for _ in range(20):
            again = jax.device_get(jitted(q, k, v, dout))
            for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
                np.testing.assert_array_equal(a, b)
        executed = _core.cuda_executions() - before
        text = jitted.lower(q, k, v, dout).as_text()
    assert "jattn_forward" in text and "jattn_backward" in text
    # Two custom calls a step. A captured one is not executed again, but for updates of the first few buffers.
    print("captured" if executed < 20 else "not captured", executed)
    np.save({path!r}, np.concatenate([np.asarray(x, np.float32).ravel() for x in jax.tree.leaves(first)]))
"""


def run(backend: str, flags: str, path: str) -> str:
    environment = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    program = textwrap.dedent(PROGRAM).format(backend=backend, path=path)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.backends("mem_efficient", "flash")
def test_captured_equals_not_captured(backend: str, tmp_path: object) -> None:
    import numpy as np

    captured, plain = f"{tmp_path}/captured.npy", f"{tmp_path}/plain.npy"
    flags = "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL"
    assert run(backend, flags, captured).startswith("captured")
    assert run(backend, "--xla_gpu_enable_command_buffer=", plain) == "not captured 40"
    np.testing.assert_array_equal(np.load(captured), np.load(plain))


DROPOUT_PROGRAM = """
    import jax, jax.numpy as jnp, numpy as np
    import jattn
    from jattn import _core

    rng = np.random.default_rng(0)
    traces = []

    for batch, q_len, kv_len, is_causal in ((1, 256, 256, True), (8, 512, 256, False)):
        shapes = [(batch, n, 4, 64) for n in (q_len, kv_len, kv_len, q_len)]
        q, k, v, dout = (jnp.asarray(rng.uniform(size=shape), jnp.float16) for shape in shapes)

        def step(q, k, v, dout, seed, offset, name={backend!r}):
            traces.append(1)
            attend = lambda *a: jattn.dot_product_attention(
                *a, is_causal=is_causal, implementation=name, dropout_rate=0.22, dropout_seed=seed,
                dropout_offset=offset)
            out, pullback = jax.vjp(attend, q * 1.5, k + 0.25, v)
            return out, pullback(dout)

        with jattn.deterministic("strict"):
            jitted = jax.jit(step, static_argnames="name")
            words = lambda *x: jnp.asarray(x, jnp.uint32)
            first = jax.device_get(jitted(q, k, v, dout, words(1, 2), words(3, 0)))
            start, count = _core.cuda_executions(), len(traces)
            for _ in range(20):
                again = jax.device_get(jitted(q, k, v, dout, words(1, 2), words(3, 0)))
                for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
                    np.testing.assert_array_equal(a, b)
            assert _core.cuda_executions() - start < 20, "not captured"
            for other in ((words(5, 2), words(3, 0)), (words(1, 2), words(4, 0))):
                changed = jax.device_get(jitted(q, k, v, dout, *other))
                assert (changed[0] != first[0]).any()
                # What the same graph computed for another seed is that seed's result.
                want = jax.device_get(jitted(q, k, v, dout, *other, name="reference"))
                for a, b in zip(jax.tree.leaves(changed), jax.tree.leaves(want), strict=True):
                    scale = np.abs(b.astype(np.float32)).max()
                    np.testing.assert_allclose(
                        a.astype(np.float32) / scale, b.astype(np.float32) / scale, atol=5e-3)
            assert len(traces) == count + 1  # the reference's
    print("ok")
"""


@pytest.mark.backends("mem_efficient", "flash")
def test_T075_dropout_in_a_captured_graph(backend: str) -> None:
    """Seed and offset are read on the device: replays with the same ones agree bit by bit, others need no new trace."""
    flags = "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL"
    environment = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DROPOUT_PROGRAM).format(backend=backend)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "ok", done.stderr[-3000:]
