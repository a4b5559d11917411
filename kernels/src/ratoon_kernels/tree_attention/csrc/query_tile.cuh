// What the query-stationary kernels share: a query tile's key tiles, the mask, writing its rows.
#pragma once

#include "tile.cuh"

constexpr int NO_MASK = -1;  // instead of the first key of a partial tile: every row attends all

// Which item and head a number of the queue stands for: all items of a kv head before the next
// one's, its query heads side by side, so that the blocks at work read the same keys.
struct WorkIndex {
  int item, head;

  DEVICE WorkIndex(int index, int num_items, int heads_per_kv_head) {
    const int kv_head = index / (num_items * heads_per_kv_head);
    const int in_kv_head = index % (num_items * heads_per_kv_head);
    item = in_kv_head / heads_per_kv_head;
    head = kv_head * heads_per_kv_head + in_kv_head % heads_per_kv_head;
  }
};

// Calls visit(tile, is_full) for the key tiles of an item in order.
template <typename Visit>
DEVICE void for_each_key_tile(const int2* runs, const ForwardItem& item, Visit visit) {
  int2 next_run = item.run_begin < item.run_end ? runs[item.run_begin] : int2{0, 0};
  for (int r = item.run_begin; r < item.run_end; ++r) {
    const int2 run = next_run;
    if (r + 1 < item.run_end) next_run = runs[r + 1];
    for (int tile = run.x; tile < run.x + (run.y >> 1); ++tile) visit(tile, run.y & 1);
  }
}

// Sets a thread's logits to -inf where row q does not attend a key: those of
// first + c <= q < end[c] attend the one in column c.
template <int COUNT>
DEVICE void mask_logits(float (&s)[COUNT], const int* end, int first, int row) {
  const int column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < COUNT / 4; ++i) {
    const int2 stop = *reinterpret_cast<const int2*>(end + 8 * i + column);
    const int start = first + 8 * i + column;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int q = row + 8 * h;
      if (!(start <= q && q < stop.x)) s[4 * i + 2 * h] = NEGATIVE_INFINITY;
      if (!(start + 1 <= q && q < stop.y)) s[4 * i + 2 * h + 1] = NEGATIVE_INFINITY;
    }
  }
}

#if WINDOW
// Sets a thread's logits to -inf where a row does not see keys that far back: start[q] is the first
// that row q does, and `first` the one in column 0. There are values for whole tiles of rows.
template <int COUNT>
DEVICE void mask_before(float (&s)[COUNT], const int* start, int row, int first) {
  const int column = first + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int before = start[row + 8 * h] - column;
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (8 * i + e < before) s[4 * i + 2 * h + e] = NEGATIVE_INFINITY;
      }
    }
  }
}
#endif

// This thread's first row in a query tile; the other is 8 further.
DEVICE int row_in_tile(int group) {
  const int thread = threadIdx.x % WARPGROUP;
  return group * CONSUMER_ROWS + thread / 32 * 16 + thread % 32 / 4;
}

// Writes a thread's fragment of rows of one head as fp32.
template <int COUNT>
DEVICE void store_fp32(const float (&o)[COUNT], float* out, int64_t row_stride, int row,
                       int num_rows) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (row + 8 * h >= num_rows) continue;
    float* line = out + (row + 8 * h) * row_stride + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i) {
      *reinterpret_cast<float2*>(line + 8 * i) = float2{o[4 * i + 2 * h], o[4 * i + 2 * h + 1]};
    }
  }
}

// Writes a warpgroup's 64 rows in 16 bits through its own rows of a tile in shared memory, which it
// has read for the last time. The store is committed by the warpgroup's first thread, not waited
// for.
template <int COUNT>
DEVICE void store_tile(const float (&o)[COUNT], uint8_t* tile, const TensorMap* map, int group,
                       int first_row, int head) {
  const uint32_t base = shared_address(tile);
  const int warp_row = group * CONSUMER_ROWS + threadIdx.x % WARPGROUP / 32 * 16;
#pragma unroll
  for (int i = 0; i < COUNT / 8; ++i) {
    store_matrices(block_address(base + (i / 4) * TILE * ROW_BYTES, warp_row, 2 * (i % 4)),
                   pack(o[8 * i], o[8 * i + 1]), pack(o[8 * i + 2], o[8 * i + 3]),
                   pack(o[8 * i + 4], o[8 * i + 5]), pack(o[8 * i + 6], o[8 * i + 7]));
  }
  fence_async_proxy();
  named_barrier_sync(3 + group, WARPGROUP);
  if (threadIdx.x % WARPGROUP == 0) {
#pragma unroll
    for (int slab = 0; slab < COUNT / 32; ++slab) {
      const uint32_t rows = base + (slab * TILE + group * CONSUMER_ROWS) * ROW_BYTES;
      tma_store(map, rows, 0, first_row + group * CONSUMER_ROWS, slab, head);
    }
    bulk_commit();
  }
}
