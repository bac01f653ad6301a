"""Calls inside captured command buffers: the same bits as outside, run after run."""

import dataclasses
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from jattn.testing import oracle
from jattn.testing.cases import Case
from jattn.testing.inputs import Operands

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


CAPTURE = "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL"
NO_CAPTURE = "--xla_gpu_enable_command_buffer="


def run_program(program: str, flags: str) -> str:
    """Returns the last line that a program prints in a process of its own under these flags of XLA."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def run(backend: str, flags: str, path: Path) -> str:
    return run_program(textwrap.dedent(PROGRAM).format(backend=backend, path=str(path)), flags)


@pytest.mark.backends("mem_efficient", "flash")
def test_captured_equals_not_captured(backend: str, tmp_path: Path) -> None:
    captured, plain = tmp_path / "captured.npy", tmp_path / "plain.npy"
    assert run(backend, CAPTURE, captured).startswith("captured")
    assert run(backend, NO_CAPTURE, plain) == "not captured 40"
    np.testing.assert_array_equal(np.load(captured), np.load(plain))


# Compared with the oracle, outside of that process: XLA would tune 20 products of each problem for the reference, which
# took over 100 s on one core.
DROPOUT_PROGRAM = """
    import jax, jax.numpy as jnp, numpy as np
    import jattn
    from jattn import _core

    for name, is_causal in {problems!r}:
        arrays = np.load(f"{folder}/{{name}}.npz")
        q, k, v, dout = (jnp.asarray(arrays[x]) for x in ("q", "k", "v", "dout"))
        traces = []

        def step(q, k, v, dout, seed, offset):
            traces.append(1)
            attend = lambda *a: jattn.dot_product_attention(
                *a, is_causal=is_causal, implementation={backend!r}, dropout_rate={rate}, dropout_seed=seed,
                dropout_offset=offset)
            out, pullback = jax.vjp(attend, q * 1.5, k + 0.25, v)
            return out, *pullback(dout)

        with jattn.deterministic("strict"):
            jitted = jax.jit(step)
            run = lambda words: jax.device_get(jitted(q, k, v, dout, *(jnp.asarray(x, jnp.uint32) for x in words)))
            words = {words!r}
            first = run(words[0])
            start = _core.cuda_executions()
            for _ in range(20):
                for a, b in zip(first, run(words[0]), strict=True):
                    np.testing.assert_array_equal(a, b)
            assert _core.cuda_executions() - start < 20, "not captured"
            for i, other in enumerate(words[1:], 1):
                changed = run(other)
                assert (changed[0] != first[0]).any()
                np.savez(f"{folder}/{{name}}-{{i}}.npz", *changed)
            assert len(traces) == 1
    print("ok")
"""

# Pairs of dropout_seed and dropout_offset: what is replayed, then another seed, then another offset.
DROPOUT_WORDS = (((1, 2), (3, 0)), ((5, 2), (3, 0)), ((1, 2), (4, 0)))
BASE = Case("captured", num_heads=2, num_kv_heads=2, dtype="float16", dropout_rate=0.22)
DROPOUT_CASES = (
    BASE.but("square", batch=1, q_len=256, kv_len=256, is_causal=True),
    BASE.but("wide", batch=8, q_len=512, kv_len=256),
)


@pytest.mark.backends("mem_efficient", "flash")
def test_T075_dropout_in_a_captured_graph(backend: str, tmp_path: Path) -> None:
    """Seed and offset are read on the device: replays with the same ones agree bit by bit, and without a new trace
    the same graph computes for others what belongs to those.
    """
    rng = np.random.default_rng(0)
    arrays = {}
    for case in DROPOUT_CASES:
        shapes = {"q": case.q_len, "k": case.kv_len, "v": case.kv_len, "dout": case.q_len}
        arrays[case] = {
            name: rng.uniform(size=(case.batch, length, case.num_heads, 64)).astype(np.float16)
            for name, length in shapes.items()
        }
        np.savez(tmp_path / f"{case.name}.npz", **arrays[case])
    program = textwrap.dedent(DROPOUT_PROGRAM).format(
        backend=backend,
        folder=str(tmp_path),
        problems=[(case.name, case.is_causal) for case in DROPOUT_CASES],
        rate=BASE.dropout_rate,
        words=DROPOUT_WORDS,
    )
    assert run_program(program, CAPTURE) == "ok"

    for case in DROPOUT_CASES:
        q, k, v, dout = (arrays[case][name] for name in ("q", "k", "v", "dout"))
        operands = Operands(
            q=q * np.float16(1.5),
            k=k + np.float16(0.25),
            v=v,
            dout=dout,
            dlse=np.zeros((case.batch, case.q_len, case.num_heads)),
        )
        for i, words in enumerate(DROPOUT_WORDS[1:], 1):
            seed, offset = (np.asarray(x, np.uint32) for x in words)
            want = oracle.solve(
                case, dataclasses.replace(operands, dropout_seed=seed, dropout_offset=offset)
            )
            found = np.load(tmp_path / f"{case.name}-{i}.npz")
            for name, a, b in zip(
                ("out", "dq", "dk", "dv"),
                (found[file] for file in found.files),
                (want.out, want.dq, want.dk, want.dv),
                strict=True,
            ):
                scale = np.abs(b).max()
                np.testing.assert_allclose(
                    a.astype(np.float64) / scale, b / scale, atol=5e-3, err_msg=f"{case}, {name}"
                )


CUDNN_PROGRAM = """
    import jax, jax.numpy as jnp, numpy as np
    import jattn

    rng = np.random.default_rng(0)
    q, k, v, dout = (jnp.asarray(rng.uniform(size=(8, 512, 4, 64)), jnp.float16) for _ in range(4))

    def step(q, k, v, dout):
        attend = lambda *a: jattn.dot_product_attention(*a, is_causal=True, implementation="cudnn")
        out, pullback = jax.vjp(attend, q * 1.5, k + 0.25, v)
        return out, *pullback(dout)

    jitted = jax.jit(step)
    first = jax.device_get(jitted(q, k, v, dout))
    for _ in range(20):
        np.testing.assert_array_equal(first[0], jax.device_get(jitted(q, k, v, dout))[0])
    np.savez({path!r}, *first)
    print("done")
"""


@pytest.mark.backends("cudnn")
def test_T075_cudnn_in_a_captured_graph(tmp_path: Path) -> None:
    """XLA captures its own calls of cuDNN; the backward pass adds dq up in any order."""

    def results(name: str, flags: str) -> list[np.ndarray]:
        folder = tmp_path / name
        path, dump = f"{folder}.npz", f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
        program = textwrap.dedent(CUDNN_PROGRAM).format(path=path)
        assert run_program(program, f"{flags} {dump}") == "done"
        passes = list(folder.glob("*jit_step*thunk_sequence_after_thunk_passes.txt"))
        found = any(re.search("command_?buffer", x.read_text(), re.IGNORECASE) for x in passes)
        assert found == (name == "captured")
        return [x.astype(np.float64) for x in np.load(path).values()]

    captured, plain = results("captured", f"{CAPTURE},CUDNN"), results("plain", NO_CAPTURE)
    np.testing.assert_array_equal(captured[0], plain[0])
    for a, b in zip(captured[1:], plain[1:], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3 * np.abs(b).max())
