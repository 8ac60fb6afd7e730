// What `moire bench` times: an op on rotating sets of operands, and the baselines beside it.
#pragma once

#include <moire/context.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "baseline.h"
#include "cases.h"
#include "harness.h"
#include "machine.h"

namespace moire::tool {

// How many copies of `set_bytes` span three last-level caches, within the memory there is.
int64_t rotating_sets(int64_t set_bytes);

// The library's op. Every set has run once when the constructor is done.
class OpVariant {
 public:
  // kUnsupported, or whatever else the library answers. Failures while timing throw.
  static Result<std::unique_ptr<OpVariant>> create(const Context& context, const Problem& problem);

  void run(int64_t call);
  double flops() const { return flops_; }
  double bytes() const { return bytes_; }  // as the library explains the call
  const std::string& implementation() const { return implementation_; }
  int64_t num_sets() const { return static_cast<int64_t>(sets_.size()); }
  int64_t set_bytes() const { return sets_[0]->operands.bytes(); }

 private:
  struct Set {
    explicit Set(const Problem& problem)
        : operands(problem, Operands::Content::kNormal), what(make_case(operands)) {}
    Operands operands;
    Case what;
  };
  explicit OpVariant(const Context& context) : context_(context) {}
  Status prepare(const Problem& problem);
  Status run_set(const Set& set);

  Context context_;
  std::vector<std::unique_ptr<Set>> sets_;
  std::vector<Workspace> workspaces_;  // one per call of the case, shared by the sets
  std::string implementation_;
  double flops_ = 0, bytes_ = 0;
};

// The baseline of an op on rotating sets: OpenBLAS for products, a plain copy of as many bytes for
// what only moves them; neither for the others.
class BaselineVariant {
 public:
  static std::unique_ptr<BaselineVariant> create(const Problem& problem, double bytes, Team& team);
  void run(int64_t call);
  const std::string& name() const { return name_; }

 private:
  BaselineVariant() : memory_(Memory::Backing::kPages) {}

  std::string name_;
  std::vector<std::unique_ptr<OpenBlasBaseline>> products_;
  Team* team_ = nullptr;
  Memory memory_;
  int64_t copy_bytes_ = 0, num_copies_ = 0;
  char* source_ = nullptr;
  char* target_ = nullptr;
};

}  // namespace moire::tool
