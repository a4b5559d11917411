// Tree attention, backward: dQ alone, with one order of summation (the deterministic mode).
//
// Enters: q, k, v, dout by tensor maps, `stats` (backward_prepare.cu), the forward's work list.
// Leaves: dQ (16 bits by tensor map, or fp32 where PARTIAL). Invariant: every row of dQ below
// num_queries is written once, by one warpgroup, whose keys come in ascending order.
//
// Shaped like the forward: two consumers with 64 query rows each. S = Q K^T and dP = dO V^T begin
// with -lse / scale and -delta of the rows; dS = P dP stays in registers as the A operand of dQ +=
// dS K.

#include "query_tile.cuh"

// A step takes KEYS keys (cuda_specs.py): a tile, or half of one.
constexpr int STEPS_PER_TILE = TILE / KEYS;
constexpr int K_STAGES = 2;
constexpr int V_STAGES = HEAD_DIM > 192 ? 1 : 2;
constexpr uint32_t Q_BYTES = tile_bytes(TILE, HEAD_DIM);
constexpr uint32_t DOUT_BYTES = tile_bytes(TILE, VALUE_DIM);
constexpr uint32_t K_BYTES = tile_bytes(KEYS, HEAD_DIM);
constexpr uint32_t V_BYTES = tile_bytes(KEYS, VALUE_DIM);
// Registers of a thread of each role: together no more than the 3 x 168 that a block is launched
// with, or the consumers wait for ever.
constexpr int PRODUCER_REGISTERS = 40;
constexpr int CONSUMER_REGISTERS = 232;
static_assert(PRODUCER_REGISTERS + NUM_CONSUMERS * CONSUMER_REGISTERS <= 3 * 168);
constexpr int NO_MORE = -1;

struct Shared {
  alignas(1024) uint8_t q[Q_BYTES];
  alignas(1024) uint8_t dout[DOUT_BYTES];
  alignas(1024) uint8_t k[K_STAGES][K_BYTES];
  alignas(1024) uint8_t v[V_STAGES][V_BYTES];
  alignas(16) int end[K_STAGES][KEYS];
  int k_mask[K_STAGES];  // local index of the first key of a partial step, or NO_MASK
  alignas(16) ForwardItem item;
  int head, kv_head;  // of the item; head may be NO_MORE
  alignas(8) uint64_t q_full, q_empty;
  alignas(8) uint64_t k_full[K_STAGES], k_empty[K_STAGES];
  alignas(8) uint64_t v_full[V_STAGES], v_empty[V_STAGES];
};

static_assert(sizeof(Shared) <= SHARED_BYTES);

struct Problem {
  const ForwardItem* items;
  const int2* runs;
  const int* end;
  const int* start;  // WINDOW only
  int* counter;
  const float* stats;  // [num_heads, num_rows / 8, 2, 8]
  float* dq;           // [num_queries, num_heads, HEAD_DIM], PARTIAL only
  int num_items, num_heads, heads_per_kv_head, num_queries, num_rows, key_shift;
  float scale, scale_log2;
};

// --- the producer -------------------------------------------------------------------------------

DEVICE void produce(Shared& shared, const Problem& problem, const TensorMap* q_map,
                    const TensorMap* k_map, const TensorMap* v_map, const TensorMap* dout_map) {
  Ring<K_STAGES> k_ring;
  Ring<V_STAGES> v_ring;
  const uint32_t q_full = shared_address(&shared.q_full);
  int index = blockIdx.x;
  for (uint32_t parity = 1;; parity ^= 1) {
    barrier_wait(shared_address(&shared.q_empty), parity);
    if (index >= problem.num_items) break;
    const ForwardItem& item = shared.item;
    const WorkIndex work(index, problem.num_items / problem.num_heads, problem.heads_per_kv_head);
    shared.item = problem.items[work.item];
    const int head = work.head;
    shared.head = head;
    shared.kv_head = head / problem.heads_per_kv_head;
    index = atomicAdd(problem.counter, 1) + gridDim.x;
    barrier_arrive_expect(q_full, Q_BYTES + DOUT_BYTES);
    tma_load(shared_address(shared.q), q_map, q_full, 0, item.query_tile * TILE, 0, head);
    tma_load(shared_address(shared.dout), dout_map, q_full, 0, item.query_tile * TILE, 0, head);
    for_each_key_tile(problem.runs, item, [&](int tile, bool is_full) {
#pragma unroll 1
      for (int key = tile * TILE; key < (tile + 1) * TILE; key += KEYS) {
        const int s = k_ring.stage;
        barrier_wait(shared_address(&shared.k_empty[s]), k_ring.parity ^ 1);
        const uint32_t k_full = shared_address(&shared.k_full[s]);
        shared.k_mask[s] = is_full ? NO_MASK : key;
        barrier_arrive_expect(k_full, K_BYTES + KEYS * sizeof(int));
        tma_load(shared_address(shared.k[s]), k_map, k_full, 0, key, 0, shared.kv_head);
        bulk_load(shared_address(shared.end[s]), problem.end + key, KEYS * sizeof(int), k_full);
        k_ring.next();
        const int v = v_ring.stage;
        barrier_wait(shared_address(&shared.v_empty[v]), v_ring.parity ^ 1);
        const uint32_t v_full = shared_address(&shared.v_full[v]);
        barrier_arrive_expect(v_full, V_BYTES);
        tma_load(shared_address(shared.v[v]), v_map, v_full, 0, key, 0, shared.kv_head);
        v_ring.next();
      }
    });
  }
  shared.head = NO_MORE;
  barrier_arrive(q_full);
}

// --- a consumer ---------------------------------------------------------------------------------

struct Consumer {
  Shared& shared;
  const Problem& problem;
  int group;  // 0 or 1: query rows [64 group, + 64) of the tile
  Ring<K_STAGES> k_ring;
  Ring<V_STAGES> v_ring;
  float dq[HEAD_DIM / 2];
  float minus_lse[2], minus_delta[2];  // of this thread's two rows

  DEVICE void load_stats(int first_row, int head) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + 8 * h;
      minus_lse[h] = NEGATIVE_INFINITY;
      minus_delta[h] = 0.0f;
      if (row < problem.num_queries) {
        const int64_t index = int64_t(head) * problem.num_rows + row;
        const float* stats = problem.stats + index / 8 * 16 + index % 8;
        minus_lse[h] = stats[0];
        minus_delta[h] = stats[8];
      }
    }
  }

  // d += A B^T over DIM dimensions: A the own rows of a query tile, B the keys of a step.
  template <int DIM>
  DEVICE void issue_logits(float (&d)[KEYS / 2], uint8_t* queries, uint8_t* keys) {
    const uint32_t a = descriptor(shared_address(queries) + group * CONSUMER_ROWS * ROW_BYTES, 0);
    const uint32_t b = descriptor(shared_address(keys), 0);
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
      const int in_slab = (step % 4) * 32;
      mma<KEYS, K_MAJOR, K_MAJOR>(d, advance(a, (step / 4) * TILE * ROW_BYTES + in_slab),
                                      advance(b, (step / 4) * KEYS * ROW_BYTES + in_slab), 1);
    }
    mma_commit();
  }

  DEVICE void add_keys(int row);
};

DEVICE void begin(float (&d)[KEYS / 2], const float (&value)[2]) {
#pragma unroll
  for (int i = 0; i < KEYS / 2; ++i) d[i] = value[i / 2 % 2];
}

DEVICE void Consumer::add_keys(int row) {
  float p[KEYS / 2], ds[KEYS / 2];
  uint32_t operand[KEYS / 4];
  const int s = k_ring.stage;
  begin(p, minus_lse);
  begin(ds, minus_delta);
  barrier_wait(shared_address(&shared.k_full[s]), k_ring.parity);
  const int first_key = shared.k_mask[s];
  if (first_key != NO_MASK) {
    mask_logits(p, shared.end[s], first_key - problem.key_shift, row);
#if WINDOW
    mask_before(p, problem.start, row, first_key);
#endif
  }
  hold(p);
  hold(ds);
  mma_fence();
  issue_logits<HEAD_DIM>(p, shared.q, shared.k[s]);
  barrier_wait(shared_address(&shared.v_full[v_ring.stage]), v_ring.parity);
  mma_fence();
  issue_logits<VALUE_DIM>(ds, shared.dout, shared.v[v_ring.stage]);
  mma_wait<1>();
  hold(p);
#pragma unroll
  for (int i = 0; i < KEYS / 2; ++i) p[i] = exp2_approximate(p[i] * problem.scale_log2);
  mma_wait<0>();
  hold(ds);
  release(shared_address(&shared.v_empty[v_ring.stage]));
  v_ring.next();
#pragma unroll
  for (int i = 0; i < KEYS / 4; ++i) {
    operand[i] = pack(ds[2 * i] * p[2 * i], ds[2 * i + 1] * p[2 * i + 1]);
  }
  hold(operand);
  hold(dq);
  mma_fence();
  const uint32_t k = descriptor(shared_address(shared.k[s]), KEYS * ROW_BYTES);
#pragma unroll
  for (int step = 0; step < KEYS / 16; ++step) {
    mma<HEAD_DIM, MN_MAJOR>(dq, operand + 4 * step, advance(k, step * 16 * ROW_BYTES), 1);
  }
  mma_commit();
  mma_wait<0>();
  hold(operand);
  hold(dq);
  release(shared_address(&shared.k_empty[s]));
  k_ring.next();
}

DEVICE void consume(Shared& shared, const Problem& problem, const TensorMap* dq_map, int group) {
  Consumer consumer{shared, problem, group};
  const int row = row_in_tile(group);
  for (uint32_t parity = 0;; parity ^= 1) {
    barrier_wait(shared_address(&shared.q_full), parity);
    const int head = shared.head;
    if (head == NO_MORE) break;
    const int query_tile = shared.item.query_tile;
    const int num_steps = shared.item.num_key_tiles * STEPS_PER_TILE;
    const int first_row = query_tile * TILE;
    consumer.load_stats(first_row + row, head);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) consumer.dq[i] = 0.0f;
#pragma unroll 1
    for (int step = 0; step < num_steps; ++step) consumer.add_keys(first_row + row);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) consumer.dq[i] *= problem.scale;
#if PARTIAL
    store_fp32(consumer.dq, problem.dq + int64_t(head) * HEAD_DIM,
               int64_t(problem.num_heads) * HEAD_DIM, first_row + row, problem.num_queries);
#else
    store_tile(consumer.dq, shared.q, dq_map, group, first_row, head);
    if (threadIdx.x % WARPGROUP == 0) bulk_wait_read();
#endif
    named_barrier_sync(3 + group, WARPGROUP);
    release(shared_address(&shared.q_empty));
  }
  bulk_wait();
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) tree_attention_backward_queries(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map,
    const __grid_constant__ TensorMap dq_map, const __grid_constant__ Problem problem) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&shared.q_full), 1);
    barrier_init(shared_address(&shared.q_empty), CONSUMER_ARRIVALS);
    for (int s = 0; s < K_STAGES; ++s) {
      barrier_init(shared_address(&shared.k_full[s]), 1);
      barrier_init(shared_address(&shared.k_empty[s]), CONSUMER_ARRIVALS);
    }
    for (int s = 0; s < V_STAGES; ++s) {
      barrier_init(shared_address(&shared.v_full[s]), 1);
      barrier_init(shared_address(&shared.v_empty[s]), CONSUMER_ARRIVALS);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) produce(shared, problem, &q_map, &k_map, &v_map, &dout_map);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(shared, problem, &dq_map, __shfl_sync(0xffffffffu, threadIdx.x / WARPGROUP, 0) - 1);
  }
}
