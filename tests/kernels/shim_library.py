"""Build and call the kernels compiled for the CPU (shim.h, shim.cpp); numpy only: a sanitizer can be preloaded."""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from trajectory_guard.kernels.nvrtc import KERNELS, SOURCE, Constants, layout, pack

HERE = Path(__file__).resolve().parent
GUARD = 64
FILL = 0xA5
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-variable", "-Wno-unused-parameter",
            "-Wno-unused-function")  # fmt: skip
MISMATCH = "argument sizes differ"


class ShimError(AssertionError):
    """A kernel did on the CPU what no kernel may do."""


def build_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"trajectory-guard-shim-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    return folder


def library(
    experts_or_layout, elem: int, block_tokens: int, source: str | None = None, flags: tuple[str, ...] = ()
) -> Path:
    """Path of one compiled variant, compiled unless it is there."""
    group, per_lane = experts_or_layout if isinstance(experts_or_layout, tuple) else layout(experts_or_layout)
    text = SOURCE.read_text() if source is None else source
    identity = "\n".join(
        [
            text,
            *((HERE / name).read_text() for name in ("shim.h", "shim.cpp")),
            f"{group} {per_lane} {elem}",
            f"{block_tokens} {flags}",
        ]
    )
    path = build_folder() / (hashlib.sha256(identity.encode()).hexdigest()[:24] + ".so")
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        copy = Path(folder) / "routing.cu"
        copy.write_text(text)
        made = Path(folder) / "made.so"
        command = ["g++", "-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-ffp-contract=off", *WARNINGS,
                   f"-I{HERE}", f"-DGROUP={group}",
                   f"-DPER_LANE={per_lane}", f"-DELEM={elem}", f"-DBLOCK_TOKENS={block_tokens}", f'-DSOURCE="{copy}"',
                   *flags, str(HERE / "shim.cpp"), "-o", str(made)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ShimError(f"g++ failed:\n{done.stderr}")
        os.replace(made, path)
    return path


def build(variants: list[tuple], workers: int = 2) -> None:
    """Compile variants (arguments of `library`) side by side."""
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda variant: library(*variant), variants))


class Shim:
    """One compiled variant."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.shim_launch.restype = self.library.shim_orders.restype = ctypes.c_char_p
        for name, kernel in KERNELS.items():
            sizes = (ctypes.c_int * 32)()
            n = self.library.shim_argument_sizes(name.encode(), sizes)
            want = [8 if letter == "p" else 4 for letter in kernel.arguments]
            if list(sizes[:n]) != want:
                raise ShimError(f"{MISMATCH} in {name}: the kernel takes {list(sizes[:n])}, the launcher packs {want}")

    def set(self, c: Constants) -> None:
        numbers = (c.experts, c.topk, int(c.sigmoid), int(c.norm), int(c.cutoff), int(c.stats))
        self.library.shim_set((ctypes.c_int * 6)(*numbers))

    def launch(self, name: str, blocks: int, order: int, arguments: list) -> None:
        packed = pack(name, arguments)
        places = (ctypes.c_void_p * len(packed))(*(ctypes.addressof(a) for a in packed))
        error = self.library.shim_launch(name.encode(), blocks, KERNELS[name].threads, order, places)
        if error:
            raise ShimError(f"{name}: {error.decode()}")

    def launch_orders(self, name: str, blocks: int, orders: tuple, arguments: list, outputs: "Arena") -> None:
        """One launch in each thread order on outputs filled with garbage; they must agree bit for bit."""
        packed = pack(name, arguments)
        places = (ctypes.c_void_p * len(packed))(*(ctypes.addressof(a) for a in packed))
        error = self.library.shim_orders(
            name.encode(), blocks, KERNELS[name].threads, (ctypes.c_int * len(orders))(*orders), len(orders), places,
            ctypes.c_void_p(outputs.start), ctypes.c_size_t(len(outputs.buffer)), FILL,
        )  # fmt: skip
        if error:
            raise ShimError(f"{name}: {error.decode()}")
        outputs.check()


class Arena:
    """Named output arrays in one buffer, garbage-filled, with a red zone before and after each."""

    def __init__(self, **shapes: tuple) -> None:
        spans, at = {}, GUARD
        for name, (shape, dtype) in shapes.items():
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            spans[name] = (at, size)
            at += size + GUARD + -(at + size) % 16
        self.buffer = np.empty(at + 16, np.uint8)
        skew = -self.buffer.ctypes.data % 16
        self.buffer = self.buffer[skew : skew + at]
        self.start = self.buffer.ctypes.data
        outside = np.ones(at, bool)
        self.view, self.address = {}, {}
        for name, (start, size) in spans.items():
            outside[start : start + size] = False
            shape, dtype = shapes[name]
            self.view[name] = self.buffer[start : start + size].view(dtype).reshape(shape)
            self.address[name] = self.start + start
        self.outside = np.flatnonzero(outside)

    def fill(self) -> None:
        self.buffer.fill(FILL)

    def check(self) -> None:
        if not (self.buffer[self.outside] == FILL).all():
            raise ShimError("a kernel wrote outside its outputs")


def to_bits(x: np.ndarray, elem: int) -> np.ndarray:
    """float32 array to the kernels' element type, rounded to nearest even; NaN keeps its sign."""
    x = np.ascontiguousarray(x, np.float32)
    if elem == 0:
        return x
    if elem == 2:
        return x.astype(np.float16).view(np.uint16)
    u = x.view(np.uint32)
    rounded = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), ((u >> 16) | 0x40).astype(np.uint16), rounded)


def from_bits(b: np.ndarray, elem: int) -> np.ndarray:
    """Back to float32."""
    if elem == 0:
        return b
    if elem == 2:
        return b.view(np.float16).astype(np.float32)
    return (b.astype(np.uint32) << 16).view(np.float32)


def aligned(x: np.ndarray, skew: int = 0) -> np.ndarray:
    """A copy whose address is `skew` bytes past a multiple of 16, with nothing readable promised beyond its end."""
    raw = np.empty(x.nbytes + 32, np.uint8)
    start = -raw.ctypes.data % 16 + skew
    out = raw[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out
