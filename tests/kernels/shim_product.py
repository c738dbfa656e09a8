"""The kernels on the CPU over the product of sizes, k, dtypes, modes and thread orders, against the float64 oracle.

    python tests/kernels/shim_product.py --shard 0/2            # prints one JSON line

Every launch has 37 rows: ties, constants, both zeros, -inf masks, large logits, NaN of both signs, infinities; or their
finite part; or none. Blocks are 32 tokens by default, so that 37 rows end inside the second block.
"""

import argparse
import json
import os
import signal
import sys
import time
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
        self.g_psum = rng.normal(0, 1, n_experts).astype(np.float32)
        self.g_lse = rng.normal(0, 1, self.tokens).astype(np.float32)
        self.g_weights = rng.normal(0, 1, (self.tokens, 16)).astype(np.float32)
        self.wide = int(skew == 0 and n_experts * bits.itemsize % 16 == 0)
        self.oracles: dict = {}

    def oracle(self, score: str, biased: bool):
        key = (score, biased)
        if key not in self.oracles:
            self.oracles[key] = oracle.Oracle(self.x, score, self.bias if biased else None)
        return self.oracles[key]


def close(got, want, rtol, atol, what: str) -> None:
    with np.errstate(all="ignore"):
        near = np.abs(got - want) <= atol + rtol * np.abs(want)
    bad = ~(near | (got == want) | (np.isnan(got) & np.isnan(want)))
    assert not bad.any(), f"{what}: got {got[bad][:3]}, want {want[bad][:3]}"


def run_forward(lib, case: Case, c: Constants, n: int, biased: bool, valid: bool, order: int, block_tokens: int):
    e, k = c.experts, c.topk
    blocks = max(1, -(-n // block_tokens))
    cache = case.__dict__.setdefault("arenas", {})
    arena = cache.get((e, k, n))
    if arena is None:
        cache.clear() if len(cache) > 8 else None
        arena = cache[(e, k, n)] = shim.Arena(
            weights=((n, k), np.float32), experts=((n, k), np.int32), lse=((n,), np.float32), cutoff=((n,), np.float32),
            part_counts=((blocks, e), np.int32), part_psum=((blocks, e), np.float32), counts=((e,), np.int32),
            psum=((e,), np.float32),
        )  # fmt: skip
    arena.fill()
    at = arena.address
    lib.set(c)
    address = case.bits.ctypes.data
    lib.launch("route_forward", blocks, order, [
        address, case.bias.ctypes.data if biased else 0, case.valid_bytes.ctypes.data if valid else 0,
        at["weights"], at["experts"], at["lse"] if c.stats else 0, at["cutoff"] if c.cutoff else 0,
        at["part_counts"] if c.stats else 0, at["part_psum"] if c.stats else 0, n, case.wide, SCALE,
    ])  # fmt: skip
    if c.stats:
        lib.launch("route_reduce", -(-e // 32), order,
                   [at["part_counts"], at["part_psum"], at["counts"], at["psum"], blocks])  # fmt: skip
    arena.check()
    return arena


def check_forward(arena, case: Case, c: Constants, n: int, biased: bool, valid: bool) -> None:
    v, mask = arena.view, case.valid if valid else None
    truth = case.oracle("sigmoid" if c.sigmoid else "softmax", biased)
    chosen = v["experts"]
    if n:
        truth.check_choice(chosen, 0 if biased else min(n, case.exact))
        close(v["weights"], truth.weights(chosen, c.norm, SCALE), 4e-6, 1e-6, "weights")
        if c.cutoff:
            close(v["cutoff"], np.take_along_axis(truth.choice, truth.order[:, c.topk : c.topk + 1], 1)[:n, 0], 0, 2e-6,
                  "cutoff")  # fmt: skip
    if c.stats:
        assert (v["counts"] == truth.counts(chosen, mask)).all(), "counts"
        close(v["psum"], truth.psum(n, mask), 1e-5, 1e-5, "psum")
        lse = truth.lse[:n] if mask is None else np.where(mask[:n], truth.lse[:n], 0.0)
        close(v["lse"], lse, 2e-6, 2e-6, "lse")


def run_backward(lib, case: Case, c: Constants, valid: bool, terms: int, order: int, block_tokens: int, n: int):
    truth = case.oracle("sigmoid" if c.sigmoid else "softmax", False)
    chosen = shim.aligned(truth.order[:n, : c.topk].astype(np.int32))
    g_weights = shim.aligned(np.ascontiguousarray(case.g_weights[:n, : c.topk]))
    arena = shim.Arena(g=((n, c.experts), case.bits.dtype))
    arena.fill()
    lib.set(c)
    lib.launch("route_backward", -(-n // block_tokens), order, [
        case.bits.ctypes.data, chosen.ctypes.data, case.valid_bytes.ctypes.data if valid else 0,
        g_weights.ctypes.data if terms & 1 else 0, case.g_psum.ctypes.data if terms & 2 else 0,
        case.g_lse.ctypes.data if terms & 4 else 0, arena.address["g"], n, case.wide, SCALE,
    ])  # fmt: skip
    arena.check()
    return arena, chosen, g_weights


def check_backward(arena, case: Case, c: Constants, valid: bool, terms: int, chosen, g_weights, elem: int) -> None:
    n = len(chosen)
    truth = case.oracle("sigmoid" if c.sigmoid else "softmax", False)
    want = truth.backward(
        truth.order[:, : c.topk], case.valid if valid else None, c.norm, SCALE,
        case.g_weights[:, : c.topk] if terms & 1 else None, case.g_psum if terms & 2 else None,
        case.g_lse if terms & 4 else None,
    )[:n]  # fmt: skip
    got = shim.from_bits(arena.view["g"], elem)
    rounding = (0.0, 2.0**-8, 2.0**-10)[elem]
    close(got, want, 2e-5 + rounding, 4e-6 + (6e-8 if elem == 2 else 0), "gradient")


def run_cells(sizes, topks, elems, orders, block_tokens, shard=(0, 1), source=None, flags=(), skew=0, most=20) -> dict:
    """All cells of this shard; returns how many launches were checked and the failures."""
    launches, failures, cell = 0, [], 0
    for e in sizes:
        for elem in elems:
            cell += 1
            if cell % shard[1] != shard[0]:
                continue
            try:
                lib = shim.Shim(shim.library(e, elem, block_tokens, source, flags))
            except shim.ShimError as error:
                failures.append(f"E={e} elem={elem}: {error}")
                continue
            case = Case(e, elem, skew)
            for k in topks:
                if k > e:
                    continue
                for bits in range(32):
                    c = Constants(experts=e, topk=k, elem=elem, sigmoid=bool(bits & 1), norm=bool(bits & 2),
                                  cutoff=bool(bits & 4), stats=bool(bits & 8))  # fmt: skip
                    valid = bool(bits & 16)
                    biased = bool((k + bits + bits // 4) & 1)
                    where = f"{c}, valid={valid}, biased={biased}"
                    try:
                        if not (c.cutoff and k >= e):
                            # Rows of NaN make every psum NaN, so without `valid` every other k leaves them out.
                            n = case.tokens if valid or k % 2 else case.finite
                            first = run_forward(lib, case, c, n, biased, valid, orders[0], block_tokens)
                            check_forward(first, case, c, n, biased, valid)
                            before = first.buffer.copy()
                            for order in orders[1:]:
                                again = run_forward(lib, case, c, n, biased, valid, order, block_tokens)
                                assert (again.buffer == before).all(), f"thread order {order} changes the result"
                            none = run_forward(lib, case, c, 0, biased, valid, orders[0], block_tokens)
                            check_forward(none, case, c, 0, biased, valid)
                            launches += len(orders) + 1
                        if not (c.cutoff or c.stats):
                            terms = (7, 1, 2, 4, 3, 5, 6)[(k + bits) % 7]
                            first, chosen, g = run_backward(
                                lib, case, c, valid, terms, orders[0], block_tokens, case.tokens
                            )
                            check_backward(first, case, c, valid, terms, chosen, g, elem)
                            launches += 1
                            before = first.view["g"].tobytes()
                            for order in orders[1:]:
                                again, *_ = run_backward(lib, case, c, valid, terms, order, block_tokens, case.tokens)
                                launches += 1
                                assert again.view["g"].tobytes() == before, f"thread order {order} changes the gradient"
                    except AssertionError as error:
                        failures.append(f"{where}: {error}")
                        if len(failures) >= most:
                            return {"launches": launches, "failures": failures}
    return {"launches": launches, "failures": failures}


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
    parser.add_argument("--shard", default="0/1")
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
    start = time.perf_counter()
    index, count = map(int, a.shard.split("/"))
    flags = shim.SANITIZE if a.sanitize else ()
    result = run_cells(a.sizes, a.topks, a.elems, a.orders, a.block_tokens, (index, count), flags=flags)
    result["seconds"] = round(time.perf_counter() - start, 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
