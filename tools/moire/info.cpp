// moire info: the build, the devices, and which implementations each op has on each device.
#include <moire/explain.h>

#include <algorithm>
#include <cstdio>

#include "cases.h"
#include "commands.h"
#include "problem_fields.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

// Whether a context takes the op on a small problem: asked, not run.
bool takes(const Context& context, const Problem& problem) {
  Case what(problem, Operands::Content::kNone);
  return std::all_of(what.calls.begin(), what.calls.end(), [&](const Call& call) {
    return plan(context, call, what.operands).status.ok();
  });
}

// The values of a problem's `dtype` that each op takes on a context.
Json dtypes_by_op(const Context& context) {
  Json out = Json::object();
  for (const Op& op : all_ops()) {
    Problem problem;
    problem.op = &op;
    problem.groups = problem.topk = 2;
    problem.hidden = problem.ffn = problem.rows = 128;  // a tile of scales
    Json dtypes = Json::array();
    for (const auto& [word, format] : formats()) {
      static_cast<Format&>(problem) = format;
      if (!find_mistake(problem) && takes(context, problem)) dtypes.push_back(word);
    }
    out[std::string(op.name)] = dtypes;
  }
  return out;
}

// What one kind of device has, or why it is missing.
Json describe(Device device) {
  Json out = {{"device", device_name(device)}};
  const int count = device_count(device);
  out["count"] = count;
  if (count == 0) {
    const Result<std::string> none = device_info(device, 0);
    out["missing"] = none.ok() ? "" : none.status().message();
  }
  out["devices"] = Json::array();
  for (int i = 0; i < count; ++i) {
    const Result<std::string> info = device_info(device, i);
    if (info.ok()) out["devices"].push_back(Json::parse(info.value()));
  }
  Json ops = Json::object();
  for (const AvailableImplementation& found : available_implementations()) {
    if (found.device == device_name(device)) ops[found.op].push_back(found.name);
  }
  out["ops"] = ops;
  ContextOptions options;
  options.device = device;
  const Result<Context> context = Context::create(options);
  if (context.ok()) out["problem_ops"] = dtypes_by_op(context.value());
  return out;
}

std::string field_list(const Json& object) {
  std::vector<std::string> parts;
  for (const auto& [key, value] : object.items()) {
    if (key == "device" || key == "index" || key == "name") continue;
    parts.push_back(text(key, " ", value.is_string() ? value.get<std::string>() : value.dump()));
  }
  return join(parts, ", ");
}

const std::vector<std::string> kFloats = {"fp32", "bf16", "fp16"};
const std::vector<std::string> kEightBit = {"mxfp8", "mxfp8_fast", "fp8_block"};

// "floats, 8-bit" where all of these are among the dtypes, which come in that order.
std::string groups_of(const std::vector<std::string>& dtypes) {
  std::vector<std::string> words;
  for (const auto& [name, group] : {std::pair("floats", kFloats), std::pair("8-bit", kEightBit)}) {
    std::vector<std::string> found;
    for (const std::string& d : dtypes) {
      if (std::find(group.begin(), group.end(), d) != group.end()) found.push_back(d);
    }
    if (found == group) found = {name};
    words.insert(words.end(), found.begin(), found.end());
  }
  return join(words, ", ");
}

void print(const Json& info) {
  std::printf("%s\n", paint(Colour::kBold, "build").c_str());
  for (const auto& [key, value] : info["build"].items()) {
    std::printf("  %-12s %s\n", key.c_str(), value.get<std::string>().c_str());
  }
  for (const Json& kind : info["kinds"]) {
    std::printf("\n%s\n", paint(Colour::kBold, kind["device"].get<std::string>()).c_str());
    if (kind["count"] == 0) {
      const std::string missing = kind["missing"].get<std::string>();
      print_line(4, "  ", paint(Colour::kYellow, "none:"), " ", missing);
      continue;
    }
    for (const Json& device : kind["devices"]) {
      print_line(6, "  [", device["index"].get<int>(), "] ", device["name"].get<std::string>(),
                 " (", field_list(device), ")");
    }
    // Fastest first.
    Table table({"  problem op", "entry", "implementations", "dtypes"});
    for (const Op& op : all_ops()) {
      const std::string entry(op.entry());
      // A layer is made of the ops below it and has no implementations of its own.
      const bool is_op = kind["ops"].contains(entry);
      const std::string names =
          is_op ? join(kind["ops"][entry].get<std::vector<std::string>>(), ", ") : "of its ops";
      const auto dtypes = kind["problem_ops"][std::string(op.name)];
      table.add({"  " + std::string(op.name), entry, names,
                 groups_of(dtypes.get<std::vector<std::string>>())});
    }
    std::printf("\n%s", table.to_string().c_str());
    print_line(2, "  floats: ", join(kFloats, ", "), "; 8-bit: ", join(kEightBit, ", "),
               "; the first implementation that takes a call runs it");
  }
}

}  // namespace

int run_info(const Options& options) {
  Json info = {{"version", MOIRE_TOOL_VERSION}, {"build", Json::parse(build_info())}};
  info["kinds"] = {describe(Device::kCpu), describe(Device::kCuda)};
  options.json ? print_json(info) : print(info);
  return kExitOk;
}

}  // namespace moire::tool
