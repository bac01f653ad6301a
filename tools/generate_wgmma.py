"""Writes cc/kernels/sm90/wgmma_shapes.cuh: one wgmma wrapper per tile width.

Inline assembly names every accumulator register, so a width cannot be a template argument of one function. The text
is regular and long; this script owns it. Run it after changing WIDTHS:

    python3 tools/generate_wgmma.py | clang-format > cc/kernels/sm90/wgmma_shapes.cuh
"""

from __future__ import annotations

# Columns of one wgmma, multiples of 8 up to 256: tiles of keys or queries, head dims, parts of dq. Those that plans ask
# for (jattn/backends/flash_tiles.py, flash_backward_tiles.py), and 80 of tools/bench_sm90_backward.py.
WIDTHS = (32, 64, 80, 96, 128, 192, 256)

HEADER = """\
// wgmma.mma_async for every tile width in use. Written by tools/generate_wgmma.py: change that, not this.
//
// d is the m64nNk16 float accumulator of one warpgroup (64 rows, N columns; each thread holds N / 2 values).
// kAccumulate false starts from zero and leaves the old values unread.
// kTransposeA, kTransposeB: 0 when the operand is K-major in shared memory, 1 when it is MN-major.
// Source: PTX ISA, asynchronous warpgroup level matrix instructions.
#pragma once

#include "config.cuh"

namespace jattn::sm90 {

// The name of an element type in PTX, for the "C" operand of inline assembly.
template <Element kElement>
struct PtxType;
template <>
struct PtxType<Element::kF16> {
  static constexpr char kName[] = "f16";
};
template <>
struct PtxType<Element::kBF16> {
  static constexpr char kName[] = "bf16";
};

template <int kColumns>
struct Wgmma;
"""

FOOTER = """
}  // namespace jattn::sm90
"""


def wrapped(items: list[str], indent: str, quote: bool) -> str:
    """Joins `items` with commas, a few per line; with `quote`, as pieces of a string literal."""
    per_line = 16 if quote else 6
    lines = [items[i : i + per_line] for i in range(0, len(items), per_line)]
    if quote:
        texts = [", ".join(line) for line in lines]
        return "\n".join(
            f'{indent}"{text}{", " if i + 1 < len(texts) else ""}"' for i, text in enumerate(texts)
        )
    return (",\n" + indent).join(", ".join(line) for line in lines)


def statement(columns: int, from_registers: bool, accumulate: bool) -> str:
    """Returns one asm statement: A from shared memory or from four registers, adding to d or starting at zero."""
    count = columns // 2
    registers = wrapped([f"%{i}" for i in range(count)], " " * 11, quote=True)
    # "+f" also where the old value is unread: with "=f" the compiler keeps the values of the last tile in other
    # registers than the accumulator and spills (250 bytes at head_dim 64 with three consumer warpgroups).
    outputs = wrapped([f'"+f"(d[{i}])' for i in range(count)], " " * 13, quote=False)
    n = count
    if from_registers:
        operand_a, n = f"{{%{n}, %{n + 1}, %{n + 2}, %{n + 3}}}", n + 4
        inputs = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB), '
        operands = f"{operand_a}, %{n}, {int(accumulate)}, 1, 1, %{n + 1}"
        n += 2
    else:
        inputs = '"l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB), '
        operands = f"%{n}, %{n + 1}, {int(accumulate)}, 1, 1, %{n + 2}, %{n + 3}"
        n += 4
    return f"""\
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.%{n}.%{n} {{"
{registers}
          "}}, {operands};"
           : {outputs}
           : {inputs}"C"(PtxType<kElement>::kName));"""


def shape(columns: int) -> str:
    """Returns the specialisation of Wgmma for one width."""
    count = columns // 2

    def body(from_registers: bool) -> str:
        return f"""\
    if constexpr (kAccumulate) {{
{statement(columns, from_registers, True)}
    }} else {{
{statement(columns, from_registers, False)}
    }}"""

    return f"""
template <>
struct Wgmma<{columns}> {{
  // A and B by descriptor.
  template <Element kElement, bool kAccumulate, int kTransposeA, int kTransposeB>
  static __device__ __forceinline__ void shared(float (&d)[{count}], unsigned long long a, unsigned long long b) {{
{body(False)}
  }}

  // A in registers (the fragment of a 64 x 16 tile), B by descriptor.
  template <Element kElement, bool kAccumulate, int kTransposeB>
  static __device__ __forceinline__ void registers(float (&d)[{count}], const unsigned* a, unsigned long long b) {{
{body(True)}
  }}
}};
"""


def main() -> None:
    """Prints the header."""
    print(HEADER + "".join(shape(columns) for columns in WIDTHS) + FOOTER, end="")


if __name__ == "__main__":
    main()
