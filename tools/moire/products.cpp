#include "products.h"

namespace moire::tool {
namespace {

// One linear layer; an operand is made when a pass first needs it.
class Linear {
 public:
  Linear(const Problem& problem, int64_t out, int64_t in, int64_t element_bytes,
         const std::function<char*(int64_t elements)>& take)
      : groups_(problem.groups),
        out_(out),
        in_(in),
        size_(element_bytes),
        take_(take),
        splits_(make_splits(problem)),
        x_{problem.rows * in},
        y_{problem.rows * out},
        w_{problem.groups * out * in},
        grad_x_(x_),
        grad_y_(y_),
        grad_w_(w_) {}

  void add(bool forward, bool dgrad, bool wgrad, std::vector<Product>& products) {
    for (int64_t g = 0, row = 0; g < groups_; ++g) {
      const int64_t rows = splits_[static_cast<size_t>(g)];
      const int64_t x = row * in_, y = row * out_, w = g * out_ * in_;
      row += rows;
      if (rows == 0) continue;
      if (forward)
        products.push_back({false, true, rows, out_, in_, at(x_, x), at(w_, w), at(y_, y)});
      if (dgrad) {
        products.push_back(
            {false, false, rows, in_, out_, at(grad_y_, y), at(w_, w), at(grad_x_, x)});
      }
      if (wgrad) {
        products.push_back(
            {true, false, out_, in_, rows, at(grad_y_, y), at(x_, x), at(grad_w_, w)});
      }
    }
  }

 private:
  struct Operand {
    int64_t elements;
    char* memory = nullptr;
  };
  void* at(Operand& operand, int64_t element) {
    if (operand.memory == nullptr) operand.memory = take_(operand.elements);
    return operand.memory + element * size_;
  }

  int64_t groups_, out_, in_, size_;
  const std::function<char*(int64_t elements)>& take_;
  std::vector<int64_t> splits_;
  Operand x_, y_, w_, grad_x_, grad_y_, grad_w_;
};

}  // namespace

std::vector<Product> products_of(const Problem& p, int64_t element_bytes,
                                 const std::function<char*(int64_t elements)>& take) {
  Linear fc1(p, 2 * p.ffn, p.hidden, element_bytes, take),
      fc2(p, p.columns_of_y(), p.ffn, element_bytes, take);
  const auto has = [all = p.op->products()](Products pass) { return (all & pass) != 0; };
  std::vector<Product> products;
  fc1.add(has(kFc1), false, false, products);
  fc2.add(has(kFc2), has(kFc2Dgrad), has(kFc2Wgrad), products);
  fc1.add(false, has(kFc1Dgrad), has(kFc1Wgrad), products);
  return products;
}

}  // namespace moire::tool
