#include "cases.h"

#include <moire/ops.h>

#include <bit>
#include <deque>
#include <map>
#include <memory>
#include <utility>

#include "arguments.h"
#include "commands.h"
#include "machine.h"
#include "reference/outputs.h"
#include "reference/recipe.h"
#include "sample.h"
#include "staging/entry.h"
#include "text.h"

namespace moire::tool {
namespace {

using staging::Entry;

// The arguments, with copies of what the call is going to add to.
template <class A>
class Before {
 public:
  explicit Before(const A& now)
      : args(now), walk_([this](void* memory, int64_t bytes, Role role) -> void* {
          if (role != Role::kInOut || memory == nullptr) return memory;
          const auto* first = static_cast<const std::byte*>(memory);
          return copies_.emplace_back(first, first + bytes).data();
        }) {
    visit_fields(args, walk_);
  }
  Before(const Before&) = delete;
  Before& operator=(const Before&) = delete;

  A args;

 private:
  std::deque<std::vector<std::byte>> copies_;
  staging::PointerWalk walk_;
};

// What the fields hold in the layer names its outputs.
template <class A, class Want>
std::vector<OutputErrors> judged(const OpCall& call, const A& args, const Want& want) {
  std::vector<OutputErrors> outputs = reference::compare_outputs(args, want);
  for (OutputErrors& e : outputs) e.name = std::string(call.name_of(e.name));
  return outputs;
}

template <class A, class Want>
Call::Judge judge_by(const OpCall& call, const A& args, Want want) {
  return [&call, args, want = std::move(want)] { return judged(call, args, want); };
}

// What the reference says, asked now; of the MLP in FP8 once the call has stored what lies between
// its products.
template <class A>
Call::Judge expect(const OpCall& call, const A& args) {
  if constexpr (requires { args.recipe; }) {
    if (args.recipe != MOIRE_RECIPE_AS_STORED) {
      if constexpr (requires { args.z; }) {  // an MLP
        return [&call, args, before = std::make_shared<Before<A>>(args)] {
          return judged(call, args, reference::quantized(before->args));
        };
      } else {
        return judge_by(call, args, reference::quantized(args));
      }
    }
  }
  return judge_by(call, args, reference::truth(args));
}

// Whether these are FAST sums, which then are those of FP8 tensor cores.
template <class A>
bool sum_by_tensor_cores([[maybe_unused]] A& args) {
  if constexpr (requires { args.accumulation; }) {
    return std::exchange(args.accumulation, MOIRE_ACCUMULATE_EMULATED) == MOIRE_ACCUMULATE_FAST;
  } else if constexpr (requires { args.emulate_accumulation; }) {
    return args.recipe >= MOIRE_RECIPE_MXFP8_FAST &&
           std::exchange(args.emulate_accumulation, 1) == 0;
  }
  return false;
}

// A GPU may sum FAST products by its FP8 tensor cores: each output is one or the other.
template <class A>
Call::Judge expect_on(Device device, const OpCall& call, const A& args) {
  Call::Judge exact = expect(call, args);
  A other = args;
  if (device == Device::kCpu || !sum_by_tensor_cores(other)) return exact;
  return [exact, by_tensor_cores = expect(call, other)] {
    std::vector<OutputErrors> outputs = exact();
    reference::or_else(outputs, by_tensor_cores);
    return outputs;
  };
}

// What a layer's forward keeps beside its result; what it reads in place of weights.
bool is_saved(std::string_view name, Role role) { return is_written(role) && name != "y"; }
bool is_prepared(std::string_view name, Role) { return name.ends_with("_prepared"); }

// Bytes of the memory of those fields.
class BytesOf : public MemoryVisitor {
 public:
  using Takes = bool(std::string_view name, Role role);
  BytesOf(Takes& takes, Call::Kept& kept) : takes_(takes), kept_(kept) {}
  void field(const char* name, const moire_tensor& t, Role role, const char*) {
    add(name, role, TensorView(t).num_bytes());
  }
  void field(const char* name, const moire_quantized& q, Role role, const char*) {
    add(name, role, TensorView(q.data).num_bytes() + TensorView(q.scales).num_bytes());
  }
  void field(const char*, const auto&, auto&&...) {}

 private:
  void add(const std::string& name, Role role, int64_t bytes) {
    if (takes_(name, role) && bytes > 0) kept_[name] = bytes;
  }
  Takes& takes_;
  Call::Kept& kept_;
};

double flops_of(const OpCall& call, const Problem& p) {
  const auto rows = static_cast<double>(p.rows), hidden = static_cast<double>(p.hidden),
             out = static_cast<double>(p.columns_of_y()), ffn = static_cast<double>(p.ffn);
  constexpr unsigned kFc1All = kFc1 | kFc1Dgrad | kFc1Wgrad, kFc2All = kFc2 | kFc2Dgrad | kFc2Wgrad;
  const auto products = static_cast<unsigned>(call.products);
  const double fc1 = p.is_gated() ? 2 * hidden : hidden;  // for a column of act
  const double columns =
      std::popcount(products & kFc1All) * fc1 + std::popcount(products & kFc2All) * out;
  const double size = call.size == 'H' ? hidden : call.size == 'N' ? out : ffn;
  return 2.0 * columns * rows * ffn + call.flops_per_row * rows * size;
}

template <class A>
Status run_entry(const Context& context, const A& args) {
  if (context.device() == Device::kCpu || context.is_explaining()) {
    return Entry<A>::kRun(context, args);
  }
  static staging::StagedCall staged;
  return staged.run(context, args, Entry<A>::kRun);
}

// The weight of a layer becomes a prepared one, in memory of the operands.
Status prepare(const Context& context, Operands& operands, const auto& layer, moire_weight& w,
               moire_prepared_weight& prepared) {
  PrepareWeightArgs args;
  args.w = w;
  args.recipe = layer.recipe;
  args.fractional_scales = layer.fractional_scales;
  args.dequantized = layer.recipe == MOIRE_RECIPE_MXFP8 && operands.problem().seed % 2 == 0;
  size_t bytes = 0;
  Status status = prepare_weight_form(context, args, &args.prepared);
  if (status.ok()) status = prepare_weight_workspace(context, args, &bytes);
  if (!status.ok()) return status;
  moire_tensor& memory = args.prepared.memory;
  memory.data = operands.output("prepared", DType::kUint8, {memory.shape[0]}).data;
  args.workspace = operands.workspace(bytes);
  if (operands.has_content()) status = run_entry(context, args);
  prepared = args.prepared;
  w = {.tensor = {}, .list = nullptr, .layout = w.layout};
  return status;
}
// All weights of a call whose problem says so; others stay.
template <class A>
Status prepare_weights(const Context& context, Operands& operands, A& args) {
  Status status;
  if constexpr (requires { args.w_prepared; }) {
    status = prepare(context, operands, args, args.w, args.w_prepared);
  } else if constexpr (requires { args.w1_prepared; }) {
    status = prepare(context, operands, args, args.w1, args.w1_prepared);
    if (status.ok()) status = prepare(context, operands, args, args.w2, args.w2_prepared);
  }
  return status;
}

// One call of a case, its workspace to come.
template <class A>
Call make_call(const OpCall& what, Arguments& arguments, Operands& operands) {
  const Problem& problem = operands.problem();
  const A args = arguments.of<A>(what);
  Call call;
  call.entry = what.entry;
  call.args = args;
  call.flops = flops_of(what, problem);
  // As it is run: with prepared weights from the first context on, which knows their forms.
  const auto as_run = std::make_shared<A>(args);
  const auto is_ready = std::make_shared<bool>(!problem.prepared);
  const auto ready = [as_run, is_ready, &operands, kept = call.prepared](const Context& context) {
    if (std::exchange(*is_ready, true)) return Status();
    Status status = prepare_weights(context, operands, *as_run);
    visit_fields(*as_run, BytesOf(is_prepared, *kept));
    return status;
  };
  const auto with = [as_run](Workspace given) {
    A filled = *as_run;
    if constexpr (requires { filled.workspace; }) filled.workspace = given;
    return filled;
  };
  call.run = [ready, with](const Context& context, Workspace given) {
    const Status status = ready(context);
    return status.ok() ? run_entry(context, with(given)) : status;
  };
  call.stage = [with](staging::StagedCall& staged, Workspace given) { staged.add(with(given)); };
  call.on_device = [with](staging::StagedCall& staged, Workspace given) {
    const A there = staged.on_device(with(given));
    return [there](const Context& context) { return Entry<A>::kRun(context, there); };
  };
  if constexpr (Entry<A>::kHasWorkspace) {
    call.workspace = [ready, as_run](const Context& context, size_t* bytes) {
      const Status status = ready(context);
      return status.ok() ? Entry<A>::kWorkspace(context, *as_run, bytes) : status;
    };
  }
  call.expect = [&what, args](Device device) { return expect_on(device, what, args); };
  // In FP8 an MLP is judged whole: a row of its weights' blocks does not stand for itself.
  const bool is_mlp_in_8_bits = problem.is_quantized() && what.entry.starts_with("grouped_mlp");
  if constexpr (requires { one_row(operands, args, 0, 0); }) {
    if (!is_mlp_in_8_bits) {
      call.expect_row = [&what, &operands, args](Device device, int64_t row, int64_t group) {
        return expect_on(device, what, one_row(operands, args, row, group));
      };
    }
  }
  if constexpr (requires { args.recipe, args.y; })
    visit_fields(args, BytesOf(is_saved, call.saved));
  return call;
}

}  // namespace

Case::Case(const Problem& problem, Operands::Content content) : operands(problem, content) {
  using Make = Call (*)(const OpCall&, Arguments&, Operands&);
#define MOIRE_MAKE(name) {#name, make_call<Args<moire_##name##_args>>},
  static const std::map<std::string_view, Make> entries = {MOIRE_FOR_EACH_DEFINED_OP(
      MOIRE_MAKE, MOIRE_MAKE) MOIRE_FOR_EACH_LAYER(MOIRE_MAKE, MOIRE_MAKE)};
#undef MOIRE_MAKE
  if (problem.op->is_of_ranks()) {
    calls = make_rank_calls(operands);
    return;
  }
  Arguments arguments(operands);
  for (const OpCall& call : problem.op->calls) {
    if (call.is_of_scales() && !problem.is_quantized()) continue;
    calls.push_back(entries.at(call.entry)(call, arguments, operands));
  }
}

Plan plan(const Context& context, const Call& call, Operands& operands) {
  Plan out;
  out.status = call.workspace(context, &out.workspace_bytes);
  if (!out.status.ok()) return out;
  const Context explaining = context.explaining();
  out.status = call.run(explaining, operands.workspace(out.workspace_bytes));
  out.steps = explaining.explanation();
  return out;
}

void require_memory_for(const Context& context, const Problem& problem) {
  Case what(problem, Operands::Content::kNone);
  for (const Call& call : what.calls) plan(context, call, what.operands);
  const int64_t needed = what.operands.bytes() + Operands::kRoutingBytes * problem.dropped;
  const int64_t free = available_memory_bytes();
  if (needed <= free) return;
  throw UsageError("found a problem of at least ", human_bytes(needed), ", needed at most the ",
                   human_bytes(free), " that this machine has free: ", to_line(problem),
                   "; --set rows=64 --set groups=8 makes it smaller");
}

}  // namespace moire::tool
