// One compiled variant of the kernels: g++ -DGROUP= -DPER_LANE= -DELEM= -DBLOCK_TOKENS= -DSOURCE='"routing.cu"'.
#include "shim.h"
#include SOURCE

struct Entry {
  const char* name;
  void (*call)(void**);
  int (*sizes)(int*);
};
#define ENTRY(kernel) \
  { #kernel, [](void** a) { shim_call(kernel, a); }, [](int* s) { return shim_sizes(kernel, s); } }
static const Entry shim_entries[] = {
    ENTRY(route_forward), ENTRY(route_reduce),  ENTRY(route_backward), ENTRY(permute_count),
    ENTRY(permute_scan),  ENTRY(permute_place), ENTRY(histogram_rows), ENTRY(histogram_bins),
};
static const Entry* shim_kernel;
static void** shim_arguments;

static void shim_entry() {
#ifdef __SANITIZE_ADDRESS__
  const void* bottom;
  size_t size;
  __sanitizer_finish_switch_fiber(0, &bottom, &size);
  shim_note_main(bottom, size);
#endif
  shim_kernel->call(shim_arguments);
  shim_self->state = DONE;
  ++shim_done;
  Warp& w = shim_warps[shim_self->index.x / 32];
  w.exited |= 1u << shim_self->index.x % 32;
  if (w.arrived & w.mask & ~w.exited && w.exited & w.mask) shim_fail("a lane exits that a collective waits for", 0);
  if (shim_waiting) shim_fail("a thread exits that a barrier waits for", 0);
  shim_go(&shim_main);
}

static const Entry* shim_find(const char* name) {
  for (const Entry& e : shim_entries) {
    if (!strcmp(e.name, name)) return &e;
  }
  return 0;
}

extern "C" void shim_set(const int* constants) { memcpy(&shim_constants, constants, sizeof shim_constants); }

extern "C" int shim_argument_sizes(const char* name, int* sizes) { return shim_find(name)->sizes(sizes); }

// Runs every block; returns an empty string, or what went wrong.
extern "C" const char* shim_launch(const char* name, int blocks, int threads, int order, void** arguments) {
  if (!shim_stacks) shim_stacks = (char*)aligned_alloc(64, (size_t)MAX_THREADS * STACK_BYTES);
  shim_kernel = shim_find(name);
  shim_arguments = arguments;
  shim_error[0] = 0;
  shim_threads = threads;
  shim_self = &shim_main;
  static int turn[MAX_THREADS];
  uint32_t random = 12345;
  for (int b = 0; b < blocks; ++b) {
    blockIdx.x = (unsigned)b;
#ifndef __SANITIZE_ADDRESS__
    memset(__start_shim_shared, 0xA5, (size_t)(__stop_shim_shared - __start_shim_shared));
#endif
    memset(shim_warps, 0, sizeof shim_warps);
    shim_waiting = shim_done = 0;
    for (int i = 0; i < threads; ++i) {
      shim_fibers[i].index.x = (unsigned)i;
      shim_fibers[i].state = READY;
      shim_fibers[i].stack_pointer = shim_fresh(shim_stacks + (size_t)i * STACK_BYTES, shim_entry);
      turn[i] = order == 1 ? threads - 1 - i : i;
    }
    while (shim_done < threads) {
      if (order == 2) {
        for (int i = threads - 1; i > 0; --i) {
          random = random * 1664525u + 1013904223u;
          int j = (int)((random >> 8) % (unsigned)(i + 1)), t = turn[i];
          turn[i] = turn[j];
          turn[j] = t;
        }
      }
      bool progress = false;
      int span = order == 2 ? threads : 32;  // orders 0 and 1 run a warp as far as it gets
      for (int start = 0; start < threads; start += span) {
        for (bool ran = true; ran;) {
          ran = false;
          for (int i = start; i < start + span; ++i) {
            Fiber* f = &shim_fibers[turn[i]];
            if (f->state != READY) continue;
            ran = progress = true;
            shim_go(f);
            if (shim_error[0]) return shim_error;
          }
          if (order == 2) break;
        }
      }
      if (!progress) {
        snprintf(shim_error, sizeof shim_error, "deadlock in block %d: no thread can go on", b);
        return shim_error;
      }
    }
  }
  return "";
}
