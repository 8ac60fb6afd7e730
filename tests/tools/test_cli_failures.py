"""What the command line says of what cannot be done, and how it ends: test_cli_failures.py PATH."""

import json
import os
import pathlib
import tempfile
import time

from command_line import SMALL, CommandLineTest, main, moire


class Failures(CommandLineTest):
    def test_a_typing_error_gets_a_suggestion(self):
        for arguments, meant in (
            (["explian"], "explain"),
            (["check", "--randon", "3"], "--random"),
            (["explain", "qwen3-30b"], "qwen3_30b"),
            (["explain", "cpu:sqare"], "square"),
            (["explain", SMALL, "--ops", "fc1_dgard"], "fc1_dgrad"),
            (["check", "--random", "1", "--ops", "unpermut"], "unpermute"),
            (["explain", SMALL, "--dtype", "bf61"], "bf16"),
            (["explain", SMALL, "--set", "hiden=3"], "hidden"),
            (["explain", SMALL, "--device", "cdua"], "cuda"),
            (["explain", SMALL, "--device", "gpu"], "cuda"),
            (["explain", SMALL + " act=silu layout=ungated"], "act=swiglu order=ungated"),
            (["explain", SMALL, "--set", "act=relu"], "act=reglu order=ungated"),
            (["explain", SMALL, "--set", "layout=ungated"], "order=ungated"),
            (["check", SMALL, "--implementation", "portble"], "portable"),
        ):
            self.assertTrue(self.bad(*arguments).endswith(f"; did you mean {meant}?\n"), arguments)
        self.assertNotIn("did you mean", self.bad("explain", "something_else"))

    def test_explain_says_why_a_call_cannot_run(self):
        result = moire("explain", SMALL, "--implementation", "sm90", "--json")
        self.assertEqual(result.returncode, 1)
        (call, _) = json.loads(result.stdout)["calls"]
        self.assertIn('the context asks for "sm90"', call["error"]["message"])

    def test_check_fails_where_nothing_was_checked(self):
        nothing = "so nothing was checked; needed no --implementation, or --device cuda"
        for problem, *more in (["tiny"], [SMALL, "--json"], ["--random", "3", "--ops", "fc1"]):
            result = moire("check", problem, *more, "--implementation", "sm90")
            self.assertEqual(result.returncode, 1)
            self.assertEqual(
                result.stderr,
                f"moire: check: found no problem that cpu supports with --implementation sm90, "
                f"{nothing}\n",
            )
        self.good("check", SMALL, "--implementation", "cpu")

    def test_bad_usage_is_exit_code_2_with_a_sentence(self):
        commands = "needed one of info, problems, explain, check, errors, bench"
        self.assertIn(f'moire: found command "foo", {commands}', self.bad("foo"))
        self.assertIn(f'found command "foo", {commands}', self.bad("foo", "--json"))
        self.assertIn("not expected: --no-such-option", self.bad("check", "--no-such-option"))
        self.assertIn("not expected: --no-such-option", self.bad("--no-such-option"))
        self.assertIn("needed PROBLEM or --random N", self.bad("check"))
        self.assertIn('"qwen4": found no such name or regular file', self.bad("explain", "qwen4"))
        self.assertIn('field "rows": found nothing', self.bad("check", "groups=1 hidden=1 ffn=1"))
        self.assertIn('field "hidden": found "x"', self.bad("check", SMALL, "--set", "hidden=x"))
        self.assertIn('field "op": found "fc3"', self.bad("explain", SMALL, "--ops", "fc3"))
        self.assertIn("--ops", self.bad("check", "--random", "1", "--ops", "fc3"))
        self.assertIn("needed cpu or cuda", self.bad("explain", SMALL, "--device", "tpu"))

    def test_bad_numbers_are_named_with_what_is_needed(self):
        whole = "needed a whole number from 0"
        for option, needed, values in (
            ("--random", whole, ("-1", "abc", "1e3", "1.5", "99999999999999999999")),
            ("--seed", whole, ("-1", "x", "0x10")),
            ("--threads", whole + " to 4096", ("-1", "x", "4097")),
        ):
            for value in values:
                message = self.bad("check", SMALL, f"{option}={value}")
                self.assertIn(f'{option}: found "{value}", {needed}', message)
        for value in ("-1", "0", "inf", "nan", "x", "1s"):
            message = self.bad("bench", SMALL, f"--time={value}")
            self.assertIn(f'--time: found "{value}", needed a positive number of seconds', message)

    def test_an_enormous_problem_is_refused_at_once_with_its_bytes(self):
        begin = time.monotonic()
        sizes = "groups=64 hidden=1000000 ffn=1000000 rows=100 dtype=bf16"
        message = self.bad("check", sizes)
        self.assertRegex(message, r"found a problem of at least 1.0\d PiB, needed at most the ")
        self.assertIn("that this machine has free: op=mlp groups=64 hidden=1000000", message)
        message = self.bad("check", "groups=1 hidden=1 ffn=1 rows=1099511627776 op=permute_plan")
        self.assertIn("found a problem of at least 24.0 TiB", message)
        message = self.bad("bench", sizes)
        self.assertIn("found a problem of at least 466 TiB, needed at most the ", message)
        self.assertIn("reads 698 TiB, writes 698 TiB", self.good("explain", sizes))
        message = self.bad("errors", "groups=64 hidden=1000000 ffn=1000000 rows=100")
        self.assertRegex(message, r"found a problem of at least .* PiB, needed at most the ")
        for command in ("check", "errors"):
            message = self.bad(command, f"{SMALL} dropped=1099511627776")
            self.assertIn("found a problem of at least 32.0 TiB, needed at most the ", message)
        self.assertLess(time.monotonic() - begin, 5)

    def test_an_unknown_implementation_is_bad_usage(self):
        message = self.bad("check", SMALL, "--implementation", "nope")
        self.assertIn('--implementation: found "nope", needed cpu, cuda, portable or sm90', message)

    def test_what_cannot_be_read_as_a_file_of_problems_is_bad_usage(self):
        if os.path.isfile("/proc/self/mem"):  # it opens, and its first byte cannot be read
            for command in ("explain", "check", "bench", "errors", "problems"):
                message = self.bad(command, "/proc/self/mem")
                self.assertIn("/proc/self/mem: found a file that cannot be read", message)
        self.assertIn("found no such name or regular file", self.bad("explain", 5000 * "a"))
        with tempfile.TemporaryDirectory() as folder:
            large = pathlib.Path(folder, "large")
            with large.open("wb") as file:
                file.truncate(1 << 40)
            needed = "found a file of more than 16 MiB, needed one with a problem on each line"
            self.assertIn(needed, self.bad("explain", str(large)))

    def test_bench_opens_its_chart_before_it_measures(self):
        begin = time.monotonic()
        message = self.bad("bench", SMALL, "--time", "60", "--svg", "/no/such/folder/chart.svg")
        needed = '--svg: found "/no/such/folder/chart.svg", needed a file that can be written'
        self.assertIn(needed, message)
        self.assertLess(time.monotonic() - begin, 30)

    def test_bench_refuses_more_threads_than_cores(self):
        message = self.bad("bench", SMALL, "--threads", "4096")
        self.assertIn("bench: found --threads 4096, needed at most ", message)

    def test_settings_replace_each_field_that_they_name(self):
        line = "groups=2 hidden=32 ffn=32 rows=10 seed=3"
        self.assertIn("seed=5", self.good("explain", line, "--json", "--set", "rows=12 seed=5"))

    def test_a_bad_file_is_named_with_its_line(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "mine.txt")
            path.write_text(f"# mine\n{SMALL}\n{SMALL} bias=maybe\n")
            message = self.bad("check", str(path))
            self.assertIn('mine.txt:3: field "bias": found "maybe", needed yes or no', message)

    def test_what_could_not_be_written_is_an_error(self):
        for arguments in (["info"], ["explain", SMALL], ["check", SMALL, "--json"], ["--help"]):
            with self.subTest(arguments), open("/dev/full", "w") as full:
                result = moire(*arguments, stdout=full)
                self.assertEqual(result.returncode, 1)
                self.assertEqual(result.stderr, "moire: stdout could not be written to its end\n")

    def test_options_that_would_change_nothing_are_refused(self):
        self.assertIn(
            "--set beside --random", self.bad("check", "--random", "1", "--set", "rows=5")
        )
        self.assertIn("--seed requires --random", self.bad("check", SMALL, "--seed", "5"))

    def test_bench_fails_where_nothing_was_timed(self):
        result = moire("bench", SMALL, "--ops", "fc1", "--implementation", "sm90")
        self.assertEqual(result.returncode, 1)
        self.assertIn("bench: found no problem that cpu supports", result.stderr)
        self.assertIn("so nothing was timed; needed no --implementation", result.stderr)

    def test_errors_says_which_recipe_has_no_such_field(self):
        message = self.bad("errors", SMALL, "--set", "dtype=fp8_block", "--set", "fractional=yes")
        self.assertIn("errors: of its row fp32: ", message)
        self.assertIn("needed dtype=fp8_block", message)

    def test_names_that_are_no_text_are_printed(self):
        (line,) = self.json_lines("problems", b"name=\xff " + SMALL[11:].encode(), "--json")
        self.assertIn("name=\N{REPLACEMENT CHARACTER} ", line["problem"])


if __name__ == "__main__":
    main()
