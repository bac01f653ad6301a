// Which heads are handed out together: kernels/attn/schedule.cuh.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

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

// The same number of heads of each batch entry, where neighbouring heads are those of all entries; at most all there
// are, so that the items of a section are as many as a kernel can count.
inline int32_t heads_over_batch(int64_t heads, int64_t batch, int64_t all_heads) {
  return static_cast<int32_t>(std::min(heads * batch, all_heads * batch));
}

// The heads of a section: from `wanted` to twice as many, so that the last section is as full as the others; of several
// such numbers the one nearest to `ideal`. The last blocks to start are short only if there are others to start behind
// the heavy ones.
inline int64_t full_sections(int64_t wanted, int64_t ideal, int64_t heads) {
  if (wanted >= heads) return std::max<int64_t>(heads, 1);
  const auto last = [&](int64_t section) { return (heads - 1) % section + 1; };
  int64_t best = wanted;
  for (int64_t section = wanted; section <= std::min(2 * wanted, heads); ++section) {
    const int64_t fuller = last(section) * best - last(best) * section;
    if (fuller > 0 || (fuller == 0 && std::abs(section - ideal) < std::abs(best - ideal))) best = section;
  }
  return best;
}

// Sections of `section` heads, and one of `last` to `last + section - 1` at the end.
inline Sections sections_with_last(int64_t section, int64_t last, int64_t heads) {
  return {static_cast<int32_t>(std::min(section, std::max<int64_t>(heads, 1))),
          static_cast<int32_t>(std::max<int64_t>(0, heads - std::max<int64_t>(last, 1)) / section)};
}

}  // namespace jattn::cuda
