// fuzz [--seconds S] [--seed N] [--cases N] [--op NAME]: random calls of every op through the C
// ABI.
//
// Of each: it returns; on an error it says why, and nothing was written; on success what lies
// beside the outputs, and every input, is as it was, and half of the successes are run again with
// another number of threads and another instruction set, to the same bits (of a NaN, that it is
// one). Of some successes every tensor is made one of no dtype, and every number -2^31, which the
// call has to refuse: a field that nothing checks does not stay unseen. A failure prints the call
// and the command that repeats it.
#include <moire/fields.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "backend/cpu/simd_targets.h"
#include "tests/fuzz/call.h"
#include "tests/fuzz/mutate.h"

// Highway's headers come after simd_targets.h.
#include <hwy/targets.h>

namespace moire::fuzz {
namespace {

constexpr unsigned kLongestCall = 20;  // seconds: no drawn call takes a tenth of one

// What a signal handler prints.
char current[512];

void print_current() { static_cast<void>(!write(STDERR_FILENO, current, std::strlen(current))); }

void on_signal(int number) {
  const char* const text =
      number == SIGALRM ? "fuzz: a call did not return\n" : "fuzz: a call crashed\n";
  static_cast<void>(!write(STDERR_FILENO, text, std::strlen(text)));
  print_current();
  _exit(1);
}

extern "C" void __sanitizer_set_death_callback(void (*)()) __attribute__((weak));

void install_handlers() {
  signal(SIGALRM, on_signal);
  if (__sanitizer_set_death_callback != nullptr) {
    __sanitizer_set_death_callback(print_current);  // it reports crashes better than we do
    return;
  }
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) signal(number, on_signal);
}

template <class Float>
bool same_floats(const void* a, const void* b, int64_t bytes, Float infinity, Float magnitude) {
  for (int64_t i = 0; i < bytes; i += int64_t{sizeof(Float)}) {
    Float x, y;
    std::memcpy(&x, static_cast<const char*>(a) + i, sizeof(x));
    std::memcpy(&y, static_cast<const char*>(b) + i, sizeof(y));
    const bool are_nan = (x & magnitude) > infinity && (y & magnitude) > infinity;
    if (x != y && !are_nan) return false;
  }
  return true;
}

bool same_values(int32_t dtype, const void* a, const void* b, int64_t bytes) {
  if (bytes == 0) return true;
  switch (dtype) {
    case MOIRE_FP32:
      return same_floats<uint32_t>(a, b, bytes, 0x7F800000, 0x7FFFFFFF);
    case MOIRE_BF16:
      return same_floats<uint16_t>(a, b, bytes, 0x7F80, 0x7FFF);
    case MOIRE_FP16:
      return same_floats<uint16_t>(a, b, bytes, 0x7C00, 0x7FFF);
    default:
      return std::memcmp(a, b, static_cast<size_t>(bytes)) == 0;
  }
}

// The CPU with so many threads.
class Context {
 public:
  explicit Context(int32_t num_threads) {
    moire_context_options options = {};
    options.struct_size = sizeof(options);
    options.num_threads = num_threads;
    if (moire_context_create(&options, &context_) != MOIRE_OK) {
      std::fprintf(stderr, "fuzz: %s\n", moire_last_error());
      std::exit(1);
    }
  }
  ~Context() { moire_context_destroy(context_); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  int32_t run(Call& call) const {
    alarm(kLongestCall);
    const int32_t code = call.run(context_);
    message = code == MOIRE_OK ? "" : moire_last_error();
    static_cast<void>(moire_context_check(context_));  // what was found is none of our business
    alarm(0);
    return code;
  }
  moire_context* get() const { return context_; }
  mutable std::string message;  // of the last run

 private:
  moire_context* context_ = nullptr;
};

// While it lives, the library runs without the widest instruction set: a machine with AVX-512
// becomes one with AVX2.
class OtherTarget {
 public:
  OtherTarget() {
    constexpr int64_t kWithoutFma = HWY_SCALAR | HWY_EMU128;
    const int64_t all = hwy::SupportedTargets() & HWY_TARGETS & ~kWithoutFma;
    const int64_t widest = all & -all;
    hwy::GetChosenTarget().Update(all == widest ? all : all ^ widest);
  }
  ~OtherTarget() { hwy::GetChosenTarget().Update(hwy::SupportedTargets()); }
  OtherTarget(const OtherTarget&) = delete;
  OtherTarget& operator=(const OtherTarget&) = delete;
};

struct Counts {
  int64_t calls = 0, successes = 0;
};

class Fuzzer {
 public:
  // Empty, or what is wrong.
  Complaint try_one(const Op& op, uint64_t seed, Counts& counts);
  std::string described;   // the last call
  bool is_chatty = false;  // prints it before it runs, as it may not return

 private:
  static Complaint judge(Call& call, int32_t code, const Mutation& mutation,
                         const Context& context);
  Complaint run_again(Call& call);
  Complaint find_unchecked(Call& call) const;

  const Context one_{1}, three_{3};
};

Complaint Fuzzer::try_one(const Op& op, uint64_t seed, Counts& counts) {
  const std::unique_ptr<Call> call = op.draw(seed);
  size_t needed = 0;
  if (call->has_workspace() && call->size(one_.get(), &needed) == MOIRE_OK) {
    size_t again = 0;  // as run_again() needs it
    {
      const OtherTarget target;
      static_cast<void>(call->size(three_.get(), &again));
    }
    const int64_t bytes =
        static_cast<int64_t>(call->random.percent(30) ? needed : std::max(needed, again));
    *call->workspace = {call->memory.take("workspace", bytes, 256), static_cast<size_t>(bytes)};
  }
  Mutation mutation;
  if (call->random.percent(45)) mutation = mutate(*call, needed);
  if (call->has_workspace() && !mutation.what.empty()) {
    size_t ignored = 0;
    static_cast<void>(call->size(one_.get(), &ignored));
  }
  described = std::string(op.name) + ", " + (mutation.what.empty() ? "as drawn" : mutation.what) +
              "\n" + call->text();
  if (is_chatty) std::fprintf(stderr, "%s", described.c_str());
  call->memory.remember();
  ++counts.calls;
  const int32_t code = one_.run(*call);
  counts.successes += code == MOIRE_OK;
  Complaint found = judge(*call, code, mutation, one_);
  if (!found.empty() || code != MOIRE_OK) return found;
  if (call->random.percent(20)) return find_unchecked(*call);
  return call->random.percent(50) ? run_again(*call) : Complaint();
}

Complaint Fuzzer::judge(Call& call, int32_t code, const Mutation& mutation,
                        const Context& context) {
  if (Complaint damage = call.memory.damage(); !damage.empty()) return damage;
  const bool is_known = code == MOIRE_OK || code == MOIRE_INVALID_ARGUMENT ||
                        code == MOIRE_UNSUPPORTED || code == MOIRE_OUT_OF_MEMORY;
  if (!is_known) return "the code is " + std::to_string(code) + ": " + context.message;
  if (code != MOIRE_OK && context.message.empty()) return "an error without a message";
  if (code == MOIRE_OK && mutation.must_fail) return "accepted, but is wrong: " + mutation.what;
  for (const Piece& p : call.pieces()) {
    if (p.bytes <= 0 || *p.pointer == nullptr || p.role == Role::kScratch) continue;
    if (code == MOIRE_OK && is_written(p.role)) continue;
    if (call.memory.is_unchanged(*p.pointer, p.bytes)) continue;
    return p.name + (code == MOIRE_OK ? ", an input, was written"
                                      : " was written by a call that failed: " + context.message);
  }
  return {};
}

Complaint Fuzzer::run_again(Call& call) {
  const std::vector<Piece> pieces = call.pieces();
  std::vector<std::vector<char>> first;
  for (const Piece& p : pieces) {
    const char* const data = static_cast<const char*>(*p.pointer);
    const bool is_output = is_written(p.role) && p.role != Role::kScratch && data != nullptr;
    first.emplace_back(data, is_output ? data + p.bytes : data);
  }
  call.memory.restore();
  const OtherTarget target;
  size_t needed = 0;
  const bool is_sized = !call.has_workspace() || (call.size(three_.get(), &needed) == MOIRE_OK &&
                                                  needed <= call.workspace->bytes);
  if (!is_sized) return {};
  const int32_t code = three_.run(call);
  if (code != MOIRE_OK) return "succeeded with one thread, with three: " + three_.message;
  if (Complaint found = judge(call, code, {}, three_); !found.empty()) return found;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto bytes = static_cast<int64_t>(first[i].size());
    if (same_values(pieces[i].dtype, first[i].data(), *pieces[i].pointer, bytes)) continue;
    return pieces[i].name + " has other bits with three threads and another instruction set";
  }
  return {};
}

Complaint Fuzzer::find_unchecked(Call& call) const {
  for (const Piece& p : call.pieces()) {
    if (p.tensor == nullptr || p.tensor->rank == 0 || p.role == Role::kUnused) continue;
    constexpr int32_t kNoType = 42;
    const int32_t dtype = std::exchange(p.tensor->dtype, kNoType);
    if (one_.run(call) == MOIRE_OK) return p.name + " of no dtype is accepted: nothing checks it";
    const std::string& message = one_.message;
    if (message.find(p.name) == std::string::npos) return p.name + " is blamed as: " + message;
    p.tensor->dtype = dtype;
  }
  const void* const end = reinterpret_cast<char*>(&call.struct_size()) + call.struct_size();
  for (const Value& value : call.values()) {
    const bool is_word = value.is_integer && value.bytes == sizeof(int32_t);
    const bool is_at_times_unread = value.name == "direction" || value.name == "storage";
    if (!is_word || is_at_times_unread || value.at >= end) continue;
    auto* const number = static_cast<int32_t*>(value.at);
    const int32_t before = std::exchange(*number, std::numeric_limits<int32_t>::min());
    if (one_.run(call) == MOIRE_OK) return value.name + " of -2^31 is accepted: nothing checks it";
    *number = before;
  }
  return {};
}

struct Flags {
  double seconds = 5;
  uint64_t seed = 0;
  int64_t cases = 0;  // 0: as many as there is time for
  std::string op;
};

Flags parse(int argc, char** argv) {
  Flags flags;
  flags.seed = static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    const char* const value = argv[i + 1];
    if (flag == "--seconds") flags.seconds = std::atof(value);
    if (flag == "--seed") flags.seed = std::strtoull(value, nullptr, 10);
    if (flag == "--cases") flags.cases = std::atoll(value);
    if (flag == "--op") flags.op = value;
  }
  return flags;
}

int run(const Flags& flags) {
  install_handlers();
  std::vector<Op> ops = every_op();
  if (!flags.op.empty()) std::erase_if(ops, [&](const Op& op) { return op.name != flags.op; });
  if (ops.empty()) {
    std::fprintf(stderr, "fuzz: there is no op %s\n", flags.op.c_str());
    return 2;
  }
  std::map<std::string, Counts> counts;
  Fuzzer fuzzer;
  fuzzer.is_chatty = flags.cases == 1;
  const auto start = std::chrono::steady_clock::now();
  int64_t done = 0;
  for (; flags.cases == 0 || done < flags.cases; ++done) {
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    if (flags.cases == 0 && taken.count() > flags.seconds) break;
    const uint64_t seed = flags.seed + static_cast<uint64_t>(done);
    const Op& op = ops[seed % ops.size()];
    std::snprintf(current, sizeof(current),
                  "fuzz: %s; repeat it with: fuzz --op %s --cases 1 --seed %" PRIu64 "\n", op.name,
                  op.name, seed);
    const Complaint complaint = fuzzer.try_one(op, seed, counts[op.name]);
    if (complaint.empty()) continue;
    std::fprintf(stderr, "fuzz: %s\n%s%s", complaint.c_str(),
                 fuzzer.is_chatty ? "" : fuzzer.described.c_str(), current);
    return 1;
  }
  std::printf("fuzz: %" PRId64 " calls from seed %" PRIu64 "\n", done, flags.seed);
  bool all_succeed = true;
  for (const auto& [name, count] : counts) {
    std::printf("  %-28s %8" PRId64 " calls, %" PRId64 " successful\n", name.c_str(), count.calls,
                count.successes);
    all_succeed = all_succeed && (count.successes > 0 || count.calls < 50);
  }
  if (!all_succeed) std::fprintf(stderr, "fuzz: an op never succeeds: its draw is wrong\n");
  return all_succeed ? 0 : 1;
}

}  // namespace
}  // namespace moire::fuzz

int main(int argc, char** argv) { return moire::fuzz::run(moire::fuzz::parse(argc, argv)); }
