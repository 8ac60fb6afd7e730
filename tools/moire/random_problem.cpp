// Random problems: small, ragged and hostile, over every op and option; one in 16 is wide.
#include <algorithm>

#include "problem_fields.h"
#include "problem_source.h"
#include "staging/random.h"

namespace moire::tool {
namespace {

using staging::Random;

// Around the widths of vectors and tiles, where kernels change their minds.
constexpr int64_t kEdges[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129};

const auto& pick(Random& random, const auto& values) {
  return values[static_cast<size_t>(random.below(static_cast<int64_t>(std::size(values))))];
}

// Small mostly, at an edge often, a few large.
int64_t draw_size(Random& random, int64_t largest) {
  int64_t size = 1 + random.below(48);
  if (random.chance(0.4)) size = pick(random, kEdges);
  if (random.chance(0.05)) size = 1 + random.below(largest);
  return std::min(size, largest);
}

// Wider rows than a block of a GPU takes at once (512 to 4096 columns), and more choices; few and
// thin enough for the reference.
void draw_wide_sizes(Random& random, Problem& p) {
  constexpr int64_t kParts[] = {512, 2048, 4096};
  const bool chooses = random.chance(0.5);
  p.groups = chooses ? 12 + random.below(4) : 1 + random.below(3);
  p.hidden = p.ffn = 1 + random.below(chooses ? 3 : 8);
  int64_t& wide = random.chance(0.6) ? p.hidden : p.ffn;
  wide = pick(random, kParts) + 1 + random.below(900);
  if (random.chance(0.7)) wide = (wide + 7) / 8 * 8;  // so that elements may lie in vectors
  p.rows = 1 + random.below(24);
  p.topk = 1 + random.below(std::min<int64_t>(p.groups, 12));
  p.dropped = (p.topk - p.rows % p.topk) % p.topk + p.topk * random.below(2);
}

void draw_sizes(Random& random, Problem& p) {
  if (random.chance(1.0 / 16)) return draw_wide_sizes(random, p);
  p.groups = random.chance(0.05) ? 100 + random.below(413) : 1 + random.below(9);
  p.hidden = draw_size(random, 700);
  p.ffn = draw_size(random, 400);
  // The reference computes in scalars: keep one case within milliseconds.
  if (p.hidden * p.ffn * p.groups > 200000) p.hidden = p.ffn = 1 + random.below(24);
  p.rows = random.chance(0.05) ? 0 : draw_size(random, 600);
  if (p.rows * p.hidden * p.ffn > 4000000) p.rows = 1 + random.below(40);
  if (random.chance(0.02)) p.groups = p.rows = 0;
  p.topk = random.chance(0.5) ? 1 : 1 + random.below(4);
  p.topk = std::min(p.topk, std::max<int64_t>(p.groups, 1));
  p.dropped = (p.topk - p.rows % p.topk) % p.topk;
}

// Values of the fields that are words; half of what a line need not say is left out.
void draw_words(Random& random, const Choices& given, Problem& p) {
  for (const Field& field : fields()) {
    const auto limited = given.find(field.key);
    const auto& samples = limited == given.end() ? field.codec.samples : limited->second;
    const bool is_optional = field.presence == Field::Presence::kOptional;
    if (samples.empty() || (is_optional && random.chance(0.5))) continue;
    field.codec.read(pick(random, samples), p);
  }
  if (p.op->name.starts_with("router")) p.groups = std::max<int64_t>(p.groups, p.topk);
  if (p.op->is_of_ranks() && p.groups > 0) {  // as many choices as gates make
    p.topk = 1 + random.below(std::min<int64_t>(p.groups * p.ranks, 32));
    p.dropped = (p.topk - p.rows % p.topk) % p.topk + p.topk * random.below(3);
  }
  while (const auto mistake = find_mistake(p)) {
    const Field& field = *find_field(mistake->key);
    field.codec.read(pick(random, field.codec.samples), p);
  }
}

}  // namespace

Problem random_problem(uint64_t seed, int64_t i, const Choices& given) {
  Random random(seed * 0x9E3779B97F4A7C15ULL + static_cast<uint64_t>(i));
  Problem p;
  draw_sizes(random, p);
  p.tail = random.chance(0.5) ? 0 : 1 + random.below(20);
  p.seed = random.bits() % 1000000;
  if (random.chance(0.3)) p.out_hidden = 1 + random.below(p.hidden + 16);
  draw_words(random, given, p);
  return p;
}

}  // namespace moire::tool
