// The backward of a key tile: sizes, what the kernel is given, what lies in shared memory.
#pragma once

#include "tile.cuh"

// A CTA has KEYS keys, and a step QUERY_STEP queries (cuda_specs.py). Of a whole tile each consumer
// holds dK and dV of 64 keys. With 256 dimensions there are registers for half of one: then one
// consumer holds dV, the other dK (backward_wide.cuh).
#define IS_WIDE (KEYS < 128)
constexpr int PARTS_OF_TILE = TILE / KEYS;
constexpr int NUM_STAGES = 2;
constexpr int DOUT_STAGES = HEAD_DIM > 192 ? 1 : NUM_STAGES;
// Registers of a thread of each role: together no more than the 3 x 168 that a block is launched
// with, or the consumers wait for ever.
constexpr int PRODUCER_REGISTERS = 24;
constexpr int CONSUMER_REGISTERS = 240;
static_assert(PRODUCER_REGISTERS + NUM_CONSUMERS * CONSUMER_REGISTERS <= 3 * 168);
constexpr int STEP_HALF_BYTES = QUERY_STEP * ROW_BYTES;  // of Q, dO and dS
constexpr uint32_t K_BYTES = tile_bytes(KEYS, HEAD_DIM);
constexpr uint32_t V_BYTES = tile_bytes(KEYS, VALUE_DIM);
constexpr uint32_t Q_BYTES = tile_bytes(QUERY_STEP, HEAD_DIM);
constexpr uint32_t DOUT_BYTES = tile_bytes(QUERY_STEP, VALUE_DIM);
#if WITH_DQ
// dQ^T of one step: with 64 dimensions each consumer has half of the queries, else it has 64
// dimensions of all queries at a time.
constexpr int NUM_SLABS = HEAD_DIM / SLAB;
constexpr int DQ_COLUMNS = HEAD_DIM == 64 ? QUERY_STEP / 2 : QUERY_STEP;
constexpr int DQ_VALUES = DQ_COLUMNS / 2;  // accumulators of a thread
constexpr int DQ_BYTES = DQ_VALUES * WARPGROUP * sizeof(float);
// Three times 64 dimensions are one for each consumer, and the last for both in turn.
constexpr bool HAS_THIRD_SLAB = !IS_WIDE && NUM_SLABS == 3;
constexpr int NUM_DQ_BUFFERS = HAS_THIRD_SLAB ? 2 : 1;
#endif
// Of each query of a step: -lse / scale and -delta, with which the accumulators of S^T and dP^T
// begin.
constexpr int STATS_BYTES = 2 * QUERY_STEP * sizeof(float);
constexpr int NO_MORE = -1;
// The steps of a CTA are counted through all of its pieces; step n uses stage n % 2 of every ring.
// What the consumers and the adding warps read of a step stays longer than its tiles.
constexpr int NUM_NOTES = 8;
// A consumer has no register to spare for the parity of its pieces: it is the step's highest bit.
constexpr uint32_t PIECE_PARITY = 1u << 31;

// What there is to know of a step.
struct Note {
  int head_row;   // head * num_rows + first_row: index into `stats` and `dq`
  int first_row;  // of the queries
  int is_full;    // every query attends every key
  int is_last;    // of its piece
};

struct Problem {
  const BackwardPiece* pieces;
  const int* end;
  const int* start;  // WINDOW only
  int* counter;
  const float* stats;  // [num_heads, num_rows / 8, 2, 8]
  float* dq;           // [NUM_SLABS, num_heads, num_rows, SLAB], 8 rows in fragment order
  float* slots;        // [num_kv_heads, num_slots, SLOT_VALUES]
  void *dk, *dv;       // rows of a head; 16 bits, or fp32 where PARTIAL
  int64_t dk_row, dk_head, dv_row, dv_head;  // strides in elements
  int num_pieces, num_slots, num_kv_heads, heads_per_kv_head, num_rows, num_keys, key_shift;
  int slab_rows;   // num_heads * num_rows
  int tail_heads;  // kv heads at the end whose pieces come longest first, those of all together
  float scale, scale_log2;
};

struct Shared {
  alignas(1024) uint8_t k[K_BYTES];
  alignas(1024) uint8_t v[V_BYTES];
  alignas(1024) uint8_t q[NUM_STAGES][Q_BYTES];
  alignas(1024) uint8_t dout[DOUT_STAGES][DOUT_BYTES];
#if WITH_DQ
  alignas(1024) uint8_t ds[2][KEYS / 64 * STEP_HALF_BYTES];  // [query][key]: halves of 64 keys
#if !IS_WIDE
  alignas(128) uint8_t dq[NUM_CONSUMERS][NUM_DQ_BUFFERS][DQ_BYTES];
#endif
#endif
#if IS_WIDE
  alignas(128) float p[QUERY_STEP * KEYS];  // as it lies in registers: four values of a thread
#endif
  alignas(128) float stats[NUM_STAGES][QUERY_STEP / 8][2][8];
#if WINDOW
  alignas(128) int start[NUM_STAGES][QUERY_STEP];  // first key that each query sees
#endif
  alignas(16) int end[KEYS];
  // Where the results go. Read from here, because what comes from the kernel's parameters is
  // computed before the sweep and then takes registers through it.
  Problem problem;
  alignas(16) Note notes[NUM_NOTES];
  alignas(16) BackwardPiece piece;
  int kv_head;                        // of the piece, or NO_MORE
  int first_key;                      // of the piece, or of this CTA's part of it
  uint32_t num_steps[NUM_CONSUMERS];  // of the whole CTA, once it is known
  alignas(8) uint64_t k_full, v_full, kv_empty;
  alignas(8) uint64_t q_full[NUM_STAGES], q_empty[NUM_STAGES];
  alignas(8) uint64_t dout_full[DOUT_STAGES], dout_empty[DOUT_STAGES];
  alignas(8) uint64_t ds_full[2], ds_empty[2];
  alignas(8) uint64_t dq_full[NUM_CONSUMERS], dq_empty[NUM_CONSUMERS];
  alignas(8) uint64_t p_full, p_empty;
};

static_assert(sizeof(Shared) <= SHARED_BYTES);

// The thread's index in its warpgroup, read anew: addresses that depend on it are then computed
// where they are needed, and take no register through the sweep.
DEVICE uint32_t thread_in_group() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread % WARPGROUP;
}
