"""The table of what each backend runs, found by asking the backends: no entry is written by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

from jattn import backends
from jattn.backends.base import Backend, missing_features
from jattn.device import Device
from jattn.masks import Band
from jattn.score_program import trace
from jattn.spec import FLOAT_DTYPES, Dropout, Spec

ARCHS = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
GPUS = tuple(Device("cuda", arch=arch) for arch in ARCHS)
CPU = Device("cpu")
LARGEST_HEAD_DIM_ASKED = 1024

# The arguments behind each feature of a problem; a feature that is not here fails the check of the tables. "causal" and
# "causal_window" are bands that every backend has.
ARGUMENTS = {
    "causal": "`is_causal`, upper left",
    "bias": "`bias`, any broadcast form",
    "mask": "`mask`, bool, any broadcast form",
    "causal_window": "causal `local_window_size`, upper left",
    "band": "`local_window_size` other than causal, lower-right alignment",
    "lengths": "`query_seq_lengths`, `key_value_seq_lengths`",
    "segments": "segment ids",
    "softcap": "`logits_soft_cap`",
    "grouped_heads": "fewer key/value heads than query heads",
    "value_head_dim": "another head dim for values",
    "negative_scale": "`scale` of 0 or below",
    "positions": "`query_positions`, `key_value_positions`",
    "sinks": "`sinks`",
    "alibi_slopes": "`alibi_slopes`",
    "dropout": "dropout",
    "dropout_rows": "dropout over packed sequences",
    "score_mod": "`score_mod`",
}

_PROGRAM, _ = trace(lambda score, *_: 2 * score, (), 2)
_PLAIN = Spec(2, 256, 256, 4, 4, 64, 64, "float32", 0.125)


def _problem(feature: str, dtype: str) -> Spec:
    """A plain problem with one feature."""
    changes: dict[str, dict[str, Any]] = {
        "bias": {"bias": (1, 4, 256, 256), "bias_dtype": dtype},
        "mask": {"mask": (2, 1, 256, 256)},
        "causal": {"band": Band(right=0)},
        "causal_window": {"band": Band(left=64, right=0)},
        "band": {"band": Band(left=64, right=32, lower_right=True)},
        "lengths": {"q_lengths": True, "kv_lengths": True},
        "segments": {"segments": True},
        "softcap": {"softcap": 30.0},
        "grouped_heads": {"num_kv_heads": 2},
        "value_head_dim": {"head_dim_v": 32},
        "negative_scale": {"scale": -0.125},
        "positions": {"positions": True},
        "sinks": {"sinks": (1, 4)},
        "alibi_slopes": {"alibi_slopes": (1, 4)},
        "dropout": {"dropout": Dropout(keys=(2, 4))},
        "dropout_rows": {
            "dropout": Dropout(keys=(8, 4), rows=True),
            "segments": True,
            "positions": True,
        },
        "score_mod": {"score_mod": _PROGRAM},
    }
    spec = dataclasses.replace(_PLAIN, dtype=dtype, **changes[feature])
    assert ("band" if feature.startswith("causal") else feature) in spec.features()
    return spec


def _runs(backend: Backend, spec: Spec, device: Device, *, needs_grad: bool = True) -> bool:
    refusals = missing_features(backend, spec)
    refusals += backend.unsupported(spec, device, needs_grad=needs_grad, determinism="off")
    return not refusals


def _listed() -> list[Backend]:
    """Every backend, in the order of preference."""
    chosen = [b for platform in ("cuda", "cpu") for b in backends.ORDER[platform]]
    found = {b.name: b for b in (*chosen, *backends.BY_NAME_ONLY)}
    return sorted(found.values(), key=lambda b: backends.KNOWN_NAMES.index(b.name))


def _places(backend: Backend) -> list[tuple[Device, str]]:
    """The devices and dtypes with which the backend runs the plain problem."""
    return [
        (device, dtype)
        for device in (*GPUS, CPU)
        for dtype in FLOAT_DTYPES
        if _runs(backend, dataclasses.replace(_PLAIN, dtype=dtype), device)
    ]


def _arch_name(device: Device) -> str:
    assert device.arch is not None
    return f"sm_{device.arch[0]}{device.arch[1]}"


def _devices(backend: Backend) -> str:
    found = {device for device, _ in _places(backend)}
    names = [_arch_name(device) for device in GPUS if device in found]
    if _runs(backend, _PLAIN, Device("tpu")):
        return "all"
    if names:
        return names[0] if len(names) == 1 else f"{names[0]} and later"
    return "CPU"


def _dtypes(backend: Backend) -> str:
    found = {dtype for _, dtype in _places(backend)}
    names = [dtype for dtype in FLOAT_DTYPES if dtype in found]
    return "all" if len(names) == len(FLOAT_DTYPES) else ", ".join(names)


def _head_dim_that_runs(backend: Backend, device: Device, dtype: str, *, needs_grad: bool) -> int:
    """The largest head dim of query, key and value."""
    return max(
        dim
        for dim in range(8, LARGEST_HEAD_DIM_ASKED + 1, 8)
        if _runs(
            backend,
            dataclasses.replace(_PLAIN, head_dim=dim, head_dim_v=dim, dtype=dtype),
            device,
            needs_grad=needs_grad,
        )
    )


def _largest_head_dim(backend: Backend) -> str:
    """The largest head dim, then in brackets where it is smaller."""
    found = {
        (device, dtype, needs_grad): _head_dim_that_runs(
            backend, device, dtype, needs_grad=needs_grad
        )
        for device, dtype in _places(backend)
        for needs_grad in (False, True)
    }
    largest = max(found.values())
    smaller: dict[tuple[str, int], list[str]] = {}
    for (device, dtype, needs_grad), dim in found.items():
        forward_dim = found[device, dtype, False]
        if dim < largest and (not needs_grad or dim < forward_dim):
            problem = f"{dtype} with gradients" if needs_grad else dtype
            smaller.setdefault((problem, dim), []).append(_arch_name(device))
    if largest == LARGEST_HEAD_DIM_ASKED:
        assert not smaller
        return "any"
    notes: dict[str, list[str]] = {}
    for (problem, dim), archs in smaller.items():
        notes.setdefault(f"{dim} on {', '.join(archs)}", []).append(problem)
    every = sorted({dtype for _, dtype in _places(backend)})
    texts = [
        note if sorted(problems) == every else f"{', '.join(problems)}: {note}"
        for note, problems in notes.items()
    ]
    return f"{largest} ({'; '.join(texts)})" if texts else str(largest)


def _answer(backend: Backend, feature: str) -> str:
    """Whether the backend runs the feature wherever it runs the plain problem."""
    asked = [(_problem(feature, dtype), device) for device, dtype in _places(backend)]
    if all(_runs(backend, spec, device) for spec, device in asked):
        return "yes"
    runs_forward = all(_runs(backend, spec, device, needs_grad=False) for spec, device in asked)
    return "forward only" if runs_forward else "no"


def rows() -> list[list[str]]:
    """The header, then one row for devices, dtypes, the head dim and each feature."""
    listed = _listed()
    return [
        ["", *(f"`{backend.name}`" for backend in listed)],
        ["devices", *(_devices(backend) for backend in listed)],
        ["dtypes", *(_dtypes(backend) for backend in listed)],
        ["largest head dim", *(_largest_head_dim(backend) for backend in listed)],
        *(
            [ARGUMENTS[feature], *(_answer(backend, feature) for backend in listed)]
            for feature in ARGUMENTS
        ),
    ]


def summary() -> list[list[str]]:
    """One row for each backend, with the features it refuses."""
    found = [["backend", "devices", "dtypes", "head dim", "features it refuses"]]
    for backend in _listed():
        answers = {f: _answer(backend, f) for f in ARGUMENTS}
        refused = [ARGUMENTS[f] for f in ARGUMENTS if answers[f] == "no"]
        refused += [
            f"gradients with {ARGUMENTS[f]}" for f in ARGUMENTS if answers[f] == "forward only"
        ]
        found.append(
            [
                f"`{backend.name}`",
                _devices(backend),
                _dtypes(backend),
                f"up to {_largest_head_dim(backend)}".replace("up to any", "any"),
                "; ".join(refused) or "none",
            ]
        )
    return found
