"""A test that hangs says where, in every thread, and ends its process: a worker of pytest-xdist is
then reported with the test's name, and replaced.
"""

import faulthandler
import os

import pytest

_SECONDS = 900  # for one test and what it sets up: ten times the longest on two cores
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
