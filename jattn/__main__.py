"""The command ``python -m jattn``: info, explain, cache."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

import jattn
from jattn import config, dispatch, ffi
from jattn.jax_interface import cudnn_version
from jattn.spec import FLOAT_DTYPES


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _info(_: argparse.Namespace) -> int:
    print(f"jattn {jattn.__version__}, Python {platform.python_version()}, {platform.platform()}")
    for package in ("jax", "jaxlib", "jax-cuda13-plugin", "numpy", "flax"):
        print(f"  {package:18s} {_version(package)}")
    print("devices")
    for found in jax.devices():
        print(f"  {found.platform} {found.device_kind}")
    missing = ffi.register_targets()
    if missing:
        print(f"native module: missing ({missing})")
        return 1
    from jattn import _core

    print("native module")
    print(
        f"  CPU instruction sets  {', '.join(_core.cpu_instruction_sets())};"
        f" in use: {_core.cpu_active_instruction_set()}"
    )
    print(f"  NVIDIA driver         {_core.driver_status()}")
    print(f"  NVRTC                 {_core.nvrtc_status()}")
    print(f"  cuDNN                 {cudnn_version() or 'none that XLA calls'}")
    hot = _core.hot_set()
    print(f"  kernels built in      {len(hot)}")
    cache = _core.cache_info()
    state = (
        cache["problem"]
        or cache["write_problem"]
        or ("in use" if cache["enabled"] else "switched off")
    )
    print(
        f"  kernel cache          {cache['folder']}: {cache['num_entries']} entries,"
        f" {cache['num_bytes'] / 1e6:.1f} MB, {state}"
    )
    print(f"options\n  {config.current_options()}")
    print(f"environment\n  {config.environment()}")
    print(f"backends\n  {', '.join(dispatch.known_names())}")
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    shape = (arguments.batch, arguments.q_len, arguments.heads, arguments.head_dim)
    kv_len = arguments.q_len if arguments.kv_len is None else arguments.kv_len
    kv_heads = arguments.heads if arguments.kv_heads is None else arguments.kv_heads
    kv_shape = (arguments.batch, kv_len, kv_heads, arguments.head_dim)
    named = arguments.value_head_dim
    value_shape = (*kv_shape[:3], arguments.head_dim if named is None else named)
    options: dict[str, Any] = {
        "is_causal": arguments.causal,
        "local_window_size": tuple(arguments.window) if arguments.window else None,
        "logits_soft_cap": arguments.softcap,
    }
    q_ids = jax.ShapeDtypeStruct((arguments.batch, arguments.q_len), jnp.int32)
    kv_ids = jax.ShapeDtypeStruct((arguments.batch, kv_len), jnp.int32)
    per_head = jax.ShapeDtypeStruct((arguments.heads,), jnp.float32)
    if arguments.lengths:
        options["key_value_seq_lengths"] = jax.ShapeDtypeStruct((arguments.batch,), jnp.int32)
    if arguments.segments:
        options |= {"query_segment_ids": q_ids, "key_value_segment_ids": kv_ids}
    if arguments.positions:
        options |= {"query_positions": q_ids, "key_value_positions": kv_ids}
    if arguments.sinks:
        options["sinks"] = per_head
    if arguments.alibi:
        options["alibi_slopes"] = per_head
    if arguments.dropout:
        options |= {"dropout_rate": arguments.dropout, "dropout_key": jax.random.key(0)}
    dtype = jnp.dtype(arguments.dtype)
    scores_shape = (1, arguments.heads, arguments.q_len, kv_len)
    # JAX has no float64 unless it is told to.
    with jax.enable_x64(dtype == "float64" or jax.config.values["jax_enable_x64"]):
        found = jattn.explain(
            jax.ShapeDtypeStruct(shape, dtype),
            jax.ShapeDtypeStruct(kv_shape, dtype),
            jax.ShapeDtypeStruct(value_shape, dtype),
            jax.ShapeDtypeStruct(scores_shape, dtype) if arguments.bias else None,
            jax.ShapeDtypeStruct(scores_shape, jnp.bool_) if arguments.mask else None,
            needs_grad=arguments.grad,
            device=arguments.device,
            timed=arguments.time,
            **options,
        )
        print(json.dumps(found.as_dict(), indent=1) if arguments.json else found)
    return 0 if found.chosen else 1


def _device(text: str) -> jattn.Device:
    name, _, arch = text.partition(":")
    major, _, minor = arch.partition(".")
    if arch and not (major.isdecimal() and (minor or "0").isdecimal()):
        raise argparse.ArgumentTypeError(
            f"is {text!r}, must be a platform, or one with a compute capability as in cuda:9.0"
        )
    try:
        return jattn.Device(name, arch=(int(major), int(minor or 0)) if arch else None)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _extent(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"is {text!r}, must be an integer from 0 on")
    return int(text)


def _cache(arguments: argparse.Namespace) -> int:
    if missing := ffi.register_targets():
        print(f"native module: missing ({missing})", file=sys.stderr)
        return 1
    from jattn import _core

    if arguments.clear:
        print(f"removed {_core.cache_clear()} entries from {_core.cache_info()['folder']}")
        return 0
    cache = _core.cache_info()
    for name in ("folder", "enabled", "problem", "write_problem", "num_entries", "num_bytes"):
        print(f"{name:14s} {cache[name]}")
    return 0


# Options of ``explain`` that a call has or has not; each is off by default.
_FLAGS = {
    "causal": "is_causal",
    "bias": "a bias (1, heads, query length, key length) of the dtype",
    "mask": "a bool mask of that shape",
    "lengths": "key_value_seq_lengths",
    "segments": "segment ids",
    "positions": "query_positions and key_value_positions",
    "sinks": "sinks, one a head",
    "alibi": "alibi_slopes, one a head",
    "grad": "with the backward pass",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jattn", description="Asks jattn about this machine and about a call."
    )
    commands = parser.add_subparsers(required=True)
    info = commands.add_parser("info", help="versions, devices, libraries, caches, options")
    info.set_defaults(run=_info)

    explain = commands.add_parser(
        "explain", help="which backend would run a call, and why the others would not"
    )
    add = explain.add_argument
    add("--batch", type=_extent, default=2, help="batch entries (default: %(default)s)")
    add("--q-len", type=_extent, default=2048, help="query length (default: %(default)s)")
    add("--kv-len", type=_extent, help="key length (default: --q-len)")
    add("--heads", type=_extent, default=16, help="query heads (default: %(default)s)")
    add("--kv-heads", type=_extent, help="key/value heads (default: --heads)")
    add("--head-dim", type=_extent, default=128, help="of query and key (default: %(default)s)")
    add("--value-head-dim", type=_extent, help="of the values (default: --head-dim)")
    add(
        "--dtype",
        choices=FLOAT_DTYPES,
        default="bfloat16",
        help="of query, key and value (default: %(default)s)",
    )
    add(
        "--window",
        type=int,
        nargs=2,
        metavar=("LEFT", "RIGHT"),
        help="local_window_size; -1: no limit (default: none)",
    )
    add("--softcap", type=float, metavar="CAP", help="logits_soft_cap (default: none)")
    add("--dropout", type=float, metavar="RATE", help="of attention weights (default: none)")
    for flag, text in _FLAGS.items():
        add(f"--{flag}", action="store_true", help=text)
    explain.add_argument(
        "--device",
        type=_device,
        help="cpu, or cuda:9.0 for another machine's GPU (default: this machine)",
    )
    explain.add_argument(
        "--time", action="store_true", help="run each pass on random arrays, and a matrix product"
    )
    explain.add_argument("--json", action="store_true", help="print a dictionary")
    explain.set_defaults(run=_explain)

    cache = commands.add_parser(
        "cache", help="the CUDA kernel cache on disk: folder, entries, bytes"
    )
    cache.add_argument("--clear", action="store_true", help="remove its entries")
    cache.set_defaults(run=_cache)
    return parser


def main() -> int:
    """Runs the command line; returns the exit status."""
    arguments = _parser().parse_args()
    try:
        status: int = arguments.run(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
