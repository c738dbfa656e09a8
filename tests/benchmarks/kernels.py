"""Routing kernels on a GPU: correct, repeatable, and how fast. Without one, a dry run of the same script on the CPU.

    python tests/benchmarks/kernels.py --json kernels.json

It needs torch >= 2.11 and, on a GPU, cuda.core or its bindings, and no network.

Order: correctness against float64, opcheck, 50 bitwise repeats, times, then compute-sanitizer where it is installed.
Times are medians in microseconds, the L2 cache flushed before each call; the floor is the bytes that must move over the
bandwidth of a large copy on the same card. Times of the dry run say nothing about a GPU.
"""

import argparse
import importlib
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trajectory_guard.kernels import routing

SHAPES = ((64, 8), (128, 8), (256, 8), (512, 8))
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BACKEND = "cuda" if CUDA else "torch"


def logits_of(tokens: int, n_experts: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Random logits, the same on every device."""
    x = torch.randn(tokens, n_experts, generator=torch.Generator().manual_seed(seed))
    return x.to(DEVICE, dtype)


def plain_router(x: Tensor, k: int) -> tuple[Tensor, ...]:
    """What `route` does, as one would write it in torch: the thing to beat, eagerly and compiled."""
    s = x.float().softmax(-1)
    weights, experts = s.topk(k, dim=-1)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    counts = torch.zeros(x.shape[1], dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, experts.flatten(), torch.ones_like(experts.flatten(), dtype=torch.int32))
    return weights, experts, counts, s.sum(0), x.float().logsumexp(-1)


def plain_permute(experts: Tensor, n_experts: int) -> tuple[Tensor, ...]:
    """What `permute` does, in torch."""
    order = torch.sort(experts.flatten(), stable=True)[1]
    pos = torch.empty_like(order)
    pos[order] = torch.arange(len(order), device=order.device)
    return order, pos, torch.bincount(experts.flatten(), minlength=n_experts).cumsum(0)


def errors(tokens: int, n_experts: int, k: int, dtype: torch.dtype, score: str) -> dict[str, float]:
    """Largest errors against float64, given the experts; and how far the choice is from a top-k."""
    x = logits_of(tokens, n_experts, dtype).requires_grad_()
    bias = torch.linspace(-0.01, 0.01, n_experts, device=DEVICE)
    r = routing.route(x, k, bias=bias, score=score, cutoff=True, backend=BACKEND)
    assert routing.last_backend() == BACKEND and r.psum is not None and r.lse is not None and r.cutoff is not None
    grads = [
        torch.randn(t.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) for t in (r.weights, r.psum, r.lse)
    ]
    torch.autograd.backward([r.weights, r.psum, r.lse], grads)
    z = x.detach().double().requires_grad_()
    s = z.softmax(-1) if score == "softmax" else z.sigmoid()
    picked = s.gather(1, r.experts.long())
    weights, psum, lse = picked / (picked.sum(-1, keepdim=True) + 1e-20), s.sum(0), z.logsumexp(-1)
    torch.autograd.backward([weights, psum, lse], [g.double() for g in grads])
    choice = s.detach() + bias.double()
    best = choice.topk(k + 1, dim=-1)[0]
    order, pos, offs = routing.permute(r.experts, n_experts, backend=BACKEND)
    want = plain_permute(r.experts, n_experts)
    same = all((a.flatten().long() == b.flatten().long()).all() for a, b in zip((order, pos, offs), want, strict=True))
    assert x.grad is not None and z.grad is not None
    found = {
        "choice": (choice.gather(1, r.experts.long()) - best[:, :k]).abs().amax().item(),
        "cutoff": (r.cutoff - best[:, k]).abs().amax().item(),
        "weights": (r.weights - weights).abs().amax().item(),
        "psum": ((r.psum - psum).abs() / psum).amax().item(),
        "lse": (r.lse - lse).abs().amax().item(),
        "gradient": ((x.grad - z.grad).abs() / (z.grad.abs() + 1e-2)).amax().item(),
    }
    limits = {"choice": 2e-6, "cutoff": 2e-6, "weights": 2e-6, "psum": 1e-5, "lse": 1e-5,
              "gradient": {torch.float32: 1e-3, torch.float16: 3e-3, torch.bfloat16: 1e-2}[dtype]}  # fmt: skip
    bad = {name: error for name, error in found.items() if not error <= limits[name]}
    if bad or not same:
        raise SystemExit(f"WRONG at T={tokens} E={n_experts} k={k} {dtype} {score}: {bad}, permutation right: {same}")
    return found


def correctness(tokens: int) -> dict[str, float]:
    """The worst errors over sizes, dtypes and scores; stops at the first that is too large."""
    worst: dict[str, float] = {}
    for n_experts, k in ((8, 2), (60, 4), (160, 6), (384, 8), (1024, 32), *SHAPES):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for score in ("softmax", "sigmoid"):
                for name, error in errors(tokens, n_experts, k, dtype, score).items():
                    worst[name] = max(worst.get(name, 0.0), error)
    return worst


def opcheck() -> None:
    """torch's own checks of the operations on this backend."""
    x = torch.randn(9, 6, device=DEVICE).requires_grad_()
    torch.library.opcheck(
        torch.ops.trajectory_guard.route.default, (x, None, None, 2, "softmax", True, 1.0, True, True, BACKEND)
    )
    experts = routing.route(x, 2, backend=BACKEND).experts
    torch.library.opcheck(torch.ops.trajectory_guard.permute.default, (experts, 6, BACKEND))


def repeats(tokens: int, times: int) -> None:
    """Bitwise equality of every output and gradient over repeated calls."""
    x = logits_of(tokens, 256).requires_grad_()

    def once() -> list[Tensor]:
        r = routing.route(x, 8, cutoff=True, backend=BACKEND)
        (g,) = torch.autograd.grad(r.weights.square().sum() + r.psum.square().sum() + r.lse.sum(), x)
        return [*r, g, *routing.permute(r.experts, 256, backend=BACKEND)]

    first = once()
    for i in range(times):
        if not all(torch.equal(a, b) for a, b in zip(first, once(), strict=True)):
            raise SystemExit(f"NOT REPEATABLE: call {i + 2} differs from the first")


def microseconds(call: Callable[[], object], times: int) -> float:
    """Median time of a call; on CUDA by events, after a write that flushes the L2 cache."""
    for _ in range(3):
        call()
    took = []
    flush = torch.empty(2**28 if CUDA else 1, dtype=torch.int8, device=DEVICE)
    for _ in range(times):
        flush.zero_()
        if CUDA:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(2_000_000)  # the launches queue up behind this, so that Python's own time is not measured
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            took.append(start.elapsed_time(end) * 1e3)
        else:
            begin = time.perf_counter()
            call()
            took.append((time.perf_counter() - begin) * 1e6)
    return sorted(took)[len(took) // 2]


def bandwidth() -> float:
    """Bytes per microsecond of a large copy, read and write counted."""
    a = torch.empty(2**30 if CUDA else 2**26, dtype=torch.int8, device=DEVICE)
    b = torch.empty_like(a)
    return 2 * a.numel() / microseconds(lambda: b.copy_(a), 5)


def rivals(x: Tensor, k: int) -> dict[str, Callable[[], object]]:
    """Fused routers of other packages, where installed."""
    found: dict[str, Callable[[], object]] = {}
    try:
        router = importlib.import_module("transformer_engine.pytorch.router")
        found["transformer_engine"] = lambda: router.fused_topk_with_score_function(
            x, k, False, None, None, 1.0, "softmax", None
        )
    except ImportError:
        pass
    try:
        vllm = importlib.import_module("vllm._custom_ops")
        weights = torch.empty(len(x), k, device=DEVICE)
        ids = torch.empty(len(x), k, dtype=torch.int32, device=DEVICE)
        source = torch.empty_like(ids)
        found["vllm topk_softmax"] = lambda: vllm.topk_softmax(weights, ids, source, x.float(), True)
    except (ImportError, AttributeError):
        pass
    return found


def times(tokens: int, repeat: int, compile_too: bool) -> list[dict[str, object]]:
    """One row a shape."""
    rows, speed = [], bandwidth()
    for n_experts, k in SHAPES:
        x = logits_of(tokens, n_experts).requires_grad_()
        r = routing.route(x, k, backend=BACKEND)
        g = torch.randn_like(r.weights)
        fixed = x.detach()
        base = {"E": n_experts, "k": k, "T": tokens}
        size, copies = x.numel() * x.element_size(), tokens * k * 4

        def ours(x: Tensor = x, k: int = k) -> object:
            with torch.no_grad():
                return routing.route(x, k, backend=BACKEND)

        def eager(x: Tensor = x, k: int = k) -> object:
            with torch.no_grad():
                return plain_router(x, k)

        calls: dict[str, Callable[[], object]] = {
            "forward": ours,
            "permute": lambda e=r.experts, n=n_experts: routing.permute(e, n, backend=BACKEND),
            "backward": lambda r=r, x=x, g=g: torch.autograd.grad(r.weights, x, g, retain_graph=True),
            "eager forward": eager,
            "eager permute": lambda e=r.experts, n=n_experts: plain_permute(e, n),
        }
        y = plain_router(x, k)[0]
        calls["eager backward"] = lambda y=y, x=x, g=g: torch.autograd.grad(y, x, g, retain_graph=True)
        if compile_too:
            compiled = torch.compile(plain_router)
            calls["compiled forward"] = lambda x=fixed, k=k, f=compiled: f(x, k)
        calls |= rivals(fixed, k)
        row: dict[str, object] = dict(base)
        row["floor forward"] = (size + 2 * copies) / speed
        row["floor permute"] = 3 * copies / speed
        row["floor backward"] = (2 * size + 2 * copies) / speed
        for name, call in calls.items():
            try:
                row[name] = microseconds(call, repeat)
            except Exception as error:  # another package's router may refuse a shape
                if name in ("forward", "permute", "backward"):
                    raise
                row[name] = f"failed: {error}"[:80]
        rows.append(row)
    return rows


def sanitize() -> dict[str, str]:
    """racecheck and memcheck of a small run of this script."""
    tool = shutil.which("compute-sanitizer")
    if not CUDA or tool is None:
        return {"compute-sanitizer": "not run: " + ("not installed" if CUDA else "no GPU")}
    found = {}
    for check in ("memcheck", "racecheck"):
        small = [sys.executable, __file__, "--only-correctness", "--tokens", "300"]
        command = [tool, "--tool", check, "--error-exitcode", "9", *small]
        done = subprocess.run(command, capture_output=True, text=True)
        found[check] = "clean" if done.returncode == 0 else (done.stdout + done.stderr)[-2000:]
    return found


def table(rows: list[dict[str, object]]) -> str:
    """The times of all shapes, one line a name."""
    names = [name for name in rows[0] if name not in ("E", "k", "T")]

    def shape(row: dict[str, object]) -> str:
        return f"E={row['E']} k={row['k']}"

    head = f"{'us, T = ' + str(rows[0]['T']):22}" + "".join(f"{shape(r):>12}" for r in rows)
    lines = [head]
    for name in names:
        cells = [row.get(name, "-") for row in rows]
        lines.append(f"{name:22}" + "".join(f"{c:12.1f}" if isinstance(c, float) else f"{c!s:>12.11}" for c in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536 if CUDA else 1024)
    parser.add_argument("--repeat", type=int, default=30 if CUDA else 3)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out (it takes a minute)")
    parser.add_argument("--only-correctness", action="store_true")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    card = torch.cuda.get_device_name() if CUDA else f"no GPU, dry run on {platform.processor() or 'a CPU'}"
    print(f"{card}; torch {torch.__version__}; backend {BACKEND}")
    worst = correctness(min(a.tokens, 4096))
    print("correct against float64; largest errors:", {name: f"{error:.1e}" for name, error in worst.items()})
    if a.only_correctness:
        return
    opcheck()
    print("opcheck passed")
    n = 50 if CUDA else 5
    repeats(a.tokens, n)
    print(f"{n} repeats bitwise equal")
    rows = times(a.tokens, a.repeat, CUDA and not a.no_compile)
    sanitizer = sanitize()
    print("sanitizer:", sanitizer)
    print(("\nDRY RUN ON A CPU: these times say nothing about a GPU.\n" if not CUDA else "\n") + table(rows))
    if a.json:
        result = {"card": card, "torch": torch.__version__, "backend": BACKEND, "errors": worst, "repeats": n,
                  "times_us": rows, "sanitizer": sanitizer}  # fmt: skip
        a.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
