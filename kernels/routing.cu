// Mixture-of-experts routing: forward, backward, stable permutation by expert, quantile-balancing histogram.
//
// One source without includes. NVRTC compiles it with these constants (kernels/nvrtc.py sets them):
//   EXPERTS, TOPK   E and k                      GROUP, PER_LANE  lanes a token and consecutive experts a lane
//   ELEM            0 float, 1 bfloat16, 2 half  BLOCK_TOKENS     tokens a block (128), a multiple of 32
//   SIGMOID, NORM, CUTOFF, STATS                 0 or 1, as in route()
//   PART            1 forward, 2 backward, 3 permute, 4 histogram, 0 all
// tests/kernels/ runs the same source on the CPU. The numerics contract is in kernels/reference.py.
//
// One block a multiprocessor is all that the launch bounds ask for: left to itself, ptxas spills a few bytes of some sizes
// to fit one more.
// Every shuffle and ballot names all 32 lanes and is reached by all of them: lanes without a token compute on a row of
// -inf and write nothing. Sums run in a fixed order; the only atomics are on integers.

typedef long long i64;
typedef unsigned int u32;

#define FULL 0xffffffffu
#define THREADS 256
#define GROUPS (THREADS / GROUP)
#define PADDED (GROUP * PER_LANE)
#define WORDS (BLOCK_TOKENS / 32)
#define STEPS (BLOCK_TOKENS / GROUPS)
#define MAX_TOPK 32
#define EPS 1e-20f
#define NEG_INF __int_as_float(0xff800000)
#define NAN_VALUE __int_as_float(0x7fc00000)

// Keys order like floats: signed integers with NaN below -inf and taken experts below NaN.
#define TAKEN (-2147483647 - 1)
#define NAN_KEY (-2147483647)
#define NEG_INF_KEY (-2139095041)

#if ELEM == 0
typedef float elem;
#else
typedef unsigned short elem;
#endif

__device__ __forceinline__ float to_float(elem v) {
#if ELEM == 0
  return v;
#elif ELEM == 1
  return __uint_as_float((u32)v << 16);
#elif defined(__CUDA_ARCH__)
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
  return f;
#else
  return host_half_to_float(v);
#endif
}

__device__ __forceinline__ elem from_float(float f) {
#if ELEM == 0
  return f;
#elif ELEM == 1
  u32 u = __float_as_uint(f);
  if (f != f) return (elem)((u >> 16) | 0x40u);
  return (elem)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
#elif defined(__CUDA_ARCH__)
  elem v;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(f));
  return v;
#else
  return host_float_to_half(f);
#endif
}

__device__ __forceinline__ float group_max(float v) {
#pragma unroll
  for (int o = GROUP / 2; o > 0; o /= 2) v = fmaxf(v, __shfl_xor_sync(FULL, v, o));
  return v;
}

__device__ __forceinline__ float group_sum(float v) {
#pragma unroll
  for (int o = GROUP / 2; o > 0; o /= 2) v += __shfl_xor_sync(FULL, v, o);
  return v;
}

__device__ __forceinline__ int group_max_key(int v) {
#if GROUP == 32
  return __reduce_max_sync(FULL, v);
#else
#pragma unroll
  for (int o = GROUP / 2; o > 0; o /= 2) v = max(v, __shfl_xor_sync(FULL, v, o));
  return v;
#endif
}

__device__ __forceinline__ int key_of(float c) {
  int bits = __float_as_int(c);
  return c != c ? NAN_KEY : bits ^ ((bits >> 31) & 0x7fffffff);
}

__device__ __forceinline__ float choice_of(int key) {
  return key == NAN_KEY ? NAN_VALUE : __int_as_float(key ^ ((key >> 31) & 0x7fffffff));
}

// This lane's logits, -inf beyond the last expert. wide: rows may be read in 16-byte pieces.
__device__ __forceinline__ void load_row(const elem* row, bool live, int lane, int wide, float* x) {
#pragma unroll
  for (int v = 0; v < PER_LANE; ++v) x[v] = NEG_INF;
  if (!live) return;
#if PER_LANE * (ELEM == 0 ? 4 : 2) % 16 == 0
  if (wide) {
    const int per = 16 / (int)sizeof(elem);
#pragma unroll
    for (int c = 0; c < PER_LANE / per; ++c) {
      int e = lane * PER_LANE + c * per;
      if (e < EXPERTS) {
        uint4 q = *(const uint4*)(row + e);
        u32 w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#if ELEM == 0
          x[c * per + i] = __uint_as_float(w[i]);
#else
          x[c * per + 2 * i] = to_float((elem)(w[i] & 0xffffu));
          x[c * per + 2 * i + 1] = to_float((elem)(w[i] >> 16));
#endif
        }
      }
    }
    return;
  }
#endif
#pragma unroll
  for (int v = 0; v < PER_LANE; ++v) {
    int e = lane * PER_LANE + v;
    if (e < EXPERTS) x[v] = to_float(row[e]);
  }
}

// Softmax of a row: base and inverse sum such that s = exp(x - base) * inverse; total is the sum.
// A row with no finite largest logit has NaN scores; its base is 0 so that log(total) is still its logsumexp.
__device__ __forceinline__ void row_softmax(const float* x, float* p, float& base, float& total, float& inverse) {
  float top = NEG_INF;
#pragma unroll
  for (int v = 0; v < PER_LANE; ++v) top = fmaxf(top, x[v]);
  top = group_max(top);
  bool finite = top - top == 0.0f;
  base = finite ? top : 0.0f;
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < PER_LANE; ++v) {
    p[v] = expf(x[v] - base);
    sum += p[v];
  }
  total = group_sum(sum);
  inverse = finite ? 1.0f / total : NAN_VALUE;
}

__device__ __forceinline__ float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }

// __fmul_rn: never fused into a later sum, so that a score is the same number wherever it is computed.
__device__ __forceinline__ float score_of(float x, float base, float inverse) {
  return SIGMOID ? sigmoid_of(x) : __fmul_rn(expf(x - base), inverse);
}

#if PART == 0 || PART == 1

extern "C" __global__ void __launch_bounds__(THREADS, 1)
route_forward(const elem* logits, const float* bias, const unsigned char* valid, float* weights, int* experts,
              float* lse, float* cutoff, int* part_counts, float* part_psum, int tokens, int wide, float scale) {
  __shared__ u32 routed[PADDED * WORDS];  // bit i of expert e: token i of the block goes there
  __shared__ u32 counted[WORDS];
  __shared__ float column[PADDED];
  __shared__ int picked[GROUPS * MAX_TOPK];
  __shared__ float picked_score[GROUPS * MAX_TOPK];
  int tid = threadIdx.x, warp = tid / 32, group = tid / GROUP, lane = tid % GROUP;
  i64 first = (i64)blockIdx.x * BLOCK_TOKENS;
  if (STATS) {
    for (int i = tid; i < PADDED * WORDS; i += THREADS) routed[i] = 0u;
    for (int i = tid; i < PADDED; i += THREADS) column[i] = 0.0f;
    if (warp < WORDS) {
      i64 t = first + tid;
      u32 word = __ballot_sync(FULL, t < tokens && (valid == 0 || valid[t] != 0));
      if (tid % 32 == 0) counted[warp] = word;
    }
    __syncthreads();
  }
  float b[PER_LANE], acc[PER_LANE];
#pragma unroll
  for (int v = 0; v < PER_LANE; ++v) {
    int e = lane * PER_LANE + v;
    b[v] = bias != 0 && e < EXPERTS ? bias[e] : 0.0f;
    acc[v] = 0.0f;
  }
  for (int step = 0; step < STEPS; ++step) {
    if (first + step * GROUPS + warp * (32 / GROUP) >= tokens) break;  // the same for the whole warp
    int i = step * GROUPS + group;
    i64 t = first + i;
    bool live = t < tokens;
    const elem* row = logits + t * EXPERTS;
    float x[PER_LANE], s[PER_LANE] = {}, base = 0.0f, total = 0.0f, inverse = 0.0f;
    load_row(row, live, lane, wide, x);
    if (STATS || !SIGMOID) row_softmax(x, s, base, total, inverse);
    bool counts = STATS && live && ((counted[i / 32] >> (i % 32)) & 1u);
    int key[PER_LANE];
#pragma unroll
    for (int v = 0; v < PER_LANE; ++v) {
      s[v] = SIGMOID ? sigmoid_of(x[v]) : __fmul_rn(s[v], inverse);
      if (counts) acc[v] += s[v];
      // Scores are never -0, so neither is the sum, and equal choices have equal keys.
      key[v] = x[v] == NEG_INF ? NEG_INF_KEY : key_of(s[v] + b[v]);
      if (lane * PER_LANE + v >= EXPERTS) key[v] = TAKEN;
    }
    int best = TAKEN;
    for (int j = 0; j < TOPK + CUTOFF; ++j) {
      int mine = key[0], at = 0;
#pragma unroll
      for (int v = 1; v < PER_LANE; ++v) {
        if (key[v] > mine) {
          mine = key[v];
          at = v;
        }
      }
      best = group_max_key(mine);
      u32 vote = __ballot_sync(FULL, mine == best) >> (tid % 32 / GROUP * GROUP);
      if (j < TOPK && lane == __ffs(vote) - 1) {  // the lowest lane holds the lowest expert
        picked[group * MAX_TOPK + j] = lane * PER_LANE + at;
#pragma unroll
        for (int v = 0; v < PER_LANE; ++v) {
          if (v == at) key[v] = TAKEN;
        }
      }
    }
    __syncwarp();
    float sum = 0.0f;
    for (int j = lane; j < TOPK; j += GROUP) {
      float score = live ? score_of(to_float(row[picked[group * MAX_TOPK + j]]), base, inverse) : 0.0f;
      picked_score[group * MAX_TOPK + j] = score;
      sum += score;
    }
    float d = group_sum(sum) + EPS;
    for (int j = lane; live && j < TOPK; j += GROUP) {
      int e = picked[group * MAX_TOPK + j];
      float score = picked_score[group * MAX_TOPK + j];
      weights[t * TOPK + j] = (NORM ? score / d : score) * scale;
      experts[t * TOPK + j] = e;
      if (STATS) atomicOr(&routed[e * WORDS + i / 32], 1u << (i % 32));
    }
    if (live && lane == 0) {
      if (CUTOFF) cutoff[t] = choice_of(best);
      if (STATS) lse[t] = counts ? base + logf(total) : 0.0f;
    }
    __syncwarp();  // picked is written again in the next step
  }
  if (!STATS) return;
#pragma unroll
  for (int v = 0; v < PER_LANE; ++v) {
#pragma unroll
    for (int o = GROUP; o < 32; o *= 2) acc[v] += __shfl_xor_sync(FULL, acc[v], o);
  }
  for (int w = 0; w < THREADS / 32; ++w) {
    if (warp == w && tid % 32 < GROUP) {
#pragma unroll
      for (int v = 0; v < PER_LANE; ++v) column[lane * PER_LANE + v] += acc[v];
    }
    __syncthreads();
  }
  for (int e = tid; e < EXPERTS; e += THREADS) {
    int n = 0;
#pragma unroll
    for (int w = 0; w < WORDS; ++w) n += __popc(routed[e * WORDS + w] & counted[w]);
    part_counts[(i64)blockIdx.x * EXPERTS + e] = n;
    part_psum[(i64)blockIdx.x * EXPERTS + e] = column[e];
  }
}

// Sums over blocks; 32 experts a block of 32 x 32 threads.
extern "C" __global__ void __launch_bounds__(1024, 1)
route_reduce(const int* part_counts, const float* part_psum, int* counts, float* psum, int blocks) {
  __shared__ int count_rows[32 * 32];
  __shared__ float psum_rows[32 * 32];
  int tid = threadIdx.x, row = tid / 32, e = blockIdx.x * 32 + tid % 32;
  int n = 0;
  float p = 0.0f;
  if (e < EXPERTS) {
    for (int b = row; b < blocks; b += 32) {
      n += part_counts[(i64)b * EXPERTS + e];
      p += part_psum[(i64)b * EXPERTS + e];
    }
  }
  count_rows[tid] = n;
  psum_rows[tid] = p;
  __syncthreads();
  if (row != 0 || e >= EXPERTS) return;
  for (int r = 1; r < 32; ++r) {
    n += count_rows[r * 32 + tid];
    p += psum_rows[r * 32 + tid];
  }
  counts[e] = n;
  psum[e] = p;
}

#endif
#if PART == 0 || PART == 2

extern "C" __global__ void __launch_bounds__(THREADS, 1)
route_backward(const elem* logits, const int* experts, const unsigned char* valid, const float* g_weights,
               const float* g_psum, const float* g_lse, elem* g_logits, int tokens, int wide, float scale) {
  __shared__ float chosen[GROUPS * PADDED];  // a row a group: gradient of the chosen scores, 0 elsewhere
  int tid = threadIdx.x, warp = tid / 32, group = tid / GROUP, lane = tid % GROUP;
  i64 first = (i64)blockIdx.x * BLOCK_TOKENS;
  float gp[PER_LANE];
#pragma unroll
  for (int v = 0; v < PER_LANE; ++v) {
    int e = lane * PER_LANE + v;
    gp[v] = g_psum != 0 && e < EXPERTS ? g_psum[e] : 0.0f;
  }
  for (int step = 0; step < STEPS; ++step) {
    if (first + step * GROUPS + warp * (32 / GROUP) >= tokens) break;  // the same for the whole warp
    i64 t = first + step * GROUPS + group;
    bool live = t < tokens;
    bool counts = live && (valid == 0 || valid[t] != 0);
    const elem* row = logits + t * EXPERTS;
    float x[PER_LANE], p[PER_LANE] = {}, base = 0.0f, total = 0.0f, inverse = 0.0f;
    load_row(row, live, lane, wide, x);
    if (!SIGMOID || g_lse != 0) row_softmax(x, p, base, total, inverse);
#pragma unroll
    for (int v = 0; v < PER_LANE; ++v) chosen[group * PADDED + lane * PER_LANE + v] = 0.0f;
    __syncwarp();
    if (g_weights != 0) {
      float sum = 0.0f, with_g = 0.0f;
      for (int j = lane; live && j < TOPK; j += GROUP) {
        u32 e = (u32)experts[t * TOPK + j];
        float score = e < (u32)EXPERTS ? score_of(to_float(row[e]), base, inverse) : 0.0f;
        sum += score;
      }
      float d = group_sum(sum) + EPS;
      for (int j = lane; live && j < TOPK; j += GROUP) {
        u32 e = (u32)experts[t * TOPK + j];
        float score = e < (u32)EXPERTS ? score_of(to_float(row[e]), base, inverse) : 0.0f;
        with_g += g_weights[t * TOPK + j] * scale * (score / d);
      }
      float dot = group_sum(with_g);
      for (int j = lane; live && j < TOPK; j += GROUP) {
        u32 e = (u32)experts[t * TOPK + j];
        float g = g_weights[t * TOPK + j] * scale;
        if (e < (u32)EXPERTS) chosen[group * PADDED + e] = NORM ? (g - dot) / d : g;
      }
    }
    __syncwarp();
    float ds[PER_LANE], inner = 0.0f, gl = g_lse != 0 && counts ? g_lse[t] : 0.0f;
#pragma unroll
    for (int v = 0; v < PER_LANE; ++v) {
      ds[v] = chosen[group * PADDED + lane * PER_LANE + v] + (counts ? gp[v] : 0.0f);
      p[v] = __fmul_rn(p[v], inverse);
      inner += lane * PER_LANE + v < EXPERTS ? ds[v] * p[v] : 0.0f;
    }
    if (!SIGMOID) inner = group_sum(inner);
#pragma unroll
    for (int v = 0; v < PER_LANE; ++v) {
      float s = SIGMOID ? sigmoid_of(x[v]) : p[v];
      float g = SIGMOID ? ds[v] * (s * (1.0f - s)) : s * (ds[v] - inner);
      x[v] = g_lse != 0 && counts ? g + gl * p[v] : g;
    }
    __syncwarp();  // chosen is written again in the next step
    if (!live) continue;
    elem* out = g_logits + t * EXPERTS;
#if PER_LANE * (ELEM == 0 ? 4 : 2) % 16 == 0
    if (wide) {
      const int per = 16 / (int)sizeof(elem);
#pragma unroll
      for (int c = 0; c < PER_LANE / per; ++c) {
        int e = lane * PER_LANE + c * per;
        u32 w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#if ELEM == 0
          w[i] = __float_as_uint(x[c * per + i]);
#else
          w[i] = (u32)from_float(x[c * per + 2 * i]) | ((u32)from_float(x[c * per + 2 * i + 1]) << 16);
#endif
        }
        if (e < EXPERTS) *(uint4*)(out + e) = make_uint4(w[0], w[1], w[2], w[3]);
      }
      continue;
    }
#endif
#pragma unroll
    for (int v = 0; v < PER_LANE; ++v) {
      int e = lane * PER_LANE + v;
      if (e < EXPERTS) out[e] = from_float(x[v]);
    }
  }
}

#endif
#if PART == 0 || PART == 3

// Marks which tokens of this block go to which expert. Indices outside [0, E) are left out everywhere.
__device__ __forceinline__ void mark_routed(const int* experts, i64 first, int tokens, u32* routed) {
  for (int i = threadIdx.x; i < PADDED * WORDS; i += THREADS) routed[i] = 0u;
  __syncthreads();
  for (int c = threadIdx.x; c < BLOCK_TOKENS * TOPK; c += THREADS) {
    int i = c / TOPK;
    if (first + i >= tokens) break;
    u32 e = (u32)experts[first * TOPK + c];
    if (e < (u32)EXPERTS) atomicOr(&routed[e * WORDS + i / 32], 1u << (i % 32));
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) permute_count(const int* experts, int* part, int tokens) {
  __shared__ u32 routed[PADDED * WORDS];
  mark_routed(experts, (i64)blockIdx.x * BLOCK_TOKENS, tokens, routed);
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) {
    int n = 0;
#pragma unroll
    for (int w = 0; w < WORDS; ++w) n += __popc(routed[e * WORDS + w]);
    part[(i64)blockIdx.x * EXPERTS + e] = n;
  }
}

// part[b][e]: from the copies in block b to the copies in the blocks before it; totals[e]: all copies.
extern "C" __global__ void __launch_bounds__(1024, 1) permute_scan(int* part, int* totals, int blocks) {
  __shared__ int rows[32 * 32];
  int tid = threadIdx.x, row = tid / 32, e = blockIdx.x * 32 + tid % 32;
  int each = (blocks + 31) / 32, from = row * each, to = min(from + each, blocks);
  int n = 0;
  if (e < EXPERTS) {
    for (int b = from; b < to; ++b) n += part[(i64)b * EXPERTS + e];
  }
  rows[tid] = n;
  __syncthreads();
  if (e >= EXPERTS) return;
  int before = 0;
  for (int r = 0; r < row; ++r) before += rows[r * 32 + tid % 32];
  if (row == 31) totals[e] = before + n;
  for (int b = from; b < to; ++b) {
    int here = part[(i64)b * EXPERTS + e];
    part[(i64)b * EXPERTS + e] = before;
    before += here;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
permute_place(const int* experts, const int* part, const int* totals, int* order, int* pos, int* offs, int tokens) {
  __shared__ u32 routed[PADDED * WORDS];
  __shared__ int start[PADDED];
  __shared__ int warp_sum[THREADS / 32];
  const int each = (PADDED + THREADS - 1) / THREADS;
  int tid = threadIdx.x, warp = tid / 32;
  i64 first = (i64)blockIdx.x * BLOCK_TOKENS;
  int sum = 0;
#pragma unroll
  for (int q = 0; q < each; ++q) {
    int e = tid * each + q;
    if (e < EXPERTS) sum += totals[e];
  }
  int upto = sum;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    int other = __shfl_up_sync(FULL, upto, o);
    if (tid % 32 >= o) upto += other;
  }
  if (tid % 32 == 31) warp_sum[warp] = upto;
  __syncthreads();
  int run = upto - sum;
  for (int w = 0; w < warp; ++w) run += warp_sum[w];
#pragma unroll
  for (int q = 0; q < each; ++q) {
    int e = tid * each + q;
    if (e < EXPERTS) {
      start[e] = run + part[(i64)blockIdx.x * EXPERTS + e];
      run += totals[e];
      if (blockIdx.x == 0) offs[e] = run;
    }
  }
  mark_routed(experts, first, tokens, routed);
  for (int c = tid; c < BLOCK_TOKENS * TOPK; c += THREADS) {
    int i = c / TOPK;
    if (first + i >= tokens) break;
    u32 e = (u32)experts[first * TOPK + c];
    int place = -1;
    if (e < (u32)EXPERTS) {
      place = start[e] + __popc(routed[e * WORDS + i / 32] & ((1u << (i % 32)) - 1u));
      for (int w = 0; w < i / 32; ++w) place += __popc(routed[e * WORDS + w]);
      order[place] = (int)(first * TOPK + c);
    }
    pos[first * TOPK + c] = place;
  }
}

#endif
#if PART == 0 || PART == 4

// base and inverse sum of each row's softmax, for histogram_bins.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
histogram_rows(const elem* logits, float* rows, int tokens, int wide) {
  int tid = threadIdx.x, warp = tid / 32, group = tid / GROUP, lane = tid % GROUP;
  i64 first = (i64)blockIdx.x * BLOCK_TOKENS;
  for (int step = 0; step < STEPS; ++step) {
    if (first + step * GROUPS + warp * (32 / GROUP) >= tokens) break;  // the same for the whole warp
    i64 t = first + step * GROUPS + group;
    float x[PER_LANE], p[PER_LANE], base, total, inverse;
    load_row(logits + t * EXPERTS, t < tokens, lane, wide, x);
    row_softmax(x, p, base, total, inverse);
    if (t < tokens && lane == 0) {
      rows[2 * t] = base;
      rows[2 * t + 1] = inverse;
    }
  }
}

#define HISTOGRAM_WORDS 12288
// A block counts `chunk` tokens for `each` experts, each * bins <= HISTOGRAM_WORDS.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
histogram_bins(const elem* logits, const float* cutoff, const float* rows, const float* bounds,
               const unsigned char* valid, int* hist, int tokens, int bins, int each, int chunk) {
  __shared__ int counts[HISTOGRAM_WORDS];
  int tid = threadIdx.x, slices = (EXPERTS + each - 1) / each;
  int e0 = (int)(blockIdx.x % slices) * each, mine = min(each, EXPERTS - e0);
  i64 first = (i64)(blockIdx.x / slices) * chunk, last = first + chunk < tokens ? first + chunk : tokens;
  float lo = bounds[0], per_unit = (float)bins / (bounds[1] - bounds[0]);
  for (int i = tid; i < mine * bins; i += THREADS) counts[i] = 0;
  __syncthreads();
  for (i64 t = first + tid; t < last; t += THREADS) {
    if (valid != 0 && valid[t] == 0) continue;
    float base = SIGMOID ? 0.0f : rows[2 * t], inverse = SIGMOID ? 0.0f : rows[2 * t + 1];
    for (int q = 0; q < mine; ++q) {
      float x = to_float(logits[t * EXPERTS + e0 + q]);
      float place = (cutoff[t] - score_of(x, base, inverse) - lo) * per_unit;
      if (x == NEG_INF) place = (float)bins;  // no bias would choose it
      if (place == place) atomicAdd(&counts[q * bins + (int)fminf(fmaxf(place, 0.0f), (float)(bins - 1))], 1);
    }
  }
  __syncthreads();
  for (int i = tid; i < mine * bins; i += THREADS) {
    if (counts[i] != 0) atomicAdd(&hist[(i64)e0 * bins + i], counts[i]);
  }
}

#endif
