// moire errors: how far each recipe's whole MLP is from the exact function of its inputs.
#include <moire/grouped_mlp.h>

#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "cases.h"
#include "commands.h"
#include "problem_source.h"
#include "reference/grouped_mlp.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

struct Row {
  const char* name;
  std::vector<std::string> settings;
};

const Row kRows[] = {
    {"fp32", {"dtype=fp32"}},
    {"fp16", {"dtype=fp16"}},
    {"bf16", {"dtype=bf16"}},
    {"mxfp8", {"dtype=mxfp8"}},
    {"mxfp8, gradients E5M2", {"dtype=mxfp8", "element=e5m2"}},
    {"mxfp8_fast, emulated", {"dtype=mxfp8_fast", "emulated=yes"}},
    {"fp8_block", {"dtype=fp8_block"}},
    {"fp8_block, fractional", {"dtype=fp8_block", "fractional=yes"}},
    {"fp8_block, emulated", {"dtype=fp8_block", "emulated=yes"}},
};

constexpr const char* kOutputs[] = {"y", "grad_x", "grad_w1", "grad_w2", "grad_probs"};

// Root mean square of got - want over that of want.
class Error {
 public:
  void add(const TensorView& got, const reference::Matrix& want) {
    const bool is_vector = got.rank == 1;
    for (int64_t i = 0; i < want.rows; ++i) {
      for (int64_t j = 0; j < want.columns; ++j) {
        const double value = want.at(i, j).value;
        const double at = reference::read_element(got, is_vector ? 0 : i, is_vector ? i : j);
        difference_ += (at - value) * (at - value);
        size_ += value * value;
      }
    }
  }
  void add(const moire_weight& got, const reference::Weights& want) {
    for (size_t g = 0; g < want.size(); ++g) {
      add(Weight(got).matrix(static_cast<int64_t>(g)), want[g]);
    }
  }
  double value() const { return std::sqrt(difference_ / size_); }

 private:
  double difference_ = 0, size_ = 0;
};

void run_or_throw(const Status& status) {
  if (!status.ok()) throw UsageError(status.message());
}

template <class A>
void run(const Context& context, Operands& operands, A args, Status (*op)(const Context&, const A&),
         Status (*size)(const Context&, const A&, size_t*)) {
  size_t bytes = 0;
  run_or_throw(size(context, args, &bytes));
  args.workspace = operands.workspace(bytes);
  run_or_throw(op(context, args));
}

// In the order of kOutputs.
std::vector<double> errors_of(const Context& context, const Problem& shape, const Row& row) {
  const Result<Problem> changed = with_settings(shape, row.settings);
  run_or_throw(changed.status());
  const Problem& p = changed.value();
  Operands operands(p, Operands::Content::kNormal);
  const MlpArgs args = make_mlp_args(operands);
  run(context, operands, args.forward, grouped_mlp, grouped_mlp_workspace);
  run(context, operands, args.backward, grouped_mlp_backward, grouped_mlp_backward_workspace);

  // The exact backward starts from the exact z.
  const auto forward = reference::grouped_mlp(args.forward, reference::Rounding::kNone);
  const TensorView z = operands.output("exact z", DType::kFP64, {p.capacity(), 2 * p.ffn});
  for (size_t i = 0; i < forward.z.values.size(); ++i) {
    static_cast<double*>(z.data)[i] = forward.z.values[i].value;
  }
  GroupedMlpBackwardArgs exact = args.backward;
  exact.z = z;
  const auto gradients = reference::grouped_mlp_backward(exact, reference::Rounding::kNone);

  Error errors[5];
  errors[0].add(args.forward.y, forward.y);
  errors[1].add(args.backward.grad_x, gradients.grad_x);
  errors[2].add(args.backward.grad_w1, gradients.grad_w1);
  errors[3].add(args.backward.grad_w2, gradients.grad_w2);
  if (p.probs) errors[4].add(args.backward.grad_probs, gradients.grad_probs);
  std::vector<double> values;
  for (const Error& e : errors) values.push_back(e.value());
  return values;
}

void print_json(const Problem& p, const Row& row, const std::vector<double>& errors) {
  nlohmann::ordered_json line = {{"problem", to_line(p)}, {"recipe", row.name}};
  for (size_t i = 0; i < errors.size(); ++i) line["relative_rms"][kOutputs[i]] = errors[i];
  std::printf("%s\n", line.dump().c_str());
}

void print_row(const Row& row, const std::vector<double>& errors) {
  std::string line = text("| ", row.name, " |");
  for (const double e : errors) {
    char number[32];
    std::snprintf(number, sizeof number, " %.1e |", e);
    line += number;
  }
  std::printf("%s\n", line.c_str());
}

}  // namespace

int run_errors(const Options& options) {
  const Context context = open_context(options);
  for (const Problem& p : collect_problems(options)) {
    if (!p.is("mlp") || p.rows == 0 || !options.dtypes.empty()) {
      throw UsageError(
          text("errors: found \"", to_line(p),
               "\", needed op=mlp with rows, and no --dtype: each recipe has its own"));
    }
    if (!options.json) {
      std::printf("%s\n\n| Recipe | %s |\n|---|---|---|---|---|---|\n",
                  wrap_data(text("`", to_line(p), "`")).c_str(),
                  join({std::begin(kOutputs), std::end(kOutputs)}, " | ").c_str());
    }
    Progress progress("recipes", static_cast<int64_t>(std::size(kRows)));
    for (const Row& row : kRows) {
      progress.show(&row - kRows, row.name);
      const std::vector<double> errors = errors_of(context, p, row);
      progress.clear();
      options.json ? print_json(p, row, errors) : print_row(row, errors);
      std::fflush(stdout);
    }
  }
  return kExitOk;
}

}  // namespace moire::tool
