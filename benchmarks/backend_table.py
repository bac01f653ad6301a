"""The table of what each backend runs, found by asking the backends: no entry is written by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

from jattn import backends
from jattn.backends.base import Backend, missing_features
from jattn.device import Device
from jattn.masks import Band
from jattn.spec import FEATURES, FLOAT_DTYPES, Dropout, Spec

HOPPER = Device("cuda", arch=(9, 0))
CPU = Device("cpu")
ARCHS = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
LARGEST_HEAD_DIM_ASKED = 1024

# The arguments behind each feature of a problem; a feature that is not here fails the check of the tables.
ARGUMENTS = {
    "bias": "`bias`, any broadcast form",
    "mask": "`mask`, bool, any broadcast form",
    "band": "`is_causal`, `local_window_size`, either alignment",
    "lengths": "`query_seq_lengths`, `key_value_seq_lengths`",
    "segments": "segment ids",
    "softcap": "`logits_soft_cap`",
    "grouped_heads": "fewer key heads than query heads",
    "value_head_dim": "another head dim for values",
    "negative_scale": "`scale` of 0 or below",
    "positions": "`query_positions`, `key_value_positions`",
    "sinks": "`sinks`",
    "alibi_slopes": "`alibi_slopes`",
    "dropout": "dropout",
    "dropout_rows": "dropout over packed sequences",
}

_PLAIN = Spec(2, 256, 256, 4, 4, 64, 64, "float32", 0.125)


def _problem(feature: str, dtype: str) -> Spec:
    """A plain problem with one feature."""
    changes: dict[str, dict[str, Any]] = {
        "bias": {"bias": (1, 4, 256, 256), "bias_dtype": dtype},
        "mask": {"mask": (2, 1, 256, 256)},
        "band": {"band": Band(left=64, right=0, lower_right=True)},
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
    }
    spec = dataclasses.replace(_PLAIN, dtype=dtype, **changes[feature])
    assert feature in spec.features()
    return spec


def _runs(backend: Backend, spec: Spec, device: Device, *, needs_grad: bool = True) -> bool:
    refusals = missing_features(backend, spec)
    refusals += backend.unsupported(spec, device, needs_grad=needs_grad, determinism="off")
    return not refusals


def _listed() -> list[tuple[Backend, Device]]:
    """Every backend, in the order of preference, on a device that it is made for."""
    found: dict[str, tuple[Backend, Device]] = {}
    for platform, device in (("cuda", HOPPER), ("cpu", CPU)):
        for backend in backends.ORDER[platform]:
            found[backend.name] = (backend, device)
    return sorted(found.values(), key=lambda pair: backends.KNOWN_NAMES.index(pair[0].name))


def _dtype(backend: Backend, device: Device) -> str:
    """A dtype that the backend takes."""
    return next(
        d for d in FLOAT_DTYPES if _runs(backend, dataclasses.replace(_PLAIN, dtype=d), device)
    )


def _devices(backend: Backend) -> str:
    dtype = _dtype(backend, CPU if backend.name == "cpu" else HOPPER)
    plain = dataclasses.replace(_PLAIN, dtype=dtype)
    archs = [arch for arch in ARCHS if _runs(backend, plain, Device("cuda", arch=arch))]
    names = [f"sm_{major}{minor}" for major, minor in archs]
    if _runs(backend, plain, Device("tpu")):
        return "all"
    if archs:
        return names[0] if len(names) == 1 else f"{names[0]} and later"
    return "CPU"


def _dtypes(backend: Backend, device: Device) -> str:
    names = [
        d for d in FLOAT_DTYPES if _runs(backend, dataclasses.replace(_PLAIN, dtype=d), device)
    ]
    return "all" if len(names) == len(FLOAT_DTYPES) else ", ".join(names)


def _largest_head_dim(backend: Backend, device: Device) -> str:
    dtype = _dtype(backend, device)
    dims = [
        dim
        for dim in range(8, LARGEST_HEAD_DIM_ASKED + 1, 8)
        if _runs(
            backend, dataclasses.replace(_PLAIN, head_dim=dim, head_dim_v=dim, dtype=dtype), device
        )
    ]
    return "any" if dims[-1] == LARGEST_HEAD_DIM_ASKED else str(dims[-1])


def _answer(backend: Backend, device: Device, feature: str) -> str:
    spec = _problem(feature, _dtype(backend, device))
    if _runs(backend, spec, device):
        return "yes"
    return "forward" if _runs(backend, spec, device, needs_grad=False) else "no"


def rows() -> list[list[str]]:
    """The header, then one row for devices, dtypes, the head dim and each feature."""
    listed = _listed()
    return [
        ["", *(f"`{backend.name}`" for backend, _ in listed)],
        ["devices", *(_devices(backend) for backend, _ in listed)],
        ["dtypes", *(_dtypes(backend, device) for backend, device in listed)],
        ["largest head dim", *(_largest_head_dim(backend, device) for backend, device in listed)],
        *(
            [ARGUMENTS[feature], *(_answer(backend, device, feature) for backend, device in listed)]
            for feature in FEATURES
        ),
    ]


def summary() -> list[list[str]]:
    """One row for each backend, with what it does not run."""
    found = [["backend", "devices", "dtypes", "head dim", "does not run"]]
    for backend, device in _listed():
        answers = {f: _answer(backend, device, f) for f in FEATURES}
        refused = [f for f in FEATURES if answers[f] == "no"]
        refused += [f"gradients with {ARGUMENTS[f]}" for f in FEATURES if answers[f] == "forward"]
        found.append(
            [
                f"`{backend.name}`",
                _devices(backend),
                _dtypes(backend, device),
                f"up to {_largest_head_dim(backend, device)}".replace("up to any", "any"),
                ", ".join(refused).replace("_", " ") or "nothing",
            ]
        )
    return found
