"""Runs tests of CPython's own suite in the Python that is tested, and writes down how each went.

    PYTHON collect.py RESULTS TEST...      a module such as test_socket, or the full name of one test or class

Each test writes a line when it begins and one when it ends, so that whoever reads them knows where a run hung or died.
"""

import faulthandler
import json
import os
import sys
import time
import unittest

# What a test may use (without a screen, huge files and, in truth, any network but loopback).
RESOURCES = ["cpu", "network", "subprocess", "walltime"]

# Names of tests that are not run: in a virtual machine these wait for its host.
LEFT_OUT = ("VSOCK",)


def chosen(tests):
    if isinstance(tests, unittest.TestSuite):
        tests._tests = [chosen(each) for each in tests if isinstance(each, unittest.TestSuite) or not left_out(each)]
    return tests


def left_out(test):
    return any(name in test.id() for name in LEFT_OUT)


class Recorder(unittest.TestResult):
    def __init__(self, path):
        super().__init__()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._pid = os.getpid()
        self._path = path
        self._began = 0.0
        self._bad = ""

    def _write(self, **fields):
        if os.getpid() != self._pid:  # a forked child that came out of its test
            return
        line = (json.dumps(fields) + "\n").encode()
        try:
            os.write(self._file, line)
        except OSError:  # the test has closed what it does not know
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.write(self._file, line)

    def startTest(self, test):
        super().startTest(test)
        self._began = time.monotonic()
        self._bad = ""
        self._write(begun=test.id())

    def _end(self, test, result, why=""):
        seconds = round(time.monotonic() - self._began, 3)
        self._write(test=test.id(), result=result, why=why[-4000:], seconds=seconds)

    def addSuccess(self, test):
        super().addSuccess(test)
        self._end(test, "failed" if self._bad else "passed", self._bad)

    def addError(self, test, problem):
        super().addError(test, problem)
        self._end(test, "failed", self.errors[-1][1])

    def addFailure(self, test, problem):
        super().addFailure(test, problem)
        self._end(test, "failed", self.failures[-1][1])

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self._end(test, "skipped", str(reason))

    def addExpectedFailure(self, test, problem):
        super().addExpectedFailure(test, problem)
        self._end(test, "passed")

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self._end(test, "failed", "unexpected success")

    def addSubTest(self, test, subtest, problem):
        super().addSubTest(test, subtest, problem)
        if problem is not None:
            # A test with a bad part reports no end of its own.
            self._bad = "%s\n%s" % (subtest.id(), self._exc_info_to_string(problem, test))
            self._end(test, "failed", self._bad)


def main():
    results, names = sys.argv[1], sys.argv[2:]
    sys.path[:] = [place for place in sys.path if place != os.path.dirname(os.path.abspath(__file__))]
    faulthandler.enable()
    from test import support

    support.verbose = 0
    support.use_resources = RESOURCES
    recorder = Recorder(results)
    for name in names:
        name = name if name.startswith("test.") else "test." + name
        chosen(unittest.defaultTestLoader.loadTestsFromName(name)).run(recorder)
        recorder._previousTestClass = None  # torn down, so the next name sets it up again
    recorder._write(end=len(recorder.failures) + len(recorder.errors))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that a test left behind don't keep the run


if __name__ == "__main__":
    main()
