"""The kernels on the CPU over the product of sizes, k, dtypes, modes and thread orders, against the float64 oracle.

    python tests/kernels/shim_product.py --processes 2          # everything; prints one JSON line

For every size, k and dtype the forward runs over all of: score, norm, cutoff, stats, bias, valid, T = 0 and T = 37; the
backward over all of: score, norm, valid, which of the three gradients come in; each in three thread orders that must
agree bit for bit. The 37 rows are ties, constants, both zeros, -inf masks, large logits, NaN of both signs and
infinities. Rows of NaN make every column sum NaN, so without `valid` the sums run over the 29 finite rows besides.
Blocks are 32 tokens by default, so that 37 rows end inside the second one. The sum over blocks knows nothing but E and
runs by itself, over counts of blocks that fill its 32 rows and do not.
"""

import argparse
import functools
import gc
import itertools
import json
import os
import resource
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]


import routing_oracle as oracle  # noqa: E402
import shim_library as shim  # noqa: E402
from trajectory_guard.kernels.nvrtc import Constants, layout  # noqa: E402

SIZES = (8, 16, 60, 64, 96, 128, 160, 256, 384, 512, 896)
TOPKS = tuple(range(1, 17))
ORDERS = (0, 1, 2)
PRODUCT_TOKENS = 32
SCALE = 1.5
REDUCED_BLOCKS = (1, 2, 32, 33, 70)


def variants(sizes=SIZES, elems=(0, 1, 2), block_tokens=PRODUCT_TOKENS, source=None, flags=()) -> list[tuple]:
    return sorted({(layout(e), elem, block_tokens, source, flags) for e in sizes for elem in elems})


class Case:
    """One (E, dtype): the rows in that dtype, validity, biases, and the oracles made when first needed."""

    def __init__(self, n_experts: int, elem: int, skew: int = 0) -> None:
        raw, self.exact, self.finite = oracle.rows(n_experts, seed=n_experts)
        bits = shim.to_bits(raw, elem)
        self.bits = shim.aligned(bits, skew)
        self.x = shim.from_bits(bits, elem)
        self.tokens = len(raw)
        rng = np.random.default_rng(n_experts + 1)
        self.valid = rng.random(self.tokens) < 0.7
        self.valid[self.finite :] = False
        self.valid[0] = True
        self.valid_bytes = shim.aligned(self.valid.astype(np.uint8), 1)
        self.bias = shim.aligned((np.round(rng.normal(0, 1, n_experts) * 8) / 64).astype(np.float32))
        self.g_psum = shim.aligned(rng.normal(0, 1, n_experts).astype(np.float32))
        self.g_lse = shim.aligned(rng.normal(0, 1, self.tokens).astype(np.float32))
        self.g_weights = rng.normal(0, 1, (self.tokens, 16)).astype(np.float32)
        self.wide = int(skew == 0 and n_experts * bits.itemsize % 16 == 0)
        self.oracles: dict = {}
        self.gradients: dict = {}
        self.settled: set = set()

    def oracle(self, sigmoid: bool, biased: bool):
        key = (sigmoid, biased)
        if key not in self.oracles:
            score = "sigmoid" if sigmoid else "softmax"
            self.oracles[key] = oracle.Oracle(self.x, score, self.bias if biased else None)
        return self.oracles[key]

    def gradient(self, term: int, c: Constants, valid: bool) -> np.ndarray:
        """The part of one incoming gradient: 1 weights, 2 psum, 4 lse; the backward is linear in them."""
        key = (term, c.sigmoid, c.topk, c.norm) if term == 1 else (term, c.sigmoid, valid)
        if key not in self.gradients:
            truth = self.oracle(c.sigmoid, False)
            self.gradients[key] = truth.backward(
                truth.order[:, : c.topk], self.valid if valid else None, c.norm, SCALE,
                self.g_weights[:, : c.topk] if term == 1 else None, self.g_psum if term == 2 else None,
                self.g_lse if term == 4 else None,
            )  # fmt: skip
        return self.gradients[key]

    def settle(self, check, *key) -> None:
        """Check, unless the same bits have passed the same check."""
        if key not in self.settled:
            check()
            self.settled.add(key)


case_of = functools.lru_cache(4)(Case)


def close(got, want, rtol, atol, what: str) -> None:
    with np.errstate(all="ignore"):
        near = np.abs(got - want) <= atol + rtol * np.abs(want)
    bad = ~(near | (got == want) | (np.isnan(got) & np.isnan(want)))
    assert not bad.any(), f"{what}: got {got[bad][:3]}, want {want[bad][:3]}"


def address(x: np.ndarray, given: bool = True) -> int:
    return x.ctypes.data if given else 0


def forward(lib, case: Case, c: Constants, n: int, biased: bool, valid: bool, orders: tuple, arena) -> None:
    """Launch and check one cell; the arena holds the outputs for n rows."""
    at, v, key = arena.address, arena.view, (c.sigmoid, biased, n)
    lib.set(c)
    lib.launch_orders("route_forward", len(v["part_psum"]), orders, [
        address(case.bits), address(case.bias, biased), address(case.valid_bytes, valid), at["weights"], at["experts"],
        at["lse"] if c.stats else 0, at["cutoff"] if c.cutoff else 0, at["part_counts"] if c.stats else 0,
        at["part_psum"] if c.stats else 0, n, case.wide, SCALE,
    ], arena)  # fmt: skip
    truth, mask, chosen = case.oracle(c.sigmoid, biased), case.valid if valid else None, v["experts"]
    same = (*key, chosen.tobytes())
    if n:
        case.settle(lambda: truth.check_choice(chosen, 0 if biased else min(n, case.exact)), "experts", same)
        case.settle(lambda: close(v["weights"], truth.weights(chosen, c.norm, SCALE), 4e-6, 1e-6, "weights"),
                    same, c.norm, v["weights"].tobytes())  # fmt: skip
    if n and c.cutoff:
        want = np.take_along_axis(truth.choice, truth.order[:, c.topk : c.topk + 1], 1)[:n, 0]
        case.settle(lambda: close(v["cutoff"], want, 0, 2e-6, "cutoff"), "cutoff", key, v["cutoff"].tobytes())
    if c.stats:
        assert (v["part_counts"].sum(0) == truth.counts(chosen, mask)).all(), "counts"
        psum, lse = v["part_psum"].astype(np.float64).sum(0), v["lse"]
        case.settle(lambda: close(psum, truth.psum(n, mask), 1e-5, 1e-5, "psum"), "psum", key, valid, psum.tobytes())
        want = truth.lse[:n] if mask is None else np.where(mask[:n], truth.lse[:n], 0.0)
        case.settle(lambda: close(lse, want, 2e-6, 2e-6, "lse"), "lse", key, valid, lse.tobytes())


def backward(lib, case: Case, c: Constants, valid: bool, terms: int, orders: tuple, arena, blocks: int, elem: int):
    """The gradient at the oracle's experts."""
    chosen = shim.aligned(case.oracle(c.sigmoid, False).order[:, : c.topk].astype(np.int32))
    g_weights = shim.aligned(np.ascontiguousarray(case.g_weights[:, : c.topk]))
    lib.set(c)
    lib.launch_orders("route_backward", blocks, orders, [
        address(case.bits), address(chosen), address(case.valid_bytes, valid), address(g_weights, bool(terms & 1)),
        address(case.g_psum, bool(terms & 2)), address(case.g_lse, bool(terms & 4)), arena.address["g"], case.tokens,
        case.wide, SCALE,
    ], arena)  # fmt: skip
    with np.errstate(invalid="ignore"):
        want = sum(case.gradient(term, c, valid) for term in (1, 2, 4) if terms & term)
    rounding = (0.0, 2.0**-8, 2.0**-10)[elem]
    got = shim.from_bits(arena.view["g"], elem)
    close(got, want, 2e-5 + rounding, 4e-6 + (6e-8 if elem == 2 else 0), "gradient")


def reduction(lib, n_experts: int, blocks: int, orders: tuple) -> None:
    """Counts and sums over blocks."""
    rng = np.random.default_rng(blocks)
    counts = shim.aligned(rng.integers(0, 33, (blocks, n_experts)).astype(np.int32))
    sums = shim.aligned(rng.normal(0, 1, (blocks, n_experts)).astype(np.float32))
    arena = shim.Arena(counts=((n_experts,), np.int32), psum=((n_experts,), np.float32))
    lib.set(Constants(experts=n_experts, topk=1))
    at = arena.address
    arguments = [address(counts), address(sums), at["counts"], at["psum"], blocks]
    lib.launch_orders("route_reduce", -(-n_experts // 32), orders, arguments, arena)
    assert (arena.view["counts"] == counts.sum(0)).all(), "counts over blocks"
    close(arena.view["psum"], sums.astype(np.float64).sum(0), 1e-5, 1e-5, "psum over blocks")


def cells_of(case: Case, k: int, elem: int, block_tokens: int):
    """Every launch of one size, k and dtype, as functions of a library and the orders, with words for a failure."""
    e, blocks = len(case.bias), -(-case.tokens // block_tokens)
    case.settled.clear(), case.gradients.clear()
    arenas = {}
    for n in (0, case.finite, case.tokens):
        parts = max(1, -(-n // block_tokens))
        arenas[n] = shim.Arena(
            weights=((n, k), np.float32), experts=((n, k), np.int32), lse=((n,), np.float32), cutoff=((n,), np.float32),
            part_counts=((parts, e), np.int32), part_psum=((parts, e), np.float32),
        )  # fmt: skip
    for sigmoid, norm, cutoff, stats, valid, biased in itertools.product((False, True), repeat=6):
        c = Constants(experts=e, topk=k, elem=elem, sigmoid=sigmoid, norm=norm, cutoff=cutoff, stats=stats)
        for n in (0, case.finite, case.tokens):
            if (cutoff and k == e) or (n == case.finite and (valid or not stats)):
                continue
            yield (lambda lib, orders, c=c, n=n, b=biased, v=valid: forward(lib, case, c, n, b, v, orders, arenas[n]),
                   f"{c}, T={n}, valid={valid}, biased={biased}")  # fmt: skip
    g = shim.Arena(g=((case.tokens, e), case.bits.dtype))
    for sigmoid, norm, valid in itertools.product((False, True), repeat=3):
        c = Constants(experts=e, topk=k, elem=elem, sigmoid=sigmoid, norm=norm)
        for terms in range(1, 8):
            yield (lambda lib, orders, c=c, v=valid, t=terms: backward(lib, case, c, v, t, orders, g, blocks, elem),
                   f"backward {c}, valid={valid}, terms={terms}")  # fmt: skip


def run_cells(sizes, topks, elems, orders, block_tokens, source=None, flags=(), skew=0, most=20) -> dict:
    """All cells; returns how many launches were checked and the failures."""
    launches, failures, orders = 0, [], tuple(orders)
    for e, elem in itertools.product(sizes, elems):
        try:
            lib = shim.Shim(shim.library(e, elem, block_tokens, source, flags))
        except shim.ShimError as error:
            failures.append(f"E={e} elem={elem}: {error}")
            continue
        case = case_of(e, elem, skew)
        reductions = [(functools.partial(reduction, n_experts=e, blocks=b), f"{b} blocks") for b in REDUCED_BLOCKS]
        cells = (cells_of(case, k, elem, block_tokens) for k in topks if k <= e)
        for run, where in itertools.chain(reductions, *cells):
            launches += len(orders)
            try:
                run(lib, orders=orders)
            except AssertionError as error:
                failures.append(f"{where}: {error}")
                if len(failures) >= most:
                    return {"launches": launches, "failures": failures}
    return {"launches": launches, "failures": failures}


def run_product(sizes, topks, elems, orders, block_tokens, flags, processes: int) -> dict:
    """`run_cells` in processes side by side, the largest layers first."""
    began = time.perf_counter()
    shim.build(variants(sizes, elems, block_tokens, flags=flags), processes)
    built = time.perf_counter() - began
    tasks = [(e, k, elem) for e in sorted(sizes, reverse=True) for elem in elems for k in sorted(topks, reverse=True)]
    parts = [((e,), (k,), (elem,), orders, block_tokens, None, flags) for e, k, elem in tasks if k <= e]
    if processes == 1:  # as sanitizers want it, which forking does not agree with
        done = [run_cells(*part) for part in parts]
    else:
        with ProcessPoolExecutor(processes, initializer=gc.disable) as pool:
            done = list(pool.map(run_cells, *zip(*parts, strict=True)))
    result = {key: sum((d[key] for d in done), start) for key, start in (("launches", 0), ("failures", []))}
    times = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
    return result | {
        "build_seconds": round(built, 1),
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(sum(t.ru_utime + t.ru_stime for t in times), 1),
    }


def run_planted(sources: dict[str, str]) -> dict[str, list[str]]:
    """For each broken source its failures; each runs in a process of its own, for it may crash."""
    shim.build([(layout(60), 1, PRODUCT_TOKENS, source) for source in sources.values()])
    results = {}
    for name, source in sources.items():
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            found = run_cells((60,), (3,), (1,), ORDERS, PRODUCT_TOKENS, source=source, most=1)["failures"]
            os.write(write, json.dumps(found).encode()[:4000])
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        results[name] = json.loads(text) if status == 0 else [f"killed by signal {os.WTERMSIG(status)}"]
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--planted", help="JSON file of name: broken source; prints the failures of each")
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--topks", type=int, nargs="*", default=list(TOPKS))
    parser.add_argument("--elems", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--block-tokens", type=int, default=PRODUCT_TOKENS)
    parser.add_argument("--orders", type=int, nargs="*", default=list(ORDERS))
    a = parser.parse_args()
    if a.planted:
        print(json.dumps(run_planted(json.loads(Path(a.planted).read_text()))))
        return
    flags = shim.SANITIZE if a.sanitize else ()
    print(json.dumps(run_product(a.sizes, a.topks, a.elems, a.orders, a.block_tokens, flags, a.processes)))


if __name__ == "__main__":
    main()
