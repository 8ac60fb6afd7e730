// The problem format: what is printed parses to the same problem, and what is wrong is named.
#include "problem.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

#include "cases.h"
#include "commands.h"
#include "problem_fields.h"
#include "problem_source.h"

namespace moire::tool {
namespace {

// The sentence of a UsageError, or "" where nothing is wrong.
template <class Call>
std::string refusal(Call&& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

std::string error_of(const std::string& line) {
  return refusal([&] { sensible(parse_problem(line)); });
}

std::string load_error(const std::string& what) {
  return refusal([&] { load_problems(what); });
}

const char* const kPlain = "groups=4 hidden=64 ffn=32 rows=50";

TEST(Problem, PrintsALineThatParsesToTheSameProblem) {
  constexpr uint64_t kSeed = 20261121;
  for (int64_t i = 0; i < 2000; ++i) {
    const Problem problem = random_problem(kSeed, i);
    const std::string line = to_line(problem);
    const Problem again = sensible(parse_problem(line));
    EXPECT_EQ(to_line(again), line) << "seed " << kSeed << ", problem " << i;
    EXPECT_EQ(make_splits(again), make_splits(problem)) << line;
    EXPECT_EQ(again.layout.block, problem.layout.block) << line;
    EXPECT_EQ(again.activation.limit, problem.activation.limit) << line;
    EXPECT_EQ(again.out, problem.out) << line;
    EXPECT_EQ(again.x, problem.x) << line;
    EXPECT_EQ(dtype_words(again), dtype_words(problem)) << line;
    EXPECT_EQ(again.x_columnwise, problem.x_columnwise) << line;
    EXPECT_EQ(again.act_columnwise, problem.act_columnwise) << line;
    EXPECT_EQ(again.prepared, problem.prepared) << line;
    EXPECT_EQ(again.recipe, problem.recipe) << line;
    EXPECT_EQ(again.emulated, problem.emulated) << line;
    EXPECT_EQ(again.fractional, problem.fractional) << line;
    EXPECT_EQ(again.element, problem.element) << line;
  }
}

TEST(Problem, ReadsEveryField) {
  const Problem p = parse_problem(
      "name=x op=fc1 groups=2 hidden=8 ffn=6 rows=7 topk=2 dropped=3 dtype=mxfp8_fast out=fp32 "
      "splits=3,4 "
      "act=clamped_swiglu:7:1.702:1 layout=blocks:3 order=up_first bias=yes probs=no gather=yes "
      "weights=in_out storage=list save_act=yes scores=sigmoid normalize=no tail=5 "
      "tail_rows=untouched beta=mixed scaling=fp8_tile element=e5m2 direction=both emulated=yes "
      "fractional=yes "
      "scales=padded b=fp8_block x=fp16 x_columnwise=yes act_columnwise=yes prepared=yes seed=9");
  EXPECT_EQ(p.name, "x");
  EXPECT_EQ(p.op->name, "fc1");
  EXPECT_TRUE(p.prepared);
  EXPECT_EQ(p.splits.list, (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(p.activation.kind, MOIRE_CLAMPED_SWIGLU);
  EXPECT_EQ(p.activation.alpha, 1.702F);
  EXPECT_EQ(p.layout.block, 3);
  EXPECT_EQ(p.layout.order, MOIRE_UP_FIRST);
  EXPECT_TRUE(p.bias && !p.probs && p.gather && p.in_out && p.listed && p.save_act);
  EXPECT_TRUE(p.sigmoid && !p.normalize && p.keep_tail);
  EXPECT_EQ(p.capacity(), 12);
  EXPECT_EQ(p.tokens(), 5);
  EXPECT_EQ(p.beta, 2);
  EXPECT_EQ(p.scaling, MOIRE_SCALING_FP8_TILE);
  EXPECT_EQ(p.element, DType::kE5M2);
  EXPECT_EQ(p.directions, Directions::kBoth);
  EXPECT_EQ(p.recipe, MOIRE_RECIPE_MXFP8_FAST);
  EXPECT_TRUE(p.emulated);
  EXPECT_TRUE(p.fractional);
  EXPECT_EQ(p.scale_layout, MOIRE_SCALES_PADDED);
  EXPECT_EQ(p.seed, 9U);
  EXPECT_EQ(p.b_format().recipe, MOIRE_RECIPE_FP8_BLOCK);
  EXPECT_TRUE(p.x_columnwise && p.act_columnwise);
  EXPECT_EQ(p.x, DType::kFP16);
  EXPECT_EQ(p.stored(), DType::kFP16);
}

TEST(Problem, TakesFormatsOfOperandsAsDtypes) {
  Problem p = parse_problem(std::string(kPlain) + " dtype=mxfp8 element=e5m2");
  EXPECT_EQ(p.dtype, DType::kBF16);
  EXPECT_EQ(p.recipe, MOIRE_RECIPE_MXFP8);
  EXPECT_EQ(p.element, DType::kE5M2);
  p = parse_problem(to_line(p));
  EXPECT_EQ(p.recipe, MOIRE_RECIPE_MXFP8);
  EXPECT_EQ(p.element, DType::kE5M2);
  p = parse_problem(to_line(parse_problem(std::string(kPlain) + " dtype=mxfp8_fast")));
  EXPECT_EQ(p.recipe, MOIRE_RECIPE_MXFP8_FAST);
  p = parse_problem(std::string(kPlain) + " dtype=fp8_block");
  EXPECT_EQ(p.recipe, MOIRE_RECIPE_FP8_BLOCK);
  EXPECT_EQ(parse_problem(std::string(kPlain) + " dtype=bf16").recipe, MOIRE_RECIPE_AS_STORED);
}

TEST(Problem, RefusesWhatARecipeHasNoUseFor) {
  const auto refused = [](const std::string& fields, const std::string& message) {
    EXPECT_EQ(error_of(std::string(kPlain) + " " + fields), "problem: field " + message);
  };
  const std::string needed = "needed dtype=mxfp8, mxfp8_fast or fp8_block, which quantise";
  refused("x=fp32", "\"x\": found dtype=fp32, " + needed);
  refused("dtype=bf16 x_columnwise=yes", "\"x_columnwise\": found dtype=bf16, " + needed);
  refused("dtype=bf16 act_columnwise=yes", "\"act_columnwise\": found dtype=bf16, " + needed);
  refused("dtype=bf16 prepared=yes", "\"prepared\": found dtype=bf16, " + needed);
  refused("op=linear dtype=fp16 element=e5m2", "\"element\": found dtype=fp16, " + needed);
  refused("dtype=mxfp8 fractional=yes",
          "\"fractional\": found dtype=mxfp8, needed dtype=fp8_block");
  refused("dtype=mxfp8 emulated=yes",
          "\"emulated\": found dtype=mxfp8, needed dtype=mxfp8_fast or fp8_block");
  refused("op=fc1 dtype=fp8_block b=bf16 emulated=yes",
          "\"emulated\": found b=bf16, needed FP8 operands on both sides");
  refused("op=fc1 b=mxfp8_fast",
          "\"b\": found \"mxfp8_fast\", needed same, fp32, bf16, fp16, mxfp8 or fp8_block");
  for (const std::string op : {"quantize", "quantize_weight", "requantize", "glu", "permute"}) {
    refused("op=" + op + " dtype=mxfp8",
            "\"dtype\": found mxfp8, needed fp32, bf16 or fp16 for op=" + op +
                ", which has no products");
  }
  for (const std::string field : {"x_columnwise", "act_columnwise", "prepared"}) {
    refused("op=fc1 dtype=bf16 " + field + "=yes",
            "\"" + field + "\": found dtype=bf16, " + needed);
  }
  refused("op=fc1_wgrad element=e5m2", "\"element\": found dtype=fp32, " + needed);
  refused("op=quantize emulated=yes",
          "\"emulated\": found dtype=fp32, needed dtype=mxfp8_fast or fp8_block");
  for (const char* fields : {"op=fc1 dtype=mxfp8 x_columnwise=yes act_columnwise=yes prepared=yes",
                             "op=fc1 b=fp8_block fractional=yes",
                             "op=convert_scales element=e5m2 direction=columnwise scales=dense",
                             "op=convert_glu dtype=mxfp8_fast element=e5m2 layout=interleaved",
                             "op=dispatch dtype=fp8_block",
                             "op=quantize element=e5m2 scaling=fp8_block fractional=yes"}) {
    EXPECT_EQ(error_of(std::string(kPlain) + " " + fields), "");
  }
}

TEST(Problem, RefusesWhatAnOpHasNoUseFor) {
  const std::string fp8_ops =
      "needed op=quantize, quantize_grad, quantize_weight, dequantize, requantize or "
      "convert_scales";
  const std::string product = "needed a single product, as op=fc1 or fc1_wgrad";
  for (const auto& [op, field, key, needed] :
       {std::tuple("mlp", "scaling=fp8_block", "scaling", fp8_ops),
        std::tuple("fc1", "scaling=fp8_tile", "scaling", fp8_ops),
        std::tuple("glu", "direction=columnwise", "direction", fp8_ops),
        std::tuple("linear", "direction=both", "direction", fp8_ops),
        std::tuple("mlp", "scales=dense", "scales", std::string("needed op=convert_scales")),
        std::tuple("quantize", "scales=padded", "scales", std::string("needed op=convert_scales")),
        std::tuple("mlp", "b=mxfp8", "b", product), std::tuple("linear", "b=bf16", "b", product),
        std::tuple("permute", "b=fp8_block", "b", product)}) {
    EXPECT_EQ(error_of(std::string(kPlain) + " op=" + op + " " + field),
              std::string("problem: field \"") + key + "\": found op=" + op + ", " + needed);
  }
}

TEST(Problem, TakesRowsFromAListOfSplits) {
  EXPECT_EQ(parse_problem("groups=3 hidden=8 ffn=8 splits=1,0,4").rows, 5);
}

TEST(Problem, NamesTheFieldWhatWasFoundAndWhatIsNeeded) {
  EXPECT_EQ(
      error_of(std::string(kPlain) + " dtype=fp23"),
      "problem: field \"dtype\": found \"fp23\", needed fp32, bf16, fp16, mxfp8, mxfp8_fast or "
      "fp8_block; did you mean fp32?");
  EXPECT_EQ(error_of("groups=4 hidden=64 ffn=32"),
            "problem: field \"rows\": found nothing, needed a whole number from 0 to 2^40");
  EXPECT_EQ(error_of("groups=4 groups=4 hidden=64 ffn=32 rows=1"),
            "problem: field \"groups\": found it twice, needed it once");
  EXPECT_EQ(error_of("groups=-1 hidden=64 ffn=32 rows=1"),
            "problem: field \"groups\": found \"-1\", needed a whole number from 0 to 2^40");
  EXPECT_EQ(error_of("groups=4 hidden=1099511627777 ffn=32 rows=1"),
            "problem: field \"hidden\": found \"1099511627777\", needed a whole number from 1 to "
            "2^40");
  EXPECT_EQ(error_of(std::string(kPlain) + " layout=blocks:5"),
            "problem: field \"layout\": found blocks of 5, needed a divisor of ffn=32");
  EXPECT_EQ(error_of(std::string(kPlain) + " splits=25,25"),
            "problem: field \"splits\": found 2 numbers, needed groups=4");
  EXPECT_EQ(error_of(std::string(kPlain) + " splits=25,25,1,0"),
            "problem: field \"splits\": found a sum of 51, needed rows=50");
  EXPECT_EQ(error_of(std::string(kPlain) + " splits=one_hot:4"),
            "problem: field \"splits\": found one_hot:4, needed a group below groups=4");
  EXPECT_EQ(error_of("groups=0 hidden=4 ffn=2 rows=3"),
            "problem: field \"rows\": found 3, needed 0, because groups=0");
  EXPECT_EQ(error_of(std::string(kPlain) + " op=router topk=5"),
            "problem: field \"topk\": found 5, needed at most groups=4");
  EXPECT_EQ(
      error_of(std::string(kPlain) + " op=quantize scaling=fp8_tile"),
      "problem: field \"scaling\": found fp8_tile, needed mxfp8 or fp8_block for op=quantize");
  EXPECT_EQ(error_of(std::string(kPlain) + " op=requantize direction=both"),
            "problem: field \"direction\": found both, needed rowwise or columnwise for "
            "op=requantize");
  EXPECT_EQ(error_of(std::string(kPlain) + " op=convert_scales scaling=fp8_block"),
            "problem: field \"scaling\": found fp8_block, needed mxfp8 for op=convert_scales");
  const std::string tiles = " op=convert_glu dtype=fp8_block layout=";
  const std::string of_384 = "groups=4 hidden=64 ffn=384 rows=50";
  EXPECT_EQ(
      error_of(std::string(kPlain) + tiles + "halves"),
      "problem: field \"dtype\": found fp8_block, needed gate and up in multiples of 128, as its "
      "tiles are");
  EXPECT_EQ(error_of(of_384 + tiles + "halves"), "");
  EXPECT_EQ(error_of(of_384 + tiles + "blocks:128"), "");
  EXPECT_EQ(
      error_of(of_384 + tiles + "blocks:64"),
      "problem: field \"dtype\": found fp8_block, needed gate and up in multiples of 128, as its "
      "tiles are");
  EXPECT_EQ(error_of(std::string(kPlain) + " op=quantize fractional=yes"),
            "problem: field \"fractional\": found yes, needed no, for scaling=mxfp8");
  EXPECT_EQ(error_of(std::string(kPlain) + " topk=5"),
            "problem: field \"topk\": found 5, needed at most groups=4");
  EXPECT_EQ(error_of(std::string(kPlain) + " topk=4"),
            "problem: field \"rows\": found 50, needed a multiple of topk=4 (rows and dropped "
            "choices are topk for each token)");
  EXPECT_EQ(error_of(std::string(kPlain) + " topk=4 dropped=1"),
            "problem: field \"rows\": found 50 and dropped=1, needed a multiple of topk=4 (rows "
            "and dropped choices are topk for each token)");
  EXPECT_EQ(parse_problem(std::string(kPlain) + " topk=4 dropped=2").tokens(), 13);
}

// Sizes are found without a page being touched; what fits nowhere is refused by its line.
TEST(Problem, IsRefusedWithASentenceWhereItDoesNotFit) {
  const Result<Context> context = Context::create();
  ASSERT_TRUE(context.ok()) << context.status().message();
  const auto refusal_of = [&](const std::string& line) {
    return refusal([&] { require_memory_for(context.value(), parse_problem(line)); });
  };
  const std::string wide = "groups=64 hidden=1000000 ffn=1000000 rows=100 dtype=bf16 op=";
  for (const Op& op : all_ops()) {
    const std::string name(op.name);
    EXPECT_EQ(refusal_of("groups=3 hidden=70 ffn=90 rows=50 op=" + name), "") << name;
    const bool has_rows =
        name != "convert_glu" && name != "quantize_weight" && name != "splits_to_offsets";
    EXPECT_EQ(refusal_of("groups=3 hidden=70 ffn=90 rows=1099511627776 op=" + name) != "", has_rows)
        << name;
  }
  EXPECT_EQ(
      refusal_of(wide + "fc1").find("found a problem of at least 233 TiB, needed at most the "), 0U)
      << refusal_of(wide + "fc1");
  EXPECT_NE(refusal_of(wide + "fc1").find(" free: op=fc1 groups=64 hidden=1000000"),
            std::string::npos);
  const std::string most = "1099511627776";
  EXPECT_NE(
      refusal_of("groups=8 rows=8 hidden=" + most + " ffn=" + most).find("more than 1.00 EiB"),
      std::string::npos);
  EXPECT_NE(
      refusal_of("hidden=8 rows=8 ffn=8 groups=" + most).find("whose lists alone take 64.0 TiB"),
      std::string::npos);
}

// Every recipe, what it may keep, and every pair of formats of a product.
TEST(Problem, OfRandomSeedsCoversEveryRecipeAndMix) {
  constexpr uint64_t kSeed = 5;
  std::set<std::string> seen;
  for (int64_t i = 0; i < 20000; ++i) {
    const Problem p = random_problem(kSeed, i);
    const std::string entry(p.op->entry());
    if (p.b.has_value()) seen.insert(entry + " " + dtype_words(p));
    if (entry == "convert_glu") {
      seen.insert(entry + " " + dtype_words(p) + (p.in_out ? " of columns" : " of rows") +
                  (p.seed % 2 == 0 ? " to halves" : " from halves"));
    }
    if (!entry.starts_with("grouped_mlp") && !entry.starts_with("grouped_linear")) continue;
    const std::string recipe(dtype_word(p));
    seen.insert(entry + " " + recipe + (p.emulated ? " emulated" : "") +
                (p.fractional ? " fractional" : "") + (p.x_columnwise ? " x_columnwise" : "") +
                (p.act_columnwise ? " act_columnwise" : ""));
    if (entry != "grouped_mlp") continue;
    const char* const scales[] = {" by probs", " by nothing", " by its own"};
    if (p.bias) seen.insert(recipe + scales[static_cast<size_t>(p.b2_scale)]);
    if (p.columns_of_y() != p.hidden) seen.insert(recipe + " to another width");
  }
  const char* const formats[] = {"fp32", "bf16", "fp16", "mxfp8", "fp8_block"};
  for (const std::string entry :
       {"grouped_gemm", "grouped_gemm_glu", "grouped_gemm_glu_backward", "grouped_gemm_wgrad"}) {
    for (const std::string a : formats) {
      for (const std::string b : formats) EXPECT_TRUE(seen.contains(entry + " " + a + " x " + b));
    }
  }
  for (const std::string dtype : {"fp32", "bf16", "fp16", "mxfp8", "mxfp8_fast"}) {
    for (const char* along : {" of columns", " of rows"}) {
      for (const char* way : {" to halves", " from halves"}) {
        EXPECT_TRUE(seen.contains("convert_glu " + dtype + along + way)) << dtype << along << way;
      }
    }
  }
  for (const std::string entry : {"grouped_mlp", "grouped_linear"}) {
    for (const std::string recipe :
         {"fp32", "bf16", "fp16", "mxfp8", "mxfp8_fast", "mxfp8_fast emulated", "fp8_block",
          "fp8_block fractional", "fp8_block emulated"}) {
      EXPECT_TRUE(seen.contains(entry + " " + recipe)) << entry << " " << recipe;
    }
    EXPECT_TRUE(seen.contains(entry + " mxfp8 x_columnwise act_columnwise")) << entry;
    EXPECT_TRUE(seen.contains(entry + " fp8_block x_columnwise act_columnwise")) << entry;
  }
  for (const std::string recipe : {"fp32", "bf16", "fp16", "mxfp8", "mxfp8_fast", "fp8_block"}) {
    for (const char* what : {" by probs", " by nothing", " by its own", " to another width"}) {
      EXPECT_TRUE(seen.contains(recipe + what)) << recipe << what;
    }
  }
}

TEST(Problem, NamesEveryKeyWhenOneIsUnknown) {
  const std::string message = error_of(std::string(kPlain) + " hiden=3");
  EXPECT_EQ(message.find("problem: field \"hiden\": found an unknown key, needed one of name, op,"),
            0U);
  EXPECT_NE(message.find("seed"), std::string::npos);
  EXPECT_NE(error_of("square").find("field \"square\": found no value, needed key=value"),
            std::string::npos);
}

TEST(Problem, RefusesNumbersTooLargeAndTextAfterNumbers) {
  for (const char* bad : {"hidden=99999999999999999999", "hidden=12x", "hidden=", "hidden=0",
                          "hidden=1.5", "hidden=0x10"}) {
    EXPECT_NE(error_of(std::string("groups=1 ffn=1 rows=1 ") + bad).find("field \"hidden\""),
              std::string::npos)
        << bad;
  }
}

TEST(ProblemFile, NamesFileAndLine) {
  const std::string text = std::string("# a comment\n\n") + kPlain + "\n" + kPlain + " bias=2\n";
  EXPECT_EQ(refusal([&] { parse_problems(text, "some.txt"); }),
            "some.txt:4: field \"bias\": found \"2\", needed yes or no");
}

TEST(ProblemFile, WithoutAProblemIsAnError) {
  EXPECT_EQ(refusal([] { parse_problems("# nothing\n", "empty.txt"); }),
            "empty.txt: found no problem, needed at least one line like groups=8 hidden=64 ffn=32 "
            "rows=100");
}

TEST(ProblemSource, KnowsEveryShippedName) {
  EXPECT_GE(kShippedFiles.size(), 10U);
  for (const ShippedFile& file : kShippedFiles) {
    for (const Problem& p : load_problems(file.name)) {
      EXPECT_FALSE(p.name.empty()) << to_line(p);
      EXPECT_EQ(to_line(sensible(parse_problem(to_line(p)))), to_line(p));
    }
  }
}

TEST(ProblemSource, FindsOneLineOfAFileByName) {
  const std::vector<Problem> square = load_problems("cpu:square");
  ASSERT_EQ(square.size(), 1U);
  EXPECT_EQ(square[0].rows, 1024);
  EXPECT_EQ(
      load_error("cpu:round").find("problems/cpu.txt: found no name=round, needed one of demo, "),
      0U);
}

TEST(ProblemSource, SaysWhatItAcceptsWhenItFindsNothing) {
  const std::string error = load_error("qwen4");
  EXPECT_EQ(error.find("problem \"qwen4\": found no such name or regular file, needed one"), 0U);
  EXPECT_NE(error.find("qwen3_30b"), std::string::npos);
}

TEST(ProblemSource, SettingsReplaceFieldsAndKeepTheOthers) {
  const Problem base =
      parse_problem("name=a groups=2 hidden=8 ffn=6 splits=3,4 bias=yes dtype=bf16");
  const Problem larger = with_settings(base, {"hidden=16"});
  EXPECT_EQ(larger.hidden, 16);
  EXPECT_EQ(larger.splits.list, base.splits.list);
  EXPECT_TRUE(larger.bias);
  EXPECT_EQ(larger.dtype, DType::kBF16);
  const Problem fewer = with_settings(base, {"rows=5"});
  EXPECT_EQ(fewer.rows, 5);
  EXPECT_EQ(fewer.splits.kind, Splits::Kind::kRagged);
  EXPECT_NE(refusal([&] { with_settings(base, {"rows=many"}); }), "");
}

TEST(Splits, SumToTheRowsWhateverTheirKind) {
  for (const char* kind : {"uniform", "zipf:0", "zipf:1", "zipf:2.5", "ragged", "one_hot:3"}) {
    for (const char* rows : {"0", "1", "50", "4099"}) {
      const Problem p = parse_problem(std::string("groups=7 hidden=8 ffn=8 rows=") + rows +
                                      " splits=" + kind + " seed=3");
      const std::vector<int64_t> splits = make_splits(p);
      ASSERT_EQ(splits.size(), 7U);
      EXPECT_EQ(std::accumulate(splits.begin(), splits.end(), int64_t{0}), p.rows) << kind;
      for (const int64_t rows_of_group : splits) EXPECT_GE(rows_of_group, 0);
    }
  }
}

TEST(Splits, FollowTheirKind) {
  const std::string sizes = "groups=5 hidden=8 ffn=8 rows=100 splits=";
  EXPECT_EQ(make_splits(parse_problem(sizes + "uniform")),
            (std::vector<int64_t>{20, 20, 20, 20, 20}));
  EXPECT_EQ(make_splits(parse_problem(sizes + "one_hot:2")),
            (std::vector<int64_t>{0, 0, 100, 0, 0}));
  std::vector<int64_t> zipf = make_splits(parse_problem(sizes + "zipf:1"));
  std::sort(zipf.rbegin(), zipf.rend());
  EXPECT_EQ(zipf, (std::vector<int64_t>{44, 22, 14, 11, 9}));
}

}  // namespace
}  // namespace moire::tool
