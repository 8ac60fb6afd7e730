"""A test that hangs says where, in every thread, and ends its process. Who runs workers of
pytest-xdist gives `--max-worker-restart 0`: the run then ends with that test's name. With another
worker in its place, `--dist loadfile` was seen to wait for ever.
"""

import faulthandler
import os

import pytest

_SECONDS = 600  # for one test and what it sets up: six times the longest on two cores
_STDERR = pytest.StashKey()


def pytest_configure(config):
    config.stash[_STDERR] = os.dup(2)  # of now: what tests write is captured


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    faulthandler.dump_traceback_later(_SECONDS, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
