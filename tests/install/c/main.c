/* An outside C99 project: one grouped GEMM by hand-checked numbers, and what a wrong call gets. */
#include <moire.h>
#include <stdio.h>
#include <string.h>

static int fails(const char* what) {
  printf("%s: %s\n", what, moire_last_error());
  return 1;
}

int main(void) {
  float x[3][2] = {{1, 2}, {3, 4}, {5, 6}};
  float w[2][2][2] = {{{1, 0}, {0, 1}}, {{1, 1}, {1, -1}}}; /* the identity; sum and difference */
  float y[3][2] = {{-1, -1}, {-1, -1}, {-1, -1}};
  const float want[3][2] = {{1, 2}, {7, -1}, {11, -1}};
  const int64_t offsets[3] = {0, 1, 3};
  static char scratch[1 << 20];
  char* aligned = scratch + (256 - (uintptr_t)scratch % 256) % 256;
  size_t bytes = 0;
  moire_context* context = NULL;
  moire_context_options options;
  moire_grouped_linear_args args;

  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  if (moire_version_number() != MOIRE_VERSION_NUMBER)
    return fails("the library is of another version");
  if (moire_context_create(&options, &context) != MOIRE_OK) return fails("moire_context_create");

  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.x = (moire_tensor){x, MOIRE_FP32, 2, {3, 2, 0}, 0};
  args.w.tensor = (moire_tensor){w, MOIRE_FP32, 3, {2, 2, 2}, 0};
  args.y = (moire_tensor){y, MOIRE_FP32, 2, {3, 2, 0}, 0};
  args.groups = (moire_groups){offsets, 2, 3};
  if (moire_grouped_linear_workspace(context, &args, &bytes) != MOIRE_OK)
    return fails("moire_grouped_linear_workspace");
  if (bytes > sizeof scratch - 256) return fails("the workspace is larger than thought");
  args.workspace.data = aligned;
  args.workspace.bytes = bytes;
  if (moire_grouped_linear(context, &args) != MOIRE_OK) return fails("moire_grouped_linear");
  if (memcmp(y, want, sizeof y) != 0) return fails("wrong numbers");

  args.x.shape[1] = 3;
  if (moire_grouped_linear(context, &args) != MOIRE_INVALID_ARGUMENT)
    return fails("a wrong shape was accepted");
  if (strstr(moire_last_error(), "[3, 3]") == NULL)
    return fails("the message does not name the shape");
  moire_context_destroy(context);
  puts("the grouped linear layer is right");
  return 0;
}
