// Tree attention, forward: out = softmax(scale q k^T) v over the keys on each query's own path.
//
// Enters: q, k, v by tensor maps, the work table of the forest (schedule.py). Leaves: out (16 bits
// by tensor map, or fp32 where PARTIAL) and the natural log-sum-exp. Invariant: every row of `out`
// and `lse` below num_queries is written, once, whatever it attends.
//
// One warpgroup loads (a thread of it drives the copy engine), two multiply: each owns 64 of the
// 128 query rows. The CTAs are persistent and take query tiles longest first from a counter. A
// consumer issues Q K^T of the next key tile before P V of the current one, so that the tensor
// cores work while it exponentiates, and the two consumers take turns in issuing (FlashAttention-3,
// sections 3.1 and 3.2). Full tiles run no mask code; the `end` of a partial tile's keys comes with
// its K.

#include "query_tile.cuh"

constexpr int NUM_STAGES = 2;
// Registers of a thread of each role: together no more than the 3 x 168 that a block is launched
// with, or the consumers wait for ever.
constexpr int PRODUCER_REGISTERS = 40;
constexpr int CONSUMER_REGISTERS = 232;
static_assert(PRODUCER_REGISTERS + NUM_CONSUMERS * CONSUMER_REGISTERS <= 3 * 168);
// The running maximum moves only when it is exceeded by this much (log2): P then stays below 2^8,
// and most tiles need no rescaling of the output.
constexpr float MAX_SLACK = 8.0f;

struct Shared {
  alignas(1024) uint8_t q[2][TILE_BYTES];
  alignas(1024) uint8_t k[NUM_STAGES][TILE_BYTES];
  alignas(1024) uint8_t v[NUM_STAGES][TILE_BYTES];
  alignas(16) int end[NUM_STAGES][TILE];
  int k_mask[NUM_STAGES];  // local index of the first key of a partial tile, or NO_MASK
  int item[2][4];          // query tile (-1: no more work), head, number of key tiles
  alignas(8) uint64_t q_full[2], q_empty[2];
  alignas(8) uint64_t k_full[NUM_STAGES], k_empty[NUM_STAGES];
  alignas(8) uint64_t v_full[NUM_STAGES], v_empty[NUM_STAGES];
};

static_assert(sizeof(Shared) <= SHARED_BYTES);

struct Problem {
  const ForwardItem* items;
  const int2* runs;
  const int* end;
  int* counter;
  float* out;  // [num_queries, num_heads, HEAD_DIM], PARTIAL only
  float* lse;  // [num_heads, num_queries]
  int num_items, num_heads, heads_per_kv_head, num_queries, key_shift;
  float scale_log2;  // scale / ln 2
};

// --- the producer -------------------------------------------------------------------------------

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

// --- a consumer ---------------------------------------------------------------------------------

// Rows l / 4 and l / 4 + 8 of the warp's 16: running maximum (raw logits) and sum.
struct Softmax {
  float max[2], sum[2];
};

// Exponentiates the logits in place and updates maximum and sum; returns in `factor` what earlier
// results are to be multiplied with, and whether that is 1 for all rows of the warp.
DEVICE bool exponentiate(float (&s)[TILE / 2], Softmax& rows, float (&factor)[2], float scale_log2,
                         float slack) {
  float max[2] = {s[0], s[2]};
#pragma unroll
  for (int i = 0; i < TILE / 8; ++i) {
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
    for (int i = 0; i < TILE / 8; ++i) {
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

DEVICE void pack_all(const float (&s)[TILE / 2], uint32_t (&p)[TILE / 4]) {
#pragma unroll
  for (int i = 0; i < TILE / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

DEVICE void rescale(float (&o)[HEAD_DIM / 2], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 8; ++i) {
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
  Ring<2> q_ring;
  Ring<NUM_STAGES> k_ring, v_ring;
  float o[HEAD_DIM / 2], s[TILE / 2];
  uint32_t p[TILE / 4];
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
      const uint32_t offset = (step / 4) * TILE * ROW_BYTES + (step % 4) * 32;
      mma<TILE, K_MAJOR, K_MAJOR>(s, advance(q, offset), advance(k, offset), step > 0);
    }
    mma_commit();
  }

  // O += P V of the V buffer at hand.
  DEVICE void issue_pv(int accumulate) {
    const uint32_t v = descriptor(shared_address(shared.v[v_ring.stage]), TILE * ROW_BYTES);
#pragma unroll
    for (int step = 0; step < TILE / 16; ++step) {
      mma<HEAD_DIM, MN_MAJOR>(o, p + 4 * step, advance(v, step * 16 * ROW_BYTES),
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
    }
    release(shared_address(&shared.k_empty[k_ring.stage]));
    k_ring.next();
    return exponentiate(s, rows, factor, problem.scale_log2, slack);
  }

  DEVICE void finish_pv() {
    release(shared_address(&shared.v_empty[v_ring.stage]));
    v_ring.next();
  }

  DEVICE void attend(int num_key_tiles, int tile_row, bool& has_pending_store);
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

DEVICE void Consumer::attend(int num_key_tiles, int tile_row, bool& has_pending_store) {
  wait_k();
  mma_fence();
  issue_qk();
  mma_wait<0>();
  hold(s);
  finish_qk(tile_row);
  pack_all(s, p);
  release_stored(shared, q_ring.stage ^ 1, has_pending_store);
#pragma unroll 1
  for (int tile = 1; tile < num_key_tiles; ++tile) {
    wait_k();
    wait_v();
    wait_for_turn(group);
    hold(s);
    hold(p);
    hold(o);
    mma_fence();
    issue_qk();
    issue_pv(tile > 1);
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
  issue_pv(num_key_tiles > 1);
  mma_wait<0>();
  hold(o);
  finish_pv();
}

// Normalises and writes the output and the log-sum-exp of one item.
DEVICE void Consumer::store(int query_tile, int head) {
  const int first_row = query_tile * TILE;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = quad_sum(rows.sum[h]);
    factor[h] = sum > 0.0f ? 1.0f / sum : 0.0f;
    const int q = first_row + row + 8 * h;
    if (threadIdx.x % 4 == 0 && q < problem.num_queries) {
      const float lse = (rows.max[h] * problem.scale_log2 + __log2f(sum)) * LN_2;
      problem.lse[int64_t(head) * problem.num_queries + q] = sum > 0.0f ? lse : NEGATIVE_INFINITY;
    }
  }
  rescale(o, factor);
#if PARTIAL
  store_fp32(o, problem.out + int64_t(head) * HEAD_DIM, int64_t(problem.num_heads) * HEAD_DIM,
             first_row + row, problem.num_queries);
#else
  // Each warpgroup's own rows of Q are read for the last time: they hold the output on its way out.
  store_tile(o, shared.q[q_ring.stage], out_map, group, first_row, head);
#endif
}

DEVICE void consume(Shared& shared, const Problem& problem, const TensorMap* out_map, int group) {
  const int thread = threadIdx.x % WARPGROUP;
  Consumer consumer{shared, problem, out_map, group,
                    group * CONSUMER_ROWS + thread / 32 * 16 + (thread % 32) / 4};
  consumer.slack = MAX_SLACK / problem.scale_log2;
  bool has_pending_store = false;
  if (group == 1) give_turn(group);
  while (true) {
    const int s = consumer.q_ring.stage;
    barrier_wait(shared_address(&shared.q_full[s]), consumer.q_ring.parity);
    const int query_tile = shared.item[s][0];
    if (query_tile < 0) break;
    const int head = shared.item[s][1];
    const int num_key_tiles = shared.item[s][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      consumer.rows.max[h] = NEGATIVE_INFINITY;
      consumer.rows.sum[h] = 0.0f;
    }
    if (num_key_tiles > 0) {
      consumer.attend(num_key_tiles, query_tile * TILE + consumer.row, has_pending_store);
    } else {
      release_stored(shared, s ^ 1, has_pending_store);
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; ++i) consumer.o[i] = 0.0f;
    }
    consumer.store(query_tile, head);
    // The Q buffer is free once the stores have read it, which nobody waits for here: of each
    // warpgroup the warps report that they are done with it, and the thread that stores later on.
    release(shared_address(&shared.q_empty[s]));
    has_pending_store = thread == 0;
    consumer.q_ring.next();
  }
  bulk_wait();
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    tree_attention_forward(const __grid_constant__ TensorMap q_map,
                           const __grid_constant__ TensorMap k_map,
                           const __grid_constant__ TensorMap v_map,
                           const __grid_constant__ TensorMap out_map, const ForwardItem* items,
                           const int2* runs, const int* end, int* counter, float* out, float* lse,
                           int num_items, int num_heads, int heads_per_kv_head, int num_queries,
                           int key_shift, float scale_log2) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const Problem problem{items,     runs,      end,       counter,           out,
                        lse,       num_items, num_heads, heads_per_kv_head, num_queries,
                        key_shift, scale_log2};
  if (threadIdx.x == 0) {
    for (int s = 0; s < 2; ++s) {
      barrier_init(shared_address(&shared.q_full[s]), 1);
      barrier_init(shared_address(&shared.q_empty[s]), CONSUMER_ARRIVALS + NUM_CONSUMERS);
    }
    for (int s = 0; s < NUM_STAGES; ++s) {
      barrier_init(shared_address(&shared.k_full[s]), 1);
      barrier_init(shared_address(&shared.k_empty[s]), CONSUMER_ARRIVALS);
      barrier_init(shared_address(&shared.v_full[s]), 1);
      barrier_init(shared_address(&shared.v_empty[s]), CONSUMER_ARRIVALS);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) {
      tma_prefetch(&q_map);
      tma_prefetch(&k_map);
      tma_prefetch(&v_map);
      produce(shared, problem, &q_map, &k_map, &v_map);
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(shared, problem, &out_map, threadIdx.x / WARPGROUP - 1);
  }
}
