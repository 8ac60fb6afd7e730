// Implementations of which one object answers every question: Call(state, args, workspace) plans a
// call, over no workspace where nothing is run.
#pragma once

#include "backend/implementation.h"

namespace moire::cuda {

template <class A, class Call>
constexpr Implementation<A> implementation_of(std::string_view name) {
  return {name,
          Device::kCuda,
          [](const DeviceState& state, const A& args) { return Call(state, args, {}).supports(); },
          [](const DeviceState& state, const A& args) { return Call(state, args, {}).workspace(); },
          [](const DeviceState& state, const A& args) { return Call(state, args, {}).policy(); },
          [](const Context& context, const A& args) {
            return Call(context.state(), args, args.workspace).run(context);
          },
          [](const DeviceState& state, const A& args) { return Call(state, args, {}).launches(); }};
}

}  // namespace moire::cuda
