// prepare_weight on the CPU: the codes, which its products decode where they pack them; decoded
// ones would gain nothing.
#include "backend/cpu/implementations.h"
#include "core/format.h"
#include "core/prepared_weight.h"

namespace moire::cpu {
namespace {

Reason supports(const DeviceState&, const PrepareWeightArgs& args) {
  if (args.prepared.form == static_cast<int32_t>(WeightForm::kCodes)) return {};
  return concat("prepared has form ", args.prepared.form, ", which is a GPU's");
}

Status run(const Context& context, const PrepareWeightArgs& args) {
  return kQuantizeWeight.run(context.within({"prepare_weight", "w"}),
                             quantize_step(args, copies_of(args.prepared)));
}

std::string policy(const DeviceState&, const PrepareWeightArgs& args) {
  return concat("codes, ", args.prepared.memory.shape[0], " bytes");
}

}  // namespace

WeightForm prepared_form(const DeviceState&, const PrepareWeightArgs&) {
  return WeightForm::kCodes;
}

const Implementation<PrepareWeightArgs> kPrepareWeight = {
    .name = "cpu",
    .device = Device::kCpu,
    .supports = supports,
    .workspace = no_workspace,
    .policy = policy,
    .run = run,
};

}  // namespace moire::cpu
