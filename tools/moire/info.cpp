// moire info: the build, the devices, and which implementations each op has on each device.
#include <moire/explain.h>

#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

using Json = nlohmann::ordered_json;

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

void print(const Json& info) {
  std::printf("%s\n", paint(Colour::kBold, "build").c_str());
  for (const auto& [key, value] : info["build"].items()) {
    std::printf("  %-12s %s\n", key.c_str(), value.get<std::string>().c_str());
  }
  for (const Json& kind : info["kinds"]) {
    std::printf("\n%s\n", paint(Colour::kBold, kind["device"].get<std::string>()).c_str());
    if (kind["count"] == 0) {
      const std::string missing = kind["missing"].get<std::string>();
      std::printf("  %s %s\n", paint(Colour::kYellow, "none:").c_str(), missing.c_str());
      continue;
    }
    for (const Json& device : kind["devices"]) {
      std::printf("  [%d] %s (%s)\n", device["index"].get<int>(),
                  device["name"].get<std::string>().c_str(), field_list(device).c_str());
    }
    Table table({"  op", "implementations, fastest first"},
                {Table::Align::kLeft, Table::Align::kLeft});
    for (const auto& [op, names] : kind["ops"].items()) {
      table.add({"  " + op, join(names.get<std::vector<std::string>>(), ", ")});
    }
    std::printf("\n%s", table.to_string().c_str());
  }
}

}  // namespace

int run_info(const InfoOptions& options) {
  Json info = {{"version", MOIRE_TOOL_VERSION}, {"build", Json::parse(build_info())}};
  info["kinds"] = {describe(Device::kCpu), describe(Device::kCuda)};
  if (options.common.json) {
    std::printf("%s\n", info.dump().c_str());
  } else {
    print(info);
  }
  return kExitOk;
}

}  // namespace moire::tool
