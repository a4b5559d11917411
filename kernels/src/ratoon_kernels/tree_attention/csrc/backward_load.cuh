// The backward's first warpgroup: one thread drives the loads, two more add dQ to global memory.
#pragma once

#include "backward_types.cuh"

DEVICE void load_step(Shared& shared, const Problem& problem, const TensorMap* q_map,
                      const TensorMap* dout_map, uint32_t n, int head, int query_tile,
                      int stats_tile) {
  const uint32_t s = n % NUM_STAGES;
  const uint32_t q_full = shared_address(&shared.q_full[s]);
  barrier_arrive_expect(q_full, Q_BYTES + STATS_BYTES + (WINDOW ? sizeof(int) * QUERY_STEP : 0));
#if WINDOW
  bulk_load(shared_address(shared.start[s]), problem.start + query_tile * QUERY_STEP,
            sizeof(int) * QUERY_STEP, q_full);
#endif
  tma_load(shared_address(shared.q[s]), q_map, q_full, 0, query_tile * QUERY_STEP, 0, head);
  bulk_load(shared_address(shared.stats[s]), problem.stats + int64_t(stats_tile) * STATS_VALUES,
            STATS_BYTES, q_full);
  const uint32_t d = n % DOUT_STAGES;
  const uint32_t dout_full = shared_address(&shared.dout_full[d]);
  barrier_wait(shared_address(&shared.dout_empty[d]), (n / DOUT_STAGES + 1) % 2);
  barrier_arrive_expect(dout_full, DOUT_BYTES);
  tma_load(shared_address(shared.dout[d]), dout_map, dout_full, 0, query_tile * QUERY_STEP, 0,
           head);
}

// Loads all steps of the piece at hand; returns the number of the next step. The piece is read from
// shared memory at each step: this warp has few registers.
DEVICE uint32_t load_steps(Shared& shared, const Problem& problem, const TensorMap* q_map,
                           const TensorMap* dout_map, int head, uint32_t n) {
  const BackwardPiece& piece = shared.piece;
  for (int heads_left = problem.heads_per_kv_head - 1; heads_left >= 0; --heads_left, ++head) {
    for (int tile = piece.query_begin; tile < piece.query_end; ++tile, ++n) {
      barrier_wait(shared_address(&shared.q_empty[n % NUM_STAGES]), (n / NUM_STAGES + 1) % 2);
      const int stats_tile = head * problem.num_query_tiles + tile;
      Note& note = shared.notes[n % NUM_NOTES];
      note.stats_tile = stats_tile;
      note.first_row = tile * QUERY_STEP;
      note.is_full = piece.full_begin <= tile && tile < piece.full_end;
      note.is_last = heads_left == 0 && tile + 1 == piece.query_end;
      load_step(shared, problem, q_map, dout_map, n, head, tile, stats_tile);
    }
  }
  return n;
}

DEVICE void produce(Shared& shared, const Problem& problem, const TensorMap* q_map,
                    const TensorMap* k_map, const TensorMap* v_map, const TensorMap* dout_map) {
  const uint32_t k_full = shared_address(&shared.k_full);
  const uint32_t v_full = shared_address(&shared.v_full);
  const int pieces_of_head = problem.num_pieces * PARTS_OF_TILE;
  const int num_items = pieces_of_head * problem.num_kv_heads;
  uint32_t n = 0;
  uint32_t parity = 1;
  for (int index = blockIdx.x; index < num_items; parity ^= 1) {
    // All pieces of a kv head before the next one's, in the order of their queries: the blocks at
    // work add to the same rows of dQ while these are in the L2 cache.
    const int kv_head = index / pieces_of_head;
    int piece = index % pieces_of_head / PARTS_OF_TILE;
#if WITH_DQ
    // The last kv head's come longest first, so that all blocks finish together.
    if (kv_head + 1 == problem.num_kv_heads) piece = problem.pieces[piece].longest;
#endif
    barrier_wait(shared_address(&shared.kv_empty), parity);
    shared.piece = problem.pieces[piece];
    shared.kv_head = kv_head;
    const int key_row = shared.piece.key_tile * TILE + index % PARTS_OF_TILE * KEYS;
    shared.first_key = key_row;
    barrier_arrive_expect(k_full, K_BYTES + KEYS * sizeof(int));
    tma_load(shared_address(shared.k), k_map, k_full, 0, key_row, 0, kv_head);
    bulk_load(shared_address(shared.end), problem.end + key_row, KEYS * sizeof(int), k_full);
    barrier_arrive_expect(v_full, V_BYTES);
    tma_load(shared_address(shared.v), v_map, v_full, 0, key_row, 0, kv_head);
    index = atomicAdd(problem.counter, 1) + gridDim.x;
    n = load_steps(shared, problem, q_map, dout_map, kv_head * problem.heads_per_kv_head, n);
  }
  barrier_wait(shared_address(&shared.kv_empty), parity);
  shared.kv_head = NO_MORE;
  barrier_arrive(k_full);
}

#if WITH_DQ && !IS_WIDE
// Adds what one consumer left in shared memory to dQ, step after step.
DEVICE void add_dq(Shared& shared, const Problem& problem, uint32_t group) {
  for (uint32_t n = 0;; ++n) {
    barrier_wait(shared_address(&shared.dq_full[group]), n % 2);
    if (n == shared.num_steps[group]) break;
    const int tile = shared.notes[n % NUM_NOTES].stats_tile;
    bulk_reduce_add(problem.dq + int64_t(tile) * DQ_TILE_VALUES + group * (DQ_TILE_VALUES / 2),
                    shared_address(shared.dq[group]), DQ_BYTES);
    bulk_commit();
    bulk_wait_read();
    barrier_arrive(shared_address(&shared.dq_empty[group]));
  }
  bulk_wait();
}
#endif
