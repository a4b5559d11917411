// The forward's first warpgroup: one thread drives the loads.
#pragma once

#include "forward_types.cuh"

struct Producer {
  Shared& shared;
  const Problem& problem;
  const TensorMap *k_map, *v_map;
  Ring<NUM_STAGES> k_ring, v_ring;
  int pending_tile = -1, pending_head = 0;  // the V tile that follows the K just loaded

  DEVICE void load_k(int tile, int head, bool is_full) {
    const int s = k_ring.stage;
    barrier_wait(shared_address(&shared.k_empty[s]), k_ring.parity ^ 1);
    const uint32_t full = shared_address(&shared.k_full[s]);
    shared.k_mask[s] = is_full ? NO_MASK : tile * TILE;
    barrier_arrive_expect(full, TILE_BYTES + (is_full ? 0 : TILE * sizeof(int)));
    tma_load(shared_address(shared.k[s]), k_map, full, 0, tile * TILE, 0, head);
    if (!is_full) {
      bulk_load(shared_address(shared.end[s]), problem.end + tile * TILE, TILE * sizeof(int), full);
    }
    k_ring.next();
  }

  // V follows one tile behind K, in the order in which the consumers free their buffers.
  DEVICE void load_pending_v() {
    if (pending_tile < 0) return;
    const int s = v_ring.stage;
    barrier_wait(shared_address(&shared.v_empty[s]), v_ring.parity ^ 1);
    const uint32_t full = shared_address(&shared.v_full[s]);
    barrier_arrive_expect(full, TILE_BYTES);
    tma_load(shared_address(shared.v[s]), v_map, full, 0, pending_tile * TILE, 0, pending_head);
    v_ring.next();
    pending_tile = -1;
  }

  DEVICE void load_item(const ForwardItem& item, int head) {
    for_each_key_tile(problem.runs, item, [&](int tile, bool is_full) {
      load_k(tile, head, is_full);
      load_pending_v();
      pending_tile = tile;
      pending_head = head;
    });
  }
};

DEVICE void produce(Shared& shared, const Problem& problem, const TensorMap* q_map,
                    const TensorMap* k_map, const TensorMap* v_map) {
  Producer producer{shared, problem, k_map, v_map};
  Ring<2> q_ring;
  int index = blockIdx.x;
  while (true) {
    const int next_index = atomicAdd(problem.counter, 1) + gridDim.x;
    const int s = q_ring.stage;
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
    shared.item[s][2] = item.num_key_tiles;
    barrier_arrive_expect(full, TILE_BYTES);
    tma_load(shared_address(shared.q[s]), q_map, full, 0, item.query_tile * TILE, 0, head);
    producer.load_item(item, head / problem.heads_per_kv_head);
    q_ring.next();
    index = next_index;
  }
}
