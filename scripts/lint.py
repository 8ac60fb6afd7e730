#!/usr/bin/env python3
"""House rules that no compiler checks: scripts/lint.py [ROOT].

Prints `file:line: what` per finding and exits 1 if there are any. Rules: which layer may include
what (docs/architecture.md), no disabled or commented-out code, every to-do names an issue, at most
500 lines a file and 100 columns a line, a comment at the top that says what the file is, what
begins with #! is executable, no path of one machine in docs/performance; in documents, prose of 100
columns, links that lead to a file and a heading, and to every page a link. The rules are data
below; tests/lint proves that each one fires.
"""

import os
import pathlib
import posixpath
import re
import sys
from dataclasses import dataclass

MAX_LINES = 500
MAX_COLUMNS = 100
README = "README.md"  # where reading begins

# Findings that are right the way they are: (file, rule) -> reason.
EXEMPT = {("include/moire.h", "length"): "the C contract is one header that cffi parses"}

ROOTS = (
    *("include", "src", "reference", "staging", "tools", "tests"),
    *("python", "examples", "scripts", "benchmarks", "cmake"),
)
CPP = {".h", ".hpp", ".cpp", ".c", ".cu", ".cuh"}
PYTHON = {".py"}

# ---- budgets: how many lines a part may have ----


@dataclass(frozen=True)
class Part:
    """The lines that a part may have: its budget, or, while it is over that, a ceiling that follows
    what it has down to the budget.
    """

    name: str
    folders: tuple  # with all below; one that ends in * has its own files alone
    budget: int
    ceiling: int = 0
    without: tuple = ()  # files, and folders with all below, that are another part's

    def holds(self, path):
        return not path.startswith(self.without) and any(
            posixpath.dirname(path) == folder[:-2]
            if folder.endswith("/*")
            else path.startswith(folder)
            for folder in self.folders
        )


# What fits the package into somebody else's: transformers, torch.distributed, Megatron, torchtitan.
INTEGRATIONS = tuple(
    f"python/moire/{name}.py"
    for name in (
        *("hf", "megatron", "torchtitan"),
        *("expert_parallel", "micro_batches", "travel", "process_groups", "trained"),
    )
)

# Experts over ranks: what they tell each other, and the ops that move tokens: on CUDA 1,413 lines,
# 167 of them for NCCL. Their contract, in moire.h and fields.h, is the spine's.
PARALLEL = (
    "include/moire/expert_parallel.h",
    "src/parallel/",
    "src/capi/communicator.cpp",
    "src/backend/cpu/parallel/",
    "src/backend/cuda/parallel/",
)

# Over its budget, something must leave a part before something comes.
PARTS = (
    Part(
        "spine",
        ("include/", "src/core/", "src/ops/", "src/mlp/", "src/capi/", "src/backend/*"),
        7100,
        ceiling=7976,
        without=PARALLEL,
    ),
    Part("CPU", ("src/backend/cpu/",), 7500, without=PARALLEL),
    Part("expert parallelism", PARALLEL, 2625),
    Part("CUDA", ("src/backend/cuda/",), 10000, ceiling=16589, without=PARALLEL),
    Part("Python", ("python/moire/",), 5100, ceiling=8322, without=INTEGRATIONS),
    Part("tools", ("tools/",), 6500, ceiling=7163),
)
SLACK = 250  # lines that a part may be under its ceiling before that has to fall


def sizes(lines_of, parts=PARTS):
    """(part, its lines) of the parts that are there."""
    for part in parts:
        count = sum(lines for path, lines in lines_of.items() if part.holds(path))
        if count:
            yield part, count


def check_budgets(lines_of, parts=PARTS):
    """Parts that are larger than they may be, and ceilings that are higher than they need be."""
    for part, count in sizes(lines_of, parts):
        if count > max(part.budget, part.ceiling):
            found = f"at most {max(part.budget, part.ceiling)}: something must leave before"
        elif part.ceiling and count <= part.budget:
            found = "within its budget: it needs no ceiling in scripts/lint.py"
        elif part.ceiling > count + SLACK:
            found = f"less than its ceiling of {part.ceiling} in scripts/lint.py, which must fall"
        else:
            continue
        yield Finding(part.folders[0], 1, "budget", f"{part.name} has {count} lines, {found}")


# ---- layers: what may include what ----

STD = r"<[a-z0-9_]+>"
C_STD = r"<(stdint|stddef|stdio|stdlib|string)\.h>"
POSIX = r"<(unistd|sched|pthread|fcntl|dlfcn|signal)\.h>|<sys/[a-z]+\.h>"
INTRINSICS = r"<[a-z]mmintrin\.h>|<immintrin\.h>|<cpuid\.h>"
PUBLIC = r"<moire\.h>|<moire/[a-z_]+\.h>"
CORE = r'"core/'
IMPLEMENTATION = r'"backend/(implementation|device)\.h"'
CUDA = r"<(cuda|cub|cooperative_groups|nvtx3|cute|cutlass)"
JSON = r"<nlohmann/json\.hpp>"

# The first row whose prefix the file has decides; an include must match one of its patterns.
LAYERS = (
    ("include/moire.h", (r"<(stddef|stdint)\.h>",)),
    ("include/moire/", (STD, PUBLIC)),
    ("src/core/", (STD, POSIX, INTRINSICS, PUBLIC, CORE)),
    (
        "src/backend/cpu/parallel/",
        (STD, PUBLIC, CORE, r'"backend/cpu/', r"<hwy/", r'"parallel/'),
    ),
    (
        "src/backend/cpu/",
        (STD, POSIX, INTRINSICS, PUBLIC, CORE, IMPLEMENTATION, r'"backend/cpu/', r"<hwy/"),
    ),
    # NCCL is opened at run time.
    (
        "src/backend/cuda/parallel/",
        (STD, r"<dlfcn\.h>", PUBLIC, CORE, CUDA, IMPLEMENTATION, r'"backend/cuda/', r'"parallel/'),
    ),
    # What ended a call of all ranks, as a sentence.
    (
        "src/backend/cuda/runtime/",
        (STD, PUBLIC, CORE, CUDA, IMPLEMENTATION, r'"backend/cuda/', r'"parallel/peers\.h"'),
    ),
    ("src/backend/cuda/ptx/", (STD, PUBLIC, CORE, CUDA, r'"backend/cuda/ptx/')),
    ("src/backend/cuda/", (STD, PUBLIC, CORE, CUDA, IMPLEMENTATION, r'"backend/cuda/')),
    # The registry names each backend's implementations and includes nothing else of it.
    (
        "src/backend/",
        (STD, PUBLIC, CORE, IMPLEMENTATION, r'"backend/[a-z]+/(implementations|simd)\.h"'),
    ),
    ("src/ops/", (STD, PUBLIC, CORE, IMPLEMENTATION, r'"ops/')),
    ("src/mlp/", (STD, PUBLIC, CORE, r'"mlp/')),
    # What ranks tell each other, which implementations use as well; its ops are checked as others.
    ("src/parallel/ops.cpp", (STD, PUBLIC, CORE, r'"ops/dispatch\.h"', r'"parallel/')),
    ("src/parallel/", (STD, PUBLIC, CORE, r'"parallel/')),
    # The words of its error messages are all it takes from core.
    ("src/capi/", (STD, PUBLIC, r'"core/status_macros\.h"', r'"capi/')),
    # Which field holds which result.
    ("reference/outputs", (STD, PUBLIC, r'"reference/')),
    # Shares no code with what it judges: tensor views, and nothing of src/.
    ("reference/", (STD, r"<moire\.h>", r"<moire/tensor\.h>", r'"reference/')),
    # Host memory on a device, for who is no part of the library; CUDA's run-time in one file.
    ("staging/device_memory.cpp", (STD, PUBLIC, CUDA, r'"staging/')),
    ("staging/", (STD, PUBLIC, r'"staging/')),
    # The GPU's clock.
    ("tools/moire/gpu.cu", (STD, CUDA, r'"[a-z_]+\.h"')),
    (
        "tools/",
        (
            *(STD, POSIX, PUBLIC, JSON, r"<CLI/", r"<cblas\.h>"),
            *(r'"reference/', r'"staging/', r'"[a-z_]+\.h"'),
        ),
    ),
    ("examples/", (STD, C_STD, PUBLIC)),
    ("python/", (STD, PUBLIC, r"<Python\.h>", r'"(call|overlap|tape)\.h"')),
    ("tests/", (r".",)),
    ("benchmarks/", (r".",)),
)

# The public headers in the order in which they may include each other.
PUBLIC_ORDER = (
    *("ops", "status", "explain", "context", "tensor", "roles", "fields", "groups", "buffer"),
    *("quantize", "glu", "grouped_tensor", "grouped_gemm", "routing", "grouped_mlp"),
    "expert_parallel",
)


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    rule: str
    text: str

    def __str__(self):
        return f"{self.path}:{self.line}: {self.text} [{self.rule}]"


def check_includes(path, lines):
    allowed = next((patterns for prefix, patterns in LAYERS if path.startswith(prefix)), None)
    for number, line in enumerate(lines, 1):
        match = re.match(r'\s*#\s*include\s+(<[^>]+>|"[^"]+")', line)
        if not match:
            continue
        included = match.group(1)
        if allowed is None:
            yield Finding(
                path,
                number,
                "layer",
                "this folder has no row in the table of layers in scripts/lint.py",
            )
            return
        if not any(re.match(pattern, included) for pattern in allowed):
            yield Finding(path, number, "layer", f"must not include {included}")
        public = re.match(r"<moire/(\w+)\.h>", included)
        if path.startswith("include/moire/") and public:
            yield from check_order(path, number, public.group(1))


def check_order(path, number, included):
    here = pathlib.PurePath(path).stem
    for name in (here, included):
        if name not in PUBLIC_ORDER:
            yield Finding(
                path, number, "layer", f"{name}.h is not in PUBLIC_ORDER of scripts/lint.py"
            )
            return
    if PUBLIC_ORDER.index(included) >= PUBLIC_ORDER.index(here):
        yield Finding(
            path,
            number,
            "layer",
            f"<moire/{included}.h> does not come before {here}.h in PUBLIC_ORDER",
        )


def check_disabled_code(path, lines):
    for number, line in enumerate(lines, 1):
        if re.match(r"\s*#\s*if\s+(0|false)\b", line):
            yield Finding(path, number, "disabled", "#if 0: delete the code, git remembers it")


# Formulas in comments are set in columns, further in than this.
MAX_COMMENTED_INDENT = 6

# What a line of C++ looks like after `//`: a statement, a declaration or a directive.
CPP_CODE = re.compile(
    r"""^( \#\s*(include|define|if|ifdef|endif|pragma)\b
        | (if|for|while|switch)\s*\(.*\)\s*(\{|.*;)?$
        | (return|break|continue|throw|delete)\b[^.]*;$
        | (const\s+|auto\s+|static\s+|constexpr\s+)?[\w:<>,\*&]+\s+\w+\s*(=|\{)[^.].*;$
        | [\w:\.\[\]]+(->[\w:]+)*\s*(=|\+=|-=)\s*[^=].*;$
        | [\w:\.]+(->[\w:]+)*(<[\w:, ]+>)?\(.*\);$
        | \}\s*(else.*)?$ )""",
    re.VERBOSE,
)
PYTHON_CODE = re.compile(
    r"""^( import\s+\w+$ | from\s+[\w.]+\s+import\b
        | (if|for|while|with|def|class)\b.*:$
        | return\s+\w+(\(.*\))?$ | print\(.*\)$ | assert\s+\w
        | [\w.\[\]]+\s*=\s*[\w.]+\(.*\)$ )""",
    re.VERBOSE,
)


def check_commented_code(path, lines):
    marker, code = ("//", CPP_CODE) if pathlib.PurePath(path).suffix in CPP else ("#", PYTHON_CODE)
    for number, line in enumerate(lines, 1):
        comment = re.match(rf"\s*{marker}+!? {{0,{MAX_COMMENTED_INDENT}}}(?! )(.*)", line)
        if comment and code.match(comment.group(1).strip()):
            yield Finding(path, number, "commented-out", "commented-out code: delete it")


TO_DO, FIX_ME = "TO" + "DO", "FIX" + "ME"  # in two parts, so that this file passes


def check_todo(path, lines):
    for number, line in enumerate(lines, 1):
        marked = re.search(rf"\b({TO_DO}|{FIX_ME})\b", line)
        if marked and not re.search(rf"\b{TO_DO}\(#\d+\)", line):
            yield Finding(path, number, "todo", f"needs an issue number: {TO_DO}(#12)")


def check_size(path, lines):
    if len(lines) > MAX_LINES:
        yield Finding(path, len(lines), "length", f"{len(lines)} lines, at most {MAX_LINES}")
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            yield Finding(path, number, "columns", f"{len(line)} columns, at most {MAX_COLUMNS}")


def check_header(path, lines, has_header_file):
    """A .cpp that implements a header of its name is described there."""
    if has_header_file or not lines:
        return
    first = next((line for line in lines if line.strip() and not line.startswith("#!")), "")
    directive = re.match(r"#\s*(include|pragma|if|ifndef|define)\b", first)
    if directive or not first.startswith(("//", "/*", "#", '"""', 'r"""')):
        yield Finding(path, 1, "header", "starts without a comment that says what this file is")


def check_mode(path, lines, is_executable):
    """What begins with an interpreter is run by its name, and nothing else is."""
    begins = bool(lines) and lines[0].startswith("#!")
    if begins and not is_executable:
        yield Finding(path, 1, "mode", "begins with #! and is not executable: chmod +x")
    elif is_executable and not begins:
        yield Finding(path, 1, "mode", "is executable and does not begin with #!: chmod -x")


def check_result(path, text):
    """A result under docs/performance says what was run, not where somebody keeps it."""
    for number, line in enumerate(text.splitlines(), 1):
        found = re.search(r"""["' =](/[\w.+-]+){2,}""", line)
        if found:
            yield Finding(path, number, "path", f"{found.group(0)[1:]} is a path of one machine")


# ---- documents ----


def unfenced(text):
    """(number, line) of all but blocks of code."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


def anchors(text):
    """What `#…` may name in a page: its headings, as GitHub and GitLab spell them."""
    found, taken = set(), {}
    for _, line in unfenced(text):
        if not re.match(r"#{1,6} ", line):
            continue
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip()).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        times = taken[anchor] = taken.get(anchor, -1) + 1
        found.add(f"{anchor}-{times}" if times else anchor)
    return found


def links(path, text):
    """(number, target, heading) of each relative link, the target from the root."""
    folder = posixpath.dirname(path)
    for number, line in unfenced(text):
        for target, heading in re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)", line):
            if not re.match(r"[a-z]+:", target):
                found = posixpath.join(folder, target) if target else path
                yield number, posixpath.normpath(found), heading


def check_documents(pages, exists):
    """Findings of all documents, {path: text}; `exists` says whether a path from the root does."""
    linked = set()
    for path, text in pages.items():
        for number, line in unfenced(text):
            if len(line) > MAX_COLUMNS and not line.startswith("|") and path != README:
                what = f"{len(line)} columns of prose, at most {MAX_COLUMNS}"
                yield Finding(path, number, "columns", what)
        for number, target, heading in links(path, text):
            if target != path:
                linked.add(target)
            if not exists(target):
                yield Finding(path, number, "link", f"{target} does not exist")
            elif heading and heading not in anchors(pages.get(target, "")):
                yield Finding(path, number, "link", f"{target} has no heading #{heading}")
    for path in pages.keys() - linked - {README}:
        yield Finding(path, 1, "link", "no other document links to this page")


def lint_file(path, text, has_header_file=False):
    """Findings of one file; `path` is relative to the project, with forward slashes."""
    lines = text.splitlines()
    findings = []
    if pathlib.PurePath(path).suffix in CPP:
        findings += [*check_includes(path, lines), *check_disabled_code(path, lines)]
    findings += [
        *check_commented_code(path, lines),
        *check_todo(path, lines),
        *check_size(path, lines),
    ]
    findings += check_header(path, lines, has_header_file)
    return [f for f in findings if (f.path, f.rule) not in EXEMPT]


def sources(root):
    for folder in ROOTS:
        for path in sorted((root / folder).rglob("*")):
            generated = {"build", "__pycache__"} & set(path.relative_to(root).parts)
            if path.suffix in CPP | PYTHON and not generated:
                yield path


def documents(root):
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def main(arguments):
    root = pathlib.Path(arguments[1]) if len(arguments) > 1 else pathlib.Path(__file__).parents[1]
    root = root.resolve()
    findings, count, lines_of = [], 0, {}
    for path in sources(root):
        count += 1
        public = root / "include" / "moire" / f"{path.stem}.h"
        own = path.with_suffix(".h")
        has_header_file = path.suffix in {".cpp", ".cu"} and (own.exists() or public.exists())
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(root).as_posix()
        lines_of[name] = text.count("\n")
        findings += lint_file(name, text, has_header_file)
        findings += check_mode(name, text.splitlines(), os.access(path, os.X_OK))
    findings += check_budgets(lines_of)
    for path in sorted((root / "docs" / "performance").glob("*.json*")):
        count += 1
        findings += check_result(path.relative_to(root).as_posix(), path.read_text())
    pages = {p.relative_to(root).as_posix(): p.read_text(encoding="utf-8") for p in documents(root)}
    count += len(pages)
    findings += check_documents(pages, lambda target: (root / target).exists())
    for finding in findings:
        print(finding)
    if parts := [f"{part.name} {n:,} of {part.budget:,}" for part, n in sizes(lines_of)]:
        print(f"lint: lines of {', '.join(parts)}")
    print(
        f"lint: {len(findings)} findings in {count} files"
        if findings
        else f"lint: {count} files are clean"
    )
    return 1 if findings or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
