"""What the reader of machine code makes of single instructions."""

import pytest
import sm90_listing


@pytest.mark.parametrize(
    ("text", "registers"),
    [
        ("EXIT", 0),
        ("IMAD R29, R28, 0x20, R17.reuse", 30),
        ("IMAD.WIDE.U32 R28, R10, UR21, R28", 30),
        ("STS.128 [R29+0x2f100], R8", 30),
        ("STS.64 [R20+UR4+0x8], R30", 32),
        ("LDG.E R5, desc[UR40][R30.64]", 32),
        ("LDG.E.128 R12, desc[UR40][R2.64+0x10]", 16),
        ("@!P0 LDS R7, [UR5+0x400]", 8),
    ],
)
def test_registers_of_an_instruction(text: str, registers: int) -> None:
    assert sm90_listing.registers_of(text) == registers
