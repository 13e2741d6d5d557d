#include "plan.h"

#include <algorithm>

namespace ellm {

Plan* make_plan(PlanArguments& a) {
  Plan* plan = new Plan;
  plan->blocks.assign(a.units, a.units + a.num_units);
  for (int64_t i = 0; i < a.num_requests; ++i) {
    const int64_t* r = a.requests + 5 * i;
    plan->ranges.push_back({i, r[0], r[1], r[2]});
  }
  for (int64_t i = 0; i < a.num_spans; ++i) {
    const int64_t* s = a.spans + 4 * i;
    const Range span{s[0], s[1], s[2], s[3]};
    plan->ranges.push_back(span);
    // A span begins with a block and ends with one, or where the new rows begin.
    int64_t* blocks = plan->blocks.data() + a.requests[5 * span.request + 3];
    for (int64_t at = 0; at < span.count; at += a.block_tokens) {
      blocks[(span.position + at) / a.block_tokens] = ~(span.row + at);
    }
  }
  // The new rows' KV is taken from the step, not from the pool: it is the same, at hand, and some
  // of it may have no unit. So is the rest of a block that a span shares with the new rows.
  for (int64_t i = 0; i < a.num_requests; ++i) {
    const int64_t* r = a.requests + 5 * i;
    plan->sources.push_back({plan->blocks.data() + r[3], r[1], r[0]});
  }
  plan->write_units.assign(a.write_units, a.write_units + a.num_writes);
  plan->write_offsets.assign(a.write_offsets, a.write_offsets + a.num_writes);
  plan->write_rows.resize(a.num_writes);
  for (int64_t i = 0; i < a.num_writes; ++i) {
    plan->write_rows[i] = a.write_rows != nullptr ? a.write_rows[i] : a.first_write_row + i;
  }
  a.largest_unit = 0;
  for (int64_t i = 0; i < a.num_units; ++i) a.largest_unit = std::max(a.largest_unit, a.units[i]);
  for (int64_t unit : plan->write_units) a.largest_unit = std::max(a.largest_unit, unit);
  return plan;
}

}  // namespace ellm
