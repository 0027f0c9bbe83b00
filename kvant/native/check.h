// What a batch must satisfy so that no kernel reads or writes elsewhere. Checked before the first operation of every step: a
// few microseconds.
#pragma once

#include <vector>

#include "program.h"

namespace kvant {

// The same numbers stand, with words, in abi.py.
enum Status {
  OK = 0,
  NO_MEMORY = -1,
  BAD_ID = -2,
  BAD_SLOT = -3,
  BAD_BLOCK = -4,
  BAD_LENGTH = -5,
  BAD_ROW = -6,
  BAD_POSITION = -7,
  BAD_COPY = -8
};

static inline int check_group(const Batch& b, const GroupBatch& g, int block_size) {
  for (int t = 0; t < b.tokens; ++t)
    if (g.slots[t] < 0 || g.slots[t] >= g.num_blocks * block_size) return BAD_SLOT;
  for (int s = 0; s < b.sequences; ++s) {
    const int64_t blocks = ((int64_t)g.kv_lens[s] + block_size - 1) / block_size;
    if (g.kv_lens[s] < 0 || blocks > g.table_width) return BAD_LENGTH;
    for (int64_t i = 0; i < blocks; ++i) {
      const int32_t block = g.block_table[s * g.table_width + i];
      if (block < 0 || block >= g.num_blocks) return BAD_BLOCK;
    }
    for (int t = b.query_start[s]; t < b.query_start[s + 1]; ++t)
      if (b.positions[t] >= g.kv_lens[s]) return BAD_POSITION;
  }
  for (int64_t c = 0; c < 2 * g.num_copies; ++c)
    if (g.copies[c] < 0 || g.copies[c] >= g.num_blocks) return BAD_COPY;
  return OK;
}

static inline int check_batch(const Batch& b, const std::vector<CacheGroup>& groups, int64_t vocabulary) {
  for (int t = 0; t < b.tokens; ++t) {
    if (b.ids[t] < 0 || b.ids[t] >= vocabulary) return BAD_ID;
    if (b.positions[t] < 0) return BAD_POSITION;
  }
  for (int i = 0; i < b.logit_count; ++i)
    if (b.logit_rows[i] < 0 || b.logit_rows[i] >= b.tokens) return BAD_ROW;
  if (b.best && (!b.logits || b.drawable < 1)) return BAD_ROW;
  if (b.query_start[0] != 0 || b.query_start[b.sequences] != b.tokens) return BAD_LENGTH;
  for (int s = 0; s < b.sequences; ++s)
    if (b.query_start[s + 1] < b.query_start[s]) return BAD_LENGTH;
  for (size_t g = 0; g < groups.size(); ++g) {
    const int status = check_group(b, b.groups[g], groups[g].block_size);
    if (status != OK) return status;
  }
  return OK;
}

}  // namespace kvant
