"""Arithmetic of CRC-32C: polynomials over GF(2), bits reversed. Does not import torch.

Bit 31 of a number is the coefficient of 1, bit 0 the coefficient of x ** 31.
"""

from __future__ import annotations

#: Castagnoli's polynomial.
_POLYNOMIAL = 0x82F63B78
BITS = 32


def times_x(polynomial: int) -> int:
    """Multiply by x."""
    return polynomial >> 1 ^ (_POLYNOMIAL if polynomial & 1 else 0)


def product(left: int, right: int) -> int:
    """Multiply modulo Castagnoli's polynomial."""
    total = 0
    while left:
        if left & 1 << (BITS - 1):
            total ^= right
        left = left << 1 & 0xFFFFFFFF
        right = right >> 1 ^ (
            _POLYNOMIAL if right & 1 else 0
        )  # `times_x` inlined, because a call per bit is slow
    return total


def power_of_x(exponent: int) -> int:
    """Return x to a power, modulo Castagnoli's polynomial."""
    power, square = 1 << (BITS - 1), 1 << (BITS - 2)  # 1 and x
    while exponent:
        if exponent & 1:
            power = product(power, square)
        square = product(square, square)
        exponent >>= 1
    return power


def joined(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32C of two concatenated byte strings, from both CRCs and the second's length.

    Reference: Adler, zlib's ``crc32_combine``: appending ``n`` zero bytes multiplies a checksum by
    ``x ** (8 * n)``.
    """
    return product(power_of_x(8 * second_bytes), first) ^ second
