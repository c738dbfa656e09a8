"""The CUDA source, compiled by g++ and run a fiber a thread, over the sizes, dtypes, modes and thread orders."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import shim_library
import shim_product
from trajectory_guard.kernels.nvrtc import Constants

PRODUCT = Path(__file__).with_name("shim_product.py")


def run_product(*arguments: str, environment: dict | None = None) -> dict:
    """The product in processes of its own."""
    command = [sys.executable, str(PRODUCT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | (environment or {}))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_kernels_agree_with_the_oracle_for_every_size_dtype_and_mode():
    result = run_product("--processes", "2", "--topks", "6", "--orders", "0", "2")
    assert result["failures"] == [] and result["launches"] > 13_000


@pytest.mark.slow
def test_kernels_agree_with_the_oracle_over_the_full_product_in_three_thread_orders():
    result = run_product("--processes", "2")
    assert result["failures"] == []
    cells = 504  # sizes, k and dtypes; in six of them k = E, which has no cutoff
    forward = (64 + 64 + 16) * cells - (32 + 32 + 8) * 6
    assert result["launches"] == 3 * (forward + (8 * 7 + len(shim_product.REDUCED_BLOCKS)) * cells)


def test_blocks_of_128_tokens_in_three_thread_orders():
    result = shim_product.run_cells((60, 256), (2, 8), (1,), (0, 1, 2), 128)
    assert result["failures"] == [] and result["launches"] > 300


def test_misaligned_logits_are_read_and_gradients_written_by_element():
    result = shim_product.run_cells((64,), (2,), (0, 1), (0,), shim_product.PRODUCT_TOKENS, skew=4)
    assert result["failures"] == [] and result["launches"] > 100


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("n_experts", [8, 60, 896])
def test_permutation_and_histogram_in_each_thread_order(n_experts, order):
    tokens, k, bins = 100, min(n_experts, 7), 40
    case = shim_product.Case(n_experts, 1)
    lib = shim_library.Shim(shim_library.library(n_experts, 1, shim_product.PRODUCT_TOKENS))
    rng = np.random.default_rng(0)
    experts = np.stack([rng.permutation(n_experts)[:k] for _ in range(tokens)]).astype(np.int32)
    blocks = -(-tokens // shim_product.PRODUCT_TOKENS)
    arena = shim_library.Arena(
        part=((blocks, n_experts), np.int32), totals=((n_experts,), np.int32), order=((tokens * k,), np.int32),
        pos=((tokens, k), np.int32), offs=((n_experts,), np.int32), rows=((case.tokens, 2), np.float32),
        hist=((n_experts, bins), np.int32),
    )  # fmt: skip
    arena.fill()
    at, wide = arena.address, -(-n_experts // 32)
    lib.set(Constants(experts=n_experts, topk=k))
    lib.launch("permute_count", blocks, order, [experts.ctypes.data, at["part"], tokens])
    lib.launch("permute_scan", wide, order, [at["part"], at["totals"], blocks])
    lib.launch("permute_place", blocks, order,
               [experts.ctypes.data, at["part"], at["totals"], at["order"], at["pos"], at["offs"], tokens])  # fmt: skip
    arena.check()
    want = np.argsort(experts.reshape(-1), kind="stable")
    assert (arena.view["order"] == want).all()
    assert (arena.view["order"][arena.view["pos"].reshape(-1)] == np.arange(tokens * k)).all()
    assert (arena.view["offs"] == np.bincount(experts.reshape(-1), minlength=n_experts).cumsum()).all()

    arena.view["hist"][...] = 5
    cutoff = np.full(case.tokens, 0.01, np.float32)
    bounds = np.array([-0.5, 0.5], np.float32)
    lib.launch(
        "histogram_rows", -(-case.tokens // 32), order, [case.bits.ctypes.data, at["rows"], case.tokens, case.wide]
    )
    each = min(n_experts, 5)
    lib.launch("histogram_bins", -(-n_experts // each) * 2, order, [
        case.bits.ctypes.data, cutoff.ctypes.data, at["rows"], bounds.ctypes.data, case.valid_bytes.ctypes.data,
        at["hist"], case.tokens, bins, each, 20,
    ])  # fmt: skip
    arena.check()
    place = np.clip((0.01 - case.oracle(False, False).s[case.valid] + 0.5) * bins, 0, bins - 1)
    place = np.where(case.x[case.valid] == -np.inf, bins - 1, place).astype(int)
    want_hist = 5 + np.stack([np.bincount(column, minlength=bins) for column in place.T])
    assert np.abs(arena.view["hist"].cumsum(1) - want_hist.cumsum(1)).max() <= 1  # a value on a bin's edge


def test_indices_outside_the_experts_are_left_out_and_written_nowhere():
    lib = shim_library.Shim(shim_library.library(8, 0, shim_product.PRODUCT_TOKENS))
    experts = np.array([[1, 99], [-5, 0], [2**31 - 1, -(2**31)]], np.int32)
    arena = shim_library.Arena(part=((1, 8), np.int32), totals=((8,), np.int32), order=((6,), np.int32),
                               pos=((3, 2), np.int32), offs=((8,), np.int32))  # fmt: skip
    arena.fill()
    at = arena.address
    lib.set(Constants(experts=8, topk=2))
    lib.launch("permute_count", 1, 0, [experts.ctypes.data, at["part"], 3])
    lib.launch("permute_scan", 1, 0, [at["part"], at["totals"], 1])
    lib.launch("permute_place", 1, 0,
               [experts.ctypes.data, at["part"], at["totals"], at["order"], at["pos"], at["offs"], 3])  # fmt: skip
    arena.check()
    assert arena.view["pos"].tolist() == [[1, -1], [-1, 0], [-1, -1]]
    assert arena.view["order"][:2].tolist() == [3, 0]


def test_address_and_undefined_behaviour_sanitizers_find_nothing():
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
    environment = {
        "LD_PRELOAD": runtime.strip(),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }
    cells = ["--sizes", "60", "160", "--topks", "2", "--elems", "1", "--orders", "0"]
    result = run_product("--sanitize", *cells, environment=environment)
    assert result["failures"] == [] and result["launches"] > 400


PLANTED = {
    "a tie goes to the highest lane": ("lane == __ffs(vote) - 1", "lane == 31 - __clz(vote)"),
    "a tie goes to the highest expert of a lane": ("if (key[v] > mine) {", "if (key[v] >= mine) {"),
    "a warp barrier is removed before the picks are read": (
        "    __syncwarp();\n    float sum = 0.0f;", "    float sum = 0.0f;",
    ),
    "a block barrier is removed between the warps' sums": (
        "+= acc[v];\n    }\n    __syncthreads();\n  }", "+= acc[v];\n    }\n  }",
    ),
    "a block barrier is removed after the bitmap is cleared": (
        "counted[warp] = word;\n    }\n    __syncthreads();", "counted[warp] = word;\n    }",
    ),
    "a barrier is in a divergent branch": (
        "    __syncwarp();\n    float sum = 0.0f;", "    if (live) __syncwarp();\n    float sum = 0.0f;",
    ),
    "a shuffle is in a divergent branch": (
        "float d = group_sum(sum) + EPS;", "float d = EPS; if (live) d += group_sum(sum);",
    ),
    "a term of the softmax's backward is dropped": ("s * (ds[v] - inner)", "s * ds[v]"),
    "a term of the normalisation's backward is dropped": ("NORM ? (g - dot) / d : g", "NORM ? g / d : g"),
    "the gradient of lse is dropped": ("g + gl * p[v]", "g"),
    "an argument is narrowed": ("float* part_psum, int tokens,", "float* part_psum, short tokens,"),
    "the NaN rule is removed": ("c != c ? NAN_KEY : bits", "c != c ? bits : bits"),
    "the -inf rule is removed": ("x[v] == NEG_INF ? NEG_INF_KEY : key_of", "x[v] == 1e30f ? NEG_INF_KEY : key_of"),
    "padding is counted": ("& counted[w]);", ");"),
    "padding is added to the sums": ("if (counts) acc[v]", "if (live) acc[v]"),
    "a row beyond the last token is written": (
        "for (int j = lane; live && j < TOPK; j += GROUP) {\n      int e = picked",
        "for (int j = lane; j < TOPK; j += GROUP) {\n      int e = picked",
    ),
    "rows past the first block are dropped": ("i64 first = (i64)blockIdx.x * BLOCK_TOKENS;", "i64 first = 0;"),
    "the sum over blocks stops early": ("b < blocks; b += 32)", "b < blocks - 1; b += 32)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def failures_of_planted_bugs(tmp_path_factory):
    source = shim_library.SOURCE.read_text()
    sources = {"none": source}
    for bug, (old, new) in PLANTED.items():
        assert old in source, f"the text to replace is gone, plant the bug anew: {bug}"
        sources[bug] = source.replace(old, new)
    path = tmp_path_factory.mktemp("planted") / "sources.json"
    path.write_text(json.dumps(sources))
    done = subprocess.run([sys.executable, str(PRODUCT), "--planted", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(bug, failures_of_planted_bugs):
    assert failures_of_planted_bugs[bug], f"nothing noticed that {bug}"


def test_the_source_without_a_planted_bug_passes(failures_of_planted_bugs):
    assert failures_of_planted_bugs["none"] == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (threadIdx.x != 3) __syncthreads();", "different barriers"),
        ("if (threadIdx.x % 32 < 16) __syncwarp();", "deadlock"),
        ("if (threadIdx.x < 32) __syncthreads(); else __syncwarp();", "different barriers"),
        ("if (threadIdx.x % 2) __ballot_sync(FULL, 1); else __ballot_sync(FULL, 1 );\n", "different collectives"),
        ("__shfl_xor_sync(0xfu << (threadIdx.x % 32 / 4 * 4), 1, 8);", "outside its mask|different collectives"),
    ],
)
def test_the_shim_reports_divergence_and_deadlock(body, message):
    source = shim_library.SOURCE.read_text()
    start = source.index("  __shared__ u32 routed[PADDED * WORDS];\n  mark_routed(experts, (i64)blockIdx.x")
    broken = source[:start] + body.replace("; else", ";\n else") + "\n" + source[start:]
    lib = shim_library.Shim(
        shim_library.library(8, 0, shim_product.PRODUCT_TOKENS, broken, ("-O0", "-Wno-unused-value"))
    )
    lib.set(Constants(experts=8, topk=1))
    with pytest.raises(shim_library.ShimError, match=message):
        lib.launch("permute_count", 1, 0, [0, 0, 0])
