// Prepared weights of drawn calls: what the library makes of the weights that were drawn.
#pragma once

#include <moire.h>

#include "tests/fuzz/memory.h"
#include "tests/fuzz/random.h"

namespace moire::fuzz {

inline const moire_context* preparing_context() {
  static moire_context* const context = [] {
    moire_context_options options = {};
    options.struct_size = sizeof(options);
    options.num_threads = 1;
    moire_context* made = nullptr;
    static_cast<void>(moire_context_create(&options, &made));
    return made;
  }();
  return context;
}

// Asks for the form of what `args` would prepare, and takes its memory; false if it is refused.
inline bool take_form(moire_prepare_weight_args& args, Memory& memory) {
  moire_prepared_weight& p = args.prepared;
  if (moire_prepare_weight_form(preparing_context(), &args, &p) != MOIRE_OK) return false;
  p.memory.data = memory.take("prepared", p.memory.shape[0], 256);
  return true;
}

// The weights of some layers, and the form of what prepare_weight is to make.
template <class A>
void draw_prepared(A& args, Random& random, Memory& memory) {
  if constexpr (requires { args.prepared; }) take_form(args, memory);
  const auto prepare = [&](const moire_weight& w, moire_prepared_weight& prepared) {
    moire_prepare_weight_args p = {};
    p.struct_size = sizeof(p);
    p.w = w;
    if constexpr (requires { args.recipe; }) p.recipe = args.recipe;
    if constexpr (requires { args.fractional_scales; })
      p.fractional_scales = args.fractional_scales;
    p.forward_only = static_cast<int32_t>(random.integer(0, 1));
    if (!random.percent(30) || !take_form(p, memory)) return;
    if (moire_prepare_weight(preparing_context(), &p) == MOIRE_OK) prepared = p.prepared;
  };
  if constexpr (requires { args.w_prepared; }) prepare(args.w, args.w_prepared);
  if constexpr (requires { args.w1_prepared; }) prepare(args.w1, args.w1_prepared);
  if constexpr (requires { args.w2_prepared; }) prepare(args.w2, args.w2_prepared);
}

}  // namespace moire::fuzz
