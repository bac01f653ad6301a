"""Row J05: contexts nest, are part of jit's cache key, and reach rules that run after they were left."""

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import config

X = jnp.ones((1, 4, 2, 8))


def counted(function: Callable[[], Any]) -> dict[str, dict[str, int]]:
    jattn.reset_call_counters()
    function()
    return jattn.call_counters()


def fresh() -> Callable[[jax.Array], jax.Array]:
    """A jitted call of its own, so that no other test has traced it."""
    return jax.jit(lambda x: jattn.dot_product_attention(x, x, x))


def test_J05_enabled_set_retraces_and_nests() -> None:
    attend = fresh()
    assert set(counted(lambda: attend(X))) == {"cpu"}
    with jattn.sdpa_kernel(["xla"]):
        assert set(counted(lambda: attend(X))) == {"xla"}
        with jattn.sdpa_kernel("reference"):
            assert set(counted(lambda: attend(X))) == {"reference"}
        assert counted(lambda: attend(X)) == {}  # traced with this set before: a hit
    assert counted(lambda: attend(X)) == {}


def test_J05_equal_options_hit_the_cache() -> None:
    traces = 0

    @jax.jit
    def attend(x: jax.Array) -> jax.Array:
        nonlocal traces
        traces += 1
        return jattn.dot_product_attention(x, x, x)

    for _ in range(2):
        with jattn.sdpa_kernel(["cpu", "reference"]), jattn.deterministic("strict"):
            attend(X)
    assert traces == 1


@pytest.mark.parametrize("mode", ["off", "warn", "strict"])
def test_J05_determinism_is_part_of_the_key(mode: str) -> None:
    traces = []

    @jax.jit
    def grad(x: jax.Array) -> jax.Array:
        traces.append(mode)
        return jax.grad(lambda x: jattn.dot_product_attention(x, x, x).sum())(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = grad(X)
        with jattn.deterministic(mode):  # type: ignore[arg-type]
            np.testing.assert_array_equal(grad(X), plain)
    assert len(traces) == (1 if mode == "off" else 2)


def test_J05_an_unknown_mode_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"'sometimes'.*'off', 'warn' or 'strict'"),
        jattn.deterministic("sometimes"),
    ):  # type: ignore[arg-type]
        pass


def test_J05_switch_off_and_on() -> None:
    attend = fresh()
    attend(X)
    try:
        jattn.set_enabled(False)
        assert set(counted(lambda: attend(X))) == {"xla"}
        with (
            pytest.raises(jattn.NoBackendError) as error,
            pytest.warns(UserWarning, match="runtime disabled"),
        ):
            jattn.dot_product_attention(X, X, X, implementation="cpu")
        assert "DISABLED" in {reason.code for reason in error.value.reasons}
    finally:
        jattn.set_enabled(True)
    assert jattn.select_backend(X, X, X) == "cpu"


@pytest.mark.parametrize("enabled", [None, 0, 1, "off"])
def test_a_switch_that_is_no_bool_is_refused(enabled: object) -> None:
    with pytest.raises(
        TypeError, match=r"jattn\.set_enabled: enabled is .*, must be True or False"
    ):
        jattn.set_enabled(enabled)  # type: ignore[arg-type]
    with (
        pytest.raises(
            TypeError, match=r"jattn\.strict_fallback: enabled is .*, must be True or False"
        ),
        jattn.strict_fallback(enabled),  # type: ignore[arg-type]
    ):
        pass
    assert jattn.select_backend(X, X, X) == "cpu"


DETERMINISTIC = "--xla_gpu_deterministic_ops"


@pytest.mark.parametrize(
    ("flags", "asks"),
    [
        ("", False),
        (DETERMINISTIC, True),
        (f"{DETERMINISTIC}=true", True),
        (f"{DETERMINISTIC}=1", True),
        (f"--xla_a=b  {DETERMINISTIC}=True --xla_c", True),
        (f"{DETERMINISTIC}=false", False),
        (f"{DETERMINISTIC}=true {DETERMINISTIC}=false", False),
        (f"{DETERMINISTIC}=0 {DETERMINISTIC}=1", True),
        (f"{DETERMINISTIC}=0 --xla_gpu_exclude_nondeterministic_ops", True),
        (f"{DETERMINISTIC}_of_another_kind=true", False),
    ],
)
@pytest.mark.parametrize("in_file", [False, True])
def test_flags_of_xla_are_read_as_xla_does(
    flags: str, asks: bool, in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_file:
        (tmp_path / "flags").write_text(flags)
        flags = str(tmp_path / "flags")
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert config._starting_options().determinism == ("strict" if asks else "off")


def test_J05_options_reach_a_backward_traced_later() -> None:
    """The set of the forward call holds for its backward, although the context was left between the two."""
    with jattn.sdpa_kernel(["xla"]):
        _, pullback = jax.vjp(lambda x: jattn.dot_product_attention(x, x, x), X)
    assert set(counted(lambda: pullback(X))) == {"xla"}


def test_J05_options_reach_a_lowering_done_later() -> None:
    with jattn.sdpa_kernel(["reference"]):
        traced = fresh().trace(X)
    assert set(counted(traced.lower)) == {"reference"}


def test_J05_other_threads_see_the_default() -> None:
    found = []
    with jattn.sdpa_kernel(["reference"]):
        thread = threading.Thread(target=lambda: found.append(jattn.select_backend(X, X, X)))
        thread.start()
        thread.join()
        assert jattn.select_backend(X, X, X) == "reference"
    assert found == ["cpu"]


def test_a_named_implementation_must_be_enabled() -> None:
    with (
        jattn.sdpa_kernel(["xla"]),
        pytest.warns(UserWarning, match="runtime disabled"),
        pytest.raises(jattn.NoBackendError, match="No available kernel"),
    ):
        jattn.dot_product_attention(X, X, X, implementation="cpu")


def test_names_are_tried_in_order() -> None:
    def chosen(*names: str) -> str:
        return jattn.select_backend(X, X, X, implementation=names)

    assert chosen("reference", "cpu") == "reference"
    assert chosen("flash", "xla", "cpu") == "xla"
    with pytest.raises(ValueError, match=r"'flsh' is not a backend; known are .*flash"):
        jattn.dot_product_attention(X, X, X, implementation="flsh")


def test_names_of_backends_are_checked() -> None:
    with (
        jattn.sdpa_kernel("flsh"),
        pytest.raises(ValueError, match=r"sdpa_kernel: backends holds 'flsh'.*known are .*flash"),
    ):
        jattn.dot_product_attention(X, X, X)
    with pytest.raises(ValueError, match="backends is 5"), jattn.sdpa_kernel(5):  # type: ignore[arg-type]
        pass
    with pytest.raises(jattn.NoBackendError, match="No viable backend"):
        jattn.dot_product_attention(X, X, X, implementation=())


def test_the_switch_leaves_the_context_that_it_was_moved_in() -> None:
    with jattn.sdpa_kernel("xla"), jattn.deterministic("warn"):
        jattn.set_enabled(False)
    try:
        jattn.set_enabled(True)
        assert jattn.select_backend(X, X, X) == "cpu"
        assert jattn.config.current_options() == jattn.config._DEFAULT
    finally:
        jattn.set_enabled(True)


def test_strict_fallback_has_the_reasons_of_the_backends_named() -> None:
    with jattn.strict_fallback(), pytest.raises(jattn.NoBackendError) as caught:
        jattn.dot_product_attention(X, X, X, implementation=("flash", "xla"))
    assert caught.value.reasons
    assert "flash" in str(caught.value)


def test_strict_fallback_is_an_error_and_a_fallback_warns_once() -> None:
    """Where a platform has fused backends, a slow one in their place is announced."""
    shape = jax.ShapeDtypeStruct((1, 8, 1, 600), "float16")  # beyond the limit of every CUDA kernel
    call = jax.jit(lambda x: jattn.dot_product_attention(x, x, x))
    with jattn.target_device(jattn.Device("cuda", arch=(9, 0))):
        with pytest.warns(jattn.FallbackWarning, match="'xla' stands in.*(?s:.*)HEAD_DIM") as found:
            jax.eval_shape(call, shape)
        assert {warning.filename for warning in found} == {__file__}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jax.eval_shape(jax.jit(lambda x: jattn.dot_product_attention(x, x, x)), shape)
            jax.eval_shape(
                lambda x: jattn.dot_product_attention(x, x, x, implementation="xla"), shape
            )
        with jattn.strict_fallback(), pytest.raises(jattn.NoBackendError, match="HEAD_DIM"):
            jax.eval_shape(lambda x: jattn.dot_product_attention(x, x, x), shape)
