// Tree attention, before the backward: what each query brings to every step, and empty dQ.
//
// Enters: out, dout, lse and, where it has one, its gradient. Leaves: `stats` (-lse / scale and
// -delta = dlse - dout . out of each query, in the order in which backward.cu reads them), `dq` of
// zeros, the work counters at 0. Invariant: a row past the last query, and one that attends
// nothing, has -lse = -inf: its P is 0 everywhere.

#include "tile.cuh"

constexpr int LANES_PER_ROW = VALUE_DIM / 8;  // 16 bytes each
constexpr int PREPARE_THREADS = 256;

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

extern "C" __global__ void __launch_bounds__(PREPARE_THREADS)
    tree_attention_backward_prepare(const Rows out, const Rows dout, const float* lse,
                                    int64_t lse_head, const float* dlse, int64_t dlse_head,
                                    float* stats, float* dq, int* counters, int num_queries,
                                    float scale) {
  const int tile = blockIdx.x, head = blockIdx.y;
  const int64_t item = int64_t(head) * gridDim.x + tile;
  if (tile == 0 && head == 0 && threadIdx.x == 0) counters[0] = counters[1] = 0;
  float* tile_stats = stats + item * (2 * QUERY_STEP);
  const int lane = threadIdx.x % LANES_PER_ROW;
  for (int r = threadIdx.x / LANES_PER_ROW; r < QUERY_STEP; r += PREPARE_THREADS / LANES_PER_ROW) {
    const int row = tile * QUERY_STEP + r;
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
      tile_stats[r] = minus_lse;
      tile_stats[QUERY_STEP + r] = -delta;
    }
  }
  if (dq == nullptr) return;
  float4* tile_dq = reinterpret_cast<float4*>(dq + item * (QUERY_STEP * HEAD_DIM));
  for (int i = threadIdx.x; i < QUERY_STEP * HEAD_DIM / 4; i += PREPARE_THREADS) {
    tile_dq[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
  }
}
