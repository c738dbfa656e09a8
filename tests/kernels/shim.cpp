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
  shim_self->done = true;
  ++shim_done;
  Warp& w = shim_warps[shim_self->index.x / 32];
  w.exited |= 1u << shim_self->index.x % 32;
  if (w.arrived & w.mask & ~w.exited && w.exited & w.mask) shim_fail("a lane exits that a collective waits for", 0);
  if (shim_waiting) shim_fail("a thread exits that a barrier waits for", 0);
  shim_next();
}

static const Entry* shim_find(const char* name) {
  for (const Entry& e : shim_entries) {
    if (!strcmp(e.name, name)) return &e;
  }
  return 0;
}

extern "C" void shim_set(const int* constants) { memcpy(&shim_constants, constants, sizeof shim_constants); }

extern "C" int shim_argument_sizes(const char* name, int* sizes) { return shim_find(name)->sizes(sizes); }

static void shim_shuffle(short* turns, int count, int threads, uint32_t random) {
  static int shuffled_for;
  if (shuffled_for == threads) return;
  shuffled_for = threads;
  for (int c = 0; c < count; ++c, turns += MAX_THREADS) {
    for (int i = 0; i < threads; ++i) {
      random = random * 1664525u + 1013904223u;
      int j = (int)((random >> 8) % (unsigned)(i + 1));
      turns[i] = turns[j];
      turns[j] = (short)i;
    }
  }
}

// Runs every block; returns an empty string, or what went wrong.
extern "C" const char* shim_launch(const char* name, int blocks, int threads, int order, void** arguments) {
  if (!shim_stacks) shim_stacks = (char*)aligned_alloc(64, (size_t)MAX_THREADS * STACK_BYTES);
  shim_kernel = shim_find(name);
  shim_arguments = arguments;
  shim_error[0] = 0;
  shim_threads = threads;
  shim_order = order;
  shim_self = &shim_main;
  uint32_t random = 12345;
  static short turns[64][MAX_THREADS];
  if (order == 2) shim_shuffle(turns[0], 64, threads, random);
  for (int b = 0; b < blocks; ++b) {
    blockIdx.x = (unsigned)b;
#ifndef __SANITIZE_ADDRESS__
    memset(__start_shim_shared, 0xA5, (size_t)(__stop_shim_shared - __start_shim_shared));
#endif
    memset(shim_warps, 0, sizeof shim_warps);
    for (int w = 0; w < threads / 32; ++w) shim_warps[w].ready = 0xffffffffu;
    shim_waiting = shim_done = 0;
    for (int i = 0; i < threads; ++i) {
      shim_fibers[i].index.x = (unsigned)i;
      shim_fibers[i].done = false;
      shim_fibers[i].stack_pointer = shim_fresh(shim_stacks + (size_t)i * STACK_BYTES, shim_entry);
    }
    // Each turn of this loop ends when no thread is ready, or in order 2 at the end of a pass.
    for (bool progress = true; shim_done < threads;) {
      if (!progress) {
        snprintf(shim_error, sizeof shim_error, "deadlock in block %d: no thread can go on", b);
        return shim_error;
      }
      random = random * 1664525u + 1013904223u;
      shim_turn = turns[random >> 26];
      shim_turned = 0;
      shim_main.index.x = order == 1 ? (unsigned)threads - 1 : 0;
      progress = false;
      for (int w = 0; w < threads / 32; ++w) progress |= shim_warps[w].ready != 0;
      if (progress) shim_next();
      if (shim_error[0]) return shim_error;
    }
  }
  return "";
}

// Launches in each order on outputs filled with `fill`, and compares them bit for bit; the outputs stay.
extern "C" const char* shim_orders(const char* name, int blocks, int threads, const int* orders, int count,
                                   void** arguments, char* outputs, size_t bytes, int fill) {
  static char* first;
  static size_t room;
  if (bytes > room) first = (char*)realloc(first, room = bytes);
  for (int i = 0; i < count; ++i) {
    memset(outputs, fill, bytes);
    if (*shim_launch(name, blocks, threads, orders[i], arguments)) return shim_error;
    if (i == 0) {
      memcpy(first, outputs, bytes);
    } else if (memcmp(first, outputs, bytes)) {
      snprintf(shim_error, sizeof shim_error, "thread order %d changes the result", orders[i]);
      return shim_error;
    }
  }
  return "";
}
