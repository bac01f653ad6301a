// What a block of the backward works on: its item, the tiles of the other axis that it visits, and the shared-memory
// records by which the producer warp tells the consumer warpgroups.
#pragma once

#include "attn/dropout.cuh"
#include "attn/kv_range.cuh"
#include "attn/schedule.cuh"
#include "attn/sequence.cuh"
#include "sm90/backward_params.cuh"
#include "sm90/backward_shape.cuh"
#include "sm90/barrier.cuh"
#include "sm90/tma.cuh"

namespace jattn::sm90 {

enum BackwardFlags : int {
  kLastStep = 1,            // no further tile for this item
  kLimitsAbove = 2,         // some key lies beyond the upper limit of its query, or beyond the keys of the batch entry
  kLimitsBelow = 4,         // some key lies below the lower limit of its query
  kComparesSegments = 8,    // segment ids must be compared
  kComparesPositions = 16,  // positions may lie outside the band
  kComparesMask = 32,       // the packed mask of this step is there and has zeros
  kHasEmptyRows = 64        // a query sees no key, or lies beyond the last: bias or program may make anything of it
};

// Travels beside each tile of the visited axis, valid once the tile is full.
struct StepHeader {
  int first;  // query or key of the tile
  int flags;
  int64_t accumulator_row;  // of the first query in dq_accumulator; kernels that own keys
};

// Where a block stands. Query t sees keys t + lower_offset <= j < min(t + upper_offset, kv_length); the offsets are
// read only if there is a band.
struct BackwardItem {
  int first;  // key or query that the block owns first
  int head;   // key/value head or query head
  int batch;
  int q_length, kv_length;
  int upper_offset, lower_offset;
  bool runs;  // there is a tile to visit
};
inline constexpr int kNoItem = -1;  // as BackwardItem::first: the block is done

// What the scores of a step need beside the products; of one batch entry and query head.
struct alignas(16) StepTerms {
  int64_t bias;   // element of the bias of query 0 and key 0
  int head;       // query head
  float slope;    // of ALiBi: -log2(e) * slope
  PhiloxKey key;  // of dropout, as the two that follow
  uint32_t threshold;
  float factor;
};
static_assert(sizeof(StepTerms) == kStepTermsBytes);

// Parts of the control block that only some variants have: an empty base takes no room.
template <int kRows, int kStages>
struct MaskWordsPart {
  alignas(16) uint32_t mask_words[kStages][kRows * 4];  // PackedMask, of the rows that the block owns
};
template <int kStages>
struct StepTermsPart {
  StepTerms terms[kStages];
};
template <int kOwned, int kVisited, int kStages>
struct PositionsPart {
  int own_positions[kOwned];
  int positions[kStages][kVisited];
};
// What the warpgroup of dq is told of a step, beside a tile of ds.
struct DqStep {
  int64_t accumulator_row;
  int last;
};
struct DqStepsPart {
  DqStep dq_steps[2];
  Barrier ds_full[2], ds_empty[2];
};
static_assert(sizeof(DqStepsPart) == kDqStepsBytes);
// What the warps that add dq up are told of a step, beside what the consumers stage.
struct DqTurn {
  int64_t row;   // of the accumulator
  unsigned own;  // key tiles that have been added when this one has, by their order; 0: the block is done
  static constexpr unsigned kEndsItem = 1u << 31;  // in `own`, if casts_beside(): no step of the item follows
  int after;  // orders_dq(): those that must have been before; 0: this is the first
};
struct alignas(16) SendersPart {
  DqTurn dq_turns[kDqTurns];
  Barrier turn_full[kDqTurns], turn_empty[kDqTurns];
  Barrier staged_full[2][kBackwardConsumers], staged_empty[2][kBackwardConsumers];  // of a slot of staging memory
  Barrier items_ended;                                                              // of the block
};
static_assert(sizeof(SendersPart) == kSendersBytes);
template <int kStages>
struct BiasBarriersPart {
  Barrier bias_full[kStages], bias_empty[kStages];
};
// Where a tile of the gradients of scores goes, for the warp that stores it.
struct alignas(16) DsPlace {
  int key;          // the first of the tile
  int query;        // likewise; below 0: the block is done
  int head, entry;  // in BackwardParams::ds
};
template <int kStages>
struct DsPlacesPart {
  DsPlace ds_places[kStages];
  Barrier ds_written[kStages];  // of the places of a bias
};
static_assert(sizeof(DsPlacesPart<2>) == 2 * kDsPlaceBytes);
template <int kKeys>
struct KeySumsPart {
  float key_sums[kKeys];  // of the gradients of the scores of the item's keys so far
};
// What the drop warps are told of a step.
struct alignas(16) DropStep {
  int key, query;  // the first of its tile
  int batch;       // below 0: the block is done
  int head;        // query head
};
// What a drop warp knows of the head at hand: in shared memory, since it has few registers.
struct alignas(16) DropSource {
  PhiloxKey key;
  DropLimits limits;
  int batch, head;
};
struct StepDropsPart {
  uint32_t drop_bits[kBackwardConsumers * kWarpgroupThreads];  // Drops::words of each consumer thread
  DropStep drop_steps[kDropSteps];
  DropPart drop_parts[kDropSteps][kDropStepParts];  // of the queries' groups
  DropSource drop_sources[kBackwardDropWarps];
  Barrier drop_step_full[kDropSteps];
  Barrier drops_full[kBackwardConsumers], drops_empty[kBackwardConsumers];  // of a warpgroup's bits
};
// A part that is not there; of a kind of its own, or two of them could not share an address.
template <int kKind>
struct NoPart {};

template <bool kCondition, class First, class Second>
struct ConditionalType {
  using Type = First;
};
template <class First, class Second>
struct ConditionalType<false, First, Second> {
  using Type = Second;
};
template <bool kCondition, class First, class Second>
using Conditional = typename ConditionalType<kCondition, First, Second>::Type;

template <Config C, bool kOwnsQueries>
using MaskWordsOf = Conditional<C.mask, MaskWordsPart<(kOwnsQueries ? C.tile_q : C.tile_kv), C.stages>, NoPart<0>>;
template <Config C>
using StepTermsOf = Conditional<has_step_terms(C), StepTermsPart<C.stages>, NoPart<1>>;
template <Config C, bool kOwnsQueries>
using PositionsOf =
    Conditional<C.positions,
                PositionsPart<(kOwnsQueries ? C.tile_q : C.tile_kv), (kOwnsQueries ? C.tile_kv : C.tile_q), C.stages>,
                NoPart<2>>;
template <Config C>
using BiasBarriersOf = Conditional<(bias_tile_bytes(C) > 0), BiasBarriersPart<C.stages>, NoPart<3>>;
template <Config C>
using DqStepsOf = Conditional<has_dq_warpgroup(C), DqStepsPart, NoPart<4>>;

template <Config C>
using SendersOf = Conditional<has_senders(C), SendersPart, NoPart<5>>;

template <Config C>
using KeySumsOf = Conditional<C.sums_bias, KeySumsPart<C.tile_kv>, NoPart<6>>;

template <Config C>
using StepDropsOf = Conditional<C.drops_beside, StepDropsPart, NoPart<7>>;

template <Config C>
using DsPlacesOf = Conditional<C.stores_ds, DsPlacesPart<C.stages>, NoPart<8>>;

template <Config C, bool kOwnsQueries>
struct alignas(16) BackwardControl : MaskWordsOf<C, kOwnsQueries>,
                                     StepTermsOf<C>,
                                     PositionsOf<C, kOwnsQueries>,
                                     BiasBarriersOf<C>,
                                     DqStepsOf<C>,
                                     SendersOf<C>,
                                     KeySumsOf<C>,
                                     StepDropsOf<C>,
                                     DsPlacesOf<C> {
  // Of the queries of a stage, targets of bulk copies; kernels that own queries keep theirs in registers.
  alignas(16) float lse_log2[kOwnsQueries ? 1 : C.stages][kOwnsQueries ? 4 : C.tile_q];
  float delta[kOwnsQueries ? 1 : C.stages][kOwnsQueries ? 4 : C.tile_q];
  // Of the axis that the block owns, and of a stage of the other.
  int own_ids[C.segments ? (kOwnsQueries ? C.tile_q : C.tile_kv) : 1];
  int ids[C.segments ? C.stages : 1][C.segments ? (kOwnsQueries ? C.tile_kv : C.tile_q) : 1];
  StepHeader headers[C.stages];
  BackwardItem item;
  Barrier own_full, own_empty;  // the tiles that the block owns, and the record of its item
  Barrier values_empty;         // of them v, which is freed earlier than the rest
  Barrier landed;               // tiles whose padding rows must be cleared before the consumers may see them
  Barrier first_full[C.stages], first_empty[C.stages];    // q of kernels that own keys, else k
  Barrier second_full[C.stages], second_empty[C.stages];  // dout, else v
  // Of weights that the warpgroup of dv gives to that of dk; where each has both, of ds.
  Barrier exchange_full[2], exchange_empty[2];
};

template <Config C>
__device__ __forceinline__ BackwardItem backward_item(const BackwardParams& params, const WorkItem& place, int first) {
  const Sequence sequence = sequence_of<C>(params.problem, place.batch);
  BackwardItem item;
  item.first = first;
  item.head = place.head;
  item.batch = place.batch;
  item.q_length = sequence.q_length;
  item.kv_length = sequence.kv_length;
  item.upper_offset = sequence.band.offset + sequence.band.right + 1;
  item.lower_offset = sequence.band.offset - sequence.band.left;
  item.runs = false;
  return item;
}

__device__ __forceinline__ Band band_of(const BackwardItem& item) {
  return {-item.lower_offset, item.upper_offset - 1, 0};
}

// The tiles of queries that see keys [first, end), end > first.
template <Config C>
__device__ __forceinline__ TileRange queries_of_keys(const BackwardItem& item, int first, int end) {
  return visible_tiles<has_index_band(C)>(first, end, transposed(band_of(item)), item.q_length, C.tile_q);
}

// If orders_dq(): the key tiles that must have been added to dq of a tile of queries before the item adds to it: all up
// to its own, or none if it is the first there. Key tiles that see a tile of queries are neighbours, so its predecessor
// answers for all.
template <Config C>
struct Predecessor {
  int number = 0;  // of the item's key tile
  TileRange visited{0, 0, 0, 0};

  __device__ __forceinline__ explicit Predecessor(const BackwardItem& item) {
    if constexpr (orders_dq(C)) {
      number = item.first / C.tile_kv;
      if (number > 0) visited = queries_of_keys<C>(item, item.first - C.tile_kv, item.first);
    }
  }
  __device__ __forceinline__ int tiles_before(int tile) const {
    return tile >= visited.begin && tile < visited.end ? number : 0;
  }
};

// Where an item is: heads of a batch entry follow each other, or batch entries of a head where these share a bias.
template <Config C, Heaviest kHeaviest>
__device__ __forceinline__ WorkItem place_of_item(const BackwardParams& params, int heads, int number) {
  int batch = params.problem.batch, first_head = 0, first_entry = 0;
  if constexpr (C.stores_ds) {
    heads = params.launched_kv_heads;
    batch = params.launched_entries;
    first_head = params.first_kv_head;
    first_entry = params.first_entry;
  }
  if constexpr (C.bias) {
    if (params.batch_fastest) {
      const WorkItem turned =
          work_item<kHeaviest>(number, batch, heads, params.tiles, 1, params.section_heads, params.last_section);
      return {turned.head + first_entry, turned.batch + first_head, turned.tile, turned.slice};
    }
    WorkItem place =
        work_item<kHeaviest>(number, heads, batch, params.tiles, 1, params.section_heads, params.last_section);
    place.head += first_head;
    place.batch += first_entry;
    return place;
  }
  return work_item<kHeaviest>(number, heads, batch, params.tiles, 1, params.section_heads, params.last_section);
}

// An item of the list of documents: its keys end with their run, and queries [q_begin, q_end) see them. These are in
// tiles that are counted from q_first on, whose places in dq_accumulator are number q_number and the following.
struct DocumentKeys {
  BackwardItem item;
  int q_begin, q_end;
  bool is_padded;  // keys of padding are among those of the batch entry
  int q_first, q_number;
};

template <Config C>
__device__ __forceinline__ DocumentKeys document_keys(const BackwardParams& params, int number) {
  const int place = number / params.problem.num_kv_heads;
  const DocumentTile tile = params.documents[place];
  const int head = number - place * params.problem.num_kv_heads;
  DocumentKeys found{backward_item<C>(params, {tile.batch, head, 0, 0}, tile.begin),
                     tile.other_begin,
                     tile.other_end,
                     tile.own_padded,
                     tile.other_first,
                     tile.other_number};
  found.item.kv_length = tile.end;
  return found;
}

// The tiles of queries, from q_first on, that keys [item.first, end) visit: those of the document that the band leaves.
template <Config C>
__device__ __forceinline__ TileRange document_queries(const DocumentKeys& document, int end) {
  const int origin = document.q_first;
  return visible_tiles<has_index_band(C)>(document.item.first - origin, end - origin,
                                          transposed(band_of(document.item)), document.q_end - origin, C.tile_q);
}

// Walks tiles upwards from position `start` of a range, round its end, or downwards from the last tile, leaving out
// those in which no pair is visible by segments, positions or the dense mask. If may_begin_late() the first tile of the
// range comes before the one at `start`, which must be another. A warp looks at 32 tiles with one load; all its lanes
// get the same answer. If orders_dq() downwards: blocks of one head that begin together are then at the same tile until
// their diagonal, and the one with lower keys, for which the others wait, is never behind for want of work.
template <Config C>
struct RoundWalk {
  static constexpr bool kFilters = TileFilter<C>::kActive || C.mask;
  static constexpr int kFirstTiles = may_begin_late(C) ? 1 : 0;  // that precede the one at `start`

  int begin, count;
  int start;               // read if there are more tiles than kFirstTiles: at least that, less than `count`
  bool takes_all = false;  // whatever the filter says; read if Config::documents
  bool descends = orders_dq(C);
  TileFilter<C> filter;
  MaskStates states;  // of the tiles of the other axis
  int position = 0;   // tiles looked at
  uint32_t hits = 0;
  int window = 0;  // position of bit 0 of `hits`

  // For a tile of the own axis of a query head.
  __device__ __forceinline__ void look_at_mask(const PackedMask& mask, int batch, int head, int own_tile) {
    if constexpr (C.mask) states.look_at(mask, batch, head, own_tile);  // whose rows are the axis that the block owns
  }
  __device__ __forceinline__ int state(int tile) const { return C.mask ? states.of(tile) : 0; }

  __device__ __forceinline__ int tile_at(int index) const {
    if (descends) return begin + count - 1 - index;
    if (may_begin_late(C) && index == 0) return begin;
    const int from_begin = start + index - kFirstTiles;
    return begin + (from_begin < count ? from_begin : from_begin - count + kFirstTiles);
  }
  __device__ __forceinline__ void restart() {
    position = 0;
    hits = 0;
  }
  __device__ __forceinline__ bool meets(int tile) const {
    if constexpr (C.mask) return filter.meets(tile) && state(tile) != kMaskTileEmpty;
    return (C.documents && takes_all) || filter.meets(tile);
  }
  // Sets `start`, `shift` tiles behind the first that it may be, round the end. To be called before any tile is asked
  // for.
  __device__ __forceinline__ void shift_start(int64_t shift) {
    const int others = count - kFirstTiles;
    if (others > 0) start = uniform(kFirstTiles + int(shift % others));
  }
  // The next tile, or -1.
  __device__ __forceinline__ int next() {
    if constexpr (!kFilters) {
      return position < count ? tile_at(position++) : -1;
    } else {
      while (hits == 0) {
        if (position >= count) return -1;
        const int candidate = position + int(threadIdx.x & 31);
        const bool hit = candidate < count && meets(tile_at(candidate));
        hits = __ballot_sync(0xffffffffu, hit);
        window = position;
        position += 32;
      }
      const int index = window + __ffs(hits) - 1;
      hits &= hits - 1;
      return tile_at(index);
    }
  }
};

// The query heads of a key/value head, [first, end), that visit a tile of queries one after the other: from `start` on,
// round the end.
struct HeadCycle {
  int first, end, start;

  __device__ __forceinline__ int next(int head) const { return head + 1 == end ? first : head + 1; }
};
// Blocks that are at the same tile of queries begin with different heads, not to wait for each other's dq. In the order
// of the key tiles they wait less if all begin with the first.
template <Config C>
__device__ __forceinline__ HeadCycle head_cycle(const BackwardItem& item, int group_size) {
  const int first = item.head * group_size;
  return {first, first + group_size, first + (orders_dq(C) ? 0 : item.first / C.tile_kv % group_size)};
}

// The terms of a step for a query head.
template <Config C>
__device__ __forceinline__ StepTerms step_terms(const ProblemParams& problem, int batch, int head) {
  StepTerms terms{};
  terms.head = head;
  if constexpr (C.bias) terms.bias = batch * problem.bias.stride_batch + head * problem.bias.stride_head;
  if constexpr (C.alibi) terms.slope = -kLog2E * __ldg(element_of_head(problem.alibi_slopes, batch, head));
  if constexpr (C.dropout) {
    terms.threshold = uint32_t(dropout_threshold(problem, batch));
    terms.factor = kept_factor(problem, batch);
    if constexpr (!C.dropout_rows) terms.key = dropout_key(problem, batch, head);
  }
  return terms;
}

// Copies the tile of a bias whose first pair is (query, key). By one thread.
template <Config C>
__device__ __forceinline__ void load_bias_tile(unsigned tile, const BackwardParams& params, Barrier* full, int batch,
                                               int head, int query, int key) {
  const BroadcastArray& bias = params.problem.bias;
  arrive_and_expect_bytes(full, bias_tile_bytes(C));
#pragma unroll
  for (int chunk = 0; chunk < num_chunks(C.tile_kv); ++chunk) {
    load_box(tile + chunk * C.tile_q * kChunkRowBytes, &params.bias, full, key + chunk * kChunkColumns, query,
             bias.stride_head == 0 ? 0 : head, bias.stride_batch == 0 ? 0 : batch);
  }
}

// Bytes of the words of a tile of the packed mask, of the rows that the block owns.
template <Config C, bool kOwnsQueries>
__device__ __forceinline__ int mask_words_bytes(const PackedMask& mask) {
  return mask.words_row == 0 ? kMaskRowBytes : (kOwnsQueries ? C.tile_q : C.tile_kv) * kMaskRowBytes;
}
// Copies them, and signals them to a barrier that has been told to expect them.
template <Config C, bool kOwnsQueries>
__device__ __forceinline__ void load_mask_words(uint32_t* words, const PackedMask& mask, Barrier* full, int batch,
                                                int head, int first_row, int column_tile) {
  const uint32_t* source = mask.words + batch * mask.words_batch + head * mask.words_head +
                           column_tile * mask.words_column_tile + int64_t(first_row) * mask.words_row;
  load_bytes(shared_address(words), source, mask_words_bytes<C, kOwnsQueries>(mask), full);
}

// -1 and -2 mark padding of the two axes: different from every id and from each other.
template <int kPadding>
__device__ __forceinline__ int segment_id(const int32_t* ids, int64_t first, int row, int length) {
  if (row >= length) return kPadding;
  const int id = ids[first + row];
  return id < 0 ? kPadding : id;
}

// Positions of the rows [first, first + kRows), by one warp; 0 outside the array.
template <int kRows>
__device__ __forceinline__ void load_positions(int* target, const int32_t* positions, int batch, int first,
                                               int length) {
  for (int i = threadIdx.x % 32; i < kRows; i += 32) {
    target[i] = first + i < length ? positions[int64_t(batch) * length + first + i] : 0;
  }
}

// releases: arrivals that free a stage; givers: warps that fill an exchange buffer, and as many read it, or a tile of
// ds; bias_readers: warps that read tiles of a bias last.
template <Config C, bool kOwnsQueries>
__device__ __forceinline__ void init_control(BackwardControl<C, kOwnsQueries>& control, int releases, int givers,
                                             int bias_readers) {
  init_barrier(&control.own_full, 1);
  init_barrier(&control.own_empty, kBackwardConsumers * kWarpgroupThreads / 32);
  init_barrier(&control.values_empty, kBackwardConsumers * kWarpgroupThreads / 32);
  init_barrier(&control.landed, 1);
  for (int stage = 0; stage < C.stages; ++stage) {
    init_barrier(&control.first_full[stage], 1);
    init_barrier(&control.second_full[stage], 1);
    init_barrier(&control.first_empty[stage], releases);
    init_barrier(&control.second_empty[stage], releases);
  }
  for (int buffer = 0; buffer < 2; ++buffer) {
    init_barrier(&control.exchange_full[buffer], givers);
    init_barrier(&control.exchange_empty[buffer], givers);
  }
  if constexpr (bias_tile_bytes(C) > 0) {
    for (int slot = 0; slot < C.stages; ++slot) {
      init_barrier(&control.bias_full[slot], 1);
      init_barrier(&control.bias_empty[slot], bias_readers);
      if constexpr (C.stores_ds) init_barrier(&control.ds_written[slot], kDsWriters);
    }
  }
  if constexpr (has_dq_warpgroup(C)) {
    for (int buffer = 0; buffer < 2; ++buffer) {
      init_barrier(&control.ds_full[buffer], givers);
      init_barrier(&control.ds_empty[buffer], 1);
    }
  }
  if constexpr (has_senders(C)) {
    for (int turn = 0; turn < kDqTurns; ++turn) {
      init_barrier(&control.turn_full[turn], 1);
      init_barrier(&control.turn_empty[turn], num_senders(C));
    }
    init_barrier(&control.items_ended, 1);
    for (int slot = 0; slot < 2; ++slot) {
      for (int warpgroup = 0; warpgroup < kBackwardConsumers; ++warpgroup) {
        init_barrier(&control.staged_full[slot][warpgroup], kWarpgroupThreads / 32);
        init_barrier(&control.staged_empty[slot][warpgroup], 1);
      }
    }
  }
  if constexpr (C.drops_beside) {
    for (int step = 0; step < kDropSteps; ++step) init_barrier(&control.drop_step_full[step], 1);
    for (int warpgroup = 0; warpgroup < kBackwardConsumers; ++warpgroup) {
      init_barrier(&control.drops_full[warpgroup], 1);
      init_barrier(&control.drops_empty[warpgroup], kWarpgroupThreads / 32);
    }
  }
  fence_barrier_init();
}

}  // namespace jattn::sm90
