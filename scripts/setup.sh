#!/usr/bin/env bash
# Makes a machine ready: scripts/setup.sh demo|test|check
#
# demo   compiler, CMake, libraries; .venv with NumPy, cffi and a torch (the running Python's if it is 2.4 or newer)
# test   and pytest with pytest-xdist, mypy, ml_dtypes, transformers, megatron-core, torchtitan (only tests need them)
# check  and clang-format, clang-tidy, ruff
#
# System packages come through apt when this runs as root; otherwise it prints the line to run and stops. PYTHON names
# the Python to use (default: python3). pip's own environment variables and configuration apply. `make` calls this
# script and keeps a stamp per level in .venv, so that it runs once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

level=${1:-demo}
case $level in demo | test | check) ;; *) echo "usage: scripts/setup.sh demo|test|check" >&2; exit 2 ;; esac
python=${PYTHON:-python3}
venv=.venv

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
has() { command -v "$1" > /dev/null 2>&1; }

# ---- system packages: looked for by what they give, so that other ways to install them count as well

# Header and library packages that the C++ compiler does not see, one name per line.
missing_libraries() {
  local probe='
#if !__has_include(<hwy/highway.h>)
needs libhwy-dev
#endif
#if !__has_include(<gtest/gtest.h>)
needs libgtest-dev
#endif
#if !__has_include(<CLI/CLI.hpp>)
needs libcli11-dev
#endif
#if !__has_include(<nlohmann/json.hpp>)
needs nlohmann-json3-dev
#endif
#if !__has_include(<cblas.h>)
needs libopenblas-dev
#endif'
  printf '%s\n' "$probe" | "${CXX:-g++}" -E -P -x c++ - | sed -n 's/^needs //p'
}

missing_packages() {
  has git || echo git
  has cmake || echo cmake
  has ninja || echo ninja-build
  if has "${CXX:-g++}"; then
    missing_libraries
  else
    printf '%s\n' g++ libhwy-dev libgtest-dev libcli11-dev nlohmann-json3-dev libopenblas-dev
  fi
  if ! has "$python"; then
    printf '%s\n' python3 python3-venv
  elif ! "$python" -c 'import ensurepip, venv' > /dev/null 2>&1; then
    echo python3-venv
  fi
  if [ "$level" != demo ]; then has ccache || echo ccache; fi  # tests build the library again, in wheels
  if [ "$level" = check ]; then
    has clang-format-14 || echo clang-format-14
    has clang-tidy-14 || echo clang-tidy-14
  fi
}

# Without root, what the build fetches or does without is not asked for.
needed_packages() {
  if [ "$(id -u)" -eq 0 ]; then missing_packages; return; fi
  missing_packages | { grep -vxE 'libhwy-dev|libcli11-dev|nlohmann-json3-dev|libopenblas-dev|ccache' || true; }
}

install_packages() {
  local packages
  mapfile -t packages < <(needed_packages)
  if [ ${#packages[@]} -eq 0 ]; then return; fi
  has apt-get || fail "these are missing and there is no apt-get to install them: ${packages[*]}"
  if [ "$(id -u)" -ne 0 ]; then
    fail "please run this line, then call make again:
sudo apt-get update && sudo apt-get install -y --no-install-recommends ${packages[*]}"
  fi
  say "installing ${packages[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${packages[@]}" > /dev/null
}

# ---- Python packages, into .venv

# Where the running Python has a torch >= 2.4, .venv sees its packages; prints "yes" or "no".
python_has_torch() {
  "$python" - << 'PY'
try:
    import torch
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    print("yes" if version >= (2, 4) else "no")
except Exception:
    print("no")
PY
}

make_venv() {
  if ! $venv/bin/python -m pip --version > /dev/null 2>&1; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' \
      || fail "Python 3.9 or newer is needed, $python is $("$python" --version 2>&1)"
    if [ "$(python_has_torch)" = yes ]; then
      say "using the torch that $python has"
      "$python" -m venv --clear --system-site-packages $venv
      # That shows the packages of the base Python; if $python is itself a venv, show its own as well.
      "$python" - > "$(site_packages)/outer.pth" << 'PY'
import sys, sysconfig
if sys.prefix != sys.base_prefix:
    print("\n".join(sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})))
PY
    else
      "$python" -m venv --clear $venv
    fi
  fi
  echo "$PWD/python" > "$(site_packages)/moire-source.pth"  # `import moire` finds this tree
}

site_packages() { $venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

python_packages() {
  echo 'numpy cffi torch>=2.4'
  if [ "$level" != demo ]; then
    echo 'pytest pytest-xdist mypy auditwheel build ml_dtypes transformers>=5;python_version>="3.10" megatron-core>=0.16;python_version>="3.10" torchtitan>=0.3;python_version>="3.11" psutil'
  fi
  if [ "$level" = check ]; then echo 'ruff>=0.17,<0.18'; fi
  # Ubuntu 22.04's CMake is 3.22.
  local version
  version=$(cmake --version | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')
  if [ "$(printf '%s\n' 3.25 "$version" | sort -V | head -1)" != 3.25 ]; then echo 'cmake>=3.25,<4'; fi
}

install_python_packages() {
  local packages
  read -r -d '' -a packages < <(python_packages; printf '\0') || true
  say "Python packages in $venv: ${packages[*]}"
  $venv/bin/python -m pip install --quiet --disable-pip-version-check "${packages[@]}"
}

install_packages
make_venv
install_python_packages
say "$level is ready: $($venv/bin/python --version), torch $($venv/bin/python -c 'import torch; print(torch.__version__)')"
