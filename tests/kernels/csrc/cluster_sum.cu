// Each block reads the shared memory of its cluster's next block: out[block] = 1000 * (blocks of the
// cluster) + the block index of that neighbour, 1000 + its own where there is no cluster.
#include "tma.cuh"

extern "C" __global__ void cluster_sum(int* out) {
    __shared__ u32 own;
    u32 rank, size, neighbour, value;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    if (threadIdx.x == 0) {
        own = blockIdx.x;
    }
    asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(neighbour)
                 : "r"(shared_address(&own)), "r"((rank + 1) % size));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(neighbour));
    // No block may end while another reads from it.
    asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
    if (threadIdx.x == 0) {
        out[blockIdx.x] = static_cast<int>(1000 * size + value);
    }
}
