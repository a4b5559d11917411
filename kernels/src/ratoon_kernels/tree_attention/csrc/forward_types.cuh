// The forward of a query tile: sizes, what the kernel is given, what lies in shared memory.
#pragma once

#include "query_tile.cuh"

// A step takes KEYS keys (cuda_specs.py): a tile, or half of one.
constexpr int STEPS_PER_TILE = TILE / KEYS;
constexpr int NUM_Q_BUFFERS = HEAD_DIM > 128 ? 1 : 2;  // shared memory has room for no more
constexpr uint32_t Q_BYTES = tile_bytes(TILE, HEAD_DIM);
constexpr uint32_t K_BYTES = tile_bytes(KEYS, HEAD_DIM);
constexpr uint32_t V_BYTES = tile_bytes(KEYS, VALUE_DIM);
constexpr int NUM_STAGES = 2;
// Registers of a thread of each role: together no more than the 3 x 168 that a block is launched
// with, or the consumers wait for ever.
constexpr int PRODUCER_REGISTERS = 40;
constexpr int CONSUMER_REGISTERS = 232;
static_assert(PRODUCER_REGISTERS + NUM_CONSUMERS * CONSUMER_REGISTERS <= 3 * 168);
// The running maximum moves only when it is exceeded by this much (log2): P then stays below 2^8,
// and most tiles need no rescaling of the output.
constexpr float MAX_SLACK = 8.0f;

struct Shared {
  alignas(1024) uint8_t q[NUM_Q_BUFFERS][Q_BYTES];
  alignas(1024) uint8_t k[NUM_STAGES][K_BYTES];
  alignas(1024) uint8_t v[NUM_STAGES][V_BYTES];
  alignas(16) int end[NUM_STAGES][KEYS];
  int k_mask[NUM_STAGES];      // local index of the first key of a partial step, or NO_MASK
  int item[NUM_Q_BUFFERS][4];  // query tile (-1: no more work), head, number of steps
  alignas(8) uint64_t q_full[NUM_Q_BUFFERS], q_empty[NUM_Q_BUFFERS];
  alignas(8) uint64_t k_full[NUM_STAGES], k_empty[NUM_STAGES];
  alignas(8) uint64_t v_full[NUM_STAGES], v_empty[NUM_STAGES];
};

static_assert(sizeof(Shared) <= SHARED_BYTES);

struct Problem {
  const ForwardItem* items;
  const int2* runs;
  const int* end;
  const int* start;  // WINDOW only
  int* counter;
  float* out;  // [num_queries, num_heads, VALUE_DIM], PARTIAL only
  float* lse;  // [num_heads, num_queries]
  const float* sink;  // [num_heads]: logits that join the denominators; or null
  int num_items, num_heads, heads_per_kv_head, num_queries, key_shift;
  float scale_log2;  // scale / ln 2
};
