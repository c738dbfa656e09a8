"""What a cubin says of its kernels, read from its ELF sections (no tool of the CUDA toolkit is needed)."""

import struct

# Attributes of .nv.info, as `readelf` of any cubin and the output of cuobjdump -elf name them.
FRAME_SIZE, MIN_STACK_SIZE, KPARAM_INFO, CBANK_PARAM_SIZE = 0x11, 0x12, 0x17, 0x19
VALUE_IN_PLACE = 0x03


def _sections(code: bytes) -> dict[str, bytes]:
    assert code[:4] == b"\x7fELF", "not an ELF file"
    (table,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names = struct.unpack_from("<HHH", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, table + i * size) for i in range(count)]
    strings = headers[names][4]
    found = {}
    for name, kind, _, _, offset, length, *_ in headers:
        end = code.index(b"\0", strings + name)
        found[code[strings + name : end].decode()] = b"" if kind == 8 else code[offset : offset + length]
    return found


def _attributes(section: bytes) -> list[tuple[int, bytes]]:
    found, at = [], 0
    while at < len(section):
        form, attribute, value = struct.unpack_from("<BBH", section, at)
        at += 4
        if form == 4:  # the two bytes are a length
            found.append((attribute, section[at : at + value]))
            at += value
        else:
            found.append((attribute, struct.pack("<H", value)))
    return found


def argument_sizes(code: bytes, kernel: str) -> list[int]:
    """Bytes of each argument, in order; their places are checked against the size of the argument block."""
    attributes = _attributes(_sections(code)[f".nv.info.{kernel}"])
    places = {}
    for attribute, payload in attributes:
        if attribute == KPARAM_INFO:
            _, ordinal, offset, flags = struct.unpack("<IHHI", payload)
            places[ordinal] = (offset, flags >> 18)
    (total,) = (struct.unpack("<H", p)[0] for a, p in attributes if a == CBANK_PARAM_SIZE)
    last_offset, last_size = places[max(places)]
    assert last_offset + last_size == total
    return [places[i][1] for i in range(len(places))]


def stack_bytes(code: bytes) -> int:
    """The largest stack frame of any function in the cubin: local memory, spills included."""
    sizes = [struct.unpack("<II", p)[1] for a, p in _attributes(_sections(code)[".nv.info"])
             if a in (FRAME_SIZE, MIN_STACK_SIZE)]  # fmt: skip
    assert sizes, "the cubin names no frame sizes"
    return max(sizes)


def kernels(code: bytes) -> set[str]:
    """Names of the kernels in the cubin."""
    return {name[len(".nv.info.") :] for name in _sections(code) if name.startswith(".nv.info.")}
