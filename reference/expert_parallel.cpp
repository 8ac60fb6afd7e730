#include "reference/expert_parallel.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <set>
#include <string>
#include <utility>

namespace moire::reference {
namespace {

void add(std::vector<OutputErrors>& outputs, const char* name, size_t rank, OutputErrors errors) {
  errors.name = name + (" of rank " + std::to_string(rank));
  outputs.push_back(std::move(errors));
}

// Row i of `from` becomes row j of `to`, to the byte.
void copy_row(const TensorView& from, int64_t i, const TensorView& to, int64_t j) {
  if (!from.is_present()) return;
  const int64_t size = dtype_size(from.type());
  std::memcpy(static_cast<std::byte*>(to.data) + j * to.stride() * size,
              static_cast<const std::byte*>(from.data) + i * from.stride() * size,
              static_cast<size_t>(from.columns() * size));
}

// What the tokens of rank `sender` leave in the rows that `receiver` has of them in the tensors of
// `into`.
void dispatch(const moire_dispatch_args& sent, int64_t sender, const moire_dispatch_args& into,
              int64_t receiver) {
  const TensorView places = sent.places, topk_idx = sent.topk_idx, idx_recv = into.topk_idx_recv;
  const bool has_choices = topk_idx.is_present();
  const int64_t room =
      (has_choices ? idx_recv : TensorView(into.x_recv)).num_rows() / places.columns();
  const int64_t local = has_choices ? sent.num_experts / places.columns() : 0;
  const auto write_choice = [&](int64_t row, int64_t j, int64_t expert, double weight) {
    static_cast<int32_t*>(idx_recv.data)[row * idx_recv.stride() + j] =
        static_cast<int32_t>(expert);
    write_element(into.topk_weights_recv, row, j, weight);
  };
  for (int64_t row = sender * room; has_choices && row < (sender + 1) * room; ++row) {
    for (int64_t j = 0; j < topk_idx.columns(); ++j) write_choice(row, j, -1, 0);
  }
  for (int64_t t = 0; t < places.num_rows(); ++t) {
    const int64_t place = read_index(places, t, receiver);
    if (place < 0) continue;
    const int64_t row = sender * room + place;
    copy_row(sent.x, t, into.x_recv, row);
    copy_row(sent.x_scales, t, into.x_scales_recv, row);
    for (int64_t j = 0; has_choices && j < topk_idx.columns(); ++j) {
      const int64_t expert = read_index(topk_idx, t, j) - receiver * local;
      if (expert < 0 || expert >= local) continue;
      write_choice(row, j, expert, read_element(sent.topk_weights, t, j));
    }
  }
}

}  // namespace

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

Matrix combine_weights(const moire_combine_args& args, const std::vector<TensorView>& rows,
                       int64_t rank) {
  const TensorView topk_idx = args.topk_idx, places = args.places;
  const auto ranks = static_cast<int64_t>(rows.size());
  const int64_t local = args.num_experts / ranks, first = rows[0].num_rows() / ranks * rank;
  Matrix out(topk_idx.num_rows(), topk_idx.columns());
  for (int64_t t = 0; t < out.rows; ++t) {
    for (int64_t j = 0; j < out.columns; ++j) {
      const int64_t expert = read_index(topk_idx, t, j);
      if (expert < 0 || expert >= args.num_experts) continue;
      const int64_t place = read_index(places, t, expert / local);
      if (place < 0) continue;
      out.at(t, j).value =
          read_element(rows[static_cast<size_t>(expert / local)], first + place, j);
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

bool has_excess(const std::vector<moire_dispatch_plan_args>& plans) {
  return std::any_of(plans.begin(), plans.end(), [](const moire_dispatch_plan_args& plan) {
    const std::vector<int64_t> counts = dispatch_plan(plan).counts;
    return *std::max_element(counts.begin(), counts.end()) > plan.capacity;
  });
}

Judge expect_plans(const std::vector<moire_dispatch_plan_args>& calls) {
  return [calls] {
    std::vector<OutputErrors> outputs;
    for (size_t rank = 0; rank < calls.size(); ++rank) {
      const DispatchPlanResults want = dispatch_plan(calls[rank]);
      add(outputs, "places", rank, compare(calls[rank].places, want.places));
      add(outputs, "counts", rank, compare(calls[rank].counts, want.counts));
    }
    return outputs;
  };
}

Judge expect_dispatch(const std::vector<moire_dispatch_args>& calls,
                      const std::vector<std::span<std::byte>>& windows, bool is_refused) {
  std::vector<std::vector<std::byte>> images;
  for (size_t receiver = 0; receiver < calls.size(); ++receiver) {
    const std::span<std::byte> window = windows[receiver];
    auto& image = images.emplace_back(window.begin(), window.end());
    moire_dispatch_args into = calls[receiver];
    for (moire_tensor* t :
         {&into.x_recv, &into.x_scales_recv, &into.topk_idx_recv, &into.topk_weights_recv}) {
      if (!is_present(*t)) continue;
      t->data = image.data() + (static_cast<std::byte*>(t->data) - window.data());
    }
    for (size_t sender = 0; sender < calls.size() && !is_refused; ++sender) {
      dispatch(calls[sender], static_cast<int64_t>(sender), into, static_cast<int64_t>(receiver));
    }
  }
  return [windows, images] {
    std::vector<OutputErrors> outputs;
    for (size_t rank = 0; rank < windows.size(); ++rank) {
      const auto bytes = static_cast<int64_t>(windows[rank].size());
      const TensorView window(windows[rank].data(), DType::kUint8, {bytes});
      add(outputs, "window", rank, compare(window, images[rank]));
    }
    return outputs;
  };
}

Judge expect_combines(const std::vector<moire_combine_args>& calls) {
  return [calls] {
    std::vector<TensorView> rows, weights;
    for (const moire_combine_args& call : calls) {
      rows.emplace_back(call.rows);
      weights.emplace_back(call.topk_weights_recv);
    }
    std::vector<OutputErrors> outputs;
    for (size_t i = 0; i < calls.size(); ++i) {
      const auto rank = static_cast<int64_t>(i);
      add(outputs, "y", i, compare(calls[i].y, combine(calls[i].places, rows, rank)));
      add(outputs, "topk_weights", i,
          compare(calls[i].topk_weights, combine_weights(calls[i], weights, rank)));
    }
    return outputs;
  };
}

}  // namespace moire::reference
