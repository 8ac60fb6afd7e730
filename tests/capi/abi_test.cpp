// The C contract against the checked-in abi.inc: sizes, offsets, values, and what the built library
// exports; and that abi.inc forgets nothing that moire.h has.
#include <gtest/gtest.h>
#include <moire.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace moire {
namespace {

using Names = std::vector<std::string>;

// What the compiler says of one line of abi.inc, and what the line says.
struct Promise {
  std::string what;
  int64_t got, promised;
};

std::vector<Promise> promises() {
#define STRUCT(name, size) {"sizeof(" #name ")", int64_t{sizeof(name)}, size},
#define FIELD(name, field, offset) \
  {"offsetof(" #name ", " #field ")", int64_t{offsetof(name, field)}, offset},
#define ENUMERATOR(name, value) {#name, int64_t{name}, value},
  return {
#include "tests/capi/abi.inc"
  };
}

// The names that abi.inc lists: "moire_tensor.data", "MOIRE_OK = 0", C functions, C++ functions.
struct Listed {
  Names fields, values;
  std::set<std::string> c_functions, cpp_functions;
};

Listed listed() {
  Listed out;
#define FIELD(name, field, offset) out.fields.push_back(#name "." #field);
#define ENUMERATOR(name, value) out.values.push_back(#name " = " #value);
#define OP(name) out.c_functions.insert("moire_" #name);
#define OP_WITH_WORKSPACE(name) \
  OP(name)                      \
  out.c_functions.insert("moire_" #name "_workspace");
#define ENTRY(name) out.c_functions.insert(#name);
#define CPP(name) out.cpp_functions.insert(name);
#include "tests/capi/abi.inc"
  return out;
}

// moire.h without its comments.
std::string header() {
  std::ifstream file(MOIRE_HEADER_PATH);
  std::stringstream text;
  text << file.rdbuf();
  std::string all = text.str(), out;
  for (size_t at = 0; at < all.size();) {
    const size_t begin = std::min(all.find("/*", at), all.size());
    out += all.substr(at, begin - at);
    const size_t end = all.find("*/", begin);
    at = end == std::string::npos ? all.size() : end + 2;
  }
  return out;
}

// The first capture of every match, in order; with `second`, "first" + second + "second".
Names captures(const std::string& text, const std::regex& pattern, const char* second = nullptr) {
  Names out;
  for (std::sregex_iterator it(text.begin(), text.end(), pattern), end; it != end; ++it) {
    out.push_back((*it)[1].str() + (second == nullptr ? "" : second + (*it)[2].str()));
  }
  return out;
}

Names fields_of_header() {
  const std::string text = header(), opening = "typedef struct ";
  Names out;
  for (size_t at = text.find(opening); at != std::string::npos; at = text.find(opening, at + 1)) {
    const size_t brace = text.find_first_of("{;", at);
    if (text[brace] == ';') continue;  // an opaque type
    const size_t end = text.find('}', brace);
    const std::string name = captures(text.substr(at, brace - at), std::regex("(\\w+)\\s*$")).at(0);
    // "name;", "name[3];" or, of a function, "(*name)(parameters);"
    const std::regex declared(R"((?:\(\*)?(\w+)(?:\)\([^;]*\))?(?:\[\d+\])?\s*;)");
    for (const std::string& field : captures(text.substr(brace, end - brace), declared)) {
      out.push_back(name + "." + field);
    }
  }
  return out;
}

// Type letter and demangled name, without the arguments, of every symbol that the library exports.
std::vector<std::pair<char, std::string>> exported() {
  const std::string command = std::string("nm -DC --defined-only '") + MOIRE_LIBRARY_PATH + "'";
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  std::vector<std::pair<char, std::string>> out;
  char line[4096];
  while (pipe != nullptr && std::fgets(line, sizeof(line), pipe.get()) != nullptr) {
    const std::string text(line);  // "000000000001c0d0 T moire::router(...)"
    if (text.size() < 20) continue;
    const std::string name = text.substr(19);
    out.emplace_back(text[17], name.substr(0, std::min(name.find_first_of("(\n"), name.find('['))));
  }
  return out;
}

TEST(CAbi, KeepsSizesOffsetsAndValues) {
  for (const Promise& promise : promises()) {
    EXPECT_EQ(promise.got, promise.promised) << promise.what;
  }
}

TEST(CAbi, ListsEveryFieldOfTheHeader) { EXPECT_EQ(fields_of_header(), listed().fields); }

TEST(CAbi, ListsEveryValueOfTheHeader) {
  EXPECT_EQ(captures(header(), std::regex("(MOIRE_\\w+)\\s*=\\s*(\\d+)"), " = "), listed().values);
}

TEST(CAbi, ListsEveryFunctionOfTheHeader) {
  const Names declared = captures(header(), std::regex("MOIRE_API [^;(]*?(moire_\\w+)\\("));
  EXPECT_EQ(std::set<std::string>(declared.begin(), declared.end()), listed().c_functions);
}

TEST(CAbi, ExportsTheListedFunctionsAndNothingElse) {
  const auto symbols = exported();
  if (symbols.empty()) GTEST_SKIP() << "nm (binutils) is not there to list the symbols";
  std::set<std::string> c_functions, cpp_functions;
  for (const auto& [type, name] : symbols) {
    if (name.starts_with("__")) continue;  // a sanitizer's
    EXPECT_EQ(type, 'T') << name << " is neither of moire.h nor of moire/*.h";
    (name.starts_with("moire::") ? cpp_functions : c_functions).insert(name);
  }
  EXPECT_EQ(c_functions, listed().c_functions);
  EXPECT_EQ(cpp_functions, listed().cpp_functions);
}

}  // namespace
}  // namespace moire
