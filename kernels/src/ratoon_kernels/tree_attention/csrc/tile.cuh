// Geometry shared by the attention kernels: tiles in shared memory, rings, rows of the work tables.
//
// A tile of R rows and D dimensions is D / 64 slabs of [R][64] elements, each row 128 bytes,
// swizzled: the 16-byte chunk c of row r lies at chunk c ^ (r % 8). Tile bases are multiples of
// 1024 bytes.
#pragma once

#include "wgmma.cuh"

// Dimensions of queries and keys, and of values and outputs.
#if !defined(HEAD_DIM) || !defined(VALUE_DIM)
#error "HEAD_DIM and VALUE_DIM are 64 and 64, 128 and 128, 192 and 128, or 256 and 256"
#endif

// Whether a query sees no keys before `start` of its row (windows.py).
#ifndef WINDOW
#define WINDOW 0
#endif

constexpr int SHARED_BYTES = 227 * 1024;  // of a block, as cuda_specs.py asks for
constexpr int ROW_BYTES = 128;
constexpr int TILE = 128;         // queries of a forward tile, keys of every tile
constexpr int SLAB = 64;          // dimensions of a row of a tile in shared memory
constexpr int ROW_BLOCK = 64;     // queries that a block prepares or finishes (cuda_specs.py)
constexpr int WARPGROUP = 128;    // threads
constexpr int NUM_CONSUMERS = 2;  // warpgroups that multiply, 64 rows each
constexpr int CONSUMER_ROWS = 64;
constexpr int NUM_THREADS = (1 + NUM_CONSUMERS) * WARPGROUP;
constexpr float LN_2 = 0.6931471805599453f;

// Sums of a key tile that is cut into pieces: dK, then dV.
constexpr int SLOT_VALUES = TILE * (HEAD_DIM + VALUE_DIM);

constexpr uint32_t tile_bytes(int num_rows, int dim) { return num_rows * ROW_BYTES * (dim / 64); }

// One row of the forward's work list: the runs of key tiles of one query tile.
struct ForwardItem {
  int query_tile, run_begin, run_end, num_key_tiles;
};

// One row of the backward's: a key tile and the query rows that it sweeps in one go.
struct BackwardPiece {
  int key_tile, query_begin, query_end, slot, full_begin, full_end;
  int longest;  // in row i, the index of the i-th longest piece
  int unused;
};

// A ring of buffers: which one is next, and the parity of its barrier's phase.
template <int NUM_STAGES>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  DEVICE void next() {
    if (++stage == NUM_STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// A warp reports that it has read a buffer: lane 0 for all. compute-sanitizer's racecheck does not
// follow that, so tests.kernels.sanitize_case compiles the kernels with 32 arrivals instead.
#ifndef ARRIVALS_PER_WARP
#define ARRIVALS_PER_WARP 1
#endif
constexpr int CONSUMER_ARRIVALS = 4 * NUM_CONSUMERS * ARRIVALS_PER_WARP;

DEVICE void release(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 < ARRIVALS_PER_WARP) barrier_arrive(barrier);
}

// Where lane l of a warp points to in `store_matrices` of a 16 x 16 block at (row, chunk of 8
// columns) of a swizzled slab; the four matrices are (rows 0-7, 8-15) of the first 8 columns,
// then of the next 8: the order of an A fragment.
DEVICE uint32_t block_address(uint32_t slab, int row, int chunk) {
  const int lane = threadIdx.x % 32;
  const int r = row + lane % 16;
  const int c = chunk + lane / 16;
  return slab + r * ROW_BYTES + ((c ^ (r % 8)) << 4);
}
