"""Files in the idx format, as bytes, and damage to them."""

import math
import struct


def idx(shape, data=None, *, code=8, zeros=b"\0\0"):
    """An idx file of this shape, as bytes."""
    data = bytes(i % 10 for i in range(math.prod(shape))) if data is None else data
    return zeros + bytes([code, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + data


def flipped(content, at):
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]
