// Text from parts (gcc 12 has no <format>). Parts are turned into text only here, so that a check
// that holds costs no text: pass a tensor, not to_string(tensor).
#pragma once

#include <moire/tensor.h>

#include <concepts>
#include <cstdio>
#include <string>
#include <string_view>

namespace moire {

inline std::string to_text(std::string_view s) { return std::string(s); }
template <std::integral T>
std::string to_text(T value) {
  return std::to_string(value);
}
template <std::floating_point T>
std::string to_text(T value) {
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), "%g", static_cast<double>(value));
  return buffer;
}

inline std::string to_text(const moire_tensor& t) { return to_string(TensorView(t)); }
inline std::string to_text(DType dtype) { return dtype_name(dtype); }

// concat("k = ", 64) == "k = 64"
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::string out;
  (out.append(to_text(parts)), ...);
  return out;
}

// `text` as a JSON string, quotes included.
std::string json_quote(std::string_view text);

}  // namespace moire
