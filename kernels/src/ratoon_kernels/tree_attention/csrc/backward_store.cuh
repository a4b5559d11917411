// dK and dV of a piece from registers to global memory.
#pragma once

#if KEYS < 128
#include "backward_wide.cuh"
#else
#include "backward_consumer.cuh"
#endif

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

// A thread's fragment of a gradient of KEYS rows, into the rows of its kv head.
template <int COUNT>
DEVICE void store_rows(const float (&values)[COUNT], uint8_t* rows, int64_t row_bytes, int num_rows,
                       int row, float factor) {
  uint8_t* address = rows + row * row_bytes + thread_in_group() % 4 * 2 * OUTPUT_BYTES;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (row + 8 * h < num_rows) {
#pragma unroll
      for (int i = 0; i < COUNT / 4; ++i) {
        store_pair(address + 8 * i * OUTPUT_BYTES, values[4 * i + 2 * h] * factor,
                   values[4 * i + 2 * h + 1] * factor);
      }
    }
    address += 8 * row_bytes;
  }
}

// The same into the slot of a key tile that is cut into pieces. With dQ all pieces of the tile
// share one and add to it; without, each has its own.
template <int COUNT>
DEVICE void store_slot(const float (&values)[COUNT], float* slot, int row, float factor) {
  constexpr int DIM = 2 * COUNT;
  float* address = slot + row * DIM + thread_in_group() % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i) {
      const float a = values[4 * i + 2 * h] * factor, b = values[4 * i + 2 * h + 1] * factor;
      float* pair = address + 8 * h * DIM + 8 * i;
#if WITH_DQ
      reduce_add(pair, a, b);
#else
      *reinterpret_cast<float2*>(pair) = float2{a, b};
#endif
    }
  }
}

// Where a piece's results go, read before the buffers of its keys are given back.
struct Target {
  int first_key, slot, kv_head;

  DEVICE explicit Target(const Shared& shared)
      : first_key(shared.first_key), slot(shared.piece.slot), kv_head(shared.kv_head) {}

  // Address of the slot's sums of the first key.
  DEVICE float* slot_rows(const Problem& problem) const {
    return problem.slots + (int64_t(kv_head) * problem.num_slots + slot) * SLOT_VALUES;
  }
};

// This thread's first row of dK and dV.
DEVICE int row_of_keys(uint32_t group) {
  const uint32_t thread = thread_in_group();
  return group * CONSUMER_ROWS + thread / 32 * 16 + (thread % 32) / 4;
}

template <int COUNT>
DEVICE void store_dk(const float (&dk)[COUNT], const Problem& problem, const Target& target,
                     int row) {
  if (target.slot >= 0) {
    store_slot(dk, target.slot_rows(problem), target.first_key % TILE + row, problem.scale);
  } else {
    uint8_t* rows =
        static_cast<uint8_t*>(problem.dk) +
        (target.kv_head * problem.dk_head + target.first_key * problem.dk_row) * OUTPUT_BYTES;
    store_rows(dk, rows, problem.dk_row * OUTPUT_BYTES, problem.num_keys - target.first_key, row,
               problem.scale);
  }
}

template <int COUNT>
DEVICE void store_dv(const float (&dv)[COUNT], const Problem& problem, const Target& target,
                     int row) {
  if (target.slot >= 0) {
    store_slot(dv, target.slot_rows(problem) + TILE * HEAD_DIM, target.first_key % TILE + row,
               1.0f);
  } else {
    uint8_t* rows =
        static_cast<uint8_t*>(problem.dv) +
        (target.kv_head * problem.dv_head + target.first_key * problem.dv_row) * OUTPUT_BYTES;
    store_rows(dv, rows, problem.dv_row * OUTPUT_BYTES, problem.num_keys - target.first_key, row,
               1.0f);
  }
}
