// The rows of a step in one layer group, prepared once for all of the group's layers.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"

namespace ellm {

// Consecutive rows that are consecutive tokens of one request.
struct Range {
  int64_t request, row, position, count;
};

struct Plan {
  std::vector<Source> sources;    // per request
  std::vector<int64_t> blocks;    // what `sources` point into
  std::vector<Range> ranges;      // the new rows of every request, then its spans
  std::vector<int64_t> write_rows, write_units, write_offsets;
};

// What Python hands over of layer groups that differ in units alone; it owns the arrays, and they
// are copied.
struct PlanArguments {
  const int64_t* requests;  // [num_requests, 5]: row, position, count, first block, end block
  const int64_t* spans;     // [num_spans, 4]: request, row, position, count
  const int64_t* units;     // [groups, num_units]
  const int64_t* write_rows;  // [num_writes], or null: rows first_write_row, + 1, ...
  const int64_t* write_units;  // [groups, num_writes]
  const int64_t* write_offsets;
  int64_t num_requests, num_spans, num_units, num_writes, first_write_row, block_tokens;
  int64_t groups;
  int64_t largest_unit;  // set by make_plans: of those read and written
};

// One plan per group.
std::vector<Plan>* make_plans(PlanArguments& arguments);

}  // namespace ellm
