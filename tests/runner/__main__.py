"""The runners themselves: a scene that fails once passes and is told of as flaky, one that fails twice fails, and no other is played again.

    python3 tests/runner [--ringlet PATH] [NAME...]
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from harness import ROOT, Failed, has_failed, require, skip  # noqa: E402

TESTS = ROOT / "tests"

# A group of scenes, of which each notes that it is played: the first two ways of leaving the block that is not played are a line and a call.
GROUP = '''
import contextlib, pathlib, sys
sys.path.insert(0, {tests!r})
import harness

@contextlib.contextmanager
def note(ground, name):
    file = pathlib.Path({noted!r})
    played = file.read_text().split("\\n") if file.exists() else []
    file.write_text("\\n".join([*played, name]))
    # (What an earlier round has left would be in its way.)
    pathlib.Path(ground.directory, name).mkdir()
    yield played.count(name)

def scenes(ground):
    with ground.scene("fine"):
        with note(ground, "fine"):
            pass
    with ground.scene("once"), note(ground, "once") as before:
        harness.require(before, "on purpose, once")
    for name in {more}:
        with ground.scene(name):
            with note(ground, name):
                harness.require(False, "on purpose, always")
    with ground.scene("last"), note(ground, "last"):
        pass
'''
PLAY = '''
import sys
sys.path[:0] = [{tests!r}, {place!r}]
from harness import play, scenes_options, scenes_parser
sys.exit(play("runner", scenes_options(scenes_parser("", ["group"]), ["group"])))
'''
LIBTEST = '''
fn played(name: &str) -> usize {
    use std::io::Write;
    let path = format!("{}/{name}", std::env::var("NOTED").unwrap());
    std::fs::OpenOptions::new().create(true).append(true).open(&path).unwrap().write_all(b".").unwrap();
    std::fs::read(path).unwrap().len()
}
mod inner {
    #[test] fn fine() { super::played("fine"); }
    #[test] fn once() { assert!(super::played("once") > 1, "on purpose, once"); }
    #[test] fn once_and_more() { super::played("once_and_more"); }
    #[test] #[cfg(always)] fn always() { super::played("always"); panic!("on purpose, always"); }
}
'''
# A library that ends the first programs that load it: so many as the file's first line says.
PRELOADED = '''
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
__attribute__((constructor)) static void start(void) {
    char left = 0;
    int fd = open(getenv("LEFT"), O_RDWR);
    if (pread(fd, &left, 1, 0) == 1 && left > '0') {
        left--;
        pwrite(fd, &left, 1, 0);
        _exit(3);
    }
    close(fd);
}
'''


def run(argv, **environment):
    environment = {**os.environ, "RETRY_FAILED": "1", **{name: str(value) for name, value in environment.items()}}
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, env=environment, timeout=600)
    return done.returncode, done.stdout + done.stderr


def told(said):
    return re.findall(r"^flaky: (.*)", said, re.MULTILINE)


def scenes(place, options):
    """Those of the groups of tests/harness.py."""
    noted = place / "noted"
    for number, (more, retry, status, flaky, played) in enumerate(
        [
            ([], "1", 0, ["group, both: once"], "fine once last once"),
            (["always"], "1", 1, ["group, both: once"], "fine once always last once always"),
            ([], "", 1, [], "fine once last"),
        ]
    ):
        noted.unlink(missing_ok=True)
        (place / "group.py").write_text(GROUP.format(tests=str(TESTS), noted=str(noted), more=more))
        (place / "play.py").write_text(PLAY.format(tests=str(TESTS), place=str(place)))
        got, said = run([sys.executable, "-B", place / "play.py", "--ringlet", options.ringlet], RETRY_FAILED=retry)
        order = noted.read_text().split()
        require((got, told(said), order) == (status, flaky, played.split()), f"{number}: status {got}, {order}\n{said}")
        require(("on purpose, always" in said) == bool(more) and "on purpose, once" in said, said)


def commands(place, _):
    """Whole commands, by tests/retry.py."""
    noted = place / "noted"
    count = 'echo "seed 7"; echo "$@" >> "$0"; [ $(wc -l < "$0") -gt '
    for times, status, played in (0, 0, 1), (1, 0, 2), (2, 1, 2):
        noted.unlink(missing_ok=True)
        argv = [TESTS / "retry.py", "sh", "-c", f"{count}{times} ]", noted, "word"]
        got, said = run(argv)
        lines = noted.read_text().splitlines()
        require((got, len(lines), len(told(said))) == (status, played, times == 1), f"{times}: {got}, {lines}\n{said}")
        require(lines[1:] == ["word --seed 7"] * (played - 1), f"the second has another seed: {lines}")
    got, said = run([TESTS / "retry.py", "sh", "-c", "echo run; exit 77"])
    require((got, said) == (77, "run\n"), f"a command that was skipped: {got}, {said}")


def units(place, _):
    """Tests of cargo's, of which it starts a binary as it does here."""
    if not shutil.which("rustc"):
        skip("no rustc")
    (place / "unit.rs").write_text(LIBTEST)
    for always in False, True:
        binary, noted = place / f"unit{always}", place / f"noted{always}"
        noted.mkdir()
        argv = ["rustc", "--test", "--edition", "2021", *(["--cfg", "always"] if always else []), "-o", binary, place / "unit.rs"]
        subprocess.run([str(word) for word in argv], check=True, capture_output=True, timeout=600)
        got, said = run([TESTS / "retry.py", "--tests", binary], NOTED=noted)
        played = {each.name: each.stat().st_size for each in noted.iterdir()}
        wanted = {"fine": 1, "once": 2, "once_and_more": 1} | ({"always": 2} if always else {})
        require((bool(got), told(said), played) == (always, [f"{binary.name} inner::once"], wanted), f"{got}, {played}\n{said}")
    # One that dies has told of no test that failed.
    got, said = run([TESTS / "retry.py", "--tests", "sh", "-c", "kill -9 $$"])
    require(got == 137 and not told(said), f"{got}\n{said}")


def cases(place, options):
    """Conformance cases, with a library that ends what loads it."""
    if not shutil.which("cc"):
        skip("no cc")
    (place / "ends.c").write_text(PRELOADED)
    library, left = place / "ends.so", place / "left"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, place / "ends.c"], check=True, timeout=600)
    # (A case of one process, which makes no connection.)
    case = [pathlib.Path(options.ringlet).with_name("conformance"), "run", "--library", library, "--spin", 0, "rare/close_range_of_a_shared_table@unix"]
    for ends, status, flaky in ("0", 0, 0), ("1", 0, 1), ("2", 1, 0):
        left.write_text(ends)
        got, said = run(case, LEFT=left)
        require((got, len(told(said)), left.read_text()) == (status, flaky, "0"), f"{ends}: status {got}\n{said}")
        require(("0 failed" in said) == (status == 0), said)


def summary(place, options):
    """The stages of tests/run, of which a copy has others."""
    script = (TESTS / "run").read_text()
    start, end = script.index("\nringlet=$target"), script.index("\nfor name in $chosen")
    tests = place / "copy/tests"
    tests.mkdir(parents=True)
    scene = f"python3 {place}/play.py --ringlet {options.ringlet}"
    stages = f"stage fine 60 true\nstage first 60 {scene}\nbeside second 60 {scene}\nawait\nstage third 60 false\n"
    (tests / "run").write_text(script[:start] + "\n" + stages + script[end:])
    noted = place / "noted"
    (place / "group.py").write_text(GROUP.format(tests=str(TESTS), noted=str(noted), more=[]))
    (place / "play.py").write_text(PLAY.format(tests=str(TESTS), place=str(place)))
    for chosen, status in (["fine", "first"], 0), (["fine", "second"], 0), (["first", "third"], 1):
        noted.unlink(missing_ok=True)
        got, said = run(["sh", tests / "run", *chosen], CARGO_TARGET_DIR=place / "target")
        lines = said.splitlines()
        name = next(each for each in chosen if each in ("first", "second"))
        found = re.fullmatch(rf"flaky: group, both: once \({name}: (.*)\)", lines[-1])
        require(got == status and found, f"{chosen}: {got}\n{said}")
        require("on purpose, once" in pathlib.Path(found[1]).read_text(), f"the log: {found[1]}")
        require(pathlib.Path(found[1]).parent == place / "target/flaky", found[1])
        require(all(re.search(rf"^{each} .* s  {'FAILED' if each == 'third' else 'passed'}", said, re.MULTILINE) for each in chosen), said)


CHECKS = {each.__name__: each for each in (scenes, commands, units, cases, summary)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CHECKS)} (default: all)")
    parser.add_argument("--ringlet", default=ROOT / "target/release/ringlet", help="the command to test")
    options = parser.parse_args()
    options.ringlet = pathlib.Path(options.ringlet).resolve()
    failed = False
    for name in options.names or CHECKS:

        def play(name=name):
            try:
                with tempfile.TemporaryDirectory(prefix="ringlet-runner-") as directory:
                    CHECKS[name](pathlib.Path(directory), options)
            except (Failed, subprocess.SubprocessError) as problem:
                print(f"FAILED  {name}: {problem}", flush=True)
                return True
            print(f"passed  {name}", flush=True)
            return False

        failed |= has_failed(name, play)
    sys.exit(failed)


if __name__ == "__main__":
    main()
