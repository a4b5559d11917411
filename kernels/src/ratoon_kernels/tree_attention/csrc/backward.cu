// Tree attention, backward: dK and dV of a key tile, and dQ of the queries that it sweeps.
//
// Enters: q, k, v, dout by tensor maps, log-sum-exps and deltas (backward_prepare.cu), the work
// table (schedule.py). Leaves: dK and dV (16 bits; added to fp32 buffers where PARTIAL; a slot of
// fp32 where a key tile is cut into pieces), and dQ added in fp32 to `dq`, in the order of
// accumulator fragments (backward_finish.cu brings it into rows). WITH_DQ = 0 leaves dQ out: what
// remains has one order of summation. Invariant: every key row below num_keys of a piece is written
// once.
//
// Key-stationary. One warpgroup loads and adds dQ, two multiply: each owns 64 of the 128 keys and
// holds their dK and dV. S^T = K Q^T and dP^T = V dO^T leave P^T and dS^T in registers as the A
// operand of dV += P^T dO and dK += dS^T Q; dS goes once through shared memory for
// dQ^T = K^T dS^T. That product is one step late, so that the consumers need not meet in each step.
// S^T begins with -lse / scale (-inf where masked) and dP^T with -delta, which costs no register
// and no instruction after the products: P = exp(scale S), dS = P dP. A piece sweeps its queries
// once for each query head of the kv head: dK and dV need no reduction.

#include "backward_load.cuh"
#include "backward_store.cuh"

// Sweeps pieces until there are none, and stores what each leaves.
template <typename Sweeper, typename Store>
DEVICE void consume(Shared& shared, Sweeper& consumer, Store store) {
  for (;; consumer.n ^= PIECE_PARITY) {
    barrier_wait(shared_address(&shared.k_full), consumer.n / PIECE_PARITY);
    if (__any_sync(0xffffffffu, shared.kv_head == NO_MORE)) break;
    barrier_wait(shared_address(&shared.v_full), consumer.n / PIECE_PARITY);
    consumer.sweep();
    const Target target(shared);
    release(shared_address(&shared.kv_empty));
    store(target);
  }
}

#if IS_WIDE
DEVICE void consume(Shared& shared, const Problem& problem, uint32_t group) {
  if (group == 0) {
    Consumer<MAKES_DV> consumer{shared, problem};
    consume(shared, consumer, [&](const Target& target) {
      store_dv(consumer.sum, shared.problem, target, row_of_keys(0));
    });
  } else {
    Consumer<MAKES_DK> consumer{shared, problem};
    consume(shared, consumer, [&](const Target& target) {
      store_dk(consumer.sum, shared.problem, target, row_of_keys(0));
    });
  }
}
#else
DEVICE void consume(Shared& shared, const Problem& problem, uint32_t group) {
  Consumer consumer{shared, problem, group};
  consume(shared, consumer, [&](const Target& target) {
    store_dk(consumer.dk, shared.problem, target, row_of_keys(group));
    store_dv(consumer.dv, shared.problem, target, row_of_keys(group));
  });
#if WITH_DQ
  barrier_wait(shared_address(&shared.dq_empty[group]), (consumer.n + 1) % 2);
  if (thread_in_group() == 0) shared.num_steps[group] = consumer.n % PIECE_PARITY;
  barrier_arrive(shared_address(&shared.dq_full[group]));
#endif
}
#endif

DEVICE void initialise(Shared& shared) {
  barrier_init(shared_address(&shared.k_full), 1);
  barrier_init(shared_address(&shared.v_full), 1);
  barrier_init(shared_address(&shared.kv_empty), CONSUMER_ARRIVALS);
  for (int s = 0; s < NUM_STAGES; ++s) {
    barrier_init(shared_address(&shared.q_full[s]), 1);
    barrier_init(shared_address(&shared.q_empty[s]), CONSUMER_ARRIVALS);
  }
  for (int s = 0; s < DOUT_STAGES; ++s) {
    barrier_init(shared_address(&shared.dout_full[s]), 1);
    barrier_init(shared_address(&shared.dout_empty[s]), CONSUMER_ARRIVALS);
  }
  for (int s = 0; s < 2; ++s) {
    barrier_init(shared_address(&shared.ds_full[s]), KEYS / CONSUMER_ROWS * WARPGROUP);
    barrier_init(shared_address(&shared.ds_empty[s]), CONSUMER_ARRIVALS);
    barrier_init(shared_address(&shared.dq_full[s]), WARPGROUP);
    barrier_init(shared_address(&shared.dq_empty[s]), 1);
  }
  barrier_init(shared_address(&shared.p_full), WARPGROUP);
  barrier_init(shared_address(&shared.p_empty), CONSUMER_ARRIVALS / NUM_CONSUMERS);
  fence_barrier_init();
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    tree_attention_backward(const __grid_constant__ TensorMap q_map,
                            const __grid_constant__ TensorMap k_map,
                            const __grid_constant__ TensorMap v_map,
                            const __grid_constant__ TensorMap dout_map,
                            const __grid_constant__ Problem problem) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  if (threadIdx.x == 0) {
    shared.num_steps[0] = shared.num_steps[1] = uint32_t(NO_MORE);
    shared.problem = problem;
    initialise(shared);
  }
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) produce(shared, problem, &q_map, &k_map, &v_map, &dout_map);
#if WITH_DQ && !IS_WIDE
    if (threadIdx.x == 32) add_dq(shared, problem, 0);
    if (threadIdx.x == 64) add_dq(shared, problem, 1);
#endif
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(shared, problem, __shfl_sync(0xffffffffu, threadIdx.x / WARPGROUP, 0) - 1);
  }
}
