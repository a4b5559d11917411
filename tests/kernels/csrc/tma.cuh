// The few instructions that the test kernels need: barriers, bulk tensor copies, cluster registers.
#pragma once

using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct alignas(64) TensorMap {
    u64 opaque[16];
};

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect_bytes(u32 barrier, u32 num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(num_bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{\n .reg .pred p;\n"
            " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            " selp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    }
}

__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, u32 barrier, int token,
                                         int head) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %3, %5}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(0), "r"(token), "r"(head)
        : "memory");
}

// Where byte `offset` of an aligned tile of 128-byte rows lies under the 128-byte swizzle.
__device__ __forceinline__ u32 swizzled(u32 offset) { return offset ^ ((offset >> 3) & 0x70); }
