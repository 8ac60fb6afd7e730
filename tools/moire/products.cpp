#include "products.h"

#include <initializer_list>
#include <map>
#include <string>

namespace moire::tool {

std::vector<Product> products_of(const Problem& p, int64_t element_bytes,
                                 const std::function<char*(int64_t elements)>& take) {
  const std::vector<int64_t> splits = make_splits(p);
  std::map<std::string, char*> operands;  // each is made when a pass first needs it
  std::vector<Product> products;
  // Passes of one linear layer, group by group.
  const auto add = [&](const std::string& layer, int64_t out, int64_t in,
                       std::initializer_list<Products> passes) {
    const auto at = [&](const char* name, int64_t elements, int64_t first) {
      char*& memory = operands[layer + name];
      if (memory == nullptr) memory = take(elements);
      return memory + first * element_bytes;
    };
    int64_t row = 0;
    for (int64_t g = 0; g < p.groups; ++g) {
      const int64_t rows = splits[static_cast<size_t>(g)];
      const auto x = [&](const char* name) { return at(name, p.rows * in, row * in); };
      const auto y = [&](const char* name) { return at(name, p.rows * out, row * out); };
      const auto w = [&](const char* name) { return at(name, p.groups * out * in, g * out * in); };
      for (const Products pass : passes) {
        if (rows == 0 || (p.op->products() & pass) == 0) continue;
        if ((pass & (kFc1 | kFc2)) != 0) {
          products.push_back({false, true, rows, out, in, x("x"), w("w"), y("y")});
        } else if ((pass & kDgrads) != 0) {
          products.push_back({false, false, rows, in, out, y("grad_y"), w("w"), x("grad_x")});
        } else {
          products.push_back({true, false, out, in, rows, y("grad_y"), x("x"), w("grad_w")});
        }
      }
      row += rows;
    }
  };
  add("fc1 ", p.fc1_width(), p.hidden, {kFc1});
  add("fc2 ", p.columns_of_y(), p.ffn, {kFc2, kFc2Dgrad, kFc2Wgrad});
  add("fc1 ", p.fc1_width(), p.hidden, {kFc1Dgrad, kFc1Wgrad});
  return products;
}

}  // namespace moire::tool
