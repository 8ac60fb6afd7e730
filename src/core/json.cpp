// Text as JSON, and explanations.
#include <moire/explain.h>

#include "core/format.h"

namespace moire {

std::string json_quote(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20) {
      char buffer[8];
      std::snprintf(buffer, sizeof(buffer), "\\u%04x", static_cast<unsigned>(c));
      out += buffer;
      continue;
    }
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

std::string to_json(const Explanation& explanation) {
  std::string out = "[";
  for (const Step& s : explanation) {
    if (out.size() > 1) out += ", ";
    out += concat("{\"op\": ", json_quote(s.op), ", \"problem\": ", json_quote(s.problem),
                  ", \"implementation\": ", json_quote(s.implementation),
                  ", \"policy\": ", json_quote(s.policy), ", \"launches\": ", s.launches,
                  ", \"bytes_read\": ", s.bytes_read, ", \"bytes_written\": ", s.bytes_written,
                  ", \"workspace_bytes\": ", s.workspace_bytes, ", \"refused\": [");
    for (size_t i = 0; i < s.refused.size(); ++i) {
      out += concat(i == 0 ? "" : ", ",
                    "{\"implementation\": ", json_quote(s.refused[i].implementation),
                    ", \"reason\": ", json_quote(s.refused[i].reason), "}");
    }
    out += "]}";
  }
  return out + "]";
}

}  // namespace moire
