// The backward's first warpgroup: one thread drives the loads, two more add dQ to global memory.
#pragma once

#include "backward_types.cuh"

DEVICE void load_step(Shared& shared, const Problem& problem, const TensorMap* q_map,
                      const TensorMap* dout_map, uint32_t n, int head, int row,
                      const Note& note) {
  const uint32_t s = n % NUM_STAGES;
  const uint32_t q_full = shared_address(&shared.q_full[s]);
  barrier_arrive_expect(q_full,
                        Q_BYTES + STATS_BYTES + (WINDOW ? sizeof(int) * QUERY_STEP : 0));
#if WINDOW
  bulk_load(shared_address(shared.start[s]), problem.start + row, sizeof(int) * QUERY_STEP,
            q_full);
#endif
  tma_load(shared_address(shared.q[s]), q_map, q_full, 0, row, 0, head);
  bulk_load(shared_address(shared.stats[s]), problem.stats + int64_t(note.head_row) * 2,
            STATS_BYTES, q_full);
  const uint32_t d = n % DOUT_STAGES;
  const uint32_t dout_full = shared_address(&shared.dout_full[d]);
  barrier_wait(shared_address(&shared.dout_empty[d]), (n / DOUT_STAGES + 1) % 2);
  barrier_arrive_expect(dout_full, DOUT_BYTES);
  tma_load(shared_address(shared.dout[d]), dout_map, dout_full, 0, row, 0, head);
}

// Loads all steps of the piece at hand; returns the number of the next step. The piece is read from
// shared memory at each step: this warp has few registers.
DEVICE uint32_t load_steps(Shared& shared, const Problem& problem, const TensorMap* q_map,
                           const TensorMap* dout_map, int head, uint32_t n) {
  const BackwardPiece& piece = shared.piece;
  for (int heads_left = problem.heads_per_kv_head - 1; heads_left >= 0; --heads_left, ++head) {
    for (int row = piece.query_begin; row < piece.query_end; row += QUERY_STEP, ++n) {
      barrier_wait(shared_address(&shared.q_empty[n % NUM_STAGES]), (n / NUM_STAGES + 1) % 2);
      Note& note = shared.notes[n % NUM_NOTES];
      note.head_row = head * problem.num_rows + row;
      note.first_row = row;
      note.is_full = piece.full_begin <= row && row + QUERY_STEP <= piece.full_end;
      note.is_last = heads_left == 0 && row + QUERY_STEP >= piece.query_end;
      load_step(shared, problem, q_map, dout_map, n, head, row, note);
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
    int kv_head = index / pieces_of_head;
    int item = index % pieces_of_head;
#if WITH_DQ
    // The last kv heads' come longest first, so that all blocks finish together.
    const int head_of_tail = kv_head - (problem.num_kv_heads - problem.tail_heads);
    if (head_of_tail >= 0) {
      item += head_of_tail * pieces_of_head;
      kv_head += item % problem.tail_heads - head_of_tail;
      item /= problem.tail_heads;
    }
    const int piece = head_of_tail < 0 ? item / PARTS_OF_TILE
                                       : problem.pieces[item / PARTS_OF_TILE].longest;
#else
    const int piece = item / PARTS_OF_TILE;
#endif
    barrier_wait(shared_address(&shared.kv_empty), parity);
    shared.piece = problem.pieces[piece];
    shared.kv_head = kv_head;
    const int key_row = shared.piece.key_tile * TILE + item % PARTS_OF_TILE * KEYS;
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
    // With 64 dimensions the consumer's half of the queries, else its own slabs.
    const int64_t row = shared.notes[n % NUM_NOTES].head_row;
    const int first = group * (HEAD_DIM == 64 ? DQ_COLUMNS : problem.slab_rows);
    bulk_reduce_add(problem.dq + (row + first) * SLAB, shared_address(shared.dq[group][0]),
                    DQ_BYTES);
    if (HAS_THIRD_SLAB && n % 2 == group) {
      bulk_reduce_add(problem.dq + (row + 2 * problem.slab_rows) * SLAB,
                      shared_address(shared.dq[group][NUM_DQ_BUFFERS - 1]), DQ_BYTES);
    }
    bulk_commit();
    bulk_wait_read();
    barrier_arrive(shared_address(&shared.dq_empty[group]));
  }
  bulk_wait();
}
#endif
