"""The built command line, end to end: what it prints, as text and as JSON. test_cli.py PATH."""

import json
import pathlib
import re
import shlex
import tempfile
import xml.etree.ElementTree

from command_line import COMMANDS, ROOT, SMALL, CommandLineTest, main, moire, on_a_terminal


class CommandLine(CommandLineTest):
    def test_version_and_help(self):
        self.assertRegex(self.good("--version"), r"^moire \d+\.\d+\.\d+\n$")
        overview = self.good("--help")
        self.assertIn("0 done, 1 a check failed or nothing could run, 2 bad usage", overview)
        self.assertEqual(self.good(), overview)
        self.assertEqual(self.good("help"), overview)
        for command in COMMANDS:
            teaches = self.good(command, "--help")
            self.assertIn("Examples:\n  moire " + command, teaches)
            self.assertIn("--json", teaches)
            self.assertEqual(self.good("help", command), teaches)

    def test_options_may_come_before_the_command(self):
        for words in (("--json", "info"), ("info", "--json")):
            self.assertIn("ops", json.loads(moire(*words).stdout)["kinds"][0])
        self.assertEqual(moire("--help", "check").stdout, moire("check", "--help").stdout)
        self.assertEqual(moire("help", "check").stdout, moire("check", "--help").stdout)

    def test_nothing_is_wider_than_its_terminal(self):
        commands = [[command, "--help"] for command in COMMANDS]
        commands += [
            ["--help"],
            ["info"],
            ["problems", "tiny"],
            ["problems", "--fields"],
            ["explain", "qwen3_30b", "--dtype", "mxfp8"],
            ["explain", "no_such_name"],
            ["check", SMALL],
            ["check", SMALL, "--implementation", "sm90"],
            ["bench", SMALL, "--time", "0.001", "--ops", "fc1,fc2_dgrad_glu,unpermute_backward"],
        ]
        for columns in (80, 100):
            for command in commands:
                with self.subTest(command, columns=columns):
                    lines = on_a_terminal(columns, *command).splitlines()
                    self.assertTrue(lines)
                    self.assertEqual([line for line in lines if len(line) > columns], [])

    def test_lines_break_at_spaces_and_say_the_same(self):
        for command in (["bench", "--help"], ["problems", "--fields"], ["explain", SMALL]):
            words = self.good(*command).split()
            self.assertEqual(moire(*command, COLUMNS="80").stdout.split(), words)
            self.assertEqual(moire(*command, COLUMNS="45").stdout.split(), words)
        line = self.good("problems", SMALL)
        self.assertEqual(on_a_terminal(60, "problems", SMALL).split(), line.split())
        self.assertEqual(len(moire("problems", SMALL, COLUMNS="60").stdout.splitlines()), 1)

    def test_explain_plans_for_a_gpu_that_is_not_here(self):
        (info,) = self.json_lines("info", "--json")
        if info["build"]["cuda"].startswith("off"):
            message = self.bad("explain", SMALL, "--device", "sm90")
            self.assertIn("context: asked for a CUDA device, but this build of moire is", message)
        else:
            for device, first in (("sm90", "sm90"), ("sm80", "portable"), ("sm100", "portable")):
                (line,) = self.json_lines("explain", "qwen3_30b", "--device", device, "--json")
                self.assertEqual(line["device"], device)
                steps = [step for call in line["calls"] for step in call["steps"]]
                self.assertEqual({step["implementation"] for step in steps}, {first})
            self.assertIn(
                "4 persistent blocks",
                self.good("explain", SMALL.replace("fp32", "bf16"), "--device", "sm90"),
            )
            message = self.bad("explain", SMALL, "--device", "sm70")
            self.assertIn('plan_for is "sm70", must be one of sm80, ', message)
        needed = 'found "sm90", needed cpu or cuda: only explain works without the GPU'
        for command in ("check", "errors", "bench"):
            self.assertIn(needed, self.bad(command, SMALL, "--device", "sm90"))

    def test_info_tells_what_is_there_and_why_the_rest_is_not(self):
        (info,) = self.json_lines("info", "--json")
        kinds = {kind["device"]: kind for kind in info["kinds"]}
        self.assertEqual(kinds["cpu"]["count"], 1)
        self.assertEqual(kinds["cpu"]["ops"]["grouped_gemm"], ["cpu"])
        if kinds["cuda"]["count"] == 0:
            self.assertTrue(kinds["cuda"]["missing"])
        self.assertNotIn("AVX3", kinds["cpu"]["devices"][0]["simd"])  # Highway's name of AVX-512
        self.assertIn("grouped_gemm", self.good("info"))

    def test_problems_prints_lines_that_are_problems(self):
        lines = self.good("problems", "tiny").splitlines()
        self.assertGreater(len(lines), 10)
        for line in lines:
            self.assertEqual(self.good("problems", line).strip(), line)
        self.assertIn("qwen3_30b", self.good("problems"))
        self.assertIn("clamped_swiglu", self.good("problems", "--fields"))
        fields = {line["key"]: line for line in self.json_lines("problems", "--fields", "--json")}
        self.assertIn("clamped_swiglu", fields["act"]["values"])

    def test_explain_every_shipped_problem(self):
        names = {line["from"] for line in self.json_lines("problems", "--json")}
        self.assertIn("deepseek_v3", names)
        for name in sorted(names):
            for explained in self.json_lines("explain", name, "--json"):
                calls = [call["call"] for call in explained["calls"]]
                if "op=mlp " in explained["problem"]:
                    self.assertEqual(calls, ["grouped_mlp", "grouped_mlp_backward"])
                self.assertTrue(calls)
                for call in explained["calls"]:
                    for step in call["steps"]:
                        self.assertTrue(step["implementation"])
        table = self.good("explain", "qwen3_30b")
        self.assertIn("grouped_gemm_glu", table)
        self.assertIn("total:", table)

    def test_explain_shows_what_each_recipe_saves(self):
        keep = ["--set", "x_columnwise=yes", "--set", "act_columnwise=yes"]
        sizes = "groups=2 hidden=64 ffn=96 rows=70 tail=2"
        saved = {}
        lines = self.json_lines("explain", sizes, "--dtype", "bf16", "--json")
        recipes = "mxfp8,mxfp8_fast,fp8_block"
        lines += self.json_lines("explain", sizes, "--dtype", recipes, *keep, "--json")
        for line in lines:
            dtype = re.search(r"dtype=(\w+)", line["problem"])[1]
            forward, backward = line["calls"]
            saved[dtype] = forward["saved"]
            self.assertEqual(forward["saved_bytes"], sum(forward["saved"].values()))
            self.assertEqual(backward["saved"], {})
        z = 72 * 2 * 96 * 2
        self.assertEqual(saved["bf16"], {"z": z})
        # Codes, and columnwise scales: 72 / 32 + 2 rows of a byte, 72 / 128 + 2 rows of a float.
        mx = {"x_columnwise": 72 * 64 + 4 * 64, "act_columnwise": 72 * 96 + 4 * 96}
        block = {"x_columnwise": 72 * 64 + 2 * 64 * 4, "act_columnwise": 72 * 96 + 2 * 96 * 4}
        self.assertEqual(saved["mxfp8"], {"z": z, **mx})
        self.assertEqual(saved["mxfp8_fast"], saved["mxfp8"])
        self.assertEqual(saved["fp8_block"], {"z": z, **block})
        refused = moire("explain", sizes, "--dtype", "bf16", *keep)
        self.assertEqual(refused.returncode, 2)
        self.assertIn('"x_columnwise": found dtype=bf16, needed dtype=mxfp8,', refused.stderr)
        table = self.good("explain", sizes, "--dtype", "mxfp8", *keep)
        self.assertIn("saves z 27.0 KiB, x_columnwise 4.75 KiB, act_columnwise 7.12 KiB", table)

    def test_explain_shows_what_prepared_weights_take(self):
        sizes = "groups=2 hidden=64 ffn=96 rows=70 dtype=mxfp8"
        for prepared in ("yes", "no"):
            words = [sizes, "--set", f"prepared={prepared}", "--set", "seed=1"]
            (line,) = self.json_lines("explain", *words, "--json")
            for call in line["calls"]:
                names = {"w1_prepared", "w2_prepared"} if prepared == "yes" else set()
                self.assertEqual(set(call["prepared"]), names)
                self.assertEqual(call["prepared_bytes"], sum(call["prepared"].values()))
                # Codes both ways at least, a byte an element each.
                self.assertGreaterEqual(
                    call["prepared"].get("w1_prepared", 1 << 60), 2 * 2 * 192 * 64
                )
            self.assertEqual("reads w1_prepared" in self.good("explain", *words), prepared == "yes")

    def test_check_passes_the_shipped_small_problems(self):
        results = self.json_lines("check", "tiny", "tails", "--json")
        self.assertEqual(results[-1]["failed"], 0)
        self.assertEqual(results[-1]["passed"], len(results) - 1)
        self.assertLessEqual(results[-1]["max_error"], 1)

    def test_check_random_problems(self):
        (totals,) = self.json_lines("check", "--random", "200", "--seed", "11", "--json")
        self.assertEqual((totals["passed"], totals["failed"]), (200, 0))
        self.assertEqual(totals["seed"], 11)

    def test_check_counts_unsupported_apart(self):
        result = moire("check", SMALL, "--implementation", "sm90", "--json")
        one, totals = (json.loads(line) for line in result.stdout.splitlines())
        self.assertEqual(one["result"], "unsupported")
        self.assertEqual((totals["passed"], totals["unsupported"]), (0, 1))

    def test_bench_ends_with_its_table(self):
        arguments = ["bench", SMALL, "--time", "0.001", "--ops", "fc1", "--dtype", "fp32"]
        for advice in ([], ["--advice"]):
            out = self.good(*arguments, *advice)
            self.assertEqual("protocol: " in out, bool(advice))
            self.assertEqual("run longer: --time 5" in out, bool(advice))
            heading, row = out.splitlines()[-2:]
            self.assertTrue(heading.startswith("problem  op "))
            self.assertTrue(row.startswith("small "))

    def test_the_chart_has_a_title(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "chart.svg")
            self.good("bench", SMALL, "--time", "0.001", "--ops", "fc1", "--svg", str(path))
            chart = path.read_text()
        xml.etree.ElementTree.fromstring(chart)
        title = re.search("<title>(.*)</title>", chart)[1]
        self.assertTrue(title.startswith("moire bench: small on "), title)
        self.assertIn(f"class='title'>{title}</text>", chart)

    def test_bench_says_all_of_itself(self):
        with tempfile.TemporaryDirectory() as folder:
            chart = pathlib.Path(folder, "chart.svg")
            arguments = ["--time", "0.01", "--ops", "fc1,glu,router", "--json", "--svg", str(chart)]
            results = self.json_lines("bench", SMALL, *arguments)
            self.assertTrue(chart.read_text().startswith("<svg"))
        self.assertEqual(
            [(r["op"], r["dtype"]) for r in results],
            [(op, dtype) for op in ("fc1", "glu", "router") for dtype in ("fp32", "bf16")],
        )
        for r in results:
            self.assertGreater(r["seconds"]["median"], 0)
            self.assertLessEqual(r["seconds"]["p10"], r["seconds"]["p90"])
            self.assertTrue(r["samples_seconds"])
            self.assertLessEqual(r["check_max_error"], 1)
            self.assertGreater(r["machine"]["peak_flops"], 0)
            self.assertGreater(r["protocol"]["rounds"], 0)
            for warning in r["warnings"]:
                self.assertEqual(sorted(warning), ["code", "remedy", "seen"])
            for key in ("problem", "roof_share", "flops", "bytes", "operand_sets", "baseline"):
                self.assertIn(key, r)
        self.assertEqual(results[2]["baseline"], "copy of as many bytes")
        self.assertIsNotNone(results[1]["ratio_own_fp32"])

    def test_bench_times_layers_in_8_bits(self):
        arguments = [
            "--time",
            "0.01",
            "--ops",
            "mlp,linear",
            "--dtype",
            "mxfp8,fp8_block",
            "--json",
        ]
        results = self.json_lines("bench", SMALL, *arguments)
        self.assertEqual(len(results), 4)
        for r in results:
            self.assertGreater(r["seconds"]["median"], 0)

    def test_bench_times_the_dtype_of_the_line(self):
        line = "op=mlp groups=2 hidden=32 ffn=32 rows=40 "
        kept = "x=fp16 x_columnwise=yes act_columnwise=yes prepared=yes element=e5m2 "
        for problem, more, dtypes in (
            (line, [], ["fp32", "bf16"]),
            (line + "dtype=bf16", [], ["fp32", "bf16"]),
            (line + "dtype=fp16", [], ["fp32", "fp16"]),
            (line + "dtype=mxfp8", [], ["fp32", "mxfp8"]),
            (line, ["--set", "dtype=mxfp8"], ["fp32", "mxfp8"]),
            (line + "dtype=mxfp8", ["--dtype", "bf16"], ["bf16"]),
            (line + kept + "dtype=mxfp8", [], ["fp32", "mxfp8"]),
            (line + kept + "dtype=mxfp8", ["--dtype", "mxfp8"], ["mxfp8"]),
            (line + kept, ["--dtype", "mxfp8"], ["mxfp8"]),
            (line, ["--set", "prepared=yes", "--dtype", "mxfp8"], ["mxfp8"]),
            (line + "dtype=fp8_block emulated=yes fractional=yes", [], ["fp32", "fp8_block"]),
        ):
            with self.subTest(problem, more=more):
                arguments = ["--ops", "mlp", "--time", "0.001", "--json", *more]
                results = self.json_lines("bench", problem, *arguments)
                self.assertEqual([r["dtype"] for r in results], dtypes)
                for word in kept.split() if kept in problem else ():
                    self.assertIn(word, results[-1]["problem"])
        more = ["--dtype", "bf16", "--ops", "mlp"]
        message = self.bad("bench", line + kept + "dtype=mxfp8", *more)
        self.assertIn('field "x": found dtype=bf16, needed dtype=mxfp8, mxfp8_fast or', message)

    def test_fields_are_judged_beside_what_will_run(self):
        line = "groups=2 hidden=32 ffn=32 rows=40 x_columnwise=yes"
        needed = 'field "x_columnwise": found dtype=fp32, needed dtype=mxfp8, mxfp8_fast or'
        for command in ("explain", "check"):
            self.good(command, line, "--dtype", "mxfp8")
            self.good(command, line, "--set", "dtype=fp8_block")
            self.good(command, line.replace("yes", "no"))
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "mine.txt")
            path.write_text(f"{SMALL}\n{line}\n")
            self.good("explain", str(path), "--dtype", "mxfp8")
            for command in ("explain", "check", "errors", "bench", "problems"):
                self.assertIn(f"moire: problem: {needed}", moire(command, line).stderr)
                self.assertIn(f"mine.txt:2: {needed}", moire(command, str(path)).stderr)

    def test_steady_state_is_a_gpus(self):
        message = self.bad("bench", SMALL, "--sustained")
        self.assertEqual(message, "moire: bench: --sustained needs --device cuda, found cpu\n")
        self.assertIn(
            "--time excludes --sustained", self.bad("bench", SMALL, "--sustained", "--time=1")
        )

    def test_the_documented_errors_are_those_of_the_recipes(self):
        section = (ROOT / "docs" / "numerics.md").read_text().split("\n## 8. ")[1].split("\n## ")[0]
        (command,) = re.findall(r"```sh\nmoire (.*)\n```", section)
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in section.splitlines()
            if line.startswith("| ")
        ]
        (_, *outputs), *table = rows
        # Of a smaller layer: an error of 8 or 16 bits does not depend on the size, that of FP32
        # sums grows with its root, and grad_probs are few.
        sizes = ["--set", "rows=320", "--set", "hidden=128", "--set", "ffn=160"]
        lines = self.json_lines(*shlex.split(command), *sizes, "--json")
        self.assertEqual([name for name, *_ in table], [line["recipe"] for line in lines])
        for (name, *documented), line in zip(table, lines):
            self.assertEqual(list(line["relative_rms"]), outputs)
            for output, wanted in zip(outputs, map(float, documented)):
                ratio = line["relative_rms"][output] / wanted
                limit = 1.8 if name == "fp32" else 1.4 if output == "grad_probs" else 1.15
                self.assertTrue(1 / limit < ratio < limit, f"{name} {output}: {ratio:.2f}")

    def test_errors_are_of_the_function_whatever_is_kept_or_added_to(self):
        plain = self.json_lines("errors", SMALL, "--json")
        for more in ("beta=1", "beta=mixed", "save_act=yes"):
            for was, line in zip(plain, self.json_lines("errors", SMALL, "--set", more, "--json")):
                for output, error in line["relative_rms"].items():
                    ratio = error / was["relative_rms"][output]
                    self.assertTrue(0.5 < ratio < 2, f"{more} {line['recipe']} {output}: {ratio}")
        without = self.json_lines("errors", SMALL, "--set", "probs=no", "--json")
        self.assertEqual({line["relative_rms"]["grad_probs"] for line in without}, {None})
        self.assertIn(" | - |\n", self.good("errors", SMALL, "--set", "probs=no"))

    def test_every_command_of_the_guide_runs(self):
        guide = (ROOT / "docs" / "cli.md").read_text()
        blocks = re.findall(r"```sh\n(.*?)```", guide, re.DOTALL)
        commands = [line for block in blocks for line in block.splitlines()]
        self.assertGreater(len(commands), 8)
        kinds = json.loads(self.good("info", "--json"))["kinds"]
        has_gpu = any(kind["device"] == "cuda" and kind["count"] > 0 for kind in kinds)
        with tempfile.TemporaryDirectory() as folder:
            for command in commands:
                program, *arguments = shlex.split(command.split(">")[0])
                self.assertEqual(program, "moire", command)
                arguments = [a.replace("chart.svg", f"{folder}/chart.svg") for a in arguments]
                if arguments[0] == "bench":  # the same command, on a problem of no size
                    arguments = ["cpu:square" if a == "cpu" else a for a in arguments]
                    sizes = ("groups=2", "hidden=32", "ffn=16", "rows=8")
                    arguments += [a for size in sizes for a in ("--set", size)]
                    if not {"--time", "--sustained"} & set(arguments):
                        arguments += ["--time", "0.001"]
                with self.subTest(command):
                    if "cuda" in arguments and not has_gpu:  # it is understood, and says what lacks
                        self.assertIn("moire: context: ", self.bad(*arguments))
                    else:
                        self.good(*arguments)


if __name__ == "__main__":
    main()
