// The backward's warpgroups that multiply: the sweep of a key tile over its queries.
#pragma once

#include "backward_types.cuh"

struct Consumer {
  Shared& shared;
  const Problem& problem;
  uint32_t group;  // 0 or 1: keys [64 group, + 64) of the tile
  uint32_t n = 0;  // the step
  float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2];

  // d += A B^T over the head dimension: A the own rows of a key tile, B a query tile.
  DEVICE void issue_logits(float (&d)[QUERY_STEP / 2], uint8_t* keys, uint8_t* queries) {
    const uint32_t a = descriptor(shared_address(keys) + group * CONSUMER_ROWS * ROW_BYTES, 0);
    const uint32_t b = descriptor(shared_address(queries), 0);
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
      const int in_half = (step % 4) * 32;
      mma<QUERY_STEP, K_MAJOR, K_MAJOR>(d, advance(a, (step / 4) * TILE * ROW_BYTES + in_half),
                                        advance(b, (step / 4) * STEP_HALF_BYTES + in_half), 1);
    }
    mma_commit();
  }

  // d += operand B over the queries of a step.
  DEVICE void issue_keys(float (&d)[HEAD_DIM / 2], const uint32_t* operand, uint8_t* queries) {
    const uint32_t b = descriptor(shared_address(queries), STEP_HALF_BYTES);
#pragma unroll
    for (int step = 0; step < QUERY_STEP / 16; ++step) {
      mma<HEAD_DIM, MN_MAJOR>(d, operand + 4 * step, advance(b, step * 16 * ROW_BYTES), 1);
    }
    mma_commit();
  }

  DEVICE void mask(float (&s)[QUERY_STEP / 2], int first_row) const;
  template <int STAGE, bool IS_FIRST>
  DEVICE void step();
  DEVICE void sweep();
#if WITH_DQ
  DEVICE void store_ds(const uint32_t (&operand)[QUERY_STEP / 4], int stage);
  DEVICE void wait_ds(int stage) const;
  DEVICE void issue_dq(float (&dq)[DQ_VALUES], int stage);
  DEVICE void store_dq(const float (&dq)[DQ_VALUES], int stage);
  template <int STAGE>
  DEVICE void finish_last_dq();
#endif
};

// Begins the accumulators of S^T or dP^T.
DEVICE void load_stats(float (&d)[QUERY_STEP / 2], const float* stats) {
  const float2* stats_of_column = reinterpret_cast<const float2*>(stats) + thread_in_group() % 4;
#pragma unroll
  for (int i = 0; i < QUERY_STEP / 8; ++i) {
    const float2 value = stats_of_column[4 * i];
    d[4 * i] = d[4 * i + 2] = value.x;
    d[4 * i + 1] = d[4 * i + 3] = value.y;
  }
}

// Begins S^T with -inf where a query does not attend a key: those of [key - key_shift, end[key])
// do. What the product adds leaves it so, and P is 0.
DEVICE void Consumer::mask(float (&s)[QUERY_STEP / 2], int first_row) const {
  const uint32_t thread = thread_in_group();
  const int row = group * CONSUMER_ROWS + thread / 32 * 16 + (thread % 32) / 4;
  const int first_query = first_row + 2 * (thread % 4);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int start = shared.piece.key_tile * TILE + row + 8 * h - problem.key_shift;
    const uint32_t count = max(shared.end[row + 8 * h] - start, 0);
#pragma unroll
    for (int i = 0; i < QUERY_STEP / 8; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool is_attended = uint32_t(first_query + 8 * i + e - start) < count;
        if (!is_attended) s[4 * i + 2 * h + e] = NEGATIVE_INFINITY;
      }
    }
  }
}

DEVICE void pack_all(const float (&values)[QUERY_STEP / 2], uint32_t (&operand)[QUERY_STEP / 4]) {
#pragma unroll
  for (int i = 0; i < QUERY_STEP / 4; ++i) operand[i] = pack(values[2 * i], values[2 * i + 1]);
}

#if WITH_DQ
// Transposes the own 64 keys of dS^T into shared memory, where both consumers read all 128.
DEVICE void Consumer::store_ds(const uint32_t (&operand)[QUERY_STEP / 4], int stage) {
  barrier_wait(shared_address(&shared.ds_empty[stage]), (n / 2 + 1) % 2);
  const uint32_t half = shared_address(shared.ds[stage]) + group * STEP_HALF_BYTES;
  const uint32_t thread = thread_in_group();
  const uint32_t lane = thread % 32;
  const uint32_t warp = thread / 32;
  // Matrices (keys 0-7, 8-15) x (queries 0-7, 8-15) in the order of the operand; a transposed one
  // has its queries as rows.
  const uint32_t key_chunk = 2 * warp + (lane / 8) % 2;
  const uint32_t query = (lane / 16) * 8 + lane % 8;
  const uint32_t address = half + query * ROW_BYTES + ((key_chunk ^ (query % 8)) << 4);
#pragma unroll
  for (int step = 0; step < QUERY_STEP / 16; ++step) {
    store_matrices_transposed(address + 16 * step * ROW_BYTES, operand[4 * step],
                              operand[4 * step + 1], operand[4 * step + 2], operand[4 * step + 3]);
  }
  fence_async_proxy();
  barrier_arrive(shared_address(&shared.ds_full[stage]));
}

// Waits for dS of the step before this one.
DEVICE void Consumer::wait_ds(int stage) const {
  barrier_wait(shared_address(&shared.ds_full[stage]), (n - 1) / 2 % 2);
}

// dQ^T = K^T dS^T of a step: this consumer's half of the dimensions, or of the queries.
DEVICE void Consumer::issue_dq(float (&dq)[DQ_VALUES], int stage) {
  const uint32_t keys = shared_address(shared.k);
  const uint32_t ds = shared_address(shared.ds[stage]);
  const uint32_t a = descriptor(HEAD_DIM == 128 ? keys + group * TILE * ROW_BYTES : keys, 0);
  const uint32_t b = descriptor(HEAD_DIM == 128 ? ds : ds + group * DQ_COLUMNS * ROW_BYTES, 0);
#pragma unroll
  for (int i = 0; i < TILE / 16; ++i) {
    mma<DQ_COLUMNS, MN_MAJOR, K_MAJOR>(dq, advance(a, i * 16 * ROW_BYTES),
                                       advance(b, (i / 4) * STEP_HALF_BYTES + (i % 4) * 32), i > 0);
  }
  mma_commit();
}

// Hands dQ^T to the warp that adds it, as it lies in registers: four values of a thread together.
DEVICE void Consumer::store_dq(const float (&dq)[DQ_VALUES], int stage) {
  release(shared_address(&shared.ds_empty[stage]));
  barrier_wait(shared_address(&shared.dq_empty[group]), n % 2);
  const uint32_t base = shared_address(shared.dq[group]) + thread_in_group() * 16;
#pragma unroll
  for (int i = 0; i < DQ_VALUES / 4; ++i) {
    store_shared(base + i * WARPGROUP * 16, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
  }
  fence_async_proxy();
  barrier_arrive(shared_address(&shared.dq_full[group]));
}

// dQ of a piece's last step, which no later one does.
template <int STAGE>
DEVICE void Consumer::finish_last_dq() {
  wait_ds(STAGE);
  float dq[DQ_VALUES];
  hold(dq);
  mma_fence();
  issue_dq(dq, STAGE);
  mma_wait<0>();
  hold(dq);
  store_dq(dq, STAGE);
}
#endif

// One query tile of one head, and dQ of the step before unless this is the first of a piece.
template <int STAGE, bool IS_FIRST>
DEVICE void Consumer::step() {
  const uint32_t parity = n / NUM_STAGES % 2;
  float p[QUERY_STEP / 2], ds[QUERY_STEP / 2];
  uint32_t p_operand[QUERY_STEP / 4], ds_operand[QUERY_STEP / 4];
  barrier_wait(shared_address(&shared.q_full[STAGE]), parity);
  load_stats(p, shared.stats[STAGE][0]);
  const Note& note = shared.notes[n % NUM_NOTES];
  if (!note.is_full) mask(p, note.first_row);
  load_stats(ds, shared.stats[STAGE][1]);
  hold(p);
  hold(ds);
  mma_fence();
  issue_logits(p, shared.k, shared.q[STAGE]);
  barrier_wait(shared_address(&shared.dout_full[STAGE]), parity);
  mma_fence();
  issue_logits(ds, shared.v, shared.dout[STAGE]);
  mma_wait<1>();
  hold(p);
#pragma unroll
  for (int i = 0; i < QUERY_STEP / 2; ++i) p[i] = exp2_approximate(p[i] * problem.scale_log2);
  mma_wait<0>();
  hold(ds);
#pragma unroll
  for (int i = 0; i < QUERY_STEP / 2; ++i) ds[i] *= p[i];
#if WITH_DQ
  // In this order dS and P are packed where they lie: 240 registers hold no second copy.
  pack_all(ds, ds_operand);
  store_ds(ds_operand, STAGE);
  pack_all(p, p_operand);
  hold(p_operand);
  hold(ds_operand);
  hold(dv);
  hold(dk);
  mma_fence();
  issue_keys(dv, p_operand, shared.dout[STAGE]);
  issue_keys(dk, ds_operand, shared.q[STAGE]);
#else
  pack_all(p, p_operand);
  hold(p_operand);
  hold(dv);
  mma_fence();
  issue_keys(dv, p_operand, shared.dout[STAGE]);
  pack_all(ds, ds_operand);
  hold(ds_operand);
  hold(dk);
  mma_fence();
  issue_keys(dk, ds_operand, shared.q[STAGE]);
#endif
#if WITH_DQ
  float dq[DQ_VALUES];
  if (!IS_FIRST) {
    wait_ds(STAGE ^ 1);
    hold(dq);
    mma_fence();
    issue_dq(dq, STAGE ^ 1);
    mma_wait<1>();
  } else {
    mma_wait<0>();
  }
#else
  mma_wait<0>();
#endif
  hold(p_operand);
  hold(ds_operand);
  hold(dv);
  hold(dk);
  release(shared_address(&shared.q_empty[STAGE]));
  release(shared_address(&shared.dout_empty[STAGE]));
#if WITH_DQ
  if (!IS_FIRST) {
    mma_wait<0>();
    hold(dq);
    store_dq(dq, STAGE ^ 1);
  }
#endif
  ++n;
}

// All steps of a piece. Two stages in turn, each with its own code: the addresses are constants.
DEVICE void Consumer::sweep() {
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; ++i) dk[i] = dv[i] = 0.0f;
  if (n % 2 == 0) {
    step<0, true>();
  } else {
    step<1, true>();
  }
  while (!__any_sync(0xffffffffu, shared.notes[(n - 1) % NUM_NOTES].is_last)) {
    if (n % 2 == 0) {
      step<0, false>();
    } else {
      step<1, false>();
    }
  }
#if WITH_DQ
  if (n % 2 == 1) {
    finish_last_dq<0>();
  } else {
    finish_last_dq<1>();
  }
#endif
}
