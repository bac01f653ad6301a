"""Every refusal fires, and its text has the argument, the value, the rule, the remedy and the phrase of its code."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.backends.reference import ReferenceBackend
from jattn.errors import REASON_CODES

SM90 = jattn.Device("cuda", arch=(9, 0))
CPU = jattn.Device("cpu")


def alike(*shape: int, dtype: str = "bfloat16") -> tuple[jax.ShapeDtypeStruct, ...]:
    return (jax.ShapeDtypeStruct(shape, dtype),) * 3


PLAIN = alike(2, 8, 2, 64)
BIAS = {"bias": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
MASK = {"mask": jax.ShapeDtypeStruct((8, 8), "bool")}


def program(function: Any, *captures: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Keywords of a call whose scores go through score + function(key, *captures)."""

    def score_mod(score: Any, batch: Any, head: Any, query: Any, key: Any, *captures: Any) -> Any:
        return score + function(key, *captures)

    return {"score_mod": score_mod, "captures": captures}


ROW = np.ones(8, np.float32)

# (backend, code, arrays, keywords of the call, device, what the text must hold beside the phrase)
REFUSALS: tuple[tuple[str, str, Any, dict[str, Any], jattn.Device, tuple[str, ...]], ...] = (
    ("flash", "PLATFORM", PLAIN, {}, CPU, ("cpu", "cuda")),
    ("mem_efficient", "PLATFORM", PLAIN, {}, CPU, ("cpu", "cuda")),
    ("cpu", "PLATFORM", PLAIN, {}, SM90, ("sm_90",)),
    (
        "flash",
        "ARCH",
        PLAIN,
        {},
        jattn.Device("cuda", arch=(8, 0)),
        ("sm_80", "sm90", "mem_efficient"),
    ),
    ("flash", "ARCH", PLAIN, {}, jattn.Device("cuda", arch=(10, 0)), ("sm_100",)),
    (
        "mem_efficient",
        "ARCH",
        PLAIN,
        {},
        jattn.Device("cuda", arch=(7, 5)),
        ("sm_75", "sm80", "xla"),
    ),
    (
        "flash",
        "DTYPE",
        alike(2, 8, 2, 64, dtype="float32"),
        {},
        SM90,
        ("float32", "{Half, BFloat16}", "compute_dtype"),
    ),
    ("flash", "HEAD_DIM", alike(2, 8, 2, 300), {}, SM90, ("head_dim is 300", "256")),
    ("mem_efficient", "HEAD_DIM", alike(2, 8, 2, 600), {}, SM90, ("head_dim is 600", "512", "xla")),
    ("bare", "MASK", PLAIN, BIAS, SM90, ("bias", "must be one of none")),
    ("bare", "MASK", PLAIN, MASK, SM90, ("mask",)),
    ("bare", "FEATURE", PLAIN, {"is_causal": True}, SM90, ("band",)),
    ("bare", "FEATURE", PLAIN, {"logits_soft_cap": 3.0}, SM90, ("softcap",)),
    (
        "mem_efficient",
        "PRIMITIVE",
        PLAIN,
        program(lambda key: jax.scipy.special.digamma(key.astype("float32"))),
        SM90,
        ("digamma", "implementation='xla'"),
    ),
    (
        "mem_efficient",
        "CAPTURE_ACCESS",
        PLAIN,
        program(lambda key, row: jnp.sort(row * key)[0], ROW),
        SM90,
        ("sort", "float32[8]"),
    ),
    (
        "mem_efficient",
        "CAPTURES",
        PLAIN,
        program(lambda key, *rows: sum(row[key] for row in rows), *[ROW] * 17),
        SM90,
        ("17", "at most 16"),
    ),
    (
        "cudnn",
        "NOT_BUILT",
        PLAIN,
        {},
        jattn.Device("cuda", arch=(9, 0), cudnn=90100),
        ("version of cuDNN is 90100", "90800", "jax[cuda13]"),
    ),
)


class BareBackend(ReferenceBackend):
    """A user's backend that understands no feature."""

    name = "bare"
    understands = frozenset()


@pytest.fixture(autouse=True)
def bare_backend() -> Iterator[None]:
    jattn.register_backend("cuda", BareBackend())
    yield
    jattn.unregister_backend("cuda", "bare")


@pytest.mark.parametrize(
    ("backend", "code", "arrays", "keywords", "device", "words"),
    REFUSALS,
    ids=[f"{r[0]}-{r[1]}-{r[4]}".replace(" ", "-") for r in REFUSALS],
)
def test_a_refusal_says_what_and_what_to_do(
    backend: str,
    code: str,
    arrays: Any,
    keywords: dict[str, Any],
    device: jattn.Device,
    words: tuple[str, ...],
) -> None:
    explanation = jattn.explain(*arrays, implementation=backend, device=device, **keywords)
    assert explanation.chosen is None
    reason = next(r for r in explanation.reasons[backend] if r.code == code)
    text = str(reason)
    assert reason.backend == backend
    assert REASON_CODES[code] in text
    assert "{listed" not in text
    searched_for = {
        "DTYPE": "Expected query, key and value to all be of dtype: {",
        "PLATFORM": "q, k and v need to be on cuda device"
        if device == CPU
        else "q, k and v need to be on cpu",
    }
    assert text.count(searched_for.get(code, reason.rule)) == 1
    assert reason.remedy
    for part in (reason.argument, str(reason.actual), reason.rule, reason.remedy):
        assert part in text
    for word in words:
        assert word in text, text


def test_all_reasons_are_given_at_once() -> None:
    """Two things are wrong, two reasons are given; those of other backends come along."""
    arrays = alike(2, 8, 2, 300, dtype="float32")
    reasons = jattn.explain(*arrays, device=SM90, **MASK).reasons
    assert {reason.code for reason in reasons["flash"]} == {"DTYPE", "HEAD_DIM"}
    assert {reason.code for reason in reasons["bare"]} == {"MASK"}
    assert [reason.argument for reason in reasons["flash"] if reason.code == "HEAD_DIM"] == [
        "head_dim",
        "head_dim_v",
    ]
    assert "PLATFORM" in {reason.code for reason in reasons["cpu"]}


def test_symbolic_lengths_are_refused_by_kernels() -> None:
    """While exporting only the batch may be symbolic: tiles are counted from the lengths."""
    [length] = jax.export.symbolic_shape("length")
    x = jax.ShapeDtypeStruct((2, length, 2, 8), "float32")
    for backend in ("cpu", "xla"):
        with (
            pytest.warns(UserWarning, match="known number"),
            pytest.raises(jattn.NoBackendError) as error,
        ):
            jax.export.export(
                jax.jit(
                    lambda x, backend=backend: jattn.dot_product_attention(
                        x, x, x, implementation=backend
                    )
                )
            )(x)  # type: ignore[misc]
        assert "SYMBOLIC" in {reason.code for reason in error.value.reasons}


# Name of the extent -> of what else it is.
SYMBOLIC = {
    "q_len": (),
    "kv_len": (),
    "num_heads": (),
    "num_kv_heads": ("num_heads",),
    "head_dim": (),
    "head_dim_v": (),
}


@pytest.mark.parametrize("device", [CPU, SM90], ids=str)
@pytest.mark.parametrize("names", [*([name] for name in SYMBOLIC), ["q_len", "head_dim"]], ids=str)
def test_the_way_out_of_a_symbolic_extent_is_one(names: list[str], device: jattn.Device) -> None:
    """The backend that a refusal names would run the call."""
    [n] = jax.export.symbolic_shape("n")
    sizes: dict[str, Any] = dict.fromkeys(SYMBOLIC, 8) | {"num_kv_heads": 1}
    for name in names:
        sizes |= dict.fromkeys((name, *SYMBOLIC[name]), n)
    q_len, kv_len, num_heads, num_kv_heads, head_dim, head_dim_v = sizes.values()
    shapes = ((q_len, num_heads, head_dim), (kv_len, num_kv_heads, head_dim))
    q, k = (jax.ShapeDtypeStruct((2, *shape), "bfloat16") for shape in shapes)
    v = jax.ShapeDtypeStruct((2, kv_len, num_kv_heads, head_dim_v), "bfloat16")
    found = jattn.explain(q, k, v, scale=1.0, device=device)
    kernel = "cpu" if device == CPU else "flash"
    assert {r.argument for r in found.reasons[kernel] if r.code == "SYMBOLIC"} >= set(names)
    for reasons in found.reasons.values():
        for reason in reasons:
            if reason.code == "SYMBOLIC":
                [way_out] = re.findall("implementation='(.*)'", reason.remedy)
                assert way_out == found.chosen or found.reasons[way_out] == ()
    assert found.passes[0].flops is None


def test_a_symbolic_head_dim_needs_a_scale() -> None:
    [head_dim] = jax.export.symbolic_shape("d")
    x = jax.ShapeDtypeStruct((2, 8, 2, head_dim), "float32")
    with pytest.raises(ValueError, match=r"scale is None.*head dim is d.*pass scale"):
        jattn.explain(x, x, x)


def test_no_backend_error_reads_well() -> None:
    x = alike(2, 8, 2, 300, dtype="float32")
    with (
        jattn.target_device(SM90),
        pytest.warns(UserWarning, match="flash: DTYPE|flash: HEAD_DIM"),
        pytest.raises(jattn.NoBackendError) as error,
    ):
        jax.eval_shape(lambda *x: jattn.dot_product_attention(*x, implementation="flash"), *x)
    text = str(error.value)
    for words in (
        "jattn.dot_product_attention",
        "No available kernel",
        "cuda sm_90",
        "(2, 8, 2, 300)",
        "DTYPE",
        "HEAD_DIM",
    ):
        assert words in text
    assert isinstance(error.value, RuntimeError)


def test_a_code_that_nobody_listed_is_refused() -> None:
    with pytest.raises(ValueError, match="'MADE_UP' is not one of"):
        jattn.Reason("cpu", "MADE_UP", "x", 1, "rule", "remedy")


def test_cudnn_refuses_gradients_whose_bits_must_not_vary() -> None:
    with jattn.deterministic("strict"):
        forward, both = (
            jattn.explain(*PLAIN, implementation="cudnn", device=SM90, needs_grad=needs_grad)
            for needs_grad in (False, True)
        )
    assert forward.chosen == "cudnn"
    [reason] = both.reasons["cudnn"]
    assert (reason.code, reason.argument, reason.actual) == (
        "DETERMINISTIC",
        "deterministic",
        "strict",
    )
    for part in (REASON_CODES[reason.code], "deterministic is strict", reason.rule, reason.remedy):
        assert part in str(reason)


def test_every_code_is_reached_by_some_test() -> None:
    """DISABLED: test_options.py; SYMBOLIC and DETERMINISTIC: above; RAGGED_...: test_ragged.py."""
    tested = {refusal[1] for refusal in REFUSALS} | {"DISABLED", "SYMBOLIC", "DETERMINISTIC"}
    tested |= {code for code in REASON_CODES if code.startswith("RAGGED_")}
    assert set(REASON_CODES) == tested


def test_reasons_of_one_rule_share_a_line() -> None:
    """The rule lists all operations that there are."""
    of_two = program(lambda key: jax.lax.lgamma(1.0 + key) + jax.lax.digamma(1.0 + key))
    found = jattn.explain(*PLAIN, device=CPU, **of_two)
    assert [reason.actual for reason in found.reasons["cpu"]] == ["lgamma", "digamma"]
    (line,) = (line for line in str(found).splitlines() if "[cpu does not support" in line)
    assert "score_mod is lgamma, digamma, must be one of abs, " in line
