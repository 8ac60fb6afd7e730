"""The command line as `python -m moire` and, where the package is installed, as `moire`: the
program that was built with the library, in place of this process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from ._abi import library_path


def program_of(library: Path) -> Path:
    """The program of a library that lies in lib/, installed or built: bin/ is beside that."""
    return library.parent.parent / "bin" / "moire"


def main() -> NoReturn:
    program = program_of(library_path)
    if not program.is_file():
        sys.exit(
            f"moire: the command line was not built with {library_path}: there is no {program}; "
            "build it with: cmake --build --preset release --target moire_cli"
        )
    os.execv(program, [str(program), *sys.argv[1:]])


if __name__ == "__main__":
    main()
