"""Running the built command line, for the tests beside this file: each is called with its path."""

import fcntl
import json
import os
import pathlib
import pty
import re
import struct
import subprocess
import sys
import termios
import unittest

ROOT = pathlib.Path(__file__).parents[2]
MOIRE = ""
COMMANDS = ("info", "problems", "explain", "check", "errors", "bench")
SMALL = "name=small groups=3 hidden=32 ffn=16 rows=20 topk=2 dtype=fp32 splits=ragged"


def environment(**more):
    """Ours, without what decides how wide and how colourful output is."""
    inherited = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    return {**inherited, "NO_COLOR": "1", **more}


def moire(*arguments, stdout=subprocess.PIPE, **variables):
    return subprocess.run(
        [MOIRE, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
        env=environment(**variables),
    )


def on_a_terminal(columns, *arguments):
    """What a command shows, stdout and stderr, on a terminal of so many columns."""
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    child = subprocess.Popen(
        [MOIRE, *arguments], stdout=terminal, stderr=terminal, env=environment()
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            piece = os.read(screen, 65536)
        except OSError:  # Linux says so when the child has closed its end
            piece = b""
        if not piece:
            break
        shown += piece
    os.close(screen)
    child.wait()
    return re.sub(r"\r(?!\n)[^\n]*\x1b\[K", "", shown.decode()).replace("\r\n", "\n")


class CommandLineTest(unittest.TestCase):
    def good(self, *arguments):
        result = moire(*arguments)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout

    def bad(self, *arguments):
        result = moire(*arguments)
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertEqual(result.stdout, "")
        return result.stderr

    def json_lines(self, *arguments):
        return [json.loads(line) for line in self.good(*arguments).splitlines()]


def main():
    global MOIRE
    MOIRE = sys.argv.pop(1)
    unittest.main()
