// Call: one drawn call of one op through the C ABI, whatever its struct.
#pragma once

#include <moire/fields.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/fuzz/draw.h"
#include "tests/fuzz/memory.h"
#include "tests/fuzz/plan.h"
#include "tests/fuzz/random.h"

namespace moire::fuzz {

// A stretch of memory that the arguments name, as they are now.
struct Piece {
  std::string name;
  void** pointer;        // to its address, in the struct or in a list
  moire_tensor* tensor;  // of which it is the data; may be null
  int64_t bytes;
  Role role;
  int32_t dtype;  // 0: none
};

// A field that is no memory.
struct Value {
  std::string name;
  void* at;
  size_t bytes;
  bool is_integer;
};

class Call {
 public:
  explicit Call(uint64_t seed) : random(seed), plan(random) {}
  virtual ~Call() = default;

  virtual int32_t run(const moire_context* context) = 0;
  virtual bool has_workspace() const = 0;
  virtual int32_t size(const moire_context* context, size_t* bytes) = 0;
  virtual std::vector<Piece> pieces() = 0;
  virtual std::vector<moire_weight*> unused_weights() = 0;
  virtual std::vector<Value> values() = 0;
  virtual std::string text() const = 0;  // every field
  virtual size_t& struct_size() = 0;
  // Null where the struct has none.
  moire_groups* groups = nullptr;
  moire_workspace* workspace = nullptr;

  Random random;
  const Plan plan;
  Memory memory;
};

struct Op {
  const char* name;
  std::unique_ptr<Call> (*draw)(uint64_t seed);
};
std::vector<Op> every_op();

}  // namespace moire::fuzz
