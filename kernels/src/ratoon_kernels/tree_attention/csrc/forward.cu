// Tree attention, forward: out = softmax(scale q k^T) v over the keys on each query's own path.
//
// Enters: q, k, v by tensor maps, the work table of the forest (schedule.py). Leaves: out (16 bits
// by tensor map, or fp32 where PARTIAL) and the natural log-sum-exp, each head's sink in both
// where there is one. Invariant: every row of `out`
// and `lse` below num_queries is written, once, whatever it attends.
//
// One warpgroup loads (a thread of it drives the copy engine), two multiply: each owns 64 of the
// 128 query rows. The CTAs are persistent and take query tiles from a counter, longest first within
// a kv head. A consumer issues Q K^T of the next key tile before P V of the current one, so that
// the tensor cores work while it exponentiates, and the two consumers take turns in issuing
// (FlashAttention-3, sections 3.1 and 3.2). Full tiles run no mask code; the `end` of a partial
// tile's keys comes with its K.

#include "forward_consumer.cuh"
#include "forward_load.cuh"

DEVICE void consume(Shared& shared, const Problem& problem, const TensorMap* out_map, int group) {
  const int thread = threadIdx.x % WARPGROUP;
  Consumer consumer{shared, problem, out_map, group,
                    group * CONSUMER_ROWS + thread / 32 * 16 + (thread % 32) / 4};
  consumer.slack = MAX_SLACK / problem.scale_log2;
  bool has_pending_store = false;
  if (group == 1) give_turn(group);
  while (true) {
    const int s = consumer.q_ring.stage;
    barrier_wait(shared_address(&shared.q_full[s]), consumer.q_ring.parity);
    const int query_tile = shared.item[s][0];
    if (query_tile < 0) break;
    const int head = shared.item[s][1];
    const int num_steps = shared.item[s][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      consumer.rows.max[h] = NEGATIVE_INFINITY;
      consumer.rows.sum[h] = 0.0f;
    }
    if (num_steps > 0) {
      consumer.attend(num_steps, query_tile * TILE + consumer.row, has_pending_store);
    } else {
      release_stored(shared, NUM_Q_BUFFERS - 1 - s, has_pending_store);
#pragma unroll
      for (int i = 0; i < VALUE_DIM / 2; ++i) consumer.o[i] = 0.0f;
    }
    consumer.store(query_tile, head);
    // The Q buffer is free once the stores have read it, which nobody waits for here: of each
    // warpgroup the warps report that they are done with it, and the thread that stores later on.
    release(shared_address(&shared.q_empty[s]));
    has_pending_store = thread == 0;
    if (NUM_Q_BUFFERS == 1) release_stored(shared, s, has_pending_store);
    consumer.q_ring.next();
  }
  bulk_wait();
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    tree_attention_forward(const __grid_constant__ TensorMap q_map,
                           const __grid_constant__ TensorMap k_map,
                           const __grid_constant__ TensorMap v_map,
                           const __grid_constant__ TensorMap out_map, const ForwardItem* items,
                           const int2* runs, const int* end, const int* start, int* counter,
                           float* out, float* lse, const float* sink, int num_items,
                           int num_heads, int heads_per_kv_head, int num_queries, int key_shift,
                           float scale_log2) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const Problem problem{items,     runs,      end,       start,             counter,
                        out,       lse,       sink,      num_items,         num_heads,
                        heads_per_kv_head,    num_queries, key_shift,       scale_log2};
  if (threadIdx.x == 0) {
    for (int s = 0; s < NUM_Q_BUFFERS; ++s) {
      barrier_init(shared_address(&shared.q_full[s]), 1);
      barrier_init(shared_address(&shared.q_empty[s]), CONSUMER_ARRIVALS + NUM_CONSUMERS);
    }
    for (int s = 0; s < NUM_STAGES; ++s) {
      barrier_init(shared_address(&shared.k_full[s]), 1);
      barrier_init(shared_address(&shared.k_empty[s]), CONSUMER_ARRIVALS);
      barrier_init(shared_address(&shared.v_full[s]), 1);
      barrier_init(shared_address(&shared.v_empty[s]), CONSUMER_ARRIVALS);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) {
      tma_prefetch(&q_map);
      tma_prefetch(&k_map);
      tma_prefetch(&v_map);
      produce(shared, problem, &q_map, &k_map, &v_map);
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(shared, problem, &out_map, threadIdx.x / WARPGROUP - 1);
  }
}
