"""The tool that runs cases again and again: what it lets pass and what not."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
import repeat_cases

CASE = "bias-bn1s"
IN_ORDER = "family=sm90_backward arch=sm_90a dq_order=2"
ANY_ORDER = "family=sm90_backward arch=sm_90a dq_order=1"


def drifting(name: str, by: float) -> Callable[[], dict[str, jax.Array]]:
    """Results whose third run differs from the others in one element of a tensor."""
    runs = 0

    def call() -> dict[str, jax.Array]:
        nonlocal runs
        runs += 1
        results = {x: jnp.asarray([1.0, 64.0, jnp.nan], jnp.float32) for x in ("out", "dq", "dk")}
        if runs == 3:
            results[name] = results[name].at[0].add(by)
        return results

    return call


@pytest.mark.parametrize(
    ("name", "by", "lowered", "passes"),
    [
        ("out", 0.0, IN_ORDER, True),
        ("out", 1e-6, ANY_ORDER, False),
        ("dk", 1e-6, ANY_ORDER, False),
        ("dq", 1e-6, IN_ORDER, False),
        ("dq", 1e-6, ANY_ORDER, True),
        ("dq", 2.0, ANY_ORDER, False),
    ],
)
def test_bits_of_every_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    by: float,
    lowered: str,
    passes: bool,
) -> None:
    monkeypatch.setattr(repeat_cases, "compile_case", lambda *_: (drifting(name, by), lowered))
    status = repeat_cases.main(["--case", CASE, "--repeat", "5"])
    printed = capsys.readouterr().out
    assert status == (0 if passes else 1)
    assert ("5 runs" in printed) == passes
    assert (f"run 2: {name} has other bits" in printed) == (not passes)


def test_runs_of_a_backend_and_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert repeat_cases.main(["--case", CASE, "--repeat", "3", "--backend", "cpu"]) == 0
    assert "1 passed" in capsys.readouterr().out
    with pytest.warns(UserWarning, match="flash"):
        assert repeat_cases.main(["--case", CASE, "--backend", "flash"]) == 1
    assert "1 refused" in capsys.readouterr().out
