// Thin wrappers of the PTX instructions that the kernels use, one instruction each.
//
// No CUDA header is included anywhere in this folder: NVRTC needs nothing but these files. Shared
// memory is addressed by 32-bit offsets in the shared window, as the instructions take it.
// PTX ISA 9.0, sections 9.7.9 (data movement), 9.7.13 (barriers), 9.7.15 (wgmma).
#pragma once

#ifdef __CUDACC_RTC__
using uint8_t = unsigned char;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int64_t = long long;
#else
#include <cstdint>
#endif

// What cuTensorMapEncodeTiled fills; only its address matters to a kernel.
struct alignas(64) TensorMap {
  uint8_t opaque[128];
};

#define DEVICE __device__ __forceinline__

#define NEGATIVE_INFINITY __int_as_float(0xff800000)

DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- mbarrier -----------------------------------------------------------------------------------

DEVICE void barrier_init(uint32_t barrier, uint32_t num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(num_arrivals)
               : "memory");
}

// Makes initialised barriers visible to the copy engine.
DEVICE void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void barrier_arrive_expect(uint32_t barrier, uint32_t num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(num_bytes)
               : "memory");
}

// Waits until the phase of this parity has completed.
DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// --- named barriers -----------------------------------------------------------------------------

DEVICE void named_barrier_sync(uint32_t barrier, uint32_t num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

DEVICE void named_barrier_arrive(uint32_t barrier, uint32_t num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

// --- the copy engine ----------------------------------------------------------------------------

// Loads a box of a 4-D tensor map; elements outside the tensor are zero.
DEVICE void tma_load(uint32_t destination, const TensorMap* map, uint32_t barrier, int x, int row,
                     int half, int head) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(row), "r"(half), "r"(head)
      : "memory");
}

// Stores a box; what lies outside the tensor is left out.
DEVICE void tma_store(const TensorMap* map, uint32_t source, int x, int row, int half, int head) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
      "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(source), "r"(x), "r"(row), "r"(half), "r"(head)
      : "memory");
}

DEVICE void tma_prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads consecutive bytes; both addresses and the size are multiples of 16.
DEVICE void bulk_load(uint32_t destination, const void* source, uint32_t num_bytes,
                      uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(destination),
      "l"(source), "r"(num_bytes), "r"(barrier)
      : "memory");
}

// Adds consecutive fp32 values of shared memory to global memory.
DEVICE void bulk_reduce_add(float* destination, uint32_t source, uint32_t num_bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   destination),
               "r"(source), "r"(num_bytes)
               : "memory");
}

// Adds two values to global memory; the address is a multiple of 8.
DEVICE void reduce_add(float* destination, float a, float b) {
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(destination), "f"(a), "f"(b)
               : "memory");
}

// Adds four values; the address is a multiple of 16.
DEVICE void reduce_add(float* destination, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(destination), "f"(a), "f"(b),
               "f"(c), "f"(d)
               : "memory");
}

DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until committed stores and reductions have read their shared memory.
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Waits until they are done and visible.
DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders this thread's shared stores before later reads by the copy engine and the tensor cores.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- warps --------------------------------------------------------------------------------------

template <int NUM_REGISTERS>
DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(NUM_REGISTERS));
}

template <int NUM_REGISTERS>
DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(NUM_REGISTERS));
}

DEVICE float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

DEVICE float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// --- arithmetic and matrices --------------------------------------------------------------------

DEVICE float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rounds two values to 16 bits; `low` goes to the lower half, the element of the lower index.
DEVICE uint32_t pack(float low, float high) {
  uint32_t packed;
#if IS_FP16
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
  return packed;
}

DEVICE float unpack_low(uint32_t packed) {
#if IS_FP16
  float value;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(value) : "r"(packed));
  return value;
#else
  return __uint_as_float(packed << 16);
#endif
}

DEVICE float unpack_high(uint32_t packed) {
#if IS_FP16
  float value;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(value) : "r"(packed));
  return value;
#else
  return __uint_as_float(packed & 0xffff0000u);
#endif
}

// Stores four 8 x 8 matrices of 16-bit elements; lane 8 i + j holds the address of row j of matrix
// i.
DEVICE void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// The same, each matrix transposed.
DEVICE void store_matrices_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                      uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

DEVICE void store_shared(uint32_t address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}
