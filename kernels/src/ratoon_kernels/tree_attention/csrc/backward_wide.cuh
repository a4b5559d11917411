// The backward's warpgroups that multiply, for gradients of 256 dimensions: both take the same 64
// keys. The first makes S^T and P, and holds dV; the second makes dP^T and dS, and holds
// dK. P goes from one to the other as it lies in registers, in fp32. dQ of a step is a step late
// here too; the consumers share its dimensions, 64 at a time, and add them from registers.
#pragma once

#include "backward_step.cuh"

enum Role : int { MAKES_DV = 0, MAKES_DK = 1 };

// d += A B^T over DIM dimensions: A the keys, B a query tile.
template <int DIM>
DEVICE void issue_logits(float (&d)[QUERY_STEP / 2], uint8_t* keys, uint8_t* queries) {
  const uint32_t a = descriptor(shared_address(keys), 0);
  const uint32_t b = descriptor(shared_address(queries), 0);
#pragma unroll
  for (int step = 0; step < DIM / 16; ++step) {
    const int in_slab = (step % 4) * 32;
    mma<QUERY_STEP, K_MAJOR, K_MAJOR>(d, advance(a, (step / 4) * KEYS * ROW_BYTES + in_slab),
                                      advance(b, (step / 4) * STEP_HALF_BYTES + in_slab), 1);
  }
  mma_commit();
}

#if WITH_DQ
// dQ^T = K^T dS^T of a step and of 64 dimensions.
DEVICE void issue_dq(Shared& shared, float (&dq)[DQ_VALUES], int slab, int stage) {
  const uint32_t a = descriptor(shared_address(shared.k) + slab * KEYS * ROW_BYTES, 0);
  const uint32_t b = descriptor(shared_address(shared.ds[stage]), 0);
  hold(dq);
  mma_fence();
#pragma unroll
  for (int i = 0; i < KEYS / 16; ++i) {
    mma<QUERY_STEP, MN_MAJOR, K_MAJOR>(dq, advance(a, i * 16 * ROW_BYTES), advance(b, i * 32),
                                       i > 0);
  }
  mma_commit();
}
#endif

template <Role ROLE>
struct Consumer {
  static constexpr int DIM = ROLE == MAKES_DV ? VALUE_DIM : HEAD_DIM;
  Shared& shared;
  const Problem& problem;
  uint32_t n = 0;  // the step
  float sum[DIM / 2];

  template <int STAGE>
  DEVICE void begin_p(float (&p)[QUERY_STEP / 2]);
  template <int STAGE>
  DEVICE void begin_ds(float (&ds)[QUERY_STEP / 2]);
  DEVICE void send_p(float (&p)[QUERY_STEP / 2]);
  DEVICE void receive_p(float (&ds)[QUERY_STEP / 2]);
  template <int STAGE, bool IS_FIRST>
  DEVICE void step();
  DEVICE void sweep();
#if WITH_DQ
  // The dimensions of this consumer: slabs [first, last] of 64. Of three each has one or two.
  static constexpr int split(int stage) { return (HEAD_DIM / 64 + stage) / 2; }
  static constexpr int first_slab(int stage) { return ROLE == MAKES_DV ? 0 : split(stage); }
  static constexpr int last_slab(int stage) {
    return (ROLE == MAKES_DV ? split(stage) : HEAD_DIM / 64) - 1;
  }
  DEVICE void wait_ds(int stage) const {
    barrier_wait(shared_address(&shared.ds_full[stage]), (n - 1) / 2 % 2);
  }
  DEVICE void add_dq(const float (&dq)[DQ_VALUES], int slab) const;
  template <int STAGE>
  DEVICE void finish_last_dq();
#endif
};

#if WITH_DQ
// Adds dQ^T of the step before this one to global memory, as it lies in registers.
template <Role ROLE>
DEVICE void Consumer<ROLE>::add_dq(const float (&dq)[DQ_VALUES], int slab) const {
  const int64_t row = shared.notes[(n - 1) % NUM_NOTES].head_row + slab * problem.slab_rows;
  float* address = problem.dq + row * SLAB + thread_in_group() * 4;
#pragma unroll
  for (int i = 0; i < DQ_VALUES / 4; ++i) {
    reduce_add(address + i * WARPGROUP * 4, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
  }
}

// dQ of a piece's last step, which no later one does.
template <Role ROLE>
template <int STAGE>
DEVICE void Consumer<ROLE>::finish_last_dq() {
  wait_ds(STAGE);
#pragma unroll
  for (int slab = first_slab(STAGE); slab <= last_slab(STAGE); ++slab) {
    float dq[DQ_VALUES];
    issue_dq(shared, dq, slab, STAGE);
    mma_wait<0>();
    hold(dq);
    if (slab == last_slab(STAGE)) release(shared_address(&shared.ds_empty[STAGE]));
    add_dq(dq, slab);
  }
}
#endif

// Issues S^T = K Q^T.
template <Role ROLE>
template <int STAGE>
DEVICE void Consumer<ROLE>::begin_p(float (&p)[QUERY_STEP / 2]) {
  barrier_wait(shared_address(&shared.q_full[STAGE]), n / NUM_STAGES % 2);
  load_stats(p, shared.stats[STAGE], 0);
  const Note& note = shared.notes[n % NUM_NOTES];
  if (!note.is_full) mask_keys(p, shared, problem.key_shift, 0, note.first_row, STAGE);
  hold(p);
  mma_fence();
  issue_logits<HEAD_DIM>(p, shared.k, shared.q[STAGE]);
}

// Issues dP^T = V dO^T.
template <Role ROLE>
template <int STAGE>
DEVICE void Consumer<ROLE>::begin_ds(float (&ds)[QUERY_STEP / 2]) {
  constexpr int DOUT_STAGE = STAGE % DOUT_STAGES;
  barrier_wait(shared_address(&shared.q_full[STAGE]), n / NUM_STAGES % 2);
  load_stats(ds, shared.stats[STAGE], 1);
  barrier_wait(shared_address(&shared.dout_full[DOUT_STAGE]), n / DOUT_STAGES % 2);
  hold(ds);
  mma_fence();
  issue_logits<VALUE_DIM>(ds, shared.v, shared.dout[DOUT_STAGE]);
}

// P = exp(scale S), for this consumer and the other.
template <Role ROLE>
DEVICE void Consumer<ROLE>::send_p(float (&p)[QUERY_STEP / 2]) {
#pragma unroll
  for (int i = 0; i < QUERY_STEP / 2; ++i) p[i] = exp2_approximate(p[i] * problem.scale_log2);
  barrier_wait(shared_address(&shared.p_empty), (n + 1) % 2);
  const uint32_t base = shared_address(shared.p) + thread_in_group() * 16;
#pragma unroll
  for (int i = 0; i < QUERY_STEP / 8; ++i) {
    store_shared(base + i * WARPGROUP * 16, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]);
  }
  barrier_arrive(shared_address(&shared.p_full));
}

// dS = P dP.
template <Role ROLE>
DEVICE void Consumer<ROLE>::receive_p(float (&ds)[QUERY_STEP / 2]) {
  barrier_wait(shared_address(&shared.p_full), n % 2);
  const float4* p = reinterpret_cast<const float4*>(shared.p) + thread_in_group();
#pragma unroll
  for (int i = 0; i < QUERY_STEP / 8; ++i) {
    const float4 value = p[i * WARPGROUP];
    ds[4 * i] *= value.x;
    ds[4 * i + 1] *= value.y;
    ds[4 * i + 2] *= value.z;
    ds[4 * i + 3] *= value.w;
  }
  release(shared_address(&shared.p_empty));
}

// One query tile of one head, and dQ of the step before unless this is the first of a piece: half
// of it behind the logits, the other half behind the product that adds to dV or dK.
template <Role ROLE>
template <int STAGE, bool IS_FIRST>
DEVICE void Consumer<ROLE>::step() {
  constexpr int DOUT_STAGE = STAGE % DOUT_STAGES;
  float logits[QUERY_STEP / 2];
  uint32_t operand[QUERY_STEP / 4];
  if (ROLE == MAKES_DV) {
    begin_p<STAGE>(logits);
  } else {
    begin_ds<STAGE>(logits);
  }
#if WITH_DQ
  constexpr int FIRST = first_slab(STAGE ^ 1), LAST = last_slab(STAGE ^ 1);
  float dq[DQ_VALUES];
  if (!IS_FIRST) {
    wait_ds(STAGE ^ 1);
    issue_dq(shared, dq, FIRST, STAGE ^ 1);
    mma_wait<1>();
  } else {
    mma_wait<0>();
  }
#else
  mma_wait<0>();
#endif
  hold(logits);
  if (ROLE == MAKES_DV) {
    release(shared_address(&shared.q_empty[STAGE]));
    send_p(logits);
    pack_all(logits, operand);
    barrier_wait(shared_address(&shared.dout_full[DOUT_STAGE]), n / DOUT_STAGES % 2);
  } else {
    release(shared_address(&shared.dout_empty[DOUT_STAGE]));
    receive_p(logits);
    pack_all(logits, operand);
#if WITH_DQ
    store_ds(shared, operand, 0, n, STAGE);
#endif
  }
  // d += operand B over the queries of the step: dV of dO, or dK of Q.
  uint8_t* queries = ROLE == MAKES_DV ? shared.dout[DOUT_STAGE] : shared.q[STAGE];
  const uint32_t b = descriptor(shared_address(queries), STEP_HALF_BYTES);
  hold(operand);
  hold(sum);
  mma_fence();
#pragma unroll
  for (int i = 0; i < QUERY_STEP / 16; ++i) {
    mma<DIM, MN_MAJOR>(sum, operand + 4 * i, advance(b, i * 16 * ROW_BYTES), 1);
  }
  mma_commit();
#if WITH_DQ
  if (!IS_FIRST) {
    mma_wait<1>();
    hold(dq);
    add_dq(dq, FIRST);
    if (FIRST < LAST) {
      issue_dq(shared, dq, LAST, STAGE ^ 1);
      mma_wait<1>();
    } else {
      mma_wait<0>();
    }
  } else {
    mma_wait<0>();
  }
#else
  mma_wait<0>();
#endif
  hold(operand);
  hold(sum);
  release(shared_address(ROLE == MAKES_DV ? &shared.dout_empty[DOUT_STAGE]
                                          : &shared.q_empty[STAGE]));
#if WITH_DQ
  if (!IS_FIRST) {
    mma_wait<0>();
    release(shared_address(&shared.ds_empty[STAGE ^ 1]));
    if (FIRST < LAST) {
      hold(dq);
      add_dq(dq, LAST);
    }
  }
#endif
  ++n;
}

// All steps of a piece. Two stages in turn, each with its own code: the addresses are constants.
template <Role ROLE>
DEVICE void Consumer<ROLE>::sweep() {
#pragma unroll
  for (int i = 0; i < DIM / 2; ++i) sum[i] = 0.0f;
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
