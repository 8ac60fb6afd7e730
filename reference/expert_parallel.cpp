#include "reference/expert_parallel.h"

#include <set>

namespace moire::reference {

DispatchPlanResults dispatch_plan(const moire_dispatch_plan_args& args) {
  const TensorView topk_idx = args.topk_idx;
  const int64_t ranks = TensorView(args.places).columns();
  const int64_t local = args.num_experts / ranks;
  DispatchPlanResults out;
  out.counts.resize(static_cast<size_t>(ranks));
  for (int64_t t = 0; t < topk_idx.num_rows(); ++t) {
    std::set<int64_t> owners;
    for (int64_t j = 0; j < topk_idx.columns(); ++j) {
      const int64_t expert = read_index(topk_idx, t, j);
      if (expert >= 0 && expert < args.num_experts) owners.insert(expert / local);
    }
    for (int64_t d = 0; d < ranks; ++d) {
      int64_t& count = out.counts[static_cast<size_t>(d)];
      const bool is_sent = owners.contains(d) && count < args.capacity;
      out.places.push_back(is_sent ? count : -1);
      if (owners.contains(d)) ++count;
    }
  }
  return out;
}

Matrix combine(const TensorView& places, const std::vector<TensorView>& rows, int64_t rank) {
  const auto ranks = static_cast<int64_t>(rows.size());
  const int64_t first = rows[0].num_rows() / ranks * rank;
  Matrix out(places.num_rows(), rows[0].columns());
  for (int64_t t = 0; t < out.rows; ++t) {
    for (int64_t h = 0; h < out.columns; ++h) {
      Dot dot;
      for (int64_t d = 0; d < ranks; ++d) {
        const int64_t place = read_index(places, t, d);
        if (place < 0) continue;
        dot.add({read_element(rows[static_cast<size_t>(d)], first + place, h)});
      }
      out.at(t, h) = dot.sum();
    }
  }
  return out;
}

}  // namespace moire::reference
