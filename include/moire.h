/* moire: the grouped MLP of mixture-of-experts models. The C contract.
 *
 * Every argument struct and every entry point is defined here, once. The C++ headers in moire/
 * derive from these structs, the backends receive them as they are, and Python parses this very
 * file. Structs start with struct_size = sizeof(struct) and only ever grow at the end; a field that
 * is zero means "default" or "absent". The functions of this header take the smaller
 * struct_size of older headers; those of moire/ are C++, are compiled with the header of the
 * library that they are linked with, and do not read it.
 *
 * Conventions:
 * - Shapes: [rows, columns], row-major, last dimension contiguous, rows `row_stride` elements
 * apart.
 * - Memory: the caller owns all of it, on the context's device. Ops allocate nothing and never
 *   synchronise.
 * - Workspace: ops that need scratch have a `_workspace` twin that says how many bytes: 256-byte
 *   aligned, any initial contents, nothing kept between calls. The size depends on shapes, capacity
 *   and, of products of MXFP8 weights, on how tensors are aligned; never on the splits.
 * - Errors: every function returns a code below; moire_last_error() has the sentence, per thread.
 *   Arguments are checked before anything runs: on an error the outputs are untouched, unless it is
 *   the device that failed, another rank, or threads that the caller lends and that never came.
 * - Threads: one context may be used by several threads.
 *
 * Symbols: T tokens, k experts per token, G groups (experts of this device), H hidden size, F
 * expert width, capacity = allocated rows of a ragged tensor, of which the first offsets[G] are in
 * use; the others are its tail.
 */
#ifndef MOIRE_H_
#define MOIRE_H_

#include <stddef.h>
#include <stdint.h>

#define MOIRE_VERSION_NUMBER 100 /* 10000 * major + 100 * minor + patch */

#if defined(_WIN32)
#define MOIRE_API
#else
#define MOIRE_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* cffi: begin (Python parses from here to "cffi: end" after removing MOIRE_API) */

/* ---- status ---------------------------------------------------------------------------------- */

enum moire_code {
  MOIRE_OK = 0,
  MOIRE_INVALID_ARGUMENT = 10, /* the call is wrong: shape, dtype, pointer, splits */
  MOIRE_UNSUPPORTED = 20,      /* the call is right, but no implementation here takes it */
  MOIRE_OUT_OF_MEMORY = 30, /* the workspace is too small, or an owning type could not allocate */
  MOIRE_DEVICE = 40,        /* the device or its driver failed */
  MOIRE_IO = 50,            /* a file could not be read or written */
  MOIRE_INTERNAL = 60,      /* a defect of this library */
  MOIRE_RANK_FAILED = 70    /* another rank left, or was not there in time */
};

/* The library's version, MOIRE_VERSION_NUMBER of the header it was built with. */
MOIRE_API int32_t moire_version_number(void);
/* The name of a code ("invalid argument"); never null. */
MOIRE_API const char* moire_code_name(int32_t code);
/* The message of this thread's last failed call, or ""; valid until this thread's next call. */
MOIRE_API const char* moire_last_error(void);
/* What this library was built with (version, compiler, backends, SIMD targets) as a JSON object;
 * static storage. */
MOIRE_API const char* moire_build_info(void);

/* ---- tensors and groups ---------------------------------------------------------------------- */

enum moire_dtype {
  MOIRE_NONE = 0,
  MOIRE_FP32 = 1,
  MOIRE_BF16 = 2,
  MOIRE_FP16 = 3,
  MOIRE_E4M3 = 4, /* OCP FP8: bias 7, max 448, no infinity */
  MOIRE_E5M2 = 5, /* OCP FP8: bias 15, max 57344 */
  MOIRE_E8M0 = 6, /* power-of-two scale, 2^(code - 127), 255 = NaN */
  MOIRE_UINT8 = 16,
  MOIRE_INT32 = 17,
  MOIRE_INT64 = 18,
  MOIRE_FP64 = 19 /* storage only: convert_glu */
};

/* A view of memory the caller owns. rank 0 = absent; data may be null only if a dimension is 0. */
typedef struct moire_tensor {
  void* data;
  int32_t dtype;      /* moire_dtype */
  int32_t rank;       /* 1 to 3; 0 = absent */
  int64_t shape[3];   /* the first `rank` entries */
  int64_t row_stride; /* elements from one row to the next; 0 = shape[rank - 1] (contiguous). Rank
                         3: matrices lie shape[1] * row_stride elements apart */
} moire_tensor;

/* The one description of raggedness: group g owns rows offsets[g] to offsets[g + 1] - 1. offsets[0]
 * = 0, non-decreasing, offsets[num_groups] <= capacity; any group may be empty; no alignment is
 * asked for. Where an op may do without groups, all zeros say so; that there are none is then said
 * by offsets that are not null. */
typedef struct moire_groups {
  const int64_t* offsets; /* [num_groups + 1] on the device; null only if num_groups is 0 */
  int64_t num_groups;
  int64_t capacity; /* rows that the ragged tensors have */
} moire_groups;

enum moire_weight_layout {
  MOIRE_OUT_IN = 0, /* [G, out, in], the usual layout of a linear layer */
  MOIRE_IN_OUT = 1  /* [G, in, out] (GPT-OSS, Qwen3-VL) */
};

/* The weights of G linear layers: one packed tensor, or a list of G separately allocated contiguous
 * matrices. */
typedef struct moire_weight {
  moire_tensor tensor;     /* rank 3; with `list`, gives dtype and shape and has data = null */
  const void* const* list; /* host array of G pointers, or null */
  int32_t layout;          /* moire_weight_layout */
} moire_weight;

/* Scratch memory of one call; see "workspace" above. */
typedef struct moire_workspace {
  void* data;
  size_t bytes;
} moire_workspace;

/* What an op writes to the tail (rows >= offsets[G]) of its outputs. Tails of inputs are never
 * read. */
enum moire_tail {
  MOIRE_TAIL_ZERO = 0,     /* exact zeros */
  MOIRE_TAIL_UNTOUCHED = 1 /* the caller's bytes stay */
};

/* ---- context --------------------------------------------------------------------------------- */

enum moire_device { MOIRE_CPU = 0, MOIRE_CUDA = 1 };

typedef struct moire_context moire_context;
typedef struct moire_communicator moire_communicator; /* see "expert parallelism" below */

typedef struct moire_context_options {
  size_t struct_size;
  int32_t device;      /* moire_device */
  int32_t index;       /* which device of that kind */
  int32_t num_threads; /* CPU: 0 = one per available core */
  int32_t strict;      /* 1: fail, with the reason, where a slower implementation than the device's
                          fastest would run */
  const char* implementation; /* force this implementation by name ("cpu", "portable", "sm90"; an op
                                 with "cuda" alone runs it); null = the first that takes the call */
  void* stream;               /* CUDA: the cudaStream_t that ops run on */
  /* CPU: threads lent by the caller; null: the context has its own. Calls body(argument) on up to
   * num_threads threads at once, the caller's among them, and returns when all calls have returned;
   * flags is 0. This is the signature of GOMP_parallel, which the OpenMP run-times of GNU, LLVM and
   * Intel export: their threads spin for a while after each parallel region, so that beside a
   * framework that uses OpenMP, threads of the context's own would have to share cores with them.
   * An op whose body is not called at all ends with MOIRE_INVALID_ARGUMENT, and what its outputs
   * hold is not defined. */
  void (*parallel)(void (*body)(void* argument), void* argument, unsigned num_threads,
                   unsigned flags);
  /* Null, or a context of the same device, whose state (a CPU's threads; what CUDA kernels
   * reported) this one shares. Such a context is cheap, one per stream say, and made without
   * touching the device, so that it may be made while a stream is captured; either may be destroyed
   * first. A captured CUDA graph uses memory of that state: it must not run after the last such
   * context is gone, nor two instances of it at the same time. */
  const moire_context* sharing;
  /* CUDA: null, or a GPU to plan for, which need not be here: "sm80", "sm86", "sm89", "sm90",
   * "sm100" or "sm120". On such a context workspaces are sized and, once it is explaining, calls
   * explained as that GPU would run them, without a driver; whatever would run is refused with
   * MOIRE_UNSUPPORTED. index and stream mean nothing then. */
  const char* plan_for;
  /* Null: this context is alone, one rank of one. Of the same device otherwise; it may be destroyed
   * before the context, whose calls with other ranks fail then. */
  const moire_communicator* communicator;
} moire_context_options;

/* Number of devices of a kind that this build can use now (0 when the build or the machine has
 * none). */
MOIRE_API int32_t moire_device_count(int32_t device, int32_t* count);
/* What one device is, as JSON (name, threads or multiprocessors, instruction set or compute
 * capability, memory). `needed` receives the size with the final zero; call with buffer = null
 * first. */
MOIRE_API int32_t moire_device_info(int32_t device, int32_t index, char* buffer, size_t bytes,
                                    size_t* needed);
/* A context: device, stream, threads, strictness, error record. MOIRE_UNSUPPORTED says which device
 * is missing and why. */
MOIRE_API int32_t moire_context_create(const moire_context_options* options,
                                       moire_context** context);
/* A cheap second context on the same device state that runs nothing: ops called on it are validated
 * and recorded, and moire_explanation tells what each would have run. */
MOIRE_API int32_t moire_context_explaining(const moire_context* context,
                                           moire_context** explaining);
/* The steps recorded so far by an explaining context, as JSON: op, implementation, policy, bytes,
 * reasons of the refused. */
MOIRE_API int32_t moire_explanation(const moire_context* explaining, char* buffer, size_t bytes,
                                    size_t* needed);
/* Waits for the context's work and returns the first error that a device reported, which is then
 * forgotten. So it does with the first infinity or NaN that was quantised (MOIRE_INVALID_ARGUMENT;
 * the call that met it succeeded). */
MOIRE_API int32_t moire_context_check(const moire_context* context);
/* Null is fine. */
MOIRE_API void moire_context_destroy(moire_context* context);

/* ---- groups ---------------------------------------------------------------------------------- */

enum moire_splits_kind {
  MOIRE_SPLITS = 0, /* [G] rows per group */
  MOIRE_ENDS = 1,   /* [G] cumulative, without the leading zero (torch's offs) */
  MOIRE_OFFSETS = 2 /* [G + 1] cumulative, with the leading zero */
};

/* One array derived from the splits: offsets * multiplier, with or without the leading zero. */
typedef struct moire_offsets_output {
  moire_tensor offsets; /* INT32 or INT64, [G + 1], or [G] without the leading zero */
  int64_t multiplier;   /* elements per row; 0 = 1 */
  int32_t no_leading_zero;
} moire_offsets_output;

typedef struct moire_splits_to_offsets_args {
  size_t struct_size;
  moire_tensor splits; /* INT32 or INT64, rank 1 */
  int32_t kind;        /* moire_splits_kind */
  int64_t capacity;    /* rows available; -1 = not checked */
  const moire_offsets_output* outputs;
  int64_t num_outputs;
  moire_workspace workspace;
} moire_splits_to_offsets_args;

/* All derived arrays in one launch. Errors: a negative split, a decreasing end, a sum past the
 * capacity or past INT32 where an output is INT32: MOIRE_INVALID_ARGUMENT names group and value. */
MOIRE_API int32_t moire_splits_to_offsets(const moire_context* context,
                                          const moire_splits_to_offsets_args* args);
MOIRE_API int32_t moire_splits_to_offsets_workspace(const moire_context* context,
                                                    const moire_splits_to_offsets_args* args,
                                                    size_t* bytes);

/* ---- quantisation ---------------------------------------------------------------------------- */

/* How elements share scales. A block lies along the dimension that a product contracts: along the
 * columns of a row (rowwise), or down the rows of a column (columnwise). Columnwise blocks start
 * anew at each group's first row; the last block of a row, a column or a group may be short. */
enum moire_scaling {
  MOIRE_SCALING_NONE = 0,
  MOIRE_SCALING_MXFP8 = 1,     /* blocks of 32, one E8M0 scale each (OCP MX v1.0) */
  MOIRE_SCALING_FP8_BLOCK = 2, /* blocks of 128, one FP32 scale each */
  MOIRE_SCALING_FP8_TILE = 3   /* tiles of 128 x 128, one FP32 scale each: weights; one copy serves
                                  both directions */
};

enum moire_direction { MOIRE_ROWWISE = 0, MOIRE_COLUMNWISE = 1 };

/* One quantised copy of a matrix or a batch, for one direction: value = data * scale. Absent where
 * data is. With b = 32 or 128 elements to a block, capacity and k of a ragged [capacity, k], and
 * [G, n, k] of weights, scales are
 *   rowwise     [capacity, ceil(k / b)]          [G, n, ceil(k / b)]
 *   columnwise  [capacity / b + G, k], group g's blocks from row offsets[g] / b + g (rounded down);
 *               rows that no block owns are never read     [G, ceil(n / b), k]
 *   tiles                                        [G, ceil(n / 128), ceil(k / 128)] */
typedef struct moire_quantized {
  moire_tensor data;   /* E4M3 or E5M2, shaped as the source; or see moire_quantize */
  moire_tensor scales; /* E8M0 (MXFP8) or FP32; rows may lie row_stride apart */
} moire_quantized;

/* A ragged matrix into FP8, in one direction or both, in one pass over the source. docs/numerics.md
 * defines every byte. On a GPU a copy as BF16 without scales, in MXFP8, is data * scale of E4M3;
 * FP8_BLOCK's may lie as FP8 tensor cores read them, columnwise data transposed to [k, R], the
 * scales of rows turned over to [ceil(k / 128), R], R = 128 (capacity / 128 + G) (docs/numerics.md,
 * 7); and with fractional_scales = 2 they are MXFP8 that is folded (docs/numerics.md, 5).
 * - MXFP8: scale = the block's largest absolute value / largest value of the element type, rounded
 *   up to a power of two; elements saturate; a NaN element is NaN (0x7F) and alone.
 * - FP8_BLOCK: scale = 1 / s, s = largest value of the element type / largest absolute value of the
 *   block, rounded down to a power of two unless fractional_scales; s = 1 where that is 0, infinite
 *   or NaN.
 * Beside the copies, in one read (on a GPU, of aligned rows), a bias' gradient: grad_bias
 * has the bits of moire_bias_backward with grad_y = source, all other fields alike and no scale. */
typedef struct moire_quantize_args {
  size_t struct_size;
  moire_tensor source;        /* [capacity, k], or [T, k] with row_idx; FP32, BF16, FP16 */
  moire_tensor row_idx;       /* [capacity] INT32 or INT64, or absent */
  int32_t scaling;            /* MXFP8 or FP8_BLOCK */
  int32_t fractional_scales;  /* FP8_BLOCK: 1 = scales need not be powers of two; 2: see above */
  moire_quantized rowwise;    /* out, or absent; rows in the order of the groups */
  moire_quantized columnwise; /* out, or absent */
  moire_groups groups;        /* absent: one group, all rows of the source */
  int32_t tail;               /* of data and of scales: zero bytes, or untouched */
  moire_tensor grad_bias;     /* in/out [G, k] FP32, BF16 or FP16, or absent; with groups */
  int32_t beta;               /* of grad_bias: 0 overwrite, 1 accumulate */
  const uint8_t* beta_per_group;
  moire_workspace workspace; /* none is needed without grad_bias */
} moire_quantize_args;
MOIRE_API int32_t moire_quantize(const moire_context* context, const moire_quantize_args* args);
MOIRE_API int32_t moire_quantize_workspace(const moire_context* context,
                                           const moire_quantize_args* args, size_t* bytes);

/* The weights of all groups into FP8, in one call. */
typedef struct moire_quantize_weight_args {
  size_t struct_size;
  moire_weight source;        /* [G, n, k] FP32, BF16 or FP16, packed or listed, either layout */
  int32_t scaling;            /* MXFP8, FP8_BLOCK or FP8_TILE */
  int32_t fractional_scales;  /* FP8_BLOCK, FP8_TILE: 1 = scales need not be powers of two */
  moire_quantized rowwise;    /* out, or absent: blocks along the last dimension; or tiles */
  moire_quantized columnwise; /* out, or absent: blocks along the middle one; never tiles */
} moire_quantize_weight_args;
MOIRE_API int32_t moire_quantize_weight(const moire_context* context,
                                        const moire_quantize_weight_args* args);

/* data * scale, in FP32, rounded once to the target's type. */
typedef struct moire_dequantize_args {
  size_t struct_size;
  moire_quantized source; /* ragged [capacity, k], or [G, n, k] */
  int32_t scaling;
  int32_t direction;   /* moire_direction; not read for FP8_TILE */
  moire_tensor target; /* out, FP32, BF16 or FP16, shape of source.data */
  moire_groups groups; /* of a ragged source; absent: one group, all rows */
  int32_t tail;
} moire_dequantize_args;
MOIRE_API int32_t moire_dequantize(const moire_context* context, const moire_dequantize_args* args);

/* One direction into the other: the decoded values are quantised again, in one pass. */
typedef struct moire_requantize_args {
  size_t struct_size;
  moire_quantized source; /* ragged [capacity, k], or [G, n, k] */
  int32_t scaling;        /* MXFP8 or FP8_BLOCK, of both */
  int32_t direction;      /* of the source; the target has the other */
  int32_t fractional_scales;
  moire_quantized target; /* out */
  moire_groups groups;    /* of a ragged source; absent: one group, all rows */
  int32_t tail;
} moire_requantize_args;
MOIRE_API int32_t moire_requantize(const moire_context* context, const moire_requantize_args* args);

/* How the scales of one direction lie in memory. All but the first are for interchange. */
enum moire_scale_layout {
  MOIRE_SCALES_CANONICAL = 0, /* see moire_quantized */
  MOIRE_SCALES_DENSE = 1,     /* columnwise: the groups' rows follow each other without gaps, sum of
                                 ceil(rows of g / b) rows; rowwise: as canonical, contiguous */
  MOIRE_SCALES_PADDED = 2, /* of each group its scales as [outer, blocks], outer = rows (rowwise) or
                              columns (columnwise: transposed), zero-padded to multiples of 128 and
                              4, one after the other. Rows of the tensor: rowwise, those of the
                              matrices; columnwise, k rounded up to 128 bytes wide, as many per
                              group as its matrix has columns */
  MOIRE_SCALES_SWIZZLED = 3 /* PADDED, in tiles of 128 x 4 (512 bytes: element [r, c] at 16 (r % 32)
                               + 4 (r / 32) + c), tiles row by row: Blackwell's tensor cores */
};

/* MXFP8 scales from one layout to another; one side is canonical. Exact in both directions. */
typedef struct moire_convert_scales_args {
  size_t struct_size;
  moire_tensor source;
  moire_tensor target; /* out; entries that belong to no block become zero bytes */
  int32_t from;        /* moire_scale_layout */
  int32_t to;
  int32_t direction; /* moire_direction */
  int64_t k;         /* columns of the quantised matrix */
  moire_groups groups;
} moire_convert_scales_args;
MOIRE_API int32_t moire_convert_scales(const moire_context* context,
                                       const moire_convert_scales_args* args);

/* shape[0] and shape[1] of the scales of [rows, k] in `num_groups` groups. DENSE columnwise, PADDED
 * and SWIZZLED depend on the splits; what is returned for them suffices for any. */
MOIRE_API int32_t moire_scales_shape(int32_t scaling, int32_t direction, int32_t layout,
                                     int64_t rows, int64_t k, int64_t num_groups, int64_t* shape);

/* ---- gated activations ----------------------------------------------------------------------- */

enum moire_glu_order { MOIRE_GATE_FIRST = 0, MOIRE_UP_FIRST = 1, MOIRE_UNGATED = 2 };

/* How gate (a) and up (b) lie along a dimension of size 2F: `block` of the first, `block` of the
 * second, repeated. Ungated: there is no up, and F columns, all of them a, wherever 2F is said. */
typedef struct moire_glu_layout {
  int64_t block; /* a divisor of F; 0 = F (two halves); 1 = element-interleaved; ungated: 0 */
  int32_t order; /* moire_glu_order */
} moire_glu_layout;

enum moire_activation_kind {
  MOIRE_SWIGLU = 0,         /* silu(a) * b */
  MOIRE_CLAMPED_SWIGLU = 1, /* g = min(a, limit), l = clamp(b, -limit, limit) + offset: g *
                               sigmoid(alpha * g) * l (GPT-OSS: limit 7, alpha 1.702, offset 1) */
  MOIRE_GEGLU_TANH = 2,     /* gelu_tanh(a) * b, computed as a * sigmoid(2u) * b,
                               u = sqrt(2/pi) * (a + 0.044715 a^3) */
  MOIRE_REGLU = 3,          /* max(a, 0) * b; the gradient at 0 is 0 */
  MOIRE_REGLU2 = 4          /* max(a, 0)^2 * b: squared ReLU */
};

/* Of an ungated layout the factor b, or l, is 1: SiLU, GELU, ReLU, ReLU^2. */
typedef struct moire_activation {
  int32_t kind; /* moire_activation_kind */
  float limit;  /* CLAMPED_SWIGLU: > 0; the gradient passes at the limit */
  float alpha;  /* CLAMPED_SWIGLU: > 0 */
  float offset; /* CLAMPED_SWIGLU */
} moire_activation;

/* act = glu(z) * probs, in FP32, rounded once. Absent groups: every row is in use. */
typedef struct moire_glu_args {
  size_t struct_size;
  moire_tensor z;     /* [capacity, 2F] FP32, BF16 or FP16 */
  moire_tensor probs; /* [capacity] FP32, or absent */
  moire_tensor act;   /* out [capacity, F], dtype of z */
  moire_groups groups;
  moire_activation activation;
  moire_glu_layout layout;
  int32_t tail; /* moire_tail */
} moire_glu_args;
MOIRE_API int32_t moire_glu(const moire_context* context, const moire_glu_args* args);

/* The gradient of moire_glu. grad_probs_i = sum_j grad_act_ij * glu(z)_ij, before the scaling by
 * probs; its partial sums cover 64 columns each and are added in order, so the result does not
 * depend on tiles or threads. */
typedef struct moire_glu_backward_args {
  size_t struct_size;
  moire_tensor z;          /* [capacity, 2F] */
  moire_tensor probs;      /* [capacity] FP32, or absent */
  moire_tensor grad_act;   /* [capacity, F], dtype of z */
  moire_tensor grad_z;     /* out [capacity, 2F], dtype of z, in the layout of z */
  moire_tensor act;        /* out [capacity, F], the forward's result again, or absent */
  moire_tensor grad_probs; /* out [capacity] FP32, or absent */
  moire_groups groups;
  moire_activation activation;
  moire_glu_layout layout;
  int32_t tail;
} moire_glu_backward_args;
MOIRE_API int32_t moire_glu_backward(const moire_context* context,
                                     const moire_glu_backward_args* args);

/* Rows, or columns, of a tensor from one gate/up layout to another, in one pass. */
typedef struct moire_convert_glu_args {
  size_t struct_size;
  moire_tensor source; /* rank 1 to 3, elements of 1, 2, 4 or 8 bytes */
  moire_tensor target; /* out; same shape and dtype, not overlapping source */
  int32_t dim;         /* which dimension holds the 2F */
  moire_glu_layout from;
  moire_glu_layout to;
} moire_convert_glu_args;
MOIRE_API int32_t moire_convert_glu(const moire_context* context,
                                    const moire_convert_glu_args* args);

/* ---- grouped GEMM ---------------------------------------------------------------------------- */

/* How the products of FP8 operands are summed. */
enum moire_accumulation {
  MOIRE_ACCUMULATE_EXACT = 0,   /* every product exact, sums in FP32 */
  MOIRE_ACCUMULATE_FAST = 1,    /* FP8 tensor cores may be used: blocks of MXFP8 are folded into
                                   128s, sums keep about 13 fraction bits (docs/numerics.md); the
                                   CPU sums as EXACT does */
  MOIRE_ACCUMULATE_EMULATED = 2 /* CPU: as Hopper's FP8 tensor cores do it; slow, for study */
};

/* Ragged M (forward, dgrad). Rows of group g: d_i = a_i * op(b_g) + bias_scale_i * bias_g, summed
 * in FP32, rounded once.
 * - Forward: a = x [., K], b = W [G, N, K] with MOIRE_OUT_IN gives d = x W^T [., N].
 * - dgrad: a = dy [., N], b = the same W with `transpose_b` gives d = dy W [., K].
 * - row_idx: row i of a is a[row_idx[i]]; the bits are those of permuted rows. Read in place, but
 *   for the SM90 kernels, which copy the rows into the workspace first (moire explain says so). */
typedef struct moire_grouped_gemm_args {
  size_t struct_size;
  moire_tensor a;       /* [capacity, k], or [T, k] with row_idx; FP32, BF16, FP16, E4M3, E5M2 */
  moire_tensor row_idx; /* [capacity] INT32 or INT64, or absent */
  moire_weight b; /* [G, n, k]; [G, k, n] if just one of layout = IN_OUT and transpose_b is set */
  int32_t transpose_b;     /* 1: contract over the weight's out dimension (dgrad) */
  moire_tensor bias;       /* [G, n], or absent */
  moire_tensor bias_scale; /* [capacity] FP32, or absent (= 1) */
  moire_tensor d;          /* out [capacity, n], FP32, BF16, FP16 */
  moire_groups groups;
  int32_t tail;
  moire_workspace workspace;
  /* Scales of an FP8 a or b, blocks along k; absent: a or b is not quantised. E8M0 scales say
   * MXFP8; FP32 ones FP8_BLOCK for a and FP8_TILE for b, which must be packed. a's are rowwise;
   * those of an MXFP8 b are rowwise where its last dimension is k, else columnwise. a and b need
   * not be quantised alike. */
  moire_tensor a_scales;
  moire_tensor b_scales;
  int32_t accumulation; /* moire_accumulation */
} moire_grouped_gemm_args;
MOIRE_API int32_t moire_grouped_gemm(const moire_context* context,
                                     const moire_grouped_gemm_args* args);
MOIRE_API int32_t moire_grouped_gemm_workspace(const moire_context* context,
                                               const moire_grouped_gemm_args* args, size_t* bytes);

/* FC1 forward: z = a * b^T (+ bias), act = glu(z) * probs. z is rounded to its storage type before
 * the activation reads it, kept or not, so that this equals moire_grouped_gemm followed by
 * moire_glu bit for bit. */
typedef struct moire_grouped_gemm_glu_args {
  size_t struct_size;
  moire_tensor a;       /* [capacity, H], or [T, H] with row_idx */
  moire_tensor row_idx; /* [capacity], or absent */
  moire_weight b;       /* [G, 2F, H] */
  moire_tensor bias;    /* [G, 2F], or absent; in `layout` like the weight */
  moire_tensor probs;   /* [capacity] FP32, or absent */
  moire_tensor z;   /* out [capacity, 2F] for the backward, or absent; its tail is never written */
  moire_tensor act; /* out [capacity, F]; z has its dtype */
  moire_groups groups;
  moire_activation activation;
  moire_glu_layout layout;
  int32_t tail; /* of act */
  moire_workspace workspace;
  moire_tensor a_scales; /* as in moire_grouped_gemm_args */
  moire_tensor b_scales;
  int32_t accumulation;
  int32_t storage; /* dtype that z is rounded to where z and act are both absent; 0 = BF16 */
  /* act quantised as it is stored, absent or not: the bytes of moire_quantize applied to act. One
   * of act and its copies is needed. */
  moire_quantized act_rowwise; /* out, or absent: MXFP8 or FP8_BLOCK by the dtype of the scales */
  moire_quantized act_columnwise; /* out, or absent */
  int32_t fractional_scales;
} moire_grouped_gemm_glu_args;
MOIRE_API int32_t moire_grouped_gemm_glu(const moire_context* context,
                                         const moire_grouped_gemm_glu_args* args);
MOIRE_API int32_t moire_grouped_gemm_glu_workspace(const moire_context* context,
                                                   const moire_grouped_gemm_glu_args* args,
                                                   size_t* bytes);

/* FC2 dgrad with the GLU backward in its epilogue: grad_act = grad_y * W2 (rounded to the storage
 * type, never stored), then grad_z, grad_probs and act as in moire_glu_backward. grad_bias_g = beta
 * * grad_bias_g + sum of group g's grad_z rows (as stored), in blocks of 32 rows from the group's
 * first row, each in runs of 4: runs and blocks are added in order. */
typedef struct moire_grouped_gemm_glu_backward_args {
  size_t struct_size;
  moire_tensor grad_y;     /* [capacity, N], or [T, N] with row_idx */
  moire_tensor row_idx;    /* [capacity], or absent */
  moire_weight w2;         /* [G, N, F] */
  moire_tensor z;          /* [capacity, 2F] as saved by the forward */
  moire_tensor probs;      /* [capacity] FP32, or absent */
  moire_tensor grad_z;     /* out [capacity, 2F], dtype of z */
  moire_tensor act;        /* out [capacity, F], or absent */
  moire_tensor grad_probs; /* out [capacity] FP32, or absent */
  moire_tensor grad_bias;  /* in/out [G, 2F] FP32, BF16 or FP16, or absent */
  int32_t beta; /* 0: grad_bias is overwritten (an empty group gets zeros); 1: accumulated */
  moire_groups groups;
  moire_activation activation;
  moire_glu_layout layout;
  int32_t tail; /* of grad_z, act and grad_probs */
  moire_workspace workspace;
  moire_tensor grad_y_scales; /* of an FP8 grad_y: MXFP8 or FP8_BLOCK along N */
  moire_tensor w2_scales;     /* of an FP8 w2: MXFP8 along N, or FP8_TILE */
  int32_t accumulation;
  /* grad_z (which may then be absent) and act quantised: the bytes of moire_quantize applied to the
   * stored tensor, whether it is stored or not. */
  moire_quantized grad_z_rowwise;    /* out, or absent */
  moire_quantized grad_z_columnwise; /* out, or absent */
  moire_quantized act_columnwise;    /* out, or absent */
  int32_t fractional_scales;
} moire_grouped_gemm_glu_backward_args;
MOIRE_API int32_t moire_grouped_gemm_glu_backward(const moire_context* context,
                                                  const moire_grouped_gemm_glu_backward_args* args);
MOIRE_API int32_t moire_grouped_gemm_glu_backward_workspace(
    const moire_context* context, const moire_grouped_gemm_glu_backward_args* args, size_t* bytes);

/* Ragged K (wgrad): d_g = beta_g * d_g + a_g^T * b_g over the rows of group g, in FP32, rounded
 * once. On FP8 tensor cores FP8_BLOCK operands may lie transposed (moire_quantize).
 * - W [G, out, in]: a = dy, b = x.
 * - W [G, in, out]: a = x, b = dy.
 * An empty group: exact zeros for beta 0, untouched for beta 1. */
typedef struct moire_grouped_gemm_wgrad_args {
  size_t struct_size;
  moire_tensor a;         /* [capacity, m], or [T, m] with a_row_idx */
  moire_tensor a_row_idx; /* [capacity], or absent */
  moire_tensor b;         /* [capacity, n], or [T, n] with b_row_idx */
  moire_tensor b_row_idx; /* [capacity], or absent */
  moire_weight d; /* in/out [G, m, n] FP32, BF16 or FP16, packed or listed; layout is not read */
  int32_t beta;   /* 0 or 1, for every group */
  const uint8_t* beta_per_group; /* [G] on the device, 0 or 1; overrides beta; null = not used */
  moire_groups groups;
  moire_workspace workspace;
  moire_tensor a_scales; /* of an FP8 a: columnwise, MXFP8 or FP8_BLOCK; then no a_row_idx */
  moire_tensor b_scales;
  int32_t accumulation;
} moire_grouped_gemm_wgrad_args;
MOIRE_API int32_t moire_grouped_gemm_wgrad(const moire_context* context,
                                           const moire_grouped_gemm_wgrad_args* args);
MOIRE_API int32_t moire_grouped_gemm_wgrad_workspace(const moire_context* context,
                                                     const moire_grouped_gemm_wgrad_args* args,
                                                     size_t* bytes);

/* The gradients of a grouped bias, in one pass over grad_y.
 * - grad_bias_g = beta_g * grad_bias_g + sum_i scale_i * grad_y_i, in blocks of 32 rows from the
 *   group's first row, each in runs of 4: runs and blocks are added in order.
 * - grad_scale_i = beta_scale * grad_scale_i + sum_j grad_y_ij * bias_gj: 64-column partial sums,
 *   added in order. */
typedef struct moire_bias_backward_args {
  size_t struct_size;
  moire_tensor grad_y;     /* [capacity, n], or [T, n] with row_idx */
  moire_tensor row_idx;    /* [capacity], or absent */
  moire_tensor scale;      /* [capacity] FP32, or absent (= 1) */
  moire_tensor bias;       /* [G, n]; needed for grad_scale only */
  moire_tensor grad_bias;  /* in/out [G, n] FP32, BF16 or FP16, or absent */
  moire_tensor grad_scale; /* in/out [capacity] FP32, or absent */
  int32_t beta;            /* of grad_bias: 0 overwrite, 1 accumulate */
  const uint8_t* beta_per_group;
  moire_groups groups;
  int32_t tail; /* of grad_scale */
  moire_workspace workspace;
  int32_t beta_scale; /* of grad_scale: 0 overwrite, 1 add (the tail is zeroed or untouched) */
} moire_bias_backward_args;
MOIRE_API int32_t moire_bias_backward(const moire_context* context,
                                      const moire_bias_backward_args* args);
MOIRE_API int32_t moire_bias_backward_workspace(const moire_context* context,
                                                const moire_bias_backward_args* args,
                                                size_t* bytes);

/* ---- routing --------------------------------------------------------------------------------- */

enum moire_router_kind {
  MOIRE_ROUTER_SOFTMAX = 0, /* scores = softmax over all experts */
  MOIRE_ROUTER_SIGMOID = 1  /* scores = sigmoid of each logit (DeepSeek-V3) */
};

/* Scores in FP32, the k largest of scores + expert_bias per token (ties: the lowest index; NaN
 * loses), weights = their scores (without the bias), divided by their sum if `normalize`, times
 * `scale`. Experts come in order of falling score + expert_bias.
 * A logit of -inf has score 0. A softmax row with NaN or +inf, or with nothing above -inf, has only
 * NaN scores: experts 0 to k - 1, weights NaN. With `normalize`, chosen scores that sum to exactly
 * zero give weights of zero, and gradients of zero. At most 4096 experts on the CPU. */
typedef struct moire_router_args {
  size_t struct_size;
  moire_tensor logits;       /* [T, E] FP32, BF16 or FP16 */
  moire_tensor expert_bias;  /* [E] FP32, for the selection only, or absent */
  int32_t kind;              /* moire_router_kind */
  int32_t normalize;         /* 1: the k weights of a token sum to `scale` */
  float scale;               /* 0 = 1 */
  moire_tensor topk_idx;     /* out [T, k] INT32 or INT64; k <= E */
  moire_tensor topk_weights; /* out [T, k] FP32 */
} moire_router_args;
MOIRE_API int32_t moire_router(const moire_context* context, const moire_router_args* args);

/* grad_logits from grad_topk_weights; the selection itself has no gradient. */
typedef struct moire_router_backward_args {
  size_t struct_size;
  moire_tensor logits;            /* [T, E], as in the forward */
  moire_tensor topk_idx;          /* [T, k], the forward's result */
  moire_tensor grad_topk_weights; /* [T, k] FP32 */
  int32_t kind;
  int32_t normalize;
  float scale;
  moire_tensor grad_logits; /* out [T, E] FP32, BF16 or FP16 */
} moire_router_backward_args;
MOIRE_API int32_t moire_router_backward(const moire_context* context,
                                        const moire_router_backward_args* args);

/* Where every top-k entry goes: rows sorted by expert, stable in token order (then in the order of
 * its entries) within an expert. An index of -1 or G drops the entry (scatter_idx -1). Unused
 * entries of gather_idx are -1. A capacity below the routed rows is an error that names how many
 * they are. */
typedef struct moire_permute_plan_args {
  size_t struct_size;
  moire_tensor topk_idx;    /* [T, k] INT32 or INT64, each in -1 ... G */
  int64_t num_groups;       /* G */
  moire_tensor offsets;     /* out [G + 1] INT64 */
  moire_tensor gather_idx;  /* out [capacity] INT32 or INT64: row -> token; capacity >= routed rows
                               (T * k always suffices) */
  moire_tensor scatter_idx; /* out [T, k], dtype of gather_idx: top-k entry -> row */
  moire_workspace workspace;
} moire_permute_plan_args;
MOIRE_API int32_t moire_permute_plan(const moire_context* context,
                                     const moire_permute_plan_args* args);
MOIRE_API int32_t moire_permute_plan_workspace(const moire_context* context,
                                               const moire_permute_plan_args* args, size_t* bytes);

/* Tokens into expert order: rows_i = x[gather_idx_i]; probs_i = topk_weights of the top-k entry
 * that row i came from. It is also the gradient of a plain unpermute. Either pair (x and rows;
 * topk_weights, scatter_idx and probs) may be absent. scatter_idx names each row of the groups
 * once, as moire_permute_plan's does; another number of rows is an error. */
typedef struct moire_permute_args {
  size_t struct_size;
  moire_tensor x;            /* [T, H] FP32, BF16 or FP16 */
  moire_tensor gather_idx;   /* [capacity] */
  moire_tensor rows;         /* out [capacity, H], dtype of x */
  moire_tensor topk_weights; /* [T, k] FP32 */
  moire_tensor scatter_idx;  /* [T, k] */
  moire_tensor probs;        /* out [capacity] FP32 */
  moire_groups groups;
  int32_t tail;
} moire_permute_args;
MOIRE_API int32_t moire_permute(const moire_context* context, const moire_permute_args* args);

/* Rows back to tokens: y_t = sum_j weights_tj * rows[scatter_idx_tj], j ascending, in FP32 (the
 * first entry is a product, each further one a fused multiply-add), rounded once; dropped entries
 * add nothing, and without any y_t is zero. It is also the gradient of moire_permute; then probs
 * and topk_weights carry the gradient of the weights back: topk_weights_tj = probs[scatter_idx_tj],
 * 0 where dropped. Either pair (rows and y; probs and topk_weights) may be absent. */
typedef struct moire_unpermute_args {
  size_t struct_size;
  moire_tensor rows;         /* [capacity, H] FP32, BF16 or FP16 */
  moire_tensor scatter_idx;  /* [T, k] */
  moire_tensor weights;      /* [T, k] FP32, or absent (= 1) */
  moire_tensor y;            /* out [T, H], dtype of rows or FP32 */
  moire_tensor probs;        /* [capacity] FP32, or absent */
  moire_tensor topk_weights; /* out [T, k] FP32, or absent */
} moire_unpermute_args;
MOIRE_API int32_t moire_unpermute(const moire_context* context, const moire_unpermute_args* args);

/* The gradient of a weighted unpermute: grad_rows[scatter_idx_tj] = weights_tj * grad_y_t, rounded
 * once; grad_weights_tj = sum_h rows[scatter_idx_tj, h] * grad_y_th (64-column partial sums, in
 * order), 0 where dropped. scatter_idx names each row of the groups once, as in moire_permute. */
typedef struct moire_unpermute_backward_args {
  size_t struct_size;
  moire_tensor grad_y;       /* [T, H] */
  moire_tensor rows;         /* [capacity, H] FP32, BF16 or FP16; needed for grad_weights only */
  moire_tensor scatter_idx;  /* [T, k] */
  moire_tensor weights;      /* [T, k] FP32, or absent (= 1) */
  moire_tensor grad_rows;    /* out [capacity, H], dtype of grad_y, or absent */
  moire_tensor grad_weights; /* out [T, k] FP32, or absent */
  moire_groups groups;
  int32_t tail; /* of grad_rows */
} moire_unpermute_backward_args;
MOIRE_API int32_t moire_unpermute_backward(const moire_context* context,
                                           const moire_unpermute_backward_args* args);

/* ---- grouped linear and grouped MLP ---------------------------------------------------------- */

enum moire_recipe {
  MOIRE_RECIPE_AS_STORED = 0,  /* operands as they are, FP32 accumulation: bf16, fp16, fp32 */
  MOIRE_RECIPE_MXFP8 = 1,      /* every product of MXFP8 operands, exact, FP32 accumulation */
  MOIRE_RECIPE_MXFP8_FAST = 2, /* the same bytes, folded where FP8 tensor cores sum them:
                                  MOIRE_ACCUMULATE_FAST */
  MOIRE_RECIPE_FP8_BLOCK = 3   /* FP8_BLOCK activations and gradients, FP8_TILE weights,
                                  MOIRE_ACCUMULATE_FAST (DeepSeek-V3) */
};

/* A weight in the form that a device's products read, made by moire_prepare_weight once for all
 * calls until the weight changes. The memory has no header: calls look at this struct alone, and
 * refuse one of another recipe, device, layout, shape or version. All zero: absent. */
typedef struct moire_prepared_weight {
  moire_tensor memory; /* UINT8 [bytes], 64-byte aligned, the caller's; opaque */
  int32_t version;     /* of the library's forms */
  int32_t form;        /* which of them (docs/numerics.md) */
  int32_t device;      /* moire_device */
  int32_t index;       /* which device of that kind */
  int32_t recipe;      /* moire_recipe */
  int32_t fractional_scales;
  int32_t forward_only;
  int32_t layout;   /* moire_weight_layout of the weight */
  int64_t shape[3]; /* of the weight */
} moire_prepared_weight;

/* Does once what a product of the recipe would do to a weight at each call. A layer takes the
 * result as w1_prepared and the like; the weight and its copies may then be absent (w1.layout is
 * still said). */
typedef struct moire_prepare_weight_args {
  size_t struct_size;
  moire_weight w; /* [G, out, in] or [G, in, out], FP32, BF16 or FP16, packed or listed */
  int32_t recipe; /* moire_recipe, but not AS_STORED, which reads weights as they are */
  int32_t fractional_scales; /* FP8_BLOCK: 1 = scales need not be powers of two */
  int32_t dequantized; /* MXFP8: 1 = what its codes decode to is kept, in BF16, where a device would
                          decode them at each call: 4 bytes an element, 2 with forward_only */
  int32_t forward_only;           /* 1: no gradient of x will be asked for */
  moire_prepared_weight prepared; /* out: as moire_prepare_weight_form gave it, with memory.data */
  moire_workspace workspace;
} moire_prepare_weight_args;
MOIRE_API int32_t moire_prepare_weight(const moire_context* context,
                                       const moire_prepare_weight_args* args);
MOIRE_API int32_t moire_prepare_weight_workspace(const moire_context* context,
                                                 const moire_prepare_weight_args* args,
                                                 size_t* bytes);
/* What moire_prepare_weight will make of such a weight on this context: all of `form` but
 * memory.data; memory.shape[0] is how many bytes it needs. args->prepared is not read. */
MOIRE_API int32_t moire_prepare_weight_form(const moire_context* context,
                                            const moire_prepare_weight_args* args,
                                            moire_prepared_weight* form);

/* Layers, in FP8 recipes: x, grad_y and weights are quantised as they are, of any float type; what
 * an MLP makes between its products (z, act and their gradients) is rounded to BF16, whatever x and
 * y are, before it is read or quantised: z, act and grad_z of such a call are BF16. Copies that a
 * step needs and that are absent are made in the workspace. */

/* y_i = x_i * W_g^T (+ scale_i * bias_g). */
typedef struct moire_grouped_linear_args {
  size_t struct_size;
  moire_tensor x;       /* [capacity, in], or [T, in] with row_idx */
  moire_tensor row_idx; /* [capacity], or absent */
  moire_weight w;       /* [G, out, in] or [G, in, out] */
  moire_tensor bias;    /* [G, out], or absent */
  moire_tensor scale;   /* [capacity] FP32, or absent (= 1) */
  moire_tensor y;       /* out [capacity, out] */
  moire_groups groups;
  int32_t recipe; /* moire_recipe */
  int32_t tail;
  moire_workspace workspace;
  moire_tensor x_scales;        /* of an x that is FP8 already, rowwise */
  moire_quantized w_quantized;  /* blocks along in, or tiles; w may then be absent */
  moire_quantized x_columnwise; /* out: kept for grad_w, or absent; may lie as wgrad reads it */
  int32_t emulate_accumulation; /* MXFP8_FAST, FP8_BLOCK on a CPU: MOIRE_ACCUMULATE_EMULATED */
  int32_t fractional_scales;    /* FP8_BLOCK: 1 = scales need not be powers of two */
  moire_prepared_weight w_prepared;
} moire_grouped_linear_args;
MOIRE_API int32_t moire_grouped_linear(const moire_context* context,
                                       const moire_grouped_linear_args* args);
MOIRE_API int32_t moire_grouped_linear_workspace(const moire_context* context,
                                                 const moire_grouped_linear_args* args,
                                                 size_t* bytes);

/* Each gradient is computed if its output is present. The weight gradient may be a second, later
 * call (delayed wgrad). */
typedef struct moire_grouped_linear_backward_args {
  size_t struct_size;
  moire_tensor x;          /* needed for grad_w */
  moire_tensor row_idx;    /* of x and, with gathered_grad_y, of grad_y */
  int32_t gathered_grad_y; /* 1: grad_y is [T, out] and is gathered by row_idx as well */
  moire_weight w;          /* needed for grad_x */
  moire_tensor bias;       /* needed for grad_scale */
  moire_tensor scale;      /* as in the forward */
  moire_tensor grad_y;     /* [capacity, out], or [T, out] */
  moire_tensor grad_x;     /* out [capacity, in], or absent; always in expert order */
  moire_weight grad_w;     /* in/out, shape and layout of w, FP32, BF16 or FP16, or absent */
  moire_tensor grad_bias;  /* in/out [G, out], or absent */
  moire_tensor grad_scale; /* out [capacity] FP32, or absent */
  int32_t beta;            /* of grad_w and grad_bias: 0 overwrite, 1 accumulate */
  const uint8_t* beta_per_group;
  moire_groups groups;
  int32_t recipe;
  int32_t tail;
  moire_workspace workspace;
  moire_quantized w_quantized;       /* blocks along out, or tiles; w may then be absent */
  moire_quantized x_columnwise;      /* x may then be absent */
  moire_quantized grad_y_rowwise;    /* both: grad_y may then be absent, but for grad_bias and */
  moire_quantized grad_y_columnwise; /* grad_scale, which are sums of grad_y itself */
  int32_t gradient_dtype;            /* of grad_y's copies: 0 or E4M3, or E5M2 */
  int32_t emulate_accumulation;
  int32_t fractional_scales;
  moire_prepared_weight w_prepared;
} moire_grouped_linear_backward_args;
MOIRE_API int32_t moire_grouped_linear_backward(const moire_context* context,
                                                const moire_grouped_linear_backward_args* args);
MOIRE_API int32_t moire_grouped_linear_backward_workspace(
    const moire_context* context, const moire_grouped_linear_backward_args* args, size_t* bytes);

/* z = x W1^T (+ b1), act = glu(z) * probs, y = act W2^T (+ s * b2), s = probs unless b2_scale or
 * b2_unscaled says otherwise. N is H in a layer that returns to where it began. */
typedef struct moire_grouped_mlp_args {
  size_t struct_size;
  moire_tensor x;       /* [capacity, H], or [T, H] with row_idx */
  moire_tensor row_idx; /* [capacity], or absent */
  moire_weight w1;      /* [G, 2F, H] or [G, H, 2F] */
  moire_tensor b1;      /* [G, 2F], or absent */
  moire_weight w2;      /* [G, N, F] or [G, F, N] */
  moire_tensor b2;      /* [G, N], or absent */
  moire_tensor probs;   /* [capacity] FP32, or absent (= 1) */
  moire_groups groups;
  moire_activation activation;
  moire_glu_layout layout; /* of w1, b1 and z */
  int32_t recipe;
  int32_t tail;     /* of y */
  moire_tensor z;   /* out [capacity, 2F]: saved for the backward, or absent */
  moire_tensor act; /* out [capacity, F]: saved to trade memory for time, or absent */
  moire_tensor y;   /* out [capacity, N] */
  moire_workspace workspace;
  moire_tensor x_scales;          /* of an x that is FP8 already, rowwise */
  moire_quantized w1_quantized;   /* blocks along H, or tiles; w1 may then be absent */
  moire_quantized w2_quantized;   /* blocks along F, or tiles */
  moire_quantized x_columnwise;   /* out: kept for grad_w1, or absent; as grouped_linear has it */
  moire_quantized act_columnwise; /* out: kept for grad_w2, or absent */
  int32_t emulate_accumulation;
  int32_t fractional_scales;
  moire_prepared_weight w1_prepared;
  moire_prepared_weight w2_prepared;
  moire_tensor b2_scale; /* [capacity] FP32 that scales b2 in the place of probs, or absent */
  int32_t b2_unscaled;   /* 1: b2 is added as it is; then there is no b2_scale */
} moire_grouped_mlp_args;
MOIRE_API int32_t moire_grouped_mlp(const moire_context* context,
                                    const moire_grouped_mlp_args* args);
MOIRE_API int32_t moire_grouped_mlp_workspace(const moire_context* context,
                                              const moire_grouped_mlp_args* args, size_t* bytes);

/* Each gradient is computed if its output is present; where probs feeds act and b2, grad_probs is
 * the sum of both paths. grad_z and act may be kept (given by the caller), so that the weight
 * gradients can be a later call of moire_grouped_linear_backward. */
typedef struct moire_grouped_mlp_backward_args {
  size_t struct_size;
  moire_tensor x;          /* as in the forward; needed for grad_w1 */
  moire_tensor row_idx;    /* of x and, with gathered_grad_y, of grad_y */
  int32_t gathered_grad_y; /* 1: grad_y is [T, N], gathered by row_idx */
  moire_weight w1;         /* needed for grad_x */
  moire_weight w2;
  moire_tensor b2; /* needed for the gradient of what scales it, if the forward had it */
  moire_tensor probs;
  moire_groups groups;
  moire_activation activation;
  moire_glu_layout layout;
  int32_t recipe;
  int32_t tail;     /* of grad_x, grad_probs and grad_b2_scale */
  moire_tensor z;   /* [capacity, 2F], saved by the forward */
  moire_tensor act; /* in: as saved, if `act_is_saved`; else out: act again, to keep, or absent */
  int32_t act_is_saved;
  moire_tensor grad_y;     /* [capacity, N], or [T, N] */
  moire_tensor grad_z;     /* out [capacity, 2F] to keep, or absent */
  moire_tensor grad_x;     /* out [capacity, H] in expert order, or absent */
  moire_weight grad_w1;    /* in/out, or absent */
  moire_tensor grad_b1;    /* in/out, or absent */
  moire_weight grad_w2;    /* in/out, or absent */
  moire_tensor grad_b2;    /* in/out, or absent */
  moire_tensor grad_probs; /* out [capacity] FP32, or absent */
  int32_t beta_w1;         /* 0 overwrite, 1 accumulate; for every group */
  int32_t beta_w2;
  int32_t beta_bias;                /* of grad_b1 and grad_b2 */
  const uint8_t* beta_w1_per_group; /* [G], overrides beta_w1; null = not used */
  const uint8_t* beta_w2_per_group;
  moire_workspace workspace;
  moire_quantized w1_quantized;      /* blocks along 2F, or tiles */
  moire_quantized w2_quantized;      /* blocks along N, or tiles */
  moire_quantized x_columnwise;      /* x may then be absent */
  moire_quantized act_columnwise;    /* in if act_is_saved (act may then be absent), else out */
  moire_quantized grad_y_rowwise;    /* both: grad_y may then be absent, but for grad_b2 and for */
  moire_quantized grad_y_columnwise; /* gradients of what scales b2 */
  moire_quantized grad_z_columnwise; /* out, to keep for a later grad_w1, or absent */
  int32_t gradient_dtype;            /* of the copies of grad_y and grad_z: 0 or E4M3, or E5M2 */
  int32_t emulate_accumulation;
  int32_t fractional_scales;
  moire_prepared_weight w1_prepared;
  moire_prepared_weight w2_prepared;
  moire_tensor b2_scale; /* both as in the forward */
  int32_t b2_unscaled;
  moire_tensor grad_b2_scale; /* out [capacity] FP32, or absent */
} moire_grouped_mlp_backward_args;
MOIRE_API int32_t moire_grouped_mlp_backward(const moire_context* context,
                                             const moire_grouped_mlp_backward_args* args);
MOIRE_API int32_t moire_grouped_mlp_backward_workspace(const moire_context* context,
                                                       const moire_grouped_mlp_backward_args* args,
                                                       size_t* bytes);

/* ---- expert parallelism ---------------------------------------------------------------------- */

/* E experts over R ranks: rank r has those from r * E / R on. A token goes once to each rank that
 * has one of its experts (dispatch); that rank does with what it received what it does with tokens
 * of its own (permute_plan of topk_idx_recv, ...); the ranks' sums come back and are added
 * (combine). Each is the other's gradient, with the forward's places: of dispatch combine(grad of
 * x_recv, grad of topk_weights_recv), of combine dispatch(grad_y).
 *
 * A communicator is a rank's knowledge of the others, and belongs to contexts. Each rank has a
 * window, memory of the same size on all; what other ranks write or read (*_recv, rows) lies in it,
 * at the same offset on every rank (anywhere, if there is but one). They touch it only while this
 * rank is in dispatch or combine; between them it is the caller's, who divides it.
 *
 * dispatch and combine are calls of all ranks together, in the same order: each waits for the
 * others, whatever its T. A call that is refused for its own arguments has not taken part, and may
 * be made again. Where ranks call different ops, or with tensors that lie or are shaped differently
 * in their windows, all get MOIRE_INVALID_ARGUMENT, which names a rank, and nothing was moved. A
 * rank that left, or did not come in time, is MOIRE_RANK_FAILED on all, now and in every later
 * call; outputs and windows then hold anything, and other ranks may touch the windows yet. */

typedef struct moire_communicator_options {
  size_t struct_size;
  int32_t num_ranks;      /* R, 1 to 1024 */
  size_t window_bytes;    /* of each rank */
  int64_t timeout_ms;     /* how long a call waits for another rank; 0 = 600,000, ten minutes */
  int32_t device;         /* moire_device, whose memory windows are */
  const int32_t* indices; /* [R] CUDA device of each rank; null = 0. Several may be on one */
  int32_t num_multiprocessors; /* that moving rows takes, of a CUDA device; 0 = all */
  int32_t rank;                /* of moire_communicator_nccl: which of the R */
  void* nccl_comm;             /* an ncclComm_t, which stays the caller's; it says R and rank */
  const void* nccl_id;         /* or, without one, an ncclUniqueId of all ranks */
} moire_communicator_options;

/* Ranks that are threads of this process: communicators[0 ... R - 1], each for the contexts of one
 * thread. A CUDA device has no more than it has queues: CUDA_DEVICE_MAX_CONNECTIONS, else 8. */
MOIRE_API int32_t moire_communicator_threads(const moire_communicator_options* options,
                                             moire_communicator** communicators);
/* This rank of several, each with a CUDA device that reaches those of all: of processes, or of
 * threads. libnccl.so.2 since 2.29.2 is opened for it. A call of all ranks. Without nccl_comm the
 * rank's device is indices[0]. */
MOIRE_API int32_t moire_communicator_nccl(const moire_communicator_options* options,
                                          moire_communicator** communicator);
/* This rank's window: zeroed at first, 256-byte aligned. */
MOIRE_API int32_t moire_communicator_window(const moire_communicator* communicator, void** data,
                                            size_t* bytes);
/* Which rank of how many, and the index of its CUDA device; -1 on the CPU. */
MOIRE_API int32_t moire_communicator_rank(const moire_communicator* communicator, int32_t* rank,
                                          int32_t* num_ranks, int32_t* index);
/* This rank leaves: calls of the others fail from now on. Null is fine. */
MOIRE_API void moire_communicator_destroy(moire_communicator* communicator);

/* Which tokens go where. A rank d has room for C rows of each rank; the first C tokens, in order,
 * that have a choice there are placed in rows 0, 1, ...; those after them are not, which counts
 * tells and moire_dispatch judges. C = the largest T of all ranks always suffices. */
typedef struct moire_dispatch_plan_args {
  size_t struct_size;
  moire_tensor topk_idx; /* [T, k] INT32 or INT64, each in -1 ... E; -1 and E go nowhere */
  int64_t num_experts;   /* E, a multiple of R */
  int64_t capacity;      /* C */
  moire_tensor places;   /* out [T, R] INT32: token -> row at each rank; -1 = not sent */
  moire_tensor counts;   /* out [R] INT64: tokens that have a choice at each rank */
  moire_workspace workspace;
} moire_dispatch_plan_args;
MOIRE_API int32_t moire_dispatch_plan(const moire_context* context,
                                      const moire_dispatch_plan_args* args);
MOIRE_API int32_t moire_dispatch_plan_workspace(const moire_context* context,
                                                const moire_dispatch_plan_args* args,
                                                size_t* bytes);

/* What becomes of tokens that have no place. */
enum moire_overflow {
  MOIRE_OVERFLOW_REFUSE = 0, /* all ranks return an error that says whose, and how many; nothing is
                                moved */
  MOIRE_OVERFLOW_DROP = 1    /* they stay away: they add nothing, and their gradients are zero */
};

/* Tokens to the ranks of their experts: row places[t, d] of those that rank d has of this rank is
 * x_t. At a receiver rows of rank s are s * C to (s + 1) * C - 1; rows that nobody sent are
 * untouched. topk_idx_recv has the receiver's own experts, from 0; choices of others, and all of
 * rows that nobody sent, are -1 with a weight of 0. Either group of operands (x and x_recv, with
 * scales; topk_idx to topk_weights_recv) may be absent. */
typedef struct moire_dispatch_args {
  size_t struct_size;
  moire_tensor x;                 /* [T, H] FP32, BF16, FP16, E4M3 or E5M2 */
  moire_tensor x_scales;          /* [T, blocks] E8M0 or FP32, of an FP8 x, rowwise */
  moire_tensor places;            /* [T, R] */
  moire_tensor counts;            /* [R] INT64; read where overflow is REFUSE */
  int32_t overflow;               /* moire_overflow */
  moire_tensor topk_idx;          /* [T, k] INT32 or INT64 */
  moire_tensor topk_weights;      /* [T, k] FP32 */
  int64_t num_experts;            /* E; with topk_idx */
  moire_tensor x_recv;            /* out [R * C, H], dtype of x */
  moire_tensor x_scales_recv;     /* out [R * C, blocks], dtype of x_scales */
  moire_tensor topk_idx_recv;     /* out [R * C, k] INT32 */
  moire_tensor topk_weights_recv; /* out [R * C, k] FP32 */
} moire_dispatch_args;
MOIRE_API int32_t moire_dispatch(const moire_context* context, const moire_dispatch_args* args);

/* Rows back to their tokens: y_t = the sum over the ranks d that t went to of row places[t, d], d
 * ascending, in FP32 (the first is taken as it is), rounded once; zero where it went nowhere.
 * topk_weights_tj is that of the row at the one rank that has expert topk_idx_tj, 0 where there is
 * none: the gradient of dispatch's weights. Either group of operands may be absent. */
typedef struct moire_combine_args {
  size_t struct_size;
  moire_tensor rows;              /* [R * C, H] FP32, BF16 or FP16 */
  moire_tensor places;            /* [T, R] */
  moire_tensor y;                 /* out [T, H], dtype of rows or FP32 */
  moire_tensor topk_weights_recv; /* [R * C, k] FP32 */
  moire_tensor topk_idx;          /* [T, k] INT32 or INT64 */
  int64_t num_experts;            /* E; with topk_idx */
  moire_tensor topk_weights;      /* out [T, k] FP32 */
} moire_combine_args;
MOIRE_API int32_t moire_combine(const moire_context* context, const moire_combine_args* args);

/* ---- fields ---------------------------------------------------------------------------------- */

/* What a call does with the memory that a field of its struct names. */
enum moire_role {
  MOIRE_ROLE_NONE = 0, /* no such op or field, or a field that names no memory */
  MOIRE_ROLE_IN = 1,
  MOIRE_ROLE_OUT = 2, /* written; read first where a beta says so */
  MOIRE_ROLE_SCRATCH = 3
};

/* The role of a field of moire_<op>_args, for bindings that tell inputs from outputs; written where
 * any call writes it (act of "grouped_mlp_backward", unless it is saved). */
MOIRE_API int32_t moire_field_role(const char* op, const char* field);

/* cffi: end */

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* MOIRE_H_ */
