"""What users import: the names, the signature that is jax.nn's and more, and what an import does not do."""

import inspect
import os
import subprocess
import sys

import jax
import pytest

import jattn

NAMES = (
    "Backend",
    "BlockMask",
    "CausalBias",
    "Device",
    "Explanation",
    "FallbackWarning",
    "FunctionExplanation",
    "FusionRecord",
    "NoBackendError",
    "RaggedArray",
    "Reason",
    "Residuals",
    "Wants",
    "__version__",
    "call_counters",
    "causal_lower_right",
    "causal_upper_left",
    "checkpoint_policy",
    "clear_fusion_log",
    "create_block_mask",
    "deterministic",
    "dropout_mask",
    "dot_product_attention",
    "explain",
    "export_disabled_checks",
    "flash_mha_varlen",
    "fuse_attention",
    "fusion_log",
    "is_left_aligned",
    "ragged_dot_product_attention",
    "register_backend",
    "reset_call_counters",
    "sdpa_kernel",
    "seed_from_key",
    "select_backend",
    "set_enabled",
    "strict_fallback",
    "target_device",
    "unregister_backend",
)


def test_the_public_names_are_these() -> None:
    found = {
        name
        for name, thing in vars(jattn).items()
        if not name.startswith("_") and not inspect.ismodule(thing)
    }
    assert found | {"__version__"} == set(NAMES)


def test_the_signature_begins_with_that_of_jax_nn() -> None:
    """Same names, order, kinds and defaults, so that one can stand for the other."""
    ours = list(inspect.signature(jattn.dot_product_attention).parameters.values())
    theirs = list(inspect.signature(jax.nn.dot_product_attention).parameters.values())
    facts = [[(p.name, p.kind, p.default) for p in parameters] for parameters in (ours, theirs)]
    assert facts[0][: len(facts[1])] == facts[1]
    added = ours[len(theirs) :]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in added)
    assert all(p.default is not inspect.Parameter.empty for p in added)


def own_functions() -> list[str]:
    """Functions of ours; ``checkpoint_policy`` is one of JAX's in some releases and another object in others."""
    found = {name: inspect.unwrap(getattr(jattn, name)) for name in NAMES}
    return [
        n for n, f in found.items() if inspect.isfunction(f) and f.__module__.startswith("jattn")
    ]


@pytest.mark.parametrize("name", own_functions())
def test_docstrings_begin_with_a_verb(name: str) -> None:
    docstring = inspect.getdoc(inspect.unwrap(getattr(jattn, name)))
    assert docstring
    verb = docstring.split()[0]
    assert verb.endswith("s"), f"{name}: the docstring begins with {verb!r}, not with a verb"


# Each in a process of its own: the order of importing jattn and of starting JAX's backend must not matter.
FRESH = {
    "import starts no backend": """
import jax, pathlib
def libraries():
    return {word for word in pathlib.Path("/proc/self/maps").read_text().lower().split() if ".so" in word}
before = libraries()
import jattn
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
assert any("_core" in name for name in libraries() - before)
assert not any("cuda" in name or "nvrtc" in name for name in libraries() - before)
""",
    "import before a backend exists, eager first": """
import jattn, jax.numpy as jnp
x = jnp.ones((1, 4, 2, 8))
assert float(jattn.dot_product_attention(x, x, x, implementation="cpu").sum()) == 64
""",
    "import after a backend exists, jit first": """
import jax, jax.numpy as jnp
x = jnp.ones((1, 4, 2, 8))
jax.block_until_ready(x + 1)
import jattn
assert float(jax.jit(lambda x: jattn.dot_product_attention(x, x, x, implementation="cpu"))(x).sum()) == 64
""",
    "other programs still run": """
import jattn, jax, jax.numpy as jnp
assert float(jax.jit(lambda x: (x @ x).sum())(jnp.ones((4, 4)))) == 64
""",
    "switched off from outside": """
import os
os.environ["JATTN_DISABLE"] = "1"
import jattn, jax.numpy as jnp
x = jnp.ones((1, 4, 2, 8))
assert jattn.select_backend(x, x, x) in ("xla", "reference")
""",
}


@pytest.mark.parametrize("what", list(FRESH))
def test_in_a_fresh_process(what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FRESH[what]],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
