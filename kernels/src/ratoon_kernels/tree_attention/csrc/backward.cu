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

#include "tile.cuh"

constexpr int NUM_STAGES = 2;
// Registers of a thread of each role: together no more than the 3 x 168 that a block is launched
// with, or the consumers wait for ever.
constexpr int PRODUCER_REGISTERS = 24;
constexpr int CONSUMER_REGISTERS = 240;
static_assert(PRODUCER_REGISTERS + NUM_CONSUMERS * CONSUMER_REGISTERS <= 3 * 168);
constexpr int STEP_HALF_BYTES = QUERY_STEP * ROW_BYTES;  // of Q, dO and dS
#if WITH_DQ
// dQ^T of one step: with 128 dimensions each consumer has 64 of them for all queries, with 64
// dimensions half of the queries.
constexpr int DQ_COLUMNS = HEAD_DIM == 128 ? QUERY_STEP : QUERY_STEP / 2;
constexpr int DQ_VALUES = DQ_COLUMNS / 2;  // accumulators of a thread
constexpr int DQ_BYTES = DQ_VALUES * WARPGROUP * sizeof(float);
constexpr int DQ_TILE_VALUES = QUERY_STEP * HEAD_DIM;
#endif
// Of each query of a step: -lse / scale and -delta, with which the accumulators of S^T and dP^T
// begin.
constexpr int STATS_VALUES = 2 * QUERY_STEP;
constexpr int STATS_BYTES = STATS_VALUES * sizeof(float);
constexpr int NO_MORE = -1;
// The steps of a CTA are counted through all of its pieces; step n uses stage n % 2 of every ring.
// What the consumers and the adding warps read of a step stays longer than its tiles.
constexpr int NUM_NOTES = 8;

// What there is to know of a step.
struct Note {
  int stats_tile;  // head * num_query_tiles + query tile: index into `stats` and `dq`
  int first_row;   // of the query tile
  int is_full;     // every query attends every key
  int is_last;     // of its piece
};

struct Problem {
  const BackwardPiece* pieces;
  const int* end;
  int* counter;
  const float* stats;  // [num_heads, num_query_tiles, STATS_VALUES]
  float* dq;           // [num_heads, num_query_tiles, DQ_TILE_VALUES] in fragment order
  float* slots;        // [num_kv_heads, num_slots, 2, TILE, HEAD_DIM]
  void *dk, *dv;       // rows of a head; 16 bits, or fp32 where PARTIAL
  int64_t dk_row, dk_head, dv_row, dv_head;  // strides in elements
  int num_pieces, num_slots, num_kv_heads, heads_per_kv_head, num_query_tiles, num_keys, key_shift;
  float scale, scale_log2;
};

struct Shared {
  alignas(1024) uint8_t k[TILE_BYTES];
  alignas(1024) uint8_t v[TILE_BYTES];
  alignas(1024) uint8_t q[NUM_STAGES][STEP_BYTES];
  alignas(1024) uint8_t dout[NUM_STAGES][STEP_BYTES];
#if WITH_DQ
  alignas(1024) uint8_t ds[2][2 * STEP_HALF_BYTES];  // [query][key]: halves of 64 keys
  alignas(128) uint8_t dq[NUM_CONSUMERS][DQ_BYTES];
#endif
  alignas(128) float stats[NUM_STAGES][2][QUERY_STEP];
  alignas(16) int end[TILE];
  // Where the results go. Read from here, because what comes from the kernel's parameters is
  // computed before the sweep and then takes registers through it.
  Problem problem;
  alignas(16) Note notes[NUM_NOTES];
  alignas(16) BackwardPiece piece;
  int kv_head;         // of the piece, or NO_MORE
  uint32_t num_steps;  // of the whole CTA, once it is known
  alignas(8) uint64_t k_full, v_full, kv_empty;
  alignas(8) uint64_t q_full[NUM_STAGES], q_empty[NUM_STAGES];
  alignas(8) uint64_t dout_full[NUM_STAGES], dout_empty[NUM_STAGES];
  alignas(8) uint64_t ds_full[2], ds_empty[2];
  alignas(8) uint64_t dq_full[NUM_CONSUMERS], dq_empty[NUM_CONSUMERS];
};

static_assert(sizeof(Shared) <= SHARED_BYTES);

// --- the producer -------------------------------------------------------------------------------

DEVICE void load_step(Shared& shared, const Problem& problem, const TensorMap* q_map,
                      const TensorMap* dout_map, uint32_t n, int head, int query_tile,
                      int stats_tile) {
  const uint32_t s = n % NUM_STAGES;
  const uint32_t parity = (n / NUM_STAGES + 1) % 2;
  const uint32_t q_full = shared_address(&shared.q_full[s]);
  barrier_arrive_expect(q_full, STEP_BYTES + STATS_BYTES);
  tma_load(shared_address(shared.q[s]), q_map, q_full, 0, query_tile * QUERY_STEP, 0, head);
  bulk_load(shared_address(shared.stats[s]), problem.stats + int64_t(stats_tile) * STATS_VALUES,
            STATS_BYTES, q_full);
  const uint32_t dout_full = shared_address(&shared.dout_full[s]);
  barrier_wait(shared_address(&shared.dout_empty[s]), parity);
  barrier_arrive_expect(dout_full, STEP_BYTES);
  tma_load(shared_address(shared.dout[s]), dout_map, dout_full, 0, query_tile * QUERY_STEP, 0,
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
  const int num_items = problem.num_pieces * problem.num_kv_heads;
  uint32_t n = 0;
  uint32_t parity = 1;
  for (int index = blockIdx.x; index < num_items; parity ^= 1) {
    // All pieces of a kv head before the next one's, in the order of their queries: the blocks at
    // work add to the same rows of dQ while these are in the L2 cache.
    const int kv_head = index / problem.num_pieces;
    int piece = index % problem.num_pieces;
#if WITH_DQ
    // The last kv head's come longest first, so that all blocks finish together.
    if (kv_head + 1 == problem.num_kv_heads) piece = problem.pieces[piece].longest;
#endif
    barrier_wait(shared_address(&shared.kv_empty), parity);
    shared.piece = problem.pieces[piece];
    shared.kv_head = kv_head;
    const int key_row = shared.piece.key_tile * TILE;
    barrier_arrive_expect(k_full, TILE_BYTES + TILE * sizeof(int));
    tma_load(shared_address(shared.k), k_map, k_full, 0, key_row, 0, kv_head);
    bulk_load(shared_address(shared.end), problem.end + key_row, TILE * sizeof(int), k_full);
    barrier_arrive_expect(v_full, TILE_BYTES);
    tma_load(shared_address(shared.v), v_map, v_full, 0, key_row, 0, kv_head);
    index = atomicAdd(problem.counter, 1) + gridDim.x;
    n = load_steps(shared, problem, q_map, dout_map, kv_head * problem.heads_per_kv_head, n);
  }
  barrier_wait(shared_address(&shared.kv_empty), parity);
  shared.kv_head = NO_MORE;
  barrier_arrive(k_full);
}

#if WITH_DQ
// Adds what one consumer left in shared memory to dQ, step after step.
DEVICE void add_dq(Shared& shared, const Problem& problem, uint32_t group) {
  for (uint32_t n = 0;; ++n) {
    barrier_wait(shared_address(&shared.dq_full[group]), n % 2);
    if (n == shared.num_steps) break;
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

// The thread's index in its warpgroup, read anew: addresses that depend on it are then computed
// where they are needed, and take no register through the sweep.
DEVICE uint32_t thread_in_group() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread % WARPGROUP;
}

// --- a consumer ---------------------------------------------------------------------------------

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

// --- results ------------------------------------------------------------------------------------

// Writes two adjacent elements of dK or dV; adds them where the gradient is accumulated.
DEVICE void store_pair(uint8_t* address, float a, float b) {
#if PARTIAL
  float2* sum = reinterpret_cast<float2*>(address);
  *sum = float2{sum->x + a, sum->y + b};
#else
  *reinterpret_cast<uint32_t*>(address) = pack(a, b);
#endif
}

constexpr int OUTPUT_BYTES = PARTIAL ? 4 : 2;  // of an element of dK and dV

// A thread's fragment of a [TILE][HEAD_DIM] gradient, into the rows of its kv head.
DEVICE void store_rows(const float (&values)[HEAD_DIM / 2], uint8_t* rows, int64_t row_bytes,
                       int num_rows, int row, float factor) {
  uint8_t* address = rows + row * row_bytes + thread_in_group() % 4 * 2 * OUTPUT_BYTES;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (row + 8 * h < num_rows) {
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 8; ++i) {
        store_pair(address + 8 * i * OUTPUT_BYTES, values[4 * i + 2 * h] * factor,
                   values[4 * i + 2 * h + 1] * factor);
      }
    }
    address += 8 * row_bytes;
  }
}

// The same into the slot of a key tile that is cut into pieces. With dQ all pieces of the tile
// share one and add to it; without, each has its own.
DEVICE void store_slot(const float (&values)[HEAD_DIM / 2], float* slot, int row, float factor) {
  float* address = slot + row * HEAD_DIM + thread_in_group() % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; ++i) {
      const float a = values[4 * i + 2 * h] * factor, b = values[4 * i + 2 * h + 1] * factor;
      float* pair = address + 8 * h * HEAD_DIM + 8 * i;
#if WITH_DQ
      reduce_add(pair, a, b);
#else
      *reinterpret_cast<float2*>(pair) = float2{a, b};
#endif
    }
  }
}

DEVICE void store_piece(const Consumer& consumer, int key_tile, int piece_slot, int kv_head) {
  const Problem& problem = consumer.shared.problem;
  const uint32_t thread = thread_in_group();
  const int row = consumer.group * CONSUMER_ROWS + thread / 32 * 16 + (thread % 32) / 4;
  if (piece_slot >= 0) {
    float* slot =
        problem.slots + (int64_t(kv_head) * problem.num_slots + piece_slot) * (2 * TILE * HEAD_DIM);
    store_slot(consumer.dk, slot, row, problem.scale);
    store_slot(consumer.dv, slot + TILE * HEAD_DIM, row, 1.0f);
  } else {
    const int64_t first_row = key_tile * TILE;
    const int num_rows = problem.num_keys - key_tile * TILE;
    uint8_t* dk = static_cast<uint8_t*>(problem.dk) +
                  (kv_head * problem.dk_head + first_row * problem.dk_row) * OUTPUT_BYTES;
    store_rows(consumer.dk, dk, problem.dk_row * OUTPUT_BYTES, num_rows, row, problem.scale);
    uint8_t* dv = static_cast<uint8_t*>(problem.dv) +
                  (kv_head * problem.dv_head + first_row * problem.dv_row) * OUTPUT_BYTES;
    store_rows(consumer.dv, dv, problem.dv_row * OUTPUT_BYTES, num_rows, row, 1.0f);
  }
}

DEVICE void consume(Shared& shared, const Problem& problem, uint32_t group) {
  Consumer consumer{shared, problem, group};
  for (uint32_t parity = 0;; parity ^= 1) {
    barrier_wait(shared_address(&shared.k_full), parity);
    if (__any_sync(0xffffffffu, shared.kv_head == NO_MORE)) break;
    barrier_wait(shared_address(&shared.v_full), parity);
    consumer.sweep();
    const int key_tile = shared.piece.key_tile, slot = shared.piece.slot, kv_head = shared.kv_head;
    release(shared_address(&shared.kv_empty));
    store_piece(consumer, key_tile, slot, kv_head);
  }
#if WITH_DQ
  barrier_wait(shared_address(&shared.dq_empty[group]), (consumer.n + 1) % 2);
  shared.num_steps = consumer.n;
  barrier_arrive(shared_address(&shared.dq_full[group]));
#endif
}

DEVICE void initialise(Shared& shared) {
  barrier_init(shared_address(&shared.k_full), 1);
  barrier_init(shared_address(&shared.v_full), 1);
  barrier_init(shared_address(&shared.kv_empty), CONSUMER_WARPS);
  for (int s = 0; s < NUM_STAGES; ++s) {
    barrier_init(shared_address(&shared.q_full[s]), 1);
    barrier_init(shared_address(&shared.q_empty[s]), CONSUMER_WARPS);
    barrier_init(shared_address(&shared.dout_full[s]), 1);
    barrier_init(shared_address(&shared.dout_empty[s]), CONSUMER_WARPS);
  }
  for (int s = 0; s < 2; ++s) {
    barrier_init(shared_address(&shared.ds_full[s]), NUM_CONSUMERS * WARPGROUP);
    barrier_init(shared_address(&shared.ds_empty[s]), CONSUMER_WARPS);
    barrier_init(shared_address(&shared.dq_full[s]), WARPGROUP);
    barrier_init(shared_address(&shared.dq_empty[s]), 1);
  }
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
    shared.num_steps = uint32_t(NO_MORE);
    shared.problem = problem;
    initialise(shared);
  }
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) produce(shared, problem, &q_map, &k_map, &v_map, &dout_map);
#if WITH_DQ
    if (threadIdx.x == 32) add_dq(shared, problem, 0);
    if (threadIdx.x == 64) add_dq(shared, problem, 1);
#endif
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(shared, problem, __shfl_sync(0xffffffffu, threadIdx.x / WARPGROUP, 0) - 1);
  }
}
