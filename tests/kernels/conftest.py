"""The backends that contract tests run on: plain torch, the CUDA source on the CPU, and a GPU where there is one."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import shim_library
from trajectory_guard.kernels import fused, routing
from trajectory_guard.kernels.nvrtc import BLOCK_TOKENS

_loaded: dict = {}


def shim_launch(name, constants, blocks, on, *arguments):
    """`fused._launch`, on CPU tensors."""
    key = shim_library.library(constants.experts, constants.elem, BLOCK_TOKENS)
    lib = _loaded.setdefault(key, None) or shim_library.Shim(key)
    _loaded[key] = lib
    lib.set(constants)
    values = [fused._address(a) if a is None or isinstance(a, torch.Tensor) else a for a in arguments]
    lib.launch(name, blocks, 0, values)


@pytest.fixture
def on_shim(monkeypatch):
    """Send the CUDA path's launches to the shim, so that `route` on CPU tensors runs the kernels."""
    monkeypatch.setattr(fused, "_launch", shim_launch)
    real = routing._use_cuda

    def use(backend, on, reason):
        chosen = backend != "torch" and not reason
        routing._last = "cuda" if chosen else "torch"
        return chosen if on.device.type == "cpu" else real(backend, on, reason)

    monkeypatch.setattr(routing, "_use_cuda", use)


@pytest.fixture(params=["torch", "shim", "cuda"])
def backend(request):
    """name and device; the operations of `routing` then run on it."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here")
        return SimpleNamespace(name="cuda", device="cuda", ran="cuda")
    if request.param == "shim":
        request.getfixturevalue("on_shim")
        return SimpleNamespace(name="auto", device="cpu", ran="cuda")
    return SimpleNamespace(name="torch", device="cpu", ran="torch")
