// What a step of the backward begins with, and what it packs: the same for every kind of consumer.
#pragma once

#include "backward_types.cuh"

// Begins the accumulators of S^T (0) or dP^T (1).
DEVICE void load_stats(float (&d)[QUERY_STEP / 2], const float (&stats)[QUERY_STEP / 8][2][8],
                       int which) {
  const uint32_t column = 2 * (thread_in_group() % 4);
#pragma unroll
  for (int i = 0; i < QUERY_STEP / 8; ++i) {
    const float2 value = *reinterpret_cast<const float2*>(&stats[i][which][column]);
    d[4 * i] = d[4 * i + 2] = value.x;
    d[4 * i + 1] = d[4 * i + 3] = value.y;
  }
}

// Begins S^T of 64 keys of the CTA with -inf where a query does not attend a key: those of
// [key - key_shift, end[key]) do, and of those under a window the ones whose first key is not past
// it. What the product adds leaves it so, and P is 0.
DEVICE void mask_keys(float (&s)[QUERY_STEP / 2], const Shared& shared, int key_shift,
                      uint32_t group, int first_row, int stage) {
  const uint32_t thread = thread_in_group();
  const int row = group * CONSUMER_ROWS + thread / 32 * 16 + (thread % 32) / 4;
  const int first_query = first_row + 2 * (thread % 4);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int start = shared.first_key + row + 8 * h - key_shift;
    const uint32_t count = max(shared.end[row + 8 * h] - start, 0);
#pragma unroll
    for (int i = 0; i < QUERY_STEP / 8; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool is_attended = uint32_t(first_query + 8 * i + e - start) < count;
        if (!is_attended) s[4 * i + 2 * h + e] = NEGATIVE_INFINITY;
      }
    }
  }
#if WINDOW
  const int key = shared.first_key + row;
  const int2* start_of_column = reinterpret_cast<const int2*>(shared.start[stage]) + thread % 4;
#pragma unroll
  for (int i = 0; i < QUERY_STEP / 8; ++i) {
    const int2 start = start_of_column[4 * i];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (key + 8 * h < start.x) s[4 * i + 2 * h] = NEGATIVE_INFINITY;
      if (key + 8 * h < start.y) s[4 * i + 2 * h + 1] = NEGATIVE_INFINITY;
    }
  }
#endif
}

DEVICE void pack_all(const float (&values)[QUERY_STEP / 2], uint32_t (&operand)[QUERY_STEP / 4]) {
#pragma unroll
  for (int i = 0; i < QUERY_STEP / 4; ++i) operand[i] = pack(values[2 * i], values[2 * i + 1]);
}

#if WITH_DQ
// Transposes a consumer's 64 keys of dS^T of step n into shared memory, where both read all keys.
DEVICE void store_ds(Shared& shared, const uint32_t (&operand)[QUERY_STEP / 4], uint32_t group,
                     uint32_t n, int stage) {
  barrier_wait(shared_address(&shared.ds_empty[stage]), (n / 2 + 1) % 2);
  const uint32_t half = shared_address(shared.ds[stage]) + group * STEP_HALF_BYTES;
  const uint32_t thread = thread_in_group();
  const uint32_t lane = thread % 32;
  const uint32_t warp = thread / 32;
  // Matrices (keys 0-7, 8-15) x (queries 0-7, 8-15) in the order of the operand; a transposed one
  // has its queries as rows.
  const uint32_t key_chunk = 2 * warp + (lane / 8) % 2;
  const uint32_t query = (lane / 16) * 8 + lane % 8;
  const uint32_t address = half + query * ROW_BYTES + ((key_chunk ^ (query % 8)) << 4);
#pragma unroll
  for (int step = 0; step < QUERY_STEP / 16; ++step) {
    store_matrices_transposed(address + 16 * step * ROW_BYTES, operand[4 * step],
                              operand[4 * step + 1], operand[4 * step + 2], operand[4 * step + 3]);
  }
  fence_async_proxy();
  barrier_arrive(shared_address(&shared.ds_full[stage]));
}
#endif
