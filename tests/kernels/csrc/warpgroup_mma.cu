// Two matrix instructions of a warpgroup, to be compiled and counted. IS_SERIALIZED: their result is
// read while they run, so that the compiler must wait after each and says so.
using u64 = unsigned long long;

__device__ __forceinline__ void multiply(float (&sum)[4], u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
        " {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "l"(a), "l"(b));
}

extern "C" __global__ void __launch_bounds__(128) warpgroup_mma(float* out, u64 a, u64 b) {
    float sum[4] = {};
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    multiply(sum, a, b);
#if IS_SERIALIZED
    sum[0] += out[1];
#endif
    multiply(sum, a + 2, b + 2);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 4; ++i) {
        out[threadIdx.x * 4 + i] = sum[i];
    }
}
