"""The words in which jattn refuses: reasons, the exception that carries them, the fallback warning."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

_PACKAGE = str(Path(__file__).parent / "_").removesuffix("_")  # with the separator behind it


@dataclasses.dataclass(frozen=True)
class Reason:
    """Says why one backend cannot run one problem.

    Attributes:
      backend: name of the backend that refuses.
      code: one of the codes of ``REASON_CODES``; programs and tests read it.
      argument: the argument (or fact of the machine) that is in the way.
      actual: its value.
      rule: what the backend requires of it.
      remedy: what the caller can do.

    Raises:
      ValueError: an unknown code.
    """

    backend: str
    code: str
    argument: str
    actual: object
    rule: str
    remedy: str

    def __post_init__(self) -> None:
        if self.code not in REASON_CODES:
            raise ValueError(f"Reason: code {self.code!r} is not one of {sorted(REASON_CODES)}")

    def __str__(self) -> str:
        phrase = REASON_CODES[self.code]
        return (
            f"{self.code}: {self.argument} is {self.actual}, {self.rule}: {self.remedy}"
            f" [{self.backend} {phrase}]"
        )


# Code -> the phrase that stands in every text with that code. Programs for other libraries look for some of these, and
# for the rules of PLATFORM and DTYPE (backends/base.py).
REASON_CODES: Mapping[str, str] = {
    "DISABLED": "has been runtime disabled",
    "NOT_BUILT": "was not compiled with this support",
    "PLATFORM": "runs on other devices",
    "ARCH": "only supports gpu architectures in the range it was written for",
    "DTYPE": "does not compute in this dtype",
    "HEAD_DIM": "requires q,k,v to have a last dimension less than or equal to its limit",
    "MASK": "does not support non-null attn_mask",
    "FEATURE": "does not support this feature",
    "PRIMITIVE": "does not support this operation in score_mod",
    "CAPTURE_ACCESS": "does not support this use of an array in score_mod",
    "CAPTURES": "does not support so many captured buffers in score_mod",
    "DETERMINISTIC": "is not deterministic",
    "SYMBOLIC": "needs extents that are known numbers",
    "RAGGED_BATCH": "needs as many sequences in query, key and value",
    "RAGGED_BROADCAST": "needs a broadcastable num heads",
    "RAGGED_KV_BROADCAST": "if one of key and value is broadcast, the other must have a consistent seq_len dim",
    "RAGGED_ZERO_LEN": "do not support seq_len == 0",
}


class NoBackendError(RuntimeError):
    """Raised while tracing when no enabled backend can run a correct call.

    Attributes:
      reasons: every reason of every backend that was asked, in the order they were asked.
    """

    def __init__(self, message: str, reasons: tuple[Reason, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons


class FallbackWarning(UserWarning):
    """Issued once per problem when a much slower backend stands in for the platform's fused ones."""


def describe_refusals(header: str, refusals: Mapping[str, tuple[Reason, ...]]) -> str:
    """Words a refusal: the header, then one block per backend with all its reasons."""
    lines = [header]
    for backend, reasons in refusals.items():
        lines.append(f"{backend} kernel not used because:")
        lines.extend(lines_of(reasons))
    return "\n".join(lines)


def lines_of(reasons: Sequence[Reason]) -> list[str]:
    """One line for each reason; those that differ in the value alone share one, for rules may be long lists."""
    values: dict[Reason, list[str]] = {}
    for reason in reasons:
        values.setdefault(dataclasses.replace(reason, actual=None), []).append(str(reason.actual))
    return [
        f"  - {dataclasses.replace(reason, actual=', '.join(dict.fromkeys(own)))}"
        for reason, own in values.items()
    ]


def warn_caller(text: str, category: type[Warning]) -> None:
    """Warns at the line outside of this package and of JAX that has led here."""

    def is_inside(file: str) -> bool:
        return file.startswith(_PACKAGE) or "/jax/_src/" in file

    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and is_inside(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
