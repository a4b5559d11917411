// The forward's warpgroups that multiply: 64 queries against the key tiles of an item.
#pragma once

#include "forward_types.cuh"

// Rows l / 4 and l / 4 + 8 of the warp's 16: running maximum (raw logits) and sum.
struct Softmax {
  float max[2], sum[2];
};

// Exponentiates the logits in place and updates maximum and sum; returns in `factor` what earlier
// results are to be multiplied with, and whether that is other than 1 for any row of the warp.
DEVICE bool exponentiate(float (&s)[KEYS / 2], Softmax& rows, float (&factor)[2],
                         float scale_log2, float slack) {
  float max[2] = {s[0], s[2]};
#pragma unroll
  for (int i = 0; i < KEYS / 8; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      max[h] = fmaxf(max[h], fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]));
    }
  }
  bool is_moved = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    max[h] = quad_max(max[h]);
    factor[h] = 1.0f;
    if (max[h] > rows.max[h] + slack) {
      factor[h] = exp2_approximate((rows.max[h] - max[h]) * scale_log2);
      rows.max[h] = max[h];
      rows.sum[h] *= factor[h];
      is_moved = true;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // A row that attends nothing yet has maximum -inf and logits -inf: exp2(-inf - 0) = 0.
    const float base = rows.max[h] == NEGATIVE_INFINITY ? 0.0f : rows.max[h] * scale_log2;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < KEYS / 8; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& value = s[4 * i + 2 * h + e];
        value = exp2_approximate(fmaf(value, scale_log2, -base));
        sum += value;
      }
    }
    rows.sum[h] += sum;
  }
  return __any_sync(0xffffffffu, is_moved);
}

DEVICE void pack_all(const float (&s)[KEYS / 2], uint32_t (&p)[KEYS / 4]) {
#pragma unroll
  for (int i = 0; i < KEYS / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

DEVICE void rescale(float (&o)[VALUE_DIM / 2], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < VALUE_DIM / 8; ++i) {
    o[4 * i] *= factor[0];
    o[4 * i + 1] *= factor[0];
    o[4 * i + 2] *= factor[1];
    o[4 * i + 3] *= factor[1];
  }
}

struct Consumer {
  Shared& shared;
  const Problem& problem;
  const TensorMap* out_map;
  int group;  // 0 or 1: query rows [64 group, + 64) of the tile
  int row;    // this thread's first row in the tile
  Ring<NUM_Q_BUFFERS> q_ring;
  Ring<NUM_STAGES> k_ring, v_ring;
  float o[VALUE_DIM / 2], s[KEYS / 2];
  uint32_t p[KEYS / 4];
  Softmax rows;
  float factor[2];
  float slack;  // MAX_SLACK in raw logits

  // S = Q K^T of the K buffer at hand.
  DEVICE void issue_qk() {
    const uint32_t q =
        descriptor(shared_address(shared.q[q_ring.stage]) + group * CONSUMER_ROWS * ROW_BYTES, 0);
    const uint32_t k = descriptor(shared_address(shared.k[k_ring.stage]), 0);
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
      const int in_slab = (step % 4) * 32;
      mma<KEYS, K_MAJOR, K_MAJOR>(s, advance(q, (step / 4) * TILE * ROW_BYTES + in_slab),
                                      advance(k, (step / 4) * KEYS * ROW_BYTES + in_slab),
                                      step > 0);
    }
    mma_commit();
  }

  // O += P V of the V buffer at hand.
  DEVICE void issue_pv(int accumulate) {
    const uint32_t v = descriptor(shared_address(shared.v[v_ring.stage]), KEYS * ROW_BYTES);
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
      mma<VALUE_DIM, MN_MAJOR>(o, p + 4 * step, advance(v, step * 16 * ROW_BYTES),
                               step > 0 ? 1 : accumulate);
    }
    mma_commit();
  }

  DEVICE void wait_k() {
    barrier_wait(shared_address(&shared.k_full[k_ring.stage]), k_ring.parity);
  }
  DEVICE void wait_v() {
    barrier_wait(shared_address(&shared.v_full[v_ring.stage]), v_ring.parity);
  }

  // After S is there: mask where needed, free K, exponentiate.
  DEVICE bool finish_qk(int tile_row) {
    const int first_key = shared.k_mask[k_ring.stage];
    if (first_key != NO_MASK) {
      mask_logits(s, shared.end[k_ring.stage], first_key - problem.key_shift, tile_row);
#if WINDOW
      // Read at each partial step: at 256 dimensions there are no registers to keep them in.
      mask_before(s, problem.start, tile_row, first_key);
#endif
    }
    release(shared_address(&shared.k_empty[k_ring.stage]));
    k_ring.next();
    return exponentiate(s, rows, factor, problem.scale_log2, slack);
  }

  DEVICE void finish_pv() {
    release(shared_address(&shared.v_empty[v_ring.stage]));
    v_ring.next();
  }

  DEVICE void attend(int num_steps, int tile_row, bool& has_pending_store);
  DEVICE void store(int query_tile, int head);
};

// The warpgroups' turns to issue: named barriers 1 and 2.
DEVICE void wait_for_turn(int group) { named_barrier_sync(1 + group, 2 * WARPGROUP); }
DEVICE void give_turn(int group) { named_barrier_arrive(1 + (group ^ 1), 2 * WARPGROUP); }

DEVICE void release_stored(Shared& shared, int stage, bool& has_pending_store) {
  if (has_pending_store) {
    bulk_wait_read();
    barrier_arrive(shared_address(&shared.q_empty[stage]));
    has_pending_store = false;
  }
}

DEVICE void Consumer::attend(int num_steps, int tile_row, bool& has_pending_store) {
  wait_k();
  mma_fence();
  issue_qk();
  mma_wait<0>();
  hold(s);
  finish_qk(tile_row);
  pack_all(s, p);
  release_stored(shared, NUM_Q_BUFFERS - 1 - q_ring.stage, has_pending_store);
#pragma unroll 1
  for (int step = 1; step < num_steps; ++step) {
    wait_k();
    wait_v();
    wait_for_turn(group);
    hold(s);
    hold(p);
    hold(o);
    mma_fence();
    issue_qk();
    issue_pv(step > 1);
    give_turn(group);
    mma_wait<1>();
    hold(s);
    const bool is_moved = finish_qk(tile_row);
    mma_wait<0>();
    hold(o);
    hold(p);
    finish_pv();
    pack_all(s, p);
    if (is_moved) rescale(o, factor);
  }
  wait_v();
  hold(p);
  hold(o);
  mma_fence();
  issue_pv(num_steps > 1);
  mma_wait<0>();
  hold(o);
  finish_pv();
}

// Lets a sink (log2) join a row's sum of exponentials above `max` (log2), which moves both; returns
// what earlier results are to be multiplied with.
DEVICE float join_sink(float sink, float& max, float& sum) {
  const float top = fmaxf(max, sink);
  const float factor = exp2_approximate(max - top);
  sum = fmaf(sum, factor, exp2_approximate(sink - top));
  max = top;
  return factor;
}

// Normalises and writes the output and the log-sum-exp of one item.
DEVICE void Consumer::store(int query_tile, int head) {
  const int first_row = query_tile * TILE;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = quad_sum(rows.sum[h]);
    float max = rows.max[h] * problem.scale_log2;
    float share = 1.0f;
    if (problem.sink != nullptr) share = join_sink(problem.sink[head] / LN_2, max, sum);
    factor[h] = sum > 0.0f ? share * (1.0f / sum) : 0.0f;
    const int q = first_row + row + 8 * h;
    if (threadIdx.x % 4 == 0 && q < problem.num_queries) {
      const float lse = (max + __log2f(sum)) * LN_2;
      problem.lse[int64_t(head) * problem.num_queries + q] = sum > 0.0f ? lse : NEGATIVE_INFINITY;
    }
  }
  rescale(o, factor);
#if PARTIAL
  store_fp32(o, problem.out + int64_t(head) * VALUE_DIM, int64_t(problem.num_heads) * VALUE_DIM,
             first_row + row, problem.num_queries);
#else
  // Each warpgroup's own rows of Q are read for the last time: they hold the output on its way out.
  store_tile(o, shared.q[q_ring.stage], out_map, group, first_row, head);
#endif
}
