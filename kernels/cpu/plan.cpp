#include "plan.h"

#include <algorithm>

namespace ellm {

namespace {

void fill(Plan* plan, const PlanArguments& a, int64_t group) {
  const int64_t* units = a.units + group * a.num_units;
  const int64_t* write_units = a.write_units + group * a.num_writes;
  plan->blocks.assign(units, units + a.num_units);
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
  plan->write_units.assign(write_units, write_units + a.num_writes);
  plan->write_offsets.assign(a.write_offsets, a.write_offsets + a.num_writes);
  plan->write_rows.resize(a.num_writes);
  for (int64_t i = 0; i < a.num_writes; ++i) {
    plan->write_rows[i] = a.write_rows != nullptr ? a.write_rows[i] : a.first_write_row + i;
  }
}

int64_t largest(const int64_t* units, int64_t count, int64_t least) {
  for (int64_t i = 0; i < count; ++i) least = std::max(least, units[i]);
  return least;
}

}  // namespace

std::vector<Plan>* make_plans(PlanArguments& a) {
  auto* plans = new std::vector<Plan>(a.groups);
  for (int64_t group = 0; group < a.groups; ++group) fill(&(*plans)[group], a, group);
  a.largest_unit = largest(a.units, a.groups * a.num_units, 0);
  a.largest_unit = largest(a.write_units, a.groups * a.num_writes, a.largest_unit);
  return plans;
}

}  // namespace ellm
