// Scaffold.
#include <moire/grouped_mlp.h>

namespace moire {
Status grouped_linear(const Context&, const GroupedLinearArgs&) {
  return {Code::kInternal, "scaffold"};
}
Status grouped_linear_workspace(const Context&, const GroupedLinearArgs&, size_t*) {
  return {Code::kInternal, "scaffold"};
}
Status grouped_linear_backward(const Context&, const GroupedLinearBackwardArgs&) {
  return {Code::kInternal, "scaffold"};
}
Status grouped_linear_backward_workspace(const Context&, const GroupedLinearBackwardArgs&,
                                         size_t*) {
  return {Code::kInternal, "scaffold"};
}
Status grouped_mlp(const Context&, const GroupedMlpArgs&) { return {Code::kInternal, "scaffold"}; }
Status grouped_mlp_workspace(const Context&, const GroupedMlpArgs&, size_t*) {
  return {Code::kInternal, "scaffold"};
}
Status grouped_mlp_backward(const Context&, const GroupedMlpBackwardArgs&) {
  return {Code::kInternal, "scaffold"};
}
Status grouped_mlp_backward_workspace(const Context&, const GroupedMlpBackwardArgs&, size_t*) {
  return {Code::kInternal, "scaffold"};
}
}  // namespace moire
