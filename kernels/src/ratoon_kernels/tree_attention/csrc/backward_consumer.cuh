// The backward's warpgroups that multiply: the sweep of a key tile over its queries.
#pragma once

#include "backward_step.cuh"

struct Consumer {
  Shared& shared;
  const Problem& problem;
  uint32_t group;  // 0 or 1: keys [64 group, + 64) of the tile
  uint32_t n = 0;  // the step
  float dk[HEAD_DIM / 2], dv[VALUE_DIM / 2];

  // d += A B^T over DIM dimensions: A the own rows of a key tile, B a query tile.
  template <int DIM>
  DEVICE void issue_logits(float (&d)[QUERY_STEP / 2], uint8_t* keys, uint8_t* queries) {
    const uint32_t a = descriptor(shared_address(keys) + group * CONSUMER_ROWS * ROW_BYTES, 0);
    const uint32_t b = descriptor(shared_address(queries), 0);
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
      const int in_slab = (step % 4) * 32;
      mma<QUERY_STEP, K_MAJOR, K_MAJOR>(d, advance(a, (step / 4) * TILE * ROW_BYTES + in_slab),
                                        advance(b, (step / 4) * STEP_HALF_BYTES + in_slab), 1);
    }
    mma_commit();
  }

  // d += operand B over the queries of a step.
  template <int COUNT>
  DEVICE void issue_keys(float (&d)[COUNT], const uint32_t* operand, uint8_t* queries) {
    const uint32_t b = descriptor(shared_address(queries), STEP_HALF_BYTES);
#pragma unroll
    for (int step = 0; step < QUERY_STEP / 16; ++step) {
      mma<2 * COUNT, MN_MAJOR>(d, operand + 4 * step, advance(b, step * 16 * ROW_BYTES), 1);
    }
    mma_commit();
  }

  template <int STAGE, bool IS_FIRST>
  DEVICE void step();
  DEVICE void sweep();
#if WITH_DQ
  DEVICE void wait_ds(int stage) const;
  DEVICE void issue_dq(float (&dq)[DQ_VALUES], uint32_t slab, int stage);
  DEVICE void store_dq(const float (&dq)[DQ_VALUES], int buffer);
  template <int STAGE>
  DEVICE void finish_dq(float (&dq)[DQ_VALUES]);
  template <int STAGE>
  DEVICE void finish_last_dq();
#endif
};

#if WITH_DQ
// Waits for dS of the step before this one.
DEVICE void Consumer::wait_ds(int stage) const {
  barrier_wait(shared_address(&shared.ds_full[stage]), (n - 1) / 2 % 2);
}

// dQ^T = K^T dS^T of a step and of 64 dimensions: a slab of K, of which there is one for either
// consumer's half of the queries where there are no more.
DEVICE void Consumer::issue_dq(float (&dq)[DQ_VALUES], uint32_t slab, int stage) {
  const uint32_t keys = shared_address(shared.k);
  const uint32_t ds = shared_address(shared.ds[stage]);
  const uint32_t a = descriptor(NUM_SLABS == 1 ? keys : keys + slab * TILE * ROW_BYTES, 0);
  const uint32_t b = descriptor(NUM_SLABS == 1 ? ds + slab * DQ_COLUMNS * ROW_BYTES : ds, 0);
  hold(dq);
  mma_fence();
#pragma unroll
  for (int i = 0; i < TILE / 16; ++i) {
    mma<DQ_COLUMNS, MN_MAJOR, K_MAJOR>(dq, advance(a, i * 16 * ROW_BYTES),
                                       advance(b, (i / 4) * STEP_HALF_BYTES + (i % 4) * 32), i > 0);
  }
  mma_commit();
}

// Stores dQ^T as it lies in registers: four values of a thread together.
DEVICE void Consumer::store_dq(const float (&dq)[DQ_VALUES], int buffer) {
  const uint32_t base = shared_address(shared.dq[group][buffer]) + thread_in_group() * 16;
#pragma unroll
  for (int i = 0; i < DQ_VALUES / 4; ++i) {
    store_shared(base + i * WARPGROUP * 16, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
  }
}

// Hands dQ^T of the step before this one, whose product is the last in flight, to the warp that
// adds it.
template <int STAGE>
DEVICE void Consumer::finish_dq(float (&dq)[DQ_VALUES]) {
  const bool has_third = HAS_THIRD_SLAB && group == STAGE;
  mma_wait<0>();
  hold(dq);
  if (!has_third) release(shared_address(&shared.ds_empty[STAGE]));
  barrier_wait(shared_address(&shared.dq_empty[group]), n % 2);
  store_dq(dq, 0);
  if (has_third) {
    issue_dq(dq, 2, STAGE);
    mma_wait<0>();
    hold(dq);
    release(shared_address(&shared.ds_empty[STAGE]));
    store_dq(dq, NUM_DQ_BUFFERS - 1);
  }
  fence_async_proxy();
  barrier_arrive(shared_address(&shared.dq_full[group]));
}

// dQ of a piece's last step, which no later one does.
template <int STAGE>
DEVICE void Consumer::finish_last_dq() {
  wait_ds(STAGE);
  float dq[DQ_VALUES];
  issue_dq(dq, group, STAGE);
  finish_dq<STAGE>(dq);
}
#endif

// One query tile of one head, and dQ of the step before unless this is the first of a piece.
template <int STAGE, bool IS_FIRST>
DEVICE void Consumer::step() {
  const uint32_t parity = n / NUM_STAGES % 2;
  float p[QUERY_STEP / 2], ds[QUERY_STEP / 2];
  uint32_t p_operand[QUERY_STEP / 4], ds_operand[QUERY_STEP / 4];
  barrier_wait(shared_address(&shared.q_full[STAGE]), parity);
  load_stats(p, shared.stats[STAGE], 0);
  const Note& note = shared.notes[n % NUM_NOTES];
  if (!note.is_full) mask_keys(p, shared, problem.key_shift, group, note.first_row, STAGE);
  load_stats(ds, shared.stats[STAGE], 1);
  hold(p);
  hold(ds);
  mma_fence();
  issue_logits<HEAD_DIM>(p, shared.k, shared.q[STAGE]);
  barrier_wait(shared_address(&shared.dout_full[STAGE]), parity);
  mma_fence();
  issue_logits<VALUE_DIM>(ds, shared.v, shared.dout[STAGE]);
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
  store_ds(shared, ds_operand, group, n, STAGE);
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
    issue_dq(dq, group, STAGE ^ 1);
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
  if (!IS_FIRST) finish_dq<STAGE ^ 1>(dq);
#endif
  ++n;
}

// All steps of a piece. Two stages in turn, each with its own code: the addresses are constants.
DEVICE void Consumer::sweep() {
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; ++i) dk[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < VALUE_DIM / 2; ++i) dv[i] = 0.0f;
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
