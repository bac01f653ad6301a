"""The check of `benchmarks.check` by PyTorch, without compilation: for runs whose time is dear.

Textbook attention in float64, one query head of one key/value head after the other; everything stays on the device.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from benchmarks.arrays import Arrays
from benchmarks.check import ERROR_FACTORS, ULPS, Verdict, num_blocks
from jattn.testing.cases import Case


class Oracle:
    """What out, dq, dk and dv of the last key/value head of the last batch entry should be, and may differ by."""

    def __init__(self, case: Case, arrays: Arrays) -> None:
        import torch

        self._case = case
        self._arrays = arrays
        self._visible = _visible(case, arrays)
        torch.backends.cuda.matmul.allow_tf32 = False
        exact = self._solve(torch.float64, rounded=False)
        rough = self._solve(torch.float32, rounded=True)
        self._want = exact
        self._allowed = {}
        epsilon = torch.finfo(getattr(torch, case.dtype)).eps
        for name, tensor in exact.items():
            error = _largest(rough[name].double() - tensor)
            self._allowed[name] = ERROR_FACTORS[name] * error + ULPS * epsilon * _largest(tensor)
        self._visible = None

    def judge(self, results: dict[str, object]) -> Verdict:
        """Compares results, full arrays in the public layout; padding has to be gone already."""
        ratios = {}
        for name, result in results.items():
            got = _tensor(result)[-1].transpose(0, 1)
            got = got[self._heads if name in ("out", "dq") else slice(-1, None)]
            want = self._want[name]
            if got.shape != want.shape:
                ratios[name] = float("nan")
            else:
                ratios[name] = float((_largest(got.double() - want) / self._allowed[name]).max())
        return Verdict(ratios)

    @property
    def _heads(self) -> slice:
        return slice(-self._case.group_size, None)

    def _solve(self, wide: Any, *, rounded: bool) -> dict[str, Any]:
        """Solves with arrays of type `wide`, rounding P, dP, dS and the results to the case's type if asked to."""
        import torch

        case, narrow = self._case, getattr(torch, self._case.dtype)

        def low(x: Any) -> Any:
            return x.to(narrow).to(wide) if rounded else x

        q, k, v, dout = (
            _tensor(x)[-1].transpose(0, 1).to(wide)
            for x in (self._arrays.q, self._arrays.k, self._arrays.v, self._arrays.dout)
        )
        k, v = k[-1], v[-1]
        heads: dict[str, list[Any]] = {"out": [], "dq": []}
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for q_head, dout_head in zip(q[self._heads], dout[self._heads], strict=True):
            s = case.scale_value * (q_head @ k.T)
            if self._visible is not None:
                s.masked_fill_(~self._visible, float("-inf"))
            p = torch.softmax(s, dim=-1)
            del s
            out = low(low(p) @ v)
            ds = low(dout_head @ v.T)
            dv += low(p).T @ dout_head
            ds -= (dout_head * out).sum(-1, keepdim=True)
            ds *= p
            ds = low(ds)
            heads["out"].append(out)
            heads["dq"].append(low(case.scale_value * (ds @ k)))
            dk += case.scale_value * (ds.T @ q_head)
        stacked = {name: torch.stack(tensors) for name, tensors in heads.items()}
        return stacked | {"dk": low(dk)[None], "dv": low(dv)[None]}


def _largest(x: Any) -> Any:
    """The largest size of a number in each block of rows of (heads, rows, features)."""
    import torch

    return torch.stack([part.abs().max() for part in x.tensor_split(num_blocks(x.shape[-2]), -2)])


def _tensor(array: object) -> Any:
    import torch

    return torch.from_dlpack(jax.block_until_ready(array))


def _visible(case: Case, arrays: Arrays) -> Any:
    """The pairs (T, S) that take part in the last batch entry; None: all."""
    import torch

    if arrays.mask is not None or arrays.bias is not None or case.softcap is not None:
        raise ValueError(f"{case.name}: the check knows neither masks nor biases nor softcaps")
    if arrays.q_lengths is not None or arrays.kv_lengths is not None or case.lower_right:
        raise ValueError(f"{case.name}: the check knows neither lengths nor the lower right")
    device = _tensor(arrays.q).device
    t = torch.arange(case.q_len, device=device)[:, None]
    j = torch.arange(case.kv_len, device=device)[None]
    left, right = case.band
    visible = None
    if right is not None:
        visible = j <= t + right
    if left is not None:
        visible = (j >= t - left) if visible is None else visible & (j >= t - left)
    if arrays.q_segments is not None and arrays.kv_segments is not None:
        q_ids, kv_ids = (
            torch.from_numpy(np.ascontiguousarray(ids[-1])).to(device)
            for ids in (arrays.q_segments, arrays.kv_segments)
        )
        same = (q_ids[:, None] == kv_ids[None]) & (q_ids[:, None] >= 0)
        visible = same if visible is None else visible & same
    return visible
