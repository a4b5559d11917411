// The forward of a query tile: sizes, what the kernel is given, what lies in shared memory.
#pragma once

#include "query_tile.cuh"

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
  alignas(1024) uint8_t q[2][TILE_BYTES];
  alignas(1024) uint8_t k[NUM_STAGES][TILE_BYTES];
  alignas(1024) uint8_t v[NUM_STAGES][TILE_BYTES];
  alignas(16) int end[NUM_STAGES][TILE];
  int k_mask[NUM_STAGES];  // local index of the first key of a partial tile, or NO_MASK
  int item[2][4];          // query tile (-1: no more work), head, number of key tiles
  alignas(8) uint64_t q_full[2], q_empty[2];
  alignas(8) uint64_t k_full[NUM_STAGES], k_empty[NUM_STAGES];
  alignas(8) uint64_t v_full[NUM_STAGES], v_empty[NUM_STAGES];
};

static_assert(sizeof(Shared) <= SHARED_BYTES);

struct Problem {
  const ForwardItem* items;
  const int2* runs;
  const int* end;
  int* counter;
  float* out;  // [num_queries, num_heads, HEAD_DIM], PARTIAL only
  float* lse;  // [num_heads, num_queries]
  int num_items, num_heads, heads_per_kv_head, num_queries, key_shift;
  float scale_log2;  // scale / ln 2
};
