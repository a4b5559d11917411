// Tree attention, before the backward: what each query brings to every step, and empty sums.
//
// Enters: out, dout, lse and, where it has one, its gradient. Leaves: `stats` (-lse / scale and
// -delta = dlse - dout . out, of eight queries side by side), `dq` and `slots` of zeros, the work
// counters at 0. Invariant: a row past the last query, and one that attends nothing, has
// -lse = -inf: its P is 0 everywhere.

#include "tile.cuh"

constexpr int LANES_PER_ROW = VALUE_DIM / 8;  // 16 bytes each
constexpr int PREPARE_THREADS = 256;

// Zeroes every `step`-th of `count` times four values, from the thread's own on.
DEVICE void zero(float* values, int64_t count, int64_t first, int64_t step) {
  float4* fours = reinterpret_cast<float4*>(values);
  for (int64_t i = first; i < count; i += step) fours[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
}

struct Rows {
  const uint8_t* base;
  int64_t row_bytes, head_bytes;

  DEVICE uint4 load(int row, int head, int lane) const {
    return *reinterpret_cast<const uint4*>(base + row * row_bytes + head * head_bytes + lane * 16);
  }
};

DEVICE float dot(uint32_t a, uint32_t b) {
  return unpack_low(a) * unpack_low(b) + unpack_high(a) * unpack_high(b);
}

// Grid: blocks of rows, heads. In falling order: the backward begins with what that leaves in the
// cache.
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS)
    tree_attention_backward_prepare(const Rows out, const Rows dout, const float* lse,
                                    int64_t lse_head, const float* dlse, int64_t dlse_head,
                                    float* stats, float* dq, float* slots, int64_t slot_fours,
                                    int* counters, int num_queries, float scale) {
  const int block = gridDim.x - 1 - blockIdx.x, head = gridDim.y - 1 - blockIdx.y;
  const int num_rows = gridDim.x * ROW_BLOCK;
  if (block == 0 && head == 0 && threadIdx.x == 0) counters[0] = counters[1] = 0;
  const int64_t slab_rows = int64_t(gridDim.y) * num_rows, head_row = int64_t(head) * num_rows;
  const int lane = threadIdx.x % LANES_PER_ROW;
  for (int r = threadIdx.x / LANES_PER_ROW; r < ROW_BLOCK; r += PREPARE_THREADS / LANES_PER_ROW) {
    const int row = block * ROW_BLOCK + r;
    float delta = 0.0f;
    if (row < num_queries) {
      const uint4 a = out.load(row, head, lane);
      const uint4 b = dout.load(row, head, lane);
      delta = dot(a.x, b.x) + dot(a.y, b.y) + dot(a.z, b.z) + dot(a.w, b.w);
    }
#pragma unroll
    for (int distance = LANES_PER_ROW / 2; distance > 0; distance /= 2) {
      delta += __shfl_xor_sync(0xffffffffu, delta, distance);
    }
    if (lane == 0) {
      float minus_lse = NEGATIVE_INFINITY;
      if (row < num_queries) {
        const float row_lse = lse[head * lse_head + row];
        if (row_lse != NEGATIVE_INFINITY) minus_lse = -row_lse / scale;
        if (dlse != nullptr) delta -= dlse[head * dlse_head + row];
      }
      float* row_stats = stats + (head_row + row) / 8 * 16 + row % 8;
      row_stats[0] = minus_lse;
      row_stats[8] = -delta;
    }
  }
  if (dq == nullptr) return;
  zero(slots, slot_fours, (int64_t(head) * gridDim.x + block) * PREPARE_THREADS + threadIdx.x,
       int64_t(gridDim.x) * gridDim.y * PREPARE_THREADS);
#pragma unroll
  for (int slab = 0; slab < HEAD_DIM / SLAB; ++slab) {
    const int64_t first = slab * slab_rows + head_row + block * ROW_BLOCK;
    zero(dq + first * SLAB, ROW_BLOCK * SLAB / 4, threadIdx.x, PREPARE_THREADS);
  }
}
