// Which heads are handed out together: kernels/attn/schedule.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/params.cuh"

namespace jattn::cuda {

struct Sections {
  int32_t heads;                  // of every section but the last
  int32_t last = kNoLastSection;  // number of the one that has all heads that are left
};

// Heads that make about so many items, where each has `items_of_head`; at least one.
inline int64_t heads_of_items(int64_t items, int64_t items_of_head) {
  return std::max<int64_t>(1, (items + items_of_head / 2) / items_of_head);
}

// The same number of heads of each batch entry, where neighbouring heads are those of all entries; at most all there are, so that
// the items of a section are as many as a kernel can count.
inline int32_t heads_over_batch(int64_t heads, int64_t batch, int64_t all_heads) {
  return static_cast<int32_t>(std::min(heads * batch, all_heads * batch));
}

// Sections of `section` heads, and one of `last` to `last + section - 1` at the end.
inline Sections sections_with_last(int64_t section, int64_t last, int64_t heads) {
  return {static_cast<int32_t>(std::min(section, std::max<int64_t>(heads, 1))),
          static_cast<int32_t>(std::max<int64_t>(0, heads - std::max<int64_t>(last, 1)) / section)};
}

}  // namespace jattn::cuda
