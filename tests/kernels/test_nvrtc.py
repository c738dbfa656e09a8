"""Compiling with NVRTC, which needs no GPU: nothing spills, arguments fit, the cache keeps its word. Never skipped."""

import ctypes
import importlib
import re

import cubin
import pytest
import torch
from trajectory_guard.kernels import fused, nvrtc, routing
from trajectory_guard.kernels.nvrtc import KERNELS, Constants

from trajectory_guard.errors import MissingExtraError

FULL = {"norm": True, "cutoff": True, "stats": True}
LAYOUTS = [(8, 2, 0), (16, 4, 1), (32, 4, 2), (64, 8, 1), (128, 8, 2), (256, 8, 1), (512, 8, 0), (1024, 16, 1)]
CASES = [("sm_90", *case) for case in LAYOUTS if case[0] not in (16, 128)] + [
    (arch, *case) for arch in ("sm_80", "sm_100") for case in (LAYOUTS[0], LAYOUTS[5], LAYOUTS[7])
]
# These spilled once.
CASES += [("sm_90", 512, 32, 1), ("sm_100", 1024, 32, 0), ("sm_100", 8, 8, 0)]


def check(code: bytes, log: str, names: set[str]) -> None:
    assert cubin.kernels(code) == names
    assert cubin.stack_bytes(code) == 0, "local memory is used"
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert len(spills) >= len(names) and set(spills) == {("0", "0", "0")}, log
    for name in names:
        want = [8 if letter == "p" else 4 for letter in KERNELS[name].arguments]
        assert cubin.argument_sizes(code, name) == want, f"the launcher packs other arguments than {name} takes"


@pytest.mark.parametrize(("arch", "experts", "topk", "elem"), CASES)
def test_kernels_compile_without_spills_or_local_memory(arch, experts, topk, elem):
    constants = Constants(experts=experts, topk=topk, elem=elem, **FULL)
    check(*nvrtc.compile_cubin(constants, 0, arch), set(KERNELS))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_every_layout_dtype_and_score_compiles_without_spills_or_local_memory(arch, sigmoid):
    for experts, _, _ in LAYOUTS:
        for elem in (0, 1, 2):
            constants = Constants(
                experts=experts, topk=min(experts, 32), elem=elem, sigmoid=sigmoid, **(FULL | {"cutoff": experts > 32})
            )
            check(*nvrtc.compile_cubin(constants, 0, arch), set(KERNELS))  # fmt: skip


@pytest.mark.parametrize("part", [1, 2, 3, 4])
def test_each_part_holds_the_kernels_that_the_launcher_expects(part):
    code, log = nvrtc.compile_cubin(Constants(experts=60, topk=4, elem=1), part, "sm_90")
    check(code, log, {name for name, kernel in KERNELS.items() if kernel.part == part})


def test_the_bindings_alone_compile_the_same_code(monkeypatch):
    constants = Constants(experts=8, topk=1)
    with_core, _ = nvrtc.compile_cubin(constants, 3, "sm_90")
    monkeypatch.setattr(nvrtc, "_core", lambda: None)
    code, log = nvrtc.compile_cubin(constants, 3, "sm_90")
    check(code, log, cubin.kernels(with_core))


def test_a_planted_error_and_a_planted_spill_are_noticed():
    with pytest.raises(nvrtc.CompileError, match="routing.cu for sm_90"):
        nvrtc.compile_cubin(Constants(experts=8), 3, "sm_90", source="int x = ;")
    source = nvrtc.SOURCE.read_text()
    broken = source.replace("int tokens, int wide, float scale) {", "short tokens, int wide, float scale) {")
    with pytest.raises(AssertionError, match="packs other arguments"):
        check(*nvrtc.compile_cubin(Constants(experts=8), 2, "sm_90", source=broken), {"route_backward"})
    local = "volatile int spill[64]; spill[tokens % 64] = tokens; if (spill[wide % 64] == 7) return;\n"
    broken = source.replace(
        "  __shared__ float chosen[GROUPS * PADDED];", local + "  __shared__ float chosen[GROUPS * PADDED];"
    )
    with pytest.raises(AssertionError, match="local memory"):
        check(*nvrtc.compile_cubin(Constants(experts=8), 2, "sm_90", source=broken), {"route_backward"})


def test_arguments_are_packed_at_the_widths_that_cuda_core_reads():
    handler = importlib.import_module("cuda.core._kernel_arg_handler")
    packed = nvrtc.pack("route_backward", [2**47 + 5, 0, 3, 0, 0, 0, 7, -9, 1, 1.5])
    holder = handler.ParamHolder(packed)
    addresses = (ctypes.c_void_p * len(packed)).from_address(holder.ptr)
    for argument, address in zip(packed, addresses, strict=True):
        assert type(argument).from_address(address).value == argument.value
        assert ctypes.sizeof(argument) == (4 if isinstance(argument.value, float) or argument.value in (-9, 1) else 8)
    with pytest.raises(ValueError, match="takes 10 arguments, got 1"):
        nvrtc.pack("route_backward", [0])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAJECTORY_GUARD_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def test_compiled_code_is_kept_and_found_again(folder, monkeypatch):
    constants = Constants(experts=8, topk=1)
    first = nvrtc.cached_cubin(constants, 3, "sm_90")
    assert [p.suffix for p in folder.iterdir()] == [".cubin"]
    monkeypatch.setattr(nvrtc, "compile_cubin", None)
    assert nvrtc.cached_cubin(constants, 3, "sm_90") == first
    with pytest.raises(TypeError):
        nvrtc.cached_cubin(constants, 3, "sm_80")
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: "99.9")
    with pytest.raises(TypeError):
        nvrtc.cached_cubin(constants, 3, "sm_90")


@pytest.mark.parametrize("damage", [lambda b: b[:100], lambda b: b"", lambda b: b[:-1] + bytes([b[-1] ^ 1])])
def test_a_corrupt_cache_file_is_compiled_anew(folder, damage, monkeypatch):
    constants = Constants(experts=8, topk=1)
    first = nvrtc.cached_cubin(constants, 3, "sm_90")
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *_: (first, ""))
    assert nvrtc.cached_cubin(constants, 3, "sm_90") == first
    assert path.read_bytes()[32:] == first and len(list(folder.iterdir())) == 1


def test_an_unwritable_cache_is_reported_once_and_does_without(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("TRAJECTORY_GUARD_CACHE", str(blocked))
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *_: (b"code", ""))
    with pytest.warns(RuntimeWarning, match="TRAJECTORY_GUARD_CACHE"):
        assert nvrtc.cached_cubin(Constants(experts=8), 3, "sm_90") == b"code"
    assert nvrtc.cached_cubin(Constants(experts=8), 3, "sm_90") == b"code"


def test_without_the_packages_the_pip_line_is_named(monkeypatch):
    real = importlib.import_module

    def absent(name, *rest):
        if name.startswith("cuda."):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(MissingExtraError, match=r'pip install "trajectory-guard\[cuda\]"'):
        nvrtc.compile_cubin(Constants(experts=8), 3, "sm_90")
    routing._unavailable.cache_clear()
    assert 'pip install "trajectory-guard[cuda]"' in routing._unavailable()
    routing._unavailable.cache_clear()


def test_what_the_kernels_cannot_take_is_named():
    assert fused.unsupported(torch.bfloat16, 1024, 32) == ""
    assert "float64" in fused.unsupported(torch.float64, 8, 1)
    assert "1025 experts" in fused.unsupported(torch.float32, 1025, 1)
    assert "k = 33" in fused.unsupported(torch.float32, 64, 33)
    assert "20000 bins" in fused.unsupported(torch.float32, 8, 1, 20000)
    with pytest.raises(ValueError, match="at most 1024 experts"):
        nvrtc.layout(1025)
