"""Draws the pictures of docs/how_a_kernel_works.md: python docs/images/draw.py writes the SVG files beside this one."""

from __future__ import annotations

from html import escape
from pathlib import Path

INK, MUTED, PAPER = "#1f2933", "#66727f", "#ffffff"
BLUE, GREEN, AMBER, RED, GREY = "#b9d6f2", "#bfe3c0", "#fbdf9d", "#f4b6ae", "#e4e7eb"


class Picture:
    """An SVG text under construction; lengths in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
            f' viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" role="img">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
            f' orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="6" fill="{PAPER}"/>',
        ]

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, text: str = "", size: int = 12
    ) -> None:
        """A rectangle with centred lines of text."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="2" fill="{fill}" stroke="{INK}"'
            ' stroke-width="0.8"/>'
        )
        lines = text.split("\n") if text else []
        for number, line in enumerate(lines):
            below = (number - (len(lines) - 1) / 2) * (size + 3)
            self.text(x + w / 2, y + h / 2 + size * 0.35 + below, line, size, "middle")

    def text(
        self, x: float, y: float, text: str, size: int = 12, anchor: str = "start", fill: str = INK
    ) -> None:
        """One line of text; y is its base line."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" xml:space="preserve"'
            f' text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> None:
        """A line with a tip at its end."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" stroke-width="1.2"{dash}'
            ' marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        """The finished text."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def tiles() -> Picture:
    """Which tiles of the scores a causal window of documents visits."""
    picture = Picture(700, 300, "Tiles of the score matrix")
    size, left, top = 30, 70, 40
    window, border = 3, 5
    for row in range(8):
        for column in range(8):
            same = (row < border) == (column < border)
            if column > row or not same or column < row - window:
                fill = GREY
            elif column in (row, row - window):
                fill = AMBER
            else:
                fill = GREEN
            picture.box(left + column * size, top + row * size, size - 2, size - 2, fill)
    picture.text(left, top - 12, "keys, 128 a tile", 12)
    picture.text(left - 12, top + 130, "queries", 12, "end")
    for y, fill, title, lines in (
        (
            60,
            GREEN,
            "whole",
            ["every pair is visible: two products and a softmax,", "no comparison at all"],
        ),
        (
            130,
            AMBER,
            "mixed",
            ["a border of the mask runs through it:", "pairs are compared and set to -inf"],
        ),
        (
            200,
            GREY,
            "skipped",
            [
                "no pair is visible: not copied, not multiplied;",
                "found from positions, lengths, ranges of ids",
            ],
        ),
    ):
        picture.box(350, y, 24, 24, fill)
        picture.text(386, y + 11, title, 13)
        for number, line in enumerate(lines):
            picture.text(386, y + 28 + 15 * number, line, 11, fill=MUTED)
    return picture


def online_softmax() -> Picture:
    """One row of queries walks over the tiles of its keys."""
    picture = Picture(700, 250, "Online softmax")
    for number in range(4):
        x = 40 + number * 165
        picture.box(x, 30, 110, 42, BLUE, f"scores of\nkey tile {number}")
        picture.arrow(x + 55, 74, x + 55, 104)
        picture.box(x, 106, 110, 66, GREEN, "row maximum m\nrow sum l\noutput O", 12)
        if number:
            picture.arrow(x - 54, 139, x - 2, 139)
            picture.text(x - 28, 130, "rescale", 10, "middle", MUTED)
    picture.text(40, 204, "m' = max(m, rowmax(s))      p = exp(s - m')      c = exp(m - m')", 13)
    picture.text(
        40,
        228,
        "l = c l + rowsum(p)         O = c O + p V         at the end: O / l, lse = m + log l",
        13,
    )
    return picture


def pipeline() -> Picture:
    """Producer, ring and two consumer warpgroups of the Hopper kernel over time."""
    picture = Picture(760, 300, "Overlap inside the Hopper kernel")
    left, unit = 130, 52
    rows = {"producer warp": 40, "tensor cores": 95, "warpgroup 0": 150, "warpgroup 1": 205}
    for name, y in rows.items():
        picture.text(left - 12, y + 20, name, 12, "end")
    for step in range(5):
        x = left + step * 2 * unit
        picture.box(x, rows["producer warp"], unit - 3, 30, BLUE, f"copy K{step + 1}", 11)
        picture.box(x + unit, rows["producer warp"], unit - 3, 30, BLUE, f"copy V{step}", 11)
    for step in range(5):
        x = left + step * 2 * unit
        for group in range(2):
            picture.box(
                x + group * unit,
                rows["tensor cores"],
                unit - 3,
                30,
                GREEN if group == 0 else "#9fd3a2",
                f"QK {step}\nPV {step - 1}" if step else f"QK {step}",
                9,
            )
        picture.box(x + unit, rows["warpgroup 0"], unit - 3, 30, AMBER, f"softmax {step}", 9)
        if step < 4:
            picture.box(
                x + 2 * unit, rows["warpgroup 1"], unit - 3, 30, AMBER, f"softmax {step}", 9
            )
    picture.arrow(left, 258, left + 10.5 * unit, 258)
    picture.text(
        left,
        278,
        "time: while one warpgroup does exponentials, the tensor cores work for the other; copies run ahead of both",
        11,
        fill=MUTED,
    )
    return picture


def backward() -> Picture:
    """A block of the backward owns a tile of keys and walks over queries."""
    picture = Picture(700, 270, "The backward pass")
    picture.box(30, 30, 104, 200, BLUE, "K, V\ntile of keys\nstays in\nshared memory", 12)
    for number in range(3):
        y = 30 + number * 70
        picture.box(190, y, 110, 56, GREY, f"Q, dO, lse, delta\nquery tile {number}", 11)
        picture.arrow(302, y + 28, 338, y + 28)
        picture.box(
            340, y, 160, 56, GREEN, "P = exp(scale Q K' - lse)\ndP = dO V'\ndS = P (dP - delta)", 10
        )
        picture.arrow(502, y + 28, 546, y + 28)
        picture.box(548, y, 112, 56, AMBER, "dQ += dS K\nin float32", 11)
    picture.arrow(190, 236, 132, 236, dashed=True)
    picture.text(
        198,
        254,
        "dV += P' dO      dK += dS' Q      stay in registers until the last query tile",
        12,
    )
    return picture


def call() -> Picture:
    """The way of a call from Python to machine code."""
    picture = Picture(760, 230, "The way of a call")
    boxes = (
        ("api.py\nchecks, Spec,\nOperands", BLUE),
        ("dispatch.py\nchooses, with\nreasons", BLUE),
        ("autodiff.py\nprimitives\nand rules", BLUE),
        ("backend\ntiles, kernel\nkeys", GREEN),
        ("ffi\ncustom call\nof XLA", GREEN),
    )
    for number, (text, fill) in enumerate(boxes):
        x = 20 + number * 148
        picture.box(x, 30, 118, 62, fill, text, 11)
        if number:
            picture.arrow(x - 28, 61, x - 2, 61)
    picture.text(
        20,
        122,
        "XLA compiles: each kernel key becomes machine code, from the first place that has it",
        12,
        fill=MUTED,
    )
    for number, (text, fill) in enumerate(
        (
            ("built into the package", AMBER),
            ("the cache on disk", AMBER),
            ("NVRTC, from headers\ninside the package", AMBER),
            ("loaded before the\nfirst run", GREY),
            ("launched: nothing is\ncompiled or allocated", GREY),
        )
    ):
        x = 20 + number * 148
        picture.box(x, 140, 128, 52, fill, text, 11)
        if number:
            picture.arrow(x - 18, 166, x - 2, 166)
    return picture


PICTURES = {
    "tiles": tiles,
    "online_softmax": online_softmax,
    "pipeline": pipeline,
    "backward": backward,
    "call": call,
}


def main() -> None:
    """Writes every picture."""
    for name, draw in PICTURES.items():
        (Path(__file__).parent / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
