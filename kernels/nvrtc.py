"""From the CUDA source to a launched kernel: constants, NVRTC, the cache of compiled code, and the launch.

Nothing is built at installation. The first call with a new (E, k, dtype, options) compiles `routing.cu` for the device
(about a second) and stores the machine code under `$TRAJECTORY_GUARD_CACHE`, by default `~/.cache/trajectory-guard`.
`cuda.core` compiles and launches; where only its bindings are installed, as beside torch's CUDA wheels, they do.
"""

import ctypes
import hashlib
import importlib
import os
import tempfile
import threading
import warnings
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from trajectory_guard.errors import MissingExtraError, TrajectoryGuardError

__all__ = ["BLOCK_TOKENS", "KERNELS", "CompileError", "Constants", "cache_folder", "compile_cubin", "launch", "layout"]

BLOCK_TOKENS = 128
HISTOGRAM_WORDS = 12288
"""Integers of shared memory in `histogram_bins`: the 48 KiB that every device gives a block without asking."""
SOURCE = Path(__file__).with_name("routing.cu")


class CompileError(TrajectoryGuardError):
    """NVRTC refused the source; the message is its log."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What the launcher must know of a kernel."""

    part: int
    """PART of routing.cu that holds it."""
    threads: int
    """Threads a block."""
    arguments: str
    """One letter an argument: p pointer, i int32, f float32."""


KERNELS = {
    "route_forward": Kernel(part=1, threads=256, arguments="pppppppppiif"),
    "route_reduce": Kernel(part=1, threads=1024, arguments="ppppi"),
    "route_backward": Kernel(part=2, threads=256, arguments="pppppppiif"),
    "permute_count": Kernel(part=3, threads=256, arguments="ppi"),
    "permute_scan": Kernel(part=3, threads=1024, arguments="ppi"),
    "permute_place": Kernel(part=3, threads=256, arguments="ppppppi"),
    "histogram_rows": Kernel(part=4, threads=256, arguments="ppii"),
    "histogram_bins": Kernel(part=4, threads=256, arguments="ppppppiiii"),
}
_TYPES = {"p": ctypes.c_uint64, "i": ctypes.c_int32, "f": ctypes.c_float}


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What a compiled kernel is specialised for; the macros of routing.cu, in lower case."""

    experts: int
    topk: int = 1
    elem: int = 0
    """0 float32, 1 bfloat16, 2 float16."""
    sigmoid: bool = False
    norm: bool = False
    cutoff: bool = False
    stats: bool = False

    def macros(self, part: int) -> dict[str, int]:
        """Macro names and values for one part of the source."""
        group, per_lane = layout(self.experts)
        named = {f.name.upper(): int(getattr(self, f.name)) for f in fields(self)}
        return named | {"GROUP": group, "PER_LANE": per_lane, "BLOCK_TOKENS": BLOCK_TOKENS, "PART": part}


def layout(experts: int) -> tuple[int, int]:
    """Lanes a token and experts a lane, for 1 to 1024 experts.

    >>> [layout(e) for e in (8, 60, 128, 256, 896)]
    [(8, 1), (8, 8), (16, 8), (32, 8), (32, 32)]
    """
    for group, per_lane in ((8, 1), (8, 2), (8, 4), (8, 8), (16, 8), (32, 8), (32, 16), (32, 32)):
        if experts <= group * per_lane:
            return group, per_lane
    raise TrajectoryGuardError(f"the CUDA kernels route to at most 1024 experts, got {experts}: use backend='torch'")


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    own = os.environ.get("TRAJECTORY_GUARD_CACHE")
    if own:
        return Path(own) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trajectory-guard" / "kernels"


def _bindings(module: str) -> Any:
    try:
        return importlib.import_module(f"cuda.bindings.{module}")
    except ImportError as error:
        raise MissingExtraError("cuda-core", "cuda") from error


def _core() -> Any:
    """The cuda.core module, or None where it is not installed or too old to have what is used here."""
    try:
        core = importlib.import_module("cuda.core")
    except ImportError:
        return None
    wanted = ("LaunchConfig", "ObjectCode", "Program", "ProgramOptions", "Stream", "launch")
    return core if all(hasattr(core, name) for name in wanted) else None


def nvrtc_version() -> str:
    """Version of the NVRTC library that will compile, as `13.0`.

    Raises:
        MissingExtraError: cuda.bindings is not installed.
        CompileError: it is, but finds no NVRTC library.
    """
    nvrtc = _bindings("nvrtc")
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise CompileError(f'no NVRTC library ({error}); run: pip install "trajectory-guard[cuda]"') from error
    if status:
        raise CompileError(f"NVRTC does not answer: {status}")
    return f"{major}.{minor}"


def compile_cubin(constants: Constants, part: int, arch: str, *, source: str | None = None) -> tuple[bytes, str]:
    """Compile one part of the source with NVRTC; needs no driver and no GPU.

    Args:
        constants: what to specialise for.
        part: PART of the source.
        arch: for example `sm_90`.
        source: other CUDA source, for tests.

    Returns:
        The machine code and the compiler's log, with registers and spills of each kernel.

    Raises:
        CompileError: NVRTC refused the source or is missing.
        MissingExtraError: cuda.core and its bindings are missing.
    """
    text = SOURCE.read_text(encoding="utf-8") if source is None else source
    nvrtc_version()
    core = _core()
    macros = sorted(constants.macros(part).items())
    if core is not None:
        options = core.ProgramOptions(
            arch=arch, ptxas_options="-v", define_macro=[(name, str(value)) for name, value in macros]
        )
        log = _Log()
        try:
            return bytes(core.Program(text, "c++", options).compile("cubin", logs=log).code), log.text
        except Exception as error:
            raise CompileError(f"NVRTC could not compile routing.cu for {arch}: {error}\n{log.text}") from error
    return _compile_with_bindings(text, [f"--gpu-architecture={arch}", "--ptxas-options=-v", *_defines(macros)])


def _defines(macros: list[tuple[str, int]]) -> list[str]:
    return [f"--define-macro={name}={value}" for name, value in macros]


class _Log:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def _compile_with_bindings(text: str, options: list[str]) -> tuple[bytes, str]:
    nvrtc = _bindings("nvrtc")

    def call(function: Any, *arguments: Any) -> Any:
        status, *values = function(*arguments)
        if status:
            raise CompileError(f"NVRTC: {function.__name__} failed with {status}")
        return values[0] if values else None

    program = call(nvrtc.nvrtcCreateProgram, text.encode(), b"routing.cu", 0, [], [])
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = b" " * call(nvrtc.nvrtcGetProgramLogSize, program)
        call(nvrtc.nvrtcGetProgramLog, program, log)
        if status:
            raise CompileError(f"NVRTC could not compile routing.cu ({status}):\n{log.decode(errors='replace')}")
        code = b" " * call(nvrtc.nvrtcGetCUBINSize, program)
        call(nvrtc.nvrtcGetCUBIN, program, code)
        return code, log.decode(errors="replace")
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def cached_cubin(constants: Constants, part: int, arch: str) -> bytes:
    """Machine code from the cache folder, or compiled and stored there.

    A file starts with the SHA-256 of the rest; one that does not match is compiled again. A folder that cannot be
    written is reported once, and the code is then compiled once a process.
    """
    text = SOURCE.read_text(encoding="utf-8")
    identity = "\n".join([nvrtc_version(), arch, *_defines(sorted(constants.macros(part).items())), text])
    path = cache_folder() / (hashlib.sha256(identity.encode()).hexdigest() + ".cubin")
    try:
        stored = path.read_bytes()
        if hashlib.sha256(stored[32:]).digest() == stored[:32]:
            return stored[32:]
    except OSError:
        pass
    code, _ = compile_cubin(constants, part, arch)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            try:
                file.write(hashlib.sha256(code).digest() + code)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                file.close()
                os.unlink(file.name)
                raise
    except OSError as error:
        _warn_unwritable(str(path.parent), str(error))
    return code


@cache
def _warn_unwritable(folder: str, error: str) -> None:
    warnings.warn(
        f"compiled kernels cannot be kept in {folder} ({error}): every process compiles again; "
        "set TRAJECTORY_GUARD_CACHE to a folder that can be written",
        RuntimeWarning,
        stacklevel=2,
    )


_LOADED: dict[tuple[Constants, int, int], dict[str, Any]] = {}
_LOCK = threading.Lock()


def launch(
    name: str, constants: Constants, blocks: int, arguments: list[Any], *, device: int, arch: str, stream: int
) -> None:
    """Launch a kernel on a device's stream, compiling and loading it first where needed.

    Args:
        name: a key of `KERNELS`.
        constants: what it is specialised for.
        blocks: grid size, at least 1.
        arguments: numbers and addresses (0 for an absent tensor) as `KERNELS[name].arguments` says.
        device: index of the CUDA device, for the cache of loaded kernels; it must be current.
        arch: the device's architecture, for example `sm_90`.
        stream: address of the CUDA stream.
    """
    kernel = KERNELS[name]
    key = (constants, kernel.part, device)
    loaded = _LOADED.get(key)
    if loaded is None:
        with _LOCK:
            loaded = _LOADED.get(key)
            if loaded is None:
                loaded = _LOADED[key] = _load(cached_cubin(constants, kernel.part, arch), kernel.part)
    packed = pack(name, arguments)
    core = _core()
    if core is not None:
        core.launch(
            core.Stream.from_handle(stream), core.LaunchConfig(grid=blocks, block=kernel.threads), loaded[name], *packed
        )
        return
    driver = _bindings("driver")
    values, types = tuple(a.value for a in packed), tuple(type(a) for a in packed)
    _driver(driver.cuLaunchKernel, loaded[name], blocks, 1, 1, kernel.threads, 1, 1, 0, stream, (values, types), 0)


def pack(name: str, arguments: list[Any]) -> list[Any]:
    """Arguments as C values of the widths that the kernel takes."""
    letters = KERNELS[name].arguments
    if len(arguments) != len(letters):
        raise TrajectoryGuardError(f"{name} takes {len(letters)} arguments, got {len(arguments)}")
    return [_TYPES[letter](value) for letter, value in zip(letters, arguments, strict=True)]


def _load(code: bytes, part: int) -> dict[str, Any]:
    names = [name for name, kernel in KERNELS.items() if kernel.part == part]
    core = _core()
    if core is not None:
        module = core.ObjectCode.from_cubin(code)
        return {name: module.get_kernel(name) for name in names}
    driver = _bindings("driver")
    library = _driver(driver.cuLibraryLoadData, code, [], [], 0, [], [], 0)
    return {name: _driver(driver.cuLibraryGetKernel, library, name.encode()) for name in names}


def _driver(function: Any, *arguments: Any) -> Any:
    status, *values = function(*arguments)
    if status:
        raise RuntimeError(f"CUDA: {function.__name__} failed with {status}")
    return values[0] if values else None
