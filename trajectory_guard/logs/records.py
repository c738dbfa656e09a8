"""TFRecord framing of event files: length, masked CRC-32C of the length, data, masked CRC-32C of the data."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["MAX_RECORD_BYTES", "DamagedRecord", "records"]

MAX_RECORD_BYTES = 64 * 2**20
"""Longest event that is read: scalars take tens of bytes, an embedded picture a few MiB."""

HEADER = struct.Struct("<QI")


class DamagedRecord(Exception):
    """The bytes at `offset` of an event file are no record."""

    def __init__(self, path: Path, offset: int) -> None:
        super().__init__(f"{path}: damaged at byte {offset}: what should be the length of a record fails its checksum")
        self.offset = offset


def records(path: Path, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yield (data, offset after it) of every whole record from `offset` on; a record still being written ends it.

    The checksum of the length is verified, so that a damaged file cannot be misread as other records.

    Raises:
        DamagedRecord: a length's checksum is wrong, or a record is longer than `MAX_RECORD_BYTES`.
    """
    with open(path, "rb") as file:
        file.seek(offset)
        while (record := _next(file, path, offset)) is not None:
            offset += len(record) + HEADER.size + 4
            yield record, offset


def _next(file: IO[bytes], path: Path, offset: int) -> bytes | None:
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    length, crc = HEADER.unpack(header)
    if masked_crc32c(header[:8]) != crc or length > MAX_RECORD_BYTES:
        raise DamagedRecord(path, offset)
    data = file.read(length + 4)
    return data[:-4] if len(data) == length + 4 else None


def masked_crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli, polynomial 0x1EDC6F41, RFC 3720) of `data`, rotated and shifted as TFRecord does.

    Example:
        >>> crc = ((masked_crc32c(b"123456789") - 0xA282EAD8) & 0xFFFFFFFF)
        >>> hex((crc >> 17 | crc << 15) & 0xFFFFFFFF)  # the published check value
        '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _table() -> list[int]:
    table = []
    for index in range(256):
        for _ in range(8):
            index = (index >> 1) ^ (0x82F63B78 if index & 1 else 0)
        table.append(index)
    return table


_TABLE = _table()
