// Which tile of which head a work item is. Blocks take the items in the order of their numbers: one each, or one after
// the other by a counter.
//
// Items of a section, `section_heads` neighbouring heads, are handed out together, the tiles with most work first:
// their K and V stay in L2, and the last blocks to start are short. For causal problems that is worth 10 to 20 % over
// one head after the other. Section `last_section` has all heads that are left.
#pragma once

#include "base/numeric.cuh"
#include "params.cuh"

namespace jattn {

struct WorkItem {
  int batch, head, tile, slice;
};

// Where the heaviest tiles are: causal queries see most keys at the end, causal keys are seen most at the start.
enum class Heaviest { kLast, kFirst };

template <Heaviest kHeaviest>
__device__ __forceinline__ WorkItem work_item(int block, int heads, int batch, int tiles, int slices, int section_heads,
                                              int last_section = kNoLastSection) {
  const int slice = block % slices;
  block /= slices;
  const int section_items = section_heads * tiles;
  const int section = min(block / section_items, last_section);
  const int first_head = section * section_heads;
  const int heads_left = batch * heads - first_head;
  const int heads_here = section == last_section ? heads_left : min(section_heads, heads_left);
  const int item = block - section * section_items;
  const int rank = item / heads_here;
  const int flat_head = first_head + item - rank * heads_here;
  const int entry = flat_head / heads;
  return {uniform(entry), uniform(flat_head - entry * heads),
          uniform(kHeaviest == Heaviest::kLast ? tiles - 1 - rank : rank), uniform(slice)};
}

}  // namespace jattn
