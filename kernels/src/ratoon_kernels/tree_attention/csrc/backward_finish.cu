// Tree attention, after the backward: dQ from the order of fragments into rows, and the sums of key
// tiles that were cut into pieces.
//
// Enters: what backward.cu left in `dq` and `slots`. Leaves: dQ times the scale (16 bits, or fp32
// where PARTIAL), dK and dV of the cut key tiles (16 bits, or added to fp32 buffers). Invariant:
// slots are added in order, so the sum has one order.

#include "tile.cuh"

constexpr int FINISH_THREADS = 256;
constexpr int FINISH_KEYS = 16;  // of a cut key tile that a block finishes (cuda_specs.py)
constexpr int PITCH = SLAB + 4;  // of a row in shared memory: no two lanes share a bank

// Rows of 8 values: four times two 16-bit ones, or 32 bytes of fp32.
DEVICE void store_eight(uint8_t* rows, int64_t element, const float* values, float factor) {
#if PARTIAL
  float4* out = reinterpret_cast<float4*>(rows + 4 * element);
  out[0] = float4{values[0] * factor, values[1] * factor, values[2] * factor, values[3] * factor};
  out[1] = float4{values[4] * factor, values[5] * factor, values[6] * factor, values[7] * factor};
#else
  *reinterpret_cast<uint4*>(rows + 2 * element) = uint4{
      pack(values[0] * factor, values[1] * factor), pack(values[2] * factor, values[3] * factor),
      pack(values[4] * factor, values[5] * factor), pack(values[6] * factor, values[7] * factor)};
#endif
}

// Grid: blocks of rows, heads times slabs of dimensions. `dq` is [slabs, num_heads, num_rows, SLAB]
// and `dq_rows` [num_queries, num_heads, HEAD_DIM]. The last heads, which the backward has left in
// the cache, come first.
extern "C" __global__ void __launch_bounds__(FINISH_THREADS)
    tree_attention_backward_finish_queries(const float* dq, uint8_t* dq_rows, int num_queries,
                                           int num_rows, float scale) {
  __shared__ float rows[ROW_BLOCK * PITCH];
  constexpr int NUM_SLABS = HEAD_DIM / SLAB;
  const int slab = blockIdx.y % NUM_SLABS, num_heads = gridDim.y / NUM_SLABS;
  const int head = num_heads - 1 - blockIdx.y / NUM_SLABS, first_row = blockIdx.x * ROW_BLOCK;
  const int64_t row_of_slab = int64_t(slab * num_heads + head) * num_rows + first_row;
  const float4* fragments = reinterpret_cast<const float4*>(dq + row_of_slab * SLAB);
#pragma unroll
  for (int i = threadIdx.x; i < ROW_BLOCK * SLAB / 4; i += FINISH_THREADS) {
    const float4 value = fragments[i];
    const int thread = i % WARPGROUP;  // of the eight queries of i / WARPGROUP
    float* line = rows + (i / WARPGROUP * 8 + 2 * (thread % 4)) * PITCH + thread / 32 * 16 +
                  thread % 32 / 4;
    line[0] = value.x;
    line[PITCH] = value.y;
    line[8] = value.z;
    line[PITCH + 8] = value.w;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < ROW_BLOCK * SLAB / 8; i += FINISH_THREADS) {
    const int row = i / (SLAB / 8), chunk = i % (SLAB / 8);
    const int64_t q = first_row + row;
    if (q < num_queries) {
      store_eight(dq_rows, (q * num_heads + head) * HEAD_DIM + slab * SLAB + 8 * chunk,
                  rows + row * PITCH + 8 * chunk, scale);
    }
  }
}

// One cut key tile: {key tile, first slot, number of slots, 0}.
struct SplitTile {
  int key_tile, first_slot, num_slots, unused;
};

// Grid: cut key tiles, kv heads, {dK, dV} of each FINISH_KEYS of a tile's keys. `slots` is
// [num_kv_heads, num_slots, SLOT_VALUES].
extern "C" __global__ void __launch_bounds__(FINISH_THREADS)
    tree_attention_backward_finish_keys(const SplitTile* tiles, const float* slots, uint8_t* dk,
                                        uint8_t* dv, int64_t dk_row, int64_t dk_head,
                                        int64_t dv_row, int64_t dv_head, int num_slots,
                                        int num_keys) {
  const SplitTile split = tiles[blockIdx.x];
  const int kv_head = blockIdx.y;
  const bool is_dv = blockIdx.z % 2 == 1;
  const int first_row = blockIdx.z / 2 * FINISH_KEYS;
  uint8_t* out = is_dv ? dv : dk;
  const int64_t row_stride = is_dv ? dv_row : dk_row;
  const int64_t head_stride = is_dv ? dv_head : dk_head;
  const int dim = is_dv ? VALUE_DIM : HEAD_DIM;
  const float* first = slots +
                       (int64_t(kv_head) * num_slots + split.first_slot) * SLOT_VALUES +
                       (is_dv ? TILE * HEAD_DIM : 0);
  for (int i = threadIdx.x; i < FINISH_KEYS * dim / 2; i += FINISH_THREADS) {
    const int row = first_row + i / (dim / 2), column = i % (dim / 2) * 2;
    const int64_t key = split.key_tile * TILE + row;
    if (key >= num_keys) break;
    float2 sum = {0.0f, 0.0f};
    for (int s = 0; s < split.num_slots; ++s) {
      const float2 value = *reinterpret_cast<const float2*>(
          first + int64_t(s) * SLOT_VALUES + row * dim + column);
      sum.x += value.x;
      sum.y += value.y;
    }
    const int64_t element = key * row_stride + kv_head * head_stride + column;
#if PARTIAL
    float2* total = reinterpret_cast<float2*>(out + 4 * element);
    *total = float2{total->x + sum.x, total->y + sum.y};
#else
    *reinterpret_cast<uint32_t*>(out + 2 * element) = pack(sum.x, sum.y);
#endif
  }
}
