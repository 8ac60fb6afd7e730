"""Every rule of scripts/lint.py fires on a bad snippet and stays silent on a good one."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import lint  # noqa: E402

HEADER = "// A file.\n"
TO_DO, FIX_ME = "TO" + "DO", "FIX" + "ME"  # in two parts, so that this file passes


def rules(path, text, has_header_file=False):
    return [f.rule for f in lint.lint_file(path, text, has_header_file)]


class Lint(unittest.TestCase):
    def test_layers_refuse_what_their_row_forbids(self):
        for path, include in [
            ("include/moire.h", "<string>"),
            ("include/moire/tensor.h", "<cuda_runtime.h>"),
            ("include/moire/tensor.h", "<Python.h>"),
            ("include/moire/tensor.h", "<moire/groups.h>"),
            ("include/moire/surprise.h", "<moire/status.h>"),
            ("src/core/format.h", '"ops/dispatch.h"'),
            ("src/backend/implementation.h", '"ops/dispatch.h"'),
            ("src/backend/cpu/glu.cpp", '"backend/cuda/device.h"'),
            ("src/backend/cuda/sm90/glu.cu", '"backend/cpu/convert-inl.h"'),
            ("src/backend/cuda/ptx/tma.cuh", '"backend/cuda/runtime/launch.h"'),
            ("src/ops/glu.cpp", '"backend/cpu/implementations.h"'),
            ("src/mlp/grouped_mlp.cpp", '"backend/implementation.h"'),
            ("src/mlp/grouped_mlp.cpp", '"ops/dispatch.h"'),
            ("src/mlp/grouped_mlp.cpp", "<nccl.h>"),
            ("src/capi/ops.cpp", '"core/tensor.h"'),
            ("reference/glu.cpp", '"core/float_formats.h"'),
            ("reference/glu.cpp", "<moire/glu.h>"),
            ("tools/moire/main.cpp", '"core/format.h"'),
            ("tools/moire/main.cpp", "<cuda_runtime.h>"),
            ("src/ops/glu.cpp", '"tests/support/random.h"'),
            ("examples/demo.cpp", '"core/format.h"'),
            ("src/new_layer/x.cpp", "<vector>"),
        ]:
            with self.subTest(path=path, include=include):
                self.assertEqual(rules(path, f"{HEADER}#include {include}\n"), ["layer"])

    def test_results_name_no_path_of_one_machine(self):
        bad = '{"library": "/home/me/build/libmoire.so"}\n'
        good = '{"command": "scripts/bench_peers.py --json docs/a.json", "unit": "TFLOP/s"}\n'
        self.assertEqual([f.rule for f in lint.check_result("docs/a.json", bad)], ["path"])
        self.assertEqual([*lint.check_result("docs/a.json", good)], [])

    def test_what_is_run_by_its_name_is_executable(self):
        for lines, is_executable, wanted in [
            (["#!/usr/bin/env python3"], True, []),
            (["#!/usr/bin/env python3"], False, ["mode"]),
            (["// A file."], True, ["mode"]),
            (["// A file."], False, []),
            ([], False, []),
        ]:
            found = [f.rule for f in lint.check_mode("scripts/a.py", lines, is_executable)]
            self.assertEqual(found, wanted)

    def test_documents(self):
        def found(text, other="[up](../README.md#what-it-is)\n"):
            pages = {"README.md": f"# What *it* is\n\n[a](docs/a.md)\n{text}", "docs/a.md": other}
            return [(f.path, f.rule) for f in lint.check_documents(pages, pages.__contains__)]

        readme, page = ("README.md", "link"), ("docs/a.md", "link")
        self.assertEqual(found("[b](https://b.example) [here](#what-it-is)\n"), [])
        self.assertEqual(found("```\nx[](docs/b.md)\n# Not a heading\n```\n"), [])
        self.assertEqual(found("[b](docs/b.md)\n"), [readme])
        self.assertEqual(found("[a](docs/a.md#nowhere)\n"), [readme])
        self.assertEqual(found("[here](#not-a-heading)\n```\n# Not a heading\n```\n"), [readme])
        self.assertEqual(found("", "[up](README.md)\n"), [page])
        wide = "x" * 101
        self.assertEqual(found("", f"{wide}\n"), [("docs/a.md", "columns")])
        self.assertEqual(found("", f"|{wide}|\n```\n{wide}\n```\n"), [])
        alone = lint.check_documents({"README.md": "", "docs/a.md": "[a](a.md)\n"}, lambda _: True)
        self.assertEqual([(f.path, f.rule) for f in alone], [page])

    def test_headings_are_named_as_hosts_of_code_name_them(self):
        text = "# 8. Error of each recipe\n## `a_b`, c: D\n## [x](y)\n## X\n"
        self.assertEqual(lint.anchors(text), {"8-error-of-each-recipe", "a_b-c-d", "x", "x-1"})

    def test_layers_allow_what_their_row_allows(self):
        for path, include in [
            ("include/moire.h", "<stdint.h>"),
            ("include/moire/groups.h", "<moire/tensor.h>"),
            ("src/backend/cpu/glu.cpp", "<hwy/highway.h>"),
            ("src/ops/glu.cpp", '"backend/implementation.h"'),
            ("benchmarks/hopper_mainloop.cu", '"backend/cuda/ptx/tma.cuh"'),
            ("reference/glu.cpp", '"reference/tensor.h"'),
            ("tools/moire/check.cpp", '"reference/glu.h"'),
            ("tests/ops/glu_test.cpp", '"core/format.h"'),
        ]:
            with self.subTest(path=path, include=include):
                self.assertEqual(rules(path, f"{HEADER}#include {include}\n"), [])

    def test_disabled_code(self):
        self.assertEqual(rules("src/core/x.cpp", HEADER + "#if 0\n#endif\n"), ["disabled"])
        self.assertEqual(rules("src/core/x.cpp", HEADER + "#if MOIRE_X\n#endif\n"), [])

    def test_commented_out_code(self):
        for line in [
            "// int x = 3;",
            "  // return status;",
            "// check.tensor(name, t, dtypes, shape);",
            "//   p->count += 1;",
            "// for (int i = 0; i < n; ++i) {",
            "// if (x) return 1;",
            '// #include "core/format.h"',
            "// } else {",
            "// std::vector<int> rows{1, 2};",
        ]:
            with self.subTest(line=line):
                self.assertEqual(rules("src/core/x.cpp", f"{HEADER}{line}\n"), ["commented-out"])
        for line in ["# print(x)", "# x = f(y)", "# import os", "    # for i in range(3):"]:
            with self.subTest(line=line):
                self.assertEqual(rules("python/x.py", f'"""X."""\n{line}\n'), ["commented-out"])

    def test_prose_and_formulas_are_not_code(self):
        for line in [
            "// Rows of group g: d_i = a_i * op(b_g) + bias;",
            "// for gate and up, in that order; the rest follows",
            "// returns the first error;",
            "// act = glu(z) * probs, in FP32, rounded once.",
            "//                 l = clamp(b, -limit, limit) + offset;",
        ]:
            with self.subTest(line=line):
                self.assertEqual(rules("src/core/x.cpp", f"{HEADER}{line}\n"), [])

    def test_to_do_needs_an_issue(self):
        self.assertEqual(rules("src/core/x.cpp", f"{HEADER}// {TO_DO}: faster\n"), ["todo"])
        self.assertEqual(rules("src/core/x.cpp", f"{HEADER}// {FIX_ME}: slow\n"), ["todo"])
        self.assertEqual(rules("src/core/x.cpp", f"{HEADER}// {TO_DO}(#7): faster\n"), [])

    def test_length_and_columns(self):
        self.assertEqual(rules("src/core/x.cpp", HEADER + "\n" * 500), ["length"])
        self.assertEqual(rules("src/core/x.cpp", HEADER + "\n" * 499), [])
        self.assertEqual(rules("src/core/x.cpp", HEADER + "x" * 101), ["columns"])
        self.assertEqual(rules("src/core/x.cpp", HEADER + "x" * 100), [])

    def test_budgets(self):
        def found(lines, budget, ceiling=0):
            part = lint.Part("spine", ("src/core/", "src/*"), budget, ceiling, ("src/core/hf.py",))
            files = {"src/core/a/x.h": lines - 3, "src/x.cpp": 3, "src/ops/x.cpp": 9}
            files["src/core/hf.py"] = 9
            return [f.text.split(",")[1] for f in lint.check_budgets(files, (part,))]

        leave = ": something must leave before"
        fall = " less than its ceiling of 500 in scripts/lint.py"
        self.assertEqual(found(100, 100), [])
        self.assertEqual(found(101, 100), [f" at most 100{leave}"])
        self.assertEqual(found(200, 100, ceiling=200), [])
        self.assertEqual(found(201, 100, ceiling=200), [f" at most 200{leave}"])
        self.assertEqual(found(249, 100, ceiling=500), [fall])
        self.assertEqual(found(250, 100, ceiling=500), [])
        within = [" within its budget: it needs no ceiling in scripts/lint.py"]
        self.assertEqual(found(100, 100, ceiling=120), within)

    def test_file_header(self):
        self.assertEqual(rules("src/core/x.h", "#pragma once\n"), ["header"])
        self.assertEqual(rules("src/core/x.cpp", "#include <vector>\n"), ["header"])
        self.assertEqual(rules("src/core/x.cpp", "#include <vector>\n", has_header_file=True), [])
        self.assertEqual(rules("python/x.py", "import os\n"), ["header"])
        self.assertEqual(rules("python/x.py", '#!/usr/bin/env python3\n"""X."""\n'), [])

    def test_the_script_exits_1_and_names_file_and_line(self):
        with tempfile.TemporaryDirectory() as folder:
            bad = pathlib.Path(folder) / "src" / "backend" / "cpu" / "x.cpp"
            bad.parent.mkdir(parents=True)
            bad.write_text(HEADER + "\n#if 0\n#endif\n")
            command = [sys.executable, str(ROOT / "scripts" / "lint.py"), folder]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 1)
            self.assertIn("src/backend/cpu/x.cpp:3:", done.stdout)
            bad.write_text(HEADER)
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            told = "lint: lines of CPU 1 of 7,500\nlint: 1 files are clean\n"
            self.assertEqual((done.returncode, done.stdout), (0, told))


class Tables(unittest.TestCase):
    def test_every_row_and_root_is_of_files_that_exist(self):
        files = [
            path.relative_to(ROOT).as_posix()
            for root in lint.ROOTS
            for path in (ROOT / root).rglob("*")
        ]
        folders = (folder.rstrip("*") for part in lint.PARTS for folder in part.folders)
        roots = (f"{root}/" for root in lint.ROOTS)
        for prefix in (*roots, *(row[0] for row in lint.LAYERS), *folders):
            self.assertTrue(any(path.startswith(prefix) for path in files), prefix)

    def test_every_folder_of_sources_is_walked(self):
        listed = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        for path in listed.stdout.splitlines():
            if pathlib.PurePath(path).suffix in lint.CPP | lint.PYTHON and "/" in path:
                self.assertIn(path.split("/")[0], lint.ROOTS, path)


if __name__ == "__main__":
    unittest.main()
