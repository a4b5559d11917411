// Copies boxes of ROWS tokens of one head through shared memory and writes them as floats: out is
// [heads, tiles * ROWS, HEAD_DIM] from element `out_start`, times `scale`. Block (x, y) copies tile x
// of head y; its first token is `first_token + x * ROWS`, so the tensor's ends can be overrun.
#include "tma.cuh"

extern "C" __global__ void __launch_bounds__(128)
    tile_copy(const __grid_constant__ TensorMap map, float* out, int first_token, i64 out_start,
              float scale) {
    extern __shared__ unsigned char dynamic_shared[];
    __shared__ alignas(8) u64 barrier_storage;
    const u32 barrier = shared_address(&barrier_storage);
    // The swizzle is of address bits, so the tile starts at a multiple of its period of 1024 bytes.
    const u32 tile = (shared_address(dynamic_shared) + 1023) / 1024 * 1024;
    const int row_start = static_cast<int>(blockIdx.x) * ROWS;
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_expect_bytes(barrier, ROWS * HEAD_DIM * 2);
        load_box(tile, &map, barrier, first_token + row_start, static_cast<int>(blockIdx.y));
    }
    __syncthreads();
    barrier_wait(barrier, 0);
    const i64 first_row = static_cast<i64>(blockIdx.y) * gridDim.x * ROWS + row_start;
    for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += blockDim.x) {
        const int row = i / HEAD_DIM, channel = i % HEAD_DIM;
        const u32 slab = tile + channel / 64 * (ROWS * 128);
        const u32 address = slab + swizzled(row * 128 + channel % 64 * 2);
        unsigned short bits;
        float value;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address));
#if IS_BF16
        asm("cvt.f32.bf16 %0, %1;" : "=f"(value) : "h"(bits));
#else
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
#endif
        out[out_start + (first_row + row) * HEAD_DIM + channel] = scale * value;
    }
}
