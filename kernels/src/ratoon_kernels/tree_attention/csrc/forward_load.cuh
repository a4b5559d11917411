// The forward's first warpgroup: one thread drives the loads.
#pragma once

#include "forward_types.cuh"

struct Producer {
  Shared& shared;
  const Problem& problem;
  const TensorMap *k_map, *v_map;
  Ring<NUM_STAGES> k_ring, v_ring;
  int pending_key = -1, pending_head = 0;  // first key of the V that follows the K just loaded

  DEVICE void load_k(int first_key, int head, bool is_full) {
    const int s = k_ring.stage;
    barrier_wait(shared_address(&shared.k_empty[s]), k_ring.parity ^ 1);
    const uint32_t full = shared_address(&shared.k_full[s]);
    shared.k_mask[s] = is_full ? NO_MASK : first_key;
    barrier_arrive_expect(full, K_BYTES + (is_full ? 0 : KEYS * sizeof(int)));
    tma_load(shared_address(shared.k[s]), k_map, full, 0, first_key, 0, head);
    if (!is_full) {
      bulk_load(shared_address(shared.end[s]), problem.end + first_key, KEYS * sizeof(int), full);
    }
    k_ring.next();
  }

  // V follows one step behind K, in the order in which the consumers free their buffers.
  DEVICE void load_pending_v() {
    if (pending_key < 0) return;
    const int s = v_ring.stage;
    barrier_wait(shared_address(&shared.v_empty[s]), v_ring.parity ^ 1);
    const uint32_t full = shared_address(&shared.v_full[s]);
    barrier_arrive_expect(full, V_BYTES);
    tma_load(shared_address(shared.v[s]), v_map, full, 0, pending_key, 0, pending_head);
    v_ring.next();
    pending_key = -1;
  }

  DEVICE void load_item(const ForwardItem& item, int head) {
    for_each_key_tile(problem.runs, item, [&](int tile, bool is_full) {
#pragma unroll
      for (int step = 0; step < STEPS_PER_TILE; ++step) {
        load_k(tile * TILE + step * KEYS, head, is_full);
        load_pending_v();
        pending_key = tile * TILE + step * KEYS;
        pending_head = head;
      }
    });
  }
};

DEVICE void produce(Shared& shared, const Problem& problem, const TensorMap* q_map,
                    const TensorMap* k_map, const TensorMap* v_map) {
  Producer producer{shared, problem, k_map, v_map};
  Ring<NUM_Q_BUFFERS> q_ring;
  int index = blockIdx.x;
  while (true) {
    const int next_index = atomicAdd(problem.counter, 1) + gridDim.x;
    const int s = q_ring.stage;
    // The one buffer is free once its item is done, for which the consumers need the last V.
    if (NUM_Q_BUFFERS == 1) producer.load_pending_v();
    barrier_wait(shared_address(&shared.q_empty[s]), q_ring.parity ^ 1);
    const uint32_t full = shared_address(&shared.q_full[s]);
    if (index >= problem.num_items) {
      producer.load_pending_v();
      shared.item[s][0] = -1;
      barrier_arrive(full);
      return;
    }
    const WorkIndex work(index, problem.num_items / problem.num_heads, problem.heads_per_kv_head);
    const ForwardItem item = problem.items[work.item];
    const int head = work.head;
    shared.item[s][0] = item.query_tile;
    shared.item[s][1] = head;
    shared.item[s][2] = item.num_key_tiles * STEPS_PER_TILE;
    barrier_arrive_expect(full, Q_BYTES);
    tma_load(shared_address(shared.q[s]), q_map, full, 0, item.query_tile * TILE, 0, head);
    producer.load_item(item, head / problem.heads_per_kv_head);
    q_ring.next();
    index = next_index;
  }
}
