"""Who runs what: (problem, device) -> backend, compared with tests/golden/dispatch.txt, which is reviewed as a diff.

Rewrite the file with `JATTN_WRITE_GOLDEN=1 pytest tests/cpu/test_dispatch.py -k golden` and read the difference.
"""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jattn
from jattn import dispatch
from jattn.backends.reference import ReferenceBackend
from jattn.testing import inputs
from jattn.testing.cases import Case

GOLDEN = Path(__file__).parents[1] / "golden" / "dispatch.txt"

DEVICES = {
    "cpu": jattn.Device("cpu"),
    "sm75": jattn.Device("cuda", arch=(7, 5)),
    "sm80": jattn.Device("cuda", arch=(8, 0)),
    "sm86": jattn.Device("cuda", arch=(8, 6)),
    "sm90": jattn.Device("cuda", arch=(9, 0)),
    "sm100": jattn.Device("cuda", arch=(10, 0)),
    "tpu": jattn.Device("tpu"),
}
BASE = Case(name="bf16", q_len=128, kv_len=128, dtype="bfloat16")


def but(name: str, **changes: Any) -> Case:
    return dataclasses.replace(BASE, name=name, **changes)


PROBLEMS = (
    BASE,
    but("f16", dtype="float16"),
    but("f32", dtype="float32"),
    but("f64", dtype="float64"),
    but("causal", is_causal=True),
    but("causal non-square", is_causal=True, q_len=100),
    but("window lower right", window=(16, 4), lower_right=True),
    but("lengths", q_lengths=(3, 128), kv_lengths=(0, 100)),
    but("segments", segments="random"),
    but("softcap", softcap=30.0),
    but("mask", mask_form="b1ts"),
    but("bias", bias_form="1nts"),
    but("bias f32", dtype="float32", bias_form="s"),
    but("grouped heads", num_heads=8, num_kv_heads=2),
    but("negative scale", scale=-1.0),
    but("scale 0", scale=0.0),
    but("decode", q_len=1, kv_len=4096),
    but("T = 0", q_len=0),
    but("S = 0", kv_len=0),
    but("D 1", head_dim=1, head_dim_v=1),
    but("D 21", head_dim=21, head_dim_v=21),
    but("D 256", head_dim=256, head_dim_v=256),
    but("D 257", head_dim=257, head_dim_v=257),
    but("D 512", head_dim=512, head_dim_v=512),
    but("D 513", head_dim=513, head_dim_v=513),
    but("D 128, Dv 64", head_dim=128),
    but("f32 D 512", dtype="float32", head_dim=512, head_dim_v=512),
)


def explained(
    case: Case, device: jattn.Device, *, needs_grad: bool, batch: int | None = None
) -> jattn.Explanation:
    case = case if batch is None else dataclasses.replace(case, batch=batch)
    with jax.enable_x64(case.dtype == "float64"):
        (q, k, v), keywords = inputs.call_arguments(case, inputs.make(case))
        return jattn.explain(q, k, v, device=device, needs_grad=needs_grad, **keywords)


def table() -> str:
    """One line a problem: the backend on each device, as forward/with gradient where the two differ."""
    rows = [["problem", *DEVICES]]
    for case in PROBLEMS:
        row = [case.name]
        for device in DEVICES.values():
            chosen = [
                explained(case, device, needs_grad=needs_grad).chosen
                for needs_grad in (False, True)
            ]
            row.append(str(chosen[0]) if chosen[0] == chosen[1] else f"{chosen[0]}/{chosen[1]}")
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        + "\n"
        for row in rows
    )


def test_golden() -> None:
    made = table()
    if os.environ.get("JATTN_WRITE_GOLDEN"):
        GOLDEN.write_text(made)
    assert made == GOLDEN.read_text()


@pytest.mark.parametrize("device", list(DEVICES))
def test_the_batch_size_does_not_change_the_choice(device: str) -> None:
    """vmap changes the batch between the two times the question is asked."""
    for case in (BASE, but("lengths", kv_lengths=(5,)), but("mask", mask_form="b1ts")):
        chosen = set()
        for batch in (1, 2, 70_000 if case is BASE else 8):
            lengths = None if case.kv_lengths is None else case.kv_lengths * batch
            one = dataclasses.replace(
                case, kv_lengths=lengths, q_len=2, kv_len=2, num_heads=1, num_kv_heads=1, head_dim=8
            )
            chosen.add(explained(one, DEVICES[device], needs_grad=True, batch=batch).chosen)
        assert len(chosen) == 1


@pytest.mark.parametrize("device", ["sm80", "sm86", "sm90"])
@pytest.mark.parametrize("case", [c for c in PROBLEMS if c.dtype != "float64"], ids=str)
def test_what_is_admitted_for_cuda_can_be_lowered(case: Case, device: str) -> None:
    """A choice made while tracing must hold in the lowering: on a machine without a GPU this makes every plan."""
    operands = inputs.make(case)
    (q, k, v), keywords = inputs.call_arguments(case, operands)
    where = DEVICES[device]
    chosen = explained(case, where, needs_grad=True).chosen
    if chosen not in ("flash", "mem_efficient"):
        assert chosen == "xla"
        return

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jattn.dot_product_attention(q, k, v, **keywords).astype("float32").sum()

    with jattn.target_device(where):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v))
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "jattn_forward" in text
    assert "jattn_backward" in text


def test_explain_is_readable() -> None:
    """A person finds the problem, the choice, and the way out of every refusal."""
    case = but("mask", mask_form="b1ts", dtype="float32")
    text = str(explained(case, DEVICES["sm90"], needs_grad=True))
    for words in (
        "cuda sm_90, forward and backward",
        "q float32 (2, 128, 2, 64)",
        "mask",
        "chosen: mem_efficient",
        "flash: refuses",
    ):
        assert words in text


def test_explain_takes_shapes_and_runs_nothing() -> None:
    x = jax.ShapeDtypeStruct((1, 1 << 20, 64, 128), "bfloat16")  # 16 GiB, if it existed
    ids = jax.ShapeDtypeStruct((1, 1 << 20), "int32")
    assert (
        jattn.explain(x, x, x, segment_ids=ids, device=DEVICES["sm90"], needs_grad=True).chosen
        == "flash"
    )
    with pytest.raises(TypeError, match="sgment_ids"):
        jattn.explain(x, x, x, sgment_ids=ids)


# ---- Backends of users -----------------------------------------------------------------------------------------------


class Registered(ReferenceBackend):
    """A backend of the user's that keeps the devices that it was traced for."""

    def __init__(self, name: str = "mine") -> None:
        self.name = name  # type: ignore[misc]
        self.traced_for: list[jattn.Device] = []

    def forward(self, spec: Any, operands: Any, device: jattn.Device) -> Any:
        self.traced_for.append(device)
        return super().forward(spec, operands, device)


@contextlib.contextmanager
def registered(*platforms: str, name: str = "mine") -> Iterator[list[Registered]]:
    """One backend of the same name for each platform."""
    made = [Registered(name) for _ in platforms]
    for platform, backend in zip(platforms, made, strict=True):
        jattn.register_backend(platform, backend)
    try:
        yield made
    finally:
        for platform in platforms:
            jattn.unregister_backend(platform, name)


X = jnp.ones((1, 4, 2, 8))


def lowered(*platforms: str) -> str:
    attend = jax.jit(lambda x: jattn.dot_product_attention(x, x, x))
    return attend.trace(X).lower(lowering_platforms=platforms).as_text()


@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm", "another"])
def test_a_registered_backend_is_lowered_for_its_platform(platform: str) -> None:
    with registered(platform) as [mine]:
        jattn.reset_call_counters()
        lowered(platform)
        assert mine.traced_for == [jattn.Device(platform)]
        assert jattn.call_counters() == {"mine": {"forward": 1}}


def test_a_program_for_several_platforms_has_the_backend_of_each() -> None:
    with registered("tpu", "rocm") as [for_tpu, for_rocm]:
        jattn.reset_call_counters()
        text = lowered("cpu", "tpu", "rocm")
        assert for_tpu.traced_for == [jattn.Device("tpu")]
        assert for_rocm.traced_for == [jattn.Device("rocm")]
        assert jattn.call_counters() == {"cpu": {"forward": 1}, "mine": {"forward": 2}}
        assert "jattn_forward_v1" in text


@pytest.mark.parametrize("platform", [None, "", "CPU", ["cpu"], "gpu"], ids=str)
def test_platforms_that_there_are_not(platform: Any) -> None:
    with pytest.raises(ValueError, match="register_backend: platform is"):
        jattn.register_backend(platform, Registered())


def test_backends_that_cannot_be_named() -> None:
    nameless = Registered()
    nameless.name = None  # type: ignore[assignment]
    for backend in (Registered, nameless):
        with pytest.raises(TypeError, match=r"register_backend: backend is .*, must be"):
            jattn.register_backend("cpu", backend)  # type: ignore[arg-type]
    assert "cpu" not in dispatch._registered or not dispatch._registered["cpu"]


def test_one_name_on_two_platforms_is_two_backends() -> None:
    options = jattn.config.current_options()
    spec = explained(BASE, DEVICES["tpu"], needs_grad=False).spec
    with registered("cpu", "tpu") as [for_cpu, for_tpu]:
        for device, backend in ((DEVICES["cpu"], for_cpu), (DEVICES["tpu"], for_tpu)):
            assert dispatch.choose(spec, device, options, needs_grad=False).backend is backend
        assert dispatch.known_names().count("mine") == 1
        with pytest.raises(ValueError, match="'mine', which is taken"):
            jattn.register_backend("tpu", Registered())


def test_a_registered_backend_is_refused_elsewhere() -> None:
    with registered("tpu", "rocm"):
        reasons = jattn.explain(X, X, X, implementation="mine").reasons["mine"]
        [reason] = reasons
        assert reason.code == "PLATFORM"
        for words in ("device is cpu", "tpu or rocm", "jattn.register_backend('cpu', ...)"):
            assert words in str(reason)


def test_a_choice_made_during_a_registration_is_not_kept() -> None:
    """A backend comes while another thread's choice is being made: here it comes out of ``unsupported``."""
    options = jattn.config.current_options()
    spec = dataclasses.replace(explained(BASE, DEVICES["cpu"], needs_grad=False).spec, scale=0.77)

    def choice() -> str:
        found = dispatch.choose(spec, jattn.Device("another"), options, needs_grad=False).backend
        assert found is not None
        return found.name

    with registered("another", name="first") as [first], contextlib.ExitStack() as later:
        asked: list[str] = []

        def unsupported(*_: Any, **__: Any) -> tuple[()]:
            if not asked:
                later.enter_context(registered("another", name="second"))
            asked.append("first")
            return ()

        first.unsupported = unsupported  # type: ignore[method-assign]
        assert [choice(), choice()] == ["first", "second"]


def test_the_warnings_given_are_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_warned", {})
    monkeypatch.setattr(dispatch, "_MOST_WARNED", 3)
    x = jax.ShapeDtypeStruct((1, 4, 2, 600), "float32")

    def attend(scale: float) -> None:
        jax.eval_shape(lambda x: jattn.dot_product_attention(x, x, x, scale=scale), x)

    with jattn.target_device(DEVICES["sm90"]):
        for scale in (1.0, 2.0, 3.0, 4.0):
            with pytest.warns(jattn.FallbackWarning):
                attend(scale)
        attend(4.0)  # warned of already
        assert len(dispatch._warned) == 3
        with pytest.warns(jattn.FallbackWarning):
            attend(1.0)  # forgotten


def test_warnings_that_are_errors_come_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_warned", {})
    x = jax.ShapeDtypeStruct((1, 4, 2, 600), "float32")
    with jattn.target_device(DEVICES["sm90"]), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(jattn.FallbackWarning):
                jax.eval_shape(lambda x: jattn.dot_product_attention(x, x, x), x)


def on_a_cpu(*shape: int) -> jax.Array:
    return jax.device_put(jnp.ones(shape), jax.devices("cpu")[0])


@pytest.mark.filterwarnings("error")
def test_arrays_on_a_cpu_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default backend is a GPU then. Arrays say where a call runs; traced ones are taken to lie where it can."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def run(x: jax.Array) -> jax.Array:
        return jattn.dot_product_attention(x, x, x, implementation="cpu").sum()

    jattn.reset_call_counters()
    for transformed in (run, jax.jit(run), jax.grad(run)):
        transformed(on_a_cpu(1, 4, 2, 8))
    wide = on_a_cpu(1, 4, 2, 600)  # which no kernel of a GPU takes
    jattn.dot_product_attention(wide, wide, wide)
    assert jattn.explain(wide, wide, wide).chosen == "cpu"
    assert jattn.select_backend(wide, wide, wide) == "cpu"
    assert jattn.call_counters() == {"cpu": {"forward": 4, "backward": 1}}


def test_a_backend_of_a_gpu_refuses_arrays_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x = on_a_cpu(1, 4, 2, 8).astype("bfloat16")
    refused = pytest.raises(jattn.NoBackendError, match="PLATFORM: device is cpu")
    with refused, pytest.warns(UserWarning, match="PLATFORM"):
        jattn.dot_product_attention(x, x, x, implementation="flash")


@pytest.mark.parametrize("kind", ["cuda", "rocm"])
def test_both_kinds_of_gpu_are_told_apart(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX says "gpu" of both, and "cuda" or "rocm" when it lowers."""

    def devices(platform: str) -> list[Any]:
        if platform != kind:
            raise RuntimeError(f"no {platform} here")
        return []

    monkeypatch.setattr(jax, "devices", devices)
    jattn.device._lowering_platform.cache_clear()
    try:
        assert jattn.device._lowering_platform("gpu") == kind
    finally:
        jattn.device._lowering_platform.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((5,), "platform is 5, must be a name"),
        (("",), "platform is '', must be a name"),
        (("CUDA", (9, 0)), "platform is 'CUDA', must be a name"),
        ((["cuda"],), r"platform is \['cuda'\], must be a name"),
        (("cuda", (True, False)), r"arch is \(True, False\), must be"),
        (("cuda", (9, 0), "9.1"), "cudnn is '9.1', must be an integer"),
    ],
)
def test_devices_that_there_are_not(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=f"jattn.Device: {words}"):
        jattn.Device(*arguments)
    assert str(jattn.Device("METAL")) == "METAL"  # as JAX calls it
