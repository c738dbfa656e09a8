// Runs CUDA kernels on the CPU, one block at a time, a fiber a thread, so that routing.cu can be tested without a GPU.
//
// A thread runs until it reaches a warp collective or a barrier. A collective completes when every lane of its mask has
// arrived at the same one with the same mask; anything else is an error, and so is a state in which no thread can go on.
// Three orders of running the threads: one warp after the other, each as far as it gets, ascending or descending; and all
// threads a step at a time, in one of 64 shuffles drawn anew in every pass. A waiting thread hands over to the next one
// itself; the loop in shim.cpp only sees the end, a deadlock, an error and the ends of passes.
// Shared memory and, by the caller, outputs are filled with garbage first.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct Constants {
  int experts, topk, sigmoid, norm, cutoff, stats;
};
static Constants shim_constants;
#define EXPERTS (shim_constants.experts)
#define TOPK (shim_constants.topk)
#define SIGMOID (shim_constants.sigmoid)
#define NORM (shim_constants.norm)
#define CUTOFF (shim_constants.cutoff)
#define STATS (shim_constants.stats)
#define PART 0

#define __device__ static
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static  // sanitized with red zones; a named section would switch those off
#else
#define __shared__ static __attribute__((section("shim_shared")))
extern char __start_shim_shared[], __stop_shim_shared[];
#endif

struct Index {
  unsigned x;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- fibers

#define MAX_THREADS 1024
#ifdef __SANITIZE_ADDRESS__
#define STACK_BYTES (128 * 1024)
extern "C" void __sanitizer_start_switch_fiber(void** fake, const void* bottom, size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void* fake, const void** bottom, size_t* size);
#else
#define STACK_BYTES (16 * 1024 + 320)  // no power of two: stacks would share their cache lines' places
#endif

struct Fiber {
  Index index;
  bool done;
  void* stack_pointer;
  void* fake;
};
static Fiber shim_fibers[MAX_THREADS];
static Fiber* shim_self;
static Fiber shim_main;
static char* shim_stacks;
static Index blockIdx;
#define threadIdx (shim_self->index)

#ifdef __x86_64__
extern "C" void shim_swap(void** from, void* to);
asm(R"(
.text
.type shim_swap,@function
shim_swap:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
static void* shim_fresh(char* stack, void (*entry)()) {
  void** top = (void**)(stack + STACK_BYTES / 16 * 16);
  *--top = 0;  // keeps the stack aligned as after a call
  *--top = (void*)entry;
  for (int i = 0; i < 6; ++i) *--top = 0;
  return top;
}
#else
#include <ucontext.h>
static ucontext_t shim_contexts[MAX_THREADS + 1];
static int shim_slot(Fiber* f) { return f == &shim_main ? MAX_THREADS : (int)(f - shim_fibers); }
static void* shim_fresh(char* stack, void (*entry)()) {
  ucontext_t* c = &shim_contexts[(stack - shim_stacks) / STACK_BYTES];
  getcontext(c);
  c->uc_stack.ss_sp = stack;
  c->uc_stack.ss_size = STACK_BYTES;
  makecontext(c, entry, 0);
  return c;
}
#endif

#ifdef __SANITIZE_ADDRESS__
static const void* shim_main_bottom;
static size_t shim_main_size;
static void shim_note_main(const void* bottom, size_t size) {
  if (!shim_main_bottom) shim_main_bottom = bottom, shim_main_size = size;
}
#endif

static void shim_go(Fiber* to) {
  Fiber* from = shim_self;
#ifdef __SANITIZE_ADDRESS__
  bool home = to == &shim_main;
  __sanitizer_start_switch_fiber(from->done ? 0 : &from->fake,
                                 home ? shim_main_bottom : shim_stacks + (to - shim_fibers) * STACK_BYTES,
                                 home ? shim_main_size : STACK_BYTES);
#endif
  shim_self = to;
#ifdef __x86_64__
  shim_swap(&from->stack_pointer, to->stack_pointer);
#else
  swapcontext(&shim_contexts[shim_slot(from)], &shim_contexts[shim_slot(to)]);
#endif
#ifdef __SANITIZE_ADDRESS__
  const void* bottom;
  size_t size;
  __sanitizer_finish_switch_fiber(from->fake, &bottom, &size);
#endif
}

// ---- errors, barriers, collectives

static char shim_error[512];
[[noreturn]] static void shim_fail(const char* what, int line) {
  snprintf(shim_error, sizeof shim_error, "%s: line %d, block %u, thread %u", what, line, blockIdx.x,
           shim_self->index.x);
  shim_go(&shim_main);
  abort();
}

struct Warp {
  unsigned ready, arrived, mask, exited;
  int kind, line, argument;
  uint32_t all, value[32], result[32];
};
static Warp shim_warps[MAX_THREADS / 32];
static int shim_order, shim_threads, shim_waiting, shim_barrier_line, shim_done;
static const short* shim_turn;  // order 2: this pass's shuffle, and how far it has got
static int shim_turned;

// Runs the next thread in this order; the loop in shim.cpp where there is none.
static void shim_next() {
  if (shim_order == 2) {
    while (shim_turned < shim_threads) {
      unsigned i = (unsigned)shim_turn[shim_turned++], bit = 1u << i % 32;
      if (!(shim_warps[i / 32].ready & bit)) continue;
      shim_warps[i / 32].ready &= ~bit;
      if (&shim_fibers[i] != shim_self) shim_go(&shim_fibers[i]);
      return;
    }
    shim_go(&shim_main);
    return;
  }
  int warps = shim_threads / 32, warp = (int)shim_self->index.x / 32, lane = (int)shim_self->index.x % 32;
  for (int tried = 0; tried <= warps; ++tried) {
    Warp& w = shim_warps[warp];
    if (w.ready) {
      unsigned later = tried || shim_self == &shim_main ? 0 : shim_order ? w.ready & ((1u << lane) - 1u) : w.ready & ~((2u << lane) - 1u);
      if (!later) later = w.ready;
      lane = shim_order ? 31 - __builtin_clz(later) : __builtin_ctz(later);
      w.ready &= ~(1u << lane);
      Fiber* f = &shim_fibers[warp * 32 + lane];
      if (f != shim_self) shim_go(f);
      return;
    }
    warp = shim_order ? (warp ? warp : warps) - 1 : warp + 1 < warps ? warp + 1 : 0;
  }
  shim_go(&shim_main);
}

enum Kind { XOR, UP, BALLOT, REDUCE_MAX, SYNC };

template <Kind kind>
static uint32_t shim_collective(int line, unsigned mask, uint32_t value, int argument) {
  unsigned lane = shim_self->index.x % 32;
  Warp& w = shim_warps[shim_self->index.x / 32];
  if (!(mask >> lane & 1)) shim_fail("a lane calls a collective whose mask leaves it out", line);
  if (w.exited & mask) shim_fail("a collective waits for a lane that has exited", line);
  if (w.arrived == 0) {
    w.kind = kind, w.line = line, w.mask = mask, w.argument = argument;
    w.all = kind == REDUCE_MAX ? value : 0;
  } else if (w.kind != kind || w.line != line || w.mask != mask || w.argument != argument) {
    shim_fail("lanes of a warp meet in different collectives", line);
  }
  if (kind == XOR || kind == UP) w.value[lane] = value;
  if (kind == BALLOT && value) w.all |= 1u << lane;
  if (kind == REDUCE_MAX && (int)value > (int)w.all) w.all = value;
  w.arrived |= 1u << lane;
  if (w.arrived != mask) {
    shim_next();
    return w.result[lane];
  }
  for (int i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    int source = kind == XOR ? (i ^ argument) & 31 : kind == UP && i >= argument ? i - argument : i;
    if (kind == XOR && !(mask >> source & 1)) shim_fail("a shuffle reads a lane outside its mask", line);
    w.result[i] = kind == XOR || kind == UP ? w.value[source] : w.all;
  }
  w.ready |= mask & ~(1u << lane);
  w.arrived = 0;
  return w.result[lane];
}

static void shim_barrier(int line) {
  if (shim_done) shim_fail("a barrier waits for a thread that has exited", line);
  if (shim_waiting == 0) shim_barrier_line = line;
  if (shim_barrier_line != line) shim_fail("threads meet in different barriers", line);
  if (++shim_waiting < shim_threads) return shim_next();
  shim_waiting = 0;
  for (int w = 0; w < shim_threads / 32; ++w) shim_warps[w].ready = 0xffffffffu;
  shim_warps[shim_self->index.x / 32].ready &= ~(1u << shim_self->index.x % 32);
}

static inline uint32_t shim_bits(float v) {
  uint32_t u;
  memcpy(&u, &v, 4);
  return u;
}
static inline float shim_float(uint32_t u) {
  float v;
  memcpy(&v, &u, 4);
  return v;
}
static inline float shim_xor(int line, unsigned mask, float v, int o) {
  return shim_float(shim_collective<XOR>(line, mask, shim_bits(v), o));
}
static inline int shim_xor(int line, unsigned mask, int v, int o) {
  return (int)shim_collective<XOR>(line, mask, (uint32_t)v, o);
}
#define __shfl_xor_sync(mask, v, o) shim_xor(__LINE__, mask, v, o)
#define __shfl_up_sync(mask, v, o) (int)shim_collective<UP>(__LINE__, mask, (uint32_t)(v), o)
#define __ballot_sync(mask, p) shim_collective<BALLOT>(__LINE__, mask, (p) ? 1u : 0u, 0)
#define __reduce_max_sync(mask, v) (int)shim_collective<REDUCE_MAX>(__LINE__, mask, (uint32_t)(v), 0)
#define __syncwarp() shim_collective<SYNC>(__LINE__, 0xffffffffu, 0, 0)
#define __syncthreads() shim_barrier(__LINE__)

// ---- device functions

static inline float __int_as_float(int v) { return shim_float((uint32_t)v); }
static inline float __int_as_float(unsigned v) { return shim_float(v); }
static inline int __float_as_int(float v) { return (int)shim_bits(v); }
static inline float __uint_as_float(uint32_t v) { return shim_float(v); }
static inline uint32_t __float_as_uint(float v) { return shim_bits(v); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline int __popc(uint32_t v) { return __builtin_popcount(v); }
static inline int __clz(uint32_t v) { return v ? __builtin_clz(v) : 32; }
static inline int __ffs(uint32_t v) { return __builtin_ffs((int)v); }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline void atomicOr(uint32_t* p, uint32_t v) { *p |= v; }
static inline void atomicAdd(int* p, int v) { *p += v; }

static inline float host_half_to_float(unsigned short h) {
  uint32_t sign = (uint32_t)(h >> 15) << 31, exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 31) return shim_float(sign | 0x7f800000u | fraction << 13);
  float v = exponent ? ldexpf((float)(fraction | 1024), (int)exponent - 25) : ldexpf((float)fraction, -24);
  return sign ? -v : v;
}
static inline unsigned short host_float_to_half(float v) {
  uint32_t u = shim_bits(v), sign = u >> 31 << 15;
  float a = fabsf(v);
  if (v != v) return (unsigned short)(sign | 0x7e00u);
  if (a == 0.0f) return (unsigned short)sign;
  if (a >= 65520.0f) return (unsigned short)(sign | 0x7c00u);
  int exponent;
  frexpf(a, &exponent);
  if (exponent < -13) exponent = -13;  // subnormal step 2^-24
  uint32_t steps = (uint32_t)rintf(ldexpf(a, 11 - exponent));
  return (unsigned short)(sign | (((uint32_t)(exponent + 13) << 10) + steps));
}

// ---- launches

template <size_t... I>
struct Places {};
template <size_t N, size_t... I>
struct MakePlaces : MakePlaces<N - 1, N - 1, I...> {};
template <size_t... I>
struct MakePlaces<0, I...> {
  typedef Places<I...> type;
};
template <class... A, size_t... I>
static void shim_call(void (*kernel)(A...), void** a, Places<I...>) {
  kernel(*(A*)a[I]...);
}
template <class... A>
static void shim_call(void (*kernel)(A...), void** a) {
  shim_call(kernel, a, typename MakePlaces<sizeof...(A)>::type());
}
template <class... A>
static int shim_sizes(void (*)(A...), int* sizes) {
  int list[] = {(int)sizeof(A)...};
  memcpy(sizes, list, sizeof list);
  return (int)sizeof...(A);
}
