// dK and dV of a piece from registers to global memory.
#pragma once

#include "backward_consumer.cuh"

// Writes two adjacent elements of dK or dV; adds them where the gradient is accumulated.
DEVICE void store_pair(uint8_t* address, float a, float b) {
#if PARTIAL
  float2* sum = reinterpret_cast<float2*>(address);
  *sum = float2{sum->x + a, sum->y + b};
#else
  *reinterpret_cast<uint32_t*>(address) = pack(a, b);
#endif
}

constexpr int OUTPUT_BYTES = PARTIAL ? 4 : 2;  // of an element of dK and dV

// A thread's fragment of a [TILE][HEAD_DIM] gradient, into the rows of its kv head.
DEVICE void store_rows(const float (&values)[HEAD_DIM / 2], uint8_t* rows, int64_t row_bytes,
                       int num_rows, int row, float factor) {
  uint8_t* address = rows + row * row_bytes + thread_in_group() % 4 * 2 * OUTPUT_BYTES;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (row + 8 * h < num_rows) {
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 8; ++i) {
        store_pair(address + 8 * i * OUTPUT_BYTES, values[4 * i + 2 * h] * factor,
                   values[4 * i + 2 * h + 1] * factor);
      }
    }
    address += 8 * row_bytes;
  }
}

// The same into the slot of a key tile that is cut into pieces. With dQ all pieces of the tile
// share one and add to it; without, each has its own.
DEVICE void store_slot(const float (&values)[HEAD_DIM / 2], float* slot, int row, float factor) {
  float* address = slot + row * HEAD_DIM + thread_in_group() % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; ++i) {
      const float a = values[4 * i + 2 * h] * factor, b = values[4 * i + 2 * h + 1] * factor;
      float* pair = address + 8 * h * HEAD_DIM + 8 * i;
#if WITH_DQ
      reduce_add(pair, a, b);
#else
      *reinterpret_cast<float2*>(pair) = float2{a, b};
#endif
    }
  }
}

DEVICE void store_piece(const Consumer& consumer, int key_tile, int piece_slot, int kv_head) {
  const Problem& problem = consumer.shared.problem;
  const uint32_t thread = thread_in_group();
  const int row = consumer.group * CONSUMER_ROWS + thread / 32 * 16 + (thread % 32) / 4;
  if (piece_slot >= 0) {
    float* slot =
        problem.slots + (int64_t(kv_head) * problem.num_slots + piece_slot) * (2 * TILE * HEAD_DIM);
    store_slot(consumer.dk, slot, row, problem.scale);
    store_slot(consumer.dv, slot + TILE * HEAD_DIM, row, 1.0f);
  } else {
    const int64_t first_row = key_tile * TILE;
    const int num_rows = problem.num_keys - key_tile * TILE;
    uint8_t* dk = static_cast<uint8_t*>(problem.dk) +
                  (kv_head * problem.dk_head + first_row * problem.dk_row) * OUTPUT_BYTES;
    store_rows(consumer.dk, dk, problem.dk_row * OUTPUT_BYTES, num_rows, row, problem.scale);
    uint8_t* dv = static_cast<uint8_t*>(problem.dv) +
                  (kv_head * problem.dv_head + first_row * problem.dv_row) * OUTPUT_BYTES;
    store_rows(consumer.dv, dv, problem.dv_row * OUTPUT_BYTES, num_rows, row, 1.0f);
  }
}
