#include "bench_variants.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "case_runner.h"
#include "text.h"

namespace moire::tool {
namespace {

constexpr int64_t kCachesSpanned = 3;
constexpr int64_t kMostSets = 512;
constexpr int64_t kMemoryShare = 4;  // of what is available, one part per variant

}  // namespace

int64_t rotating_sets(int64_t set_bytes) {
  const int64_t wanted =
      kCachesSpanned * last_level_cache_bytes() / std::max<int64_t>(1, set_bytes);
  const int64_t possible =
      available_memory_bytes() / kMemoryShare / std::max<int64_t>(1, set_bytes);
  return std::clamp<int64_t>(wanted + 1, 1, std::clamp<int64_t>(possible, 1, kMostSets));
}

Result<std::unique_ptr<OpVariant>> OpVariant::create(const Context& context,
                                                     const Problem& problem) {
  std::unique_ptr<OpVariant> variant(new OpVariant(context));
  const Status status = variant->prepare(problem);
  if (!status.ok()) return status;
  return variant;
}

Status OpVariant::prepare(const Problem& problem) {
  Operands shapes(problem, Operands::Content::kNone);
  const Case what = make_case(shapes);
  const int64_t bytes = shapes.bytes();
  std::vector<size_t> sizes;
  for (const Call& call : what.calls) {
    const Plan planned = plan(context_, call, shapes);
    if (!planned.status.ok()) return planned.status;
    sizes.push_back(planned.workspace_bytes);
    for (const Step& step : planned.steps) {
      bytes_ += static_cast<double>(step.bytes_read + step.bytes_written);
      implementation_ = step.implementation;
    }
    flops_ += call.flops;
  }
  for (int64_t i = rotating_sets(bytes); i > 0; --i) {
    sets_.push_back(std::make_unique<Set>(problem));
  }
  for (const size_t size : sizes) workspaces_.push_back(sets_[0]->operands.workspace(size));
  for (const auto& set : sets_) {
    Status ran = run_set(*set);
    if (!ran.ok()) return ran;
  }
  const std::string wrong = judge_rows(sets_[0]->operands, sets_[0]->what);
  if (!wrong.empty()) {
    throw std::runtime_error(text("bench: the result of ", to_line(problem),
                                  " is wrong, so its time means nothing: ", wrong));
  }
  return {};
}

Status OpVariant::run_set(const Set& set) {
  for (size_t i = 0; i < set.what.calls.size(); ++i) {
    Status status = set.what.calls[i].run(context_, workspaces_[i]);
    if (!status.ok()) return status;
  }
  return {};
}

void OpVariant::run(int64_t call) {
  const Status status = run_set(*sets_[static_cast<size_t>(call % num_sets())]);
  if (!status.ok()) throw std::runtime_error(status.message());
}

std::unique_ptr<BaselineVariant> BaselineVariant::create(const Problem& problem, double bytes,
                                                         Team& team) {
  std::unique_ptr<BaselineVariant> variant(new BaselineVariant());
  if (problem.op->multiplies()) {
    std::unique_ptr<OpenBlasBaseline> first = OpenBlasBaseline::create(problem);
    if (first == nullptr) return nullptr;
    const int64_t sets = rotating_sets(first->bytes());
    variant->name_ = text(openblas_name(), ", sgemm per group");
    variant->products_.push_back(std::move(first));
    while (static_cast<int64_t>(variant->products_.size()) < sets) {
      variant->products_.push_back(OpenBlasBaseline::create(problem));
    }
    for (const auto& set : variant->products_) set->run();
    return variant;
  }
  if (!problem.op->moves_bytes || bytes < 2) return nullptr;
  variant->team_ = &team;
  variant->copy_bytes_ = static_cast<int64_t>(bytes / 2);
  variant->num_copies_ = rotating_sets(2 * variant->copy_bytes_);
  const int64_t all = variant->copy_bytes_ * variant->num_copies_;
  variant->source_ = static_cast<char*>(variant->memory_.take("source", all));
  variant->target_ = static_cast<char*>(variant->memory_.take("target", all));
  std::memset(variant->source_, 1, static_cast<size_t>(all));
  std::memset(variant->target_, 2, static_cast<size_t>(all));
  variant->name_ = "copy of as many bytes";
  return variant;
}

void BaselineVariant::run(int64_t call) {
  if (!products_.empty()) {
    products_[static_cast<size_t>(call) % products_.size()]->run();
    return;
  }
  const int64_t at = call % num_copies_ * copy_bytes_;
  team_copy(*team_, source_ + at, target_ + at, copy_bytes_);
}

}  // namespace moire::tool
