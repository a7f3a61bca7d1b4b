"""Real programs that nobody here wrote, wrapped on both sides, on one side and not at all, checked for their results.

    python3 tests/programs [--mode MODE]... [--seed N] [--jobs N] [--mirror SEED | --hosts SEED | --between memory|tcp] [PROGRAM]...
"""

import argparse
import collections
import concurrent.futures
import contextlib
import importlib
import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "suites"))

import between  # noqa: E402
import harness  # noqa: E402
import inside  # noqa: E402
from harness import Failed, Outcome, Ringlet, Skipped, Test  # noqa: E402

# The longest first, for those that run side by side.
PROGRAMS = "python sockperf nginx redis iperf3 postgresql netpipe java memcached datagrams node php netcat".split()
RESULTS = ("passed", "skipped", "failed")


# What fails outside of a program's checks: it is run once more with all of them.
AROUND = ("the hosts", "leaves no process", "start or end of the program", "the adapter ends")


def run_program(program, mode, directory, ringlet, report, arguments, only=None):
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    try:
        with between.Between(ringlet, arguments.between, arguments.seed).run() if arguments.between else contextlib.nullcontext():
            run_checks(program, mode, directory, ringlet, report, arguments, only)
    except Failed as problem:
        report(Outcome(program, mode, "the hosts", "failed", 0.0, str(problem)))
    if left := harness.end_orphans():
        report(Outcome(program, mode, "leaves no process", "failed", 0.0, "left: " + ", ".join(left)))


def run_checks(program, mode, directory, ringlet, report, arguments, only):
    module = importlib.import_module(program)
    test = Test(program, mode, directory, ringlet, arguments.seed, report, arguments.limit)
    test.only = only
    try:
        harness.needs(*module.NEEDS)
        module.checks(test)
    except Skipped as reason:
        report(Outcome(program, mode, "-", "skipped", 0.0, str(reason)))
    except Failed as problem:
        report(Outcome(program, mode, "start or end of the program", "failed", 0.0, str(problem)))
    finally:
        test.close()
        try:
            ringlet and ringlet.until_no_adapter()
        except Failed as problem:
            report(Outcome(program, mode, "the adapter ends", "failed", 0.0, str(problem)))


def print_summary(outcomes, modes):
    counts = collections.Counter((outcome.program, outcome.mode, outcome.result) for outcome in outcomes)
    programs = dict.fromkeys(outcome.program for outcome in outcomes)
    print(f"\n{'/'.join(RESULTS):22}" + "".join(f"{mode:>14}" for mode in modes))
    for program in programs:
        cells = ["/".join(str(counts[program, mode, result]) for result in RESULTS) for mode in modes]
        print(f"{program:22}" + "".join(f"{cell:>14}" for cell in cells))
    for outcome in outcomes:
        if outcome.result == "failed":
            print(f"FAILED  {outcome.program}, {outcome.mode}: {outcome.check}")


def side_by_side(arguments, modes, directory):
    """Runs each program's checks in a process of their own, so many at a time: most of them wait most of the time."""
    stopped, started = [], []

    def run(program):
        if stopped:
            return [], 1
        found = directory / f"{program}.json"
        argv = [sys.executable, __file__, "--outcomes", found, "--seed", arguments.seed, "--limit", arguments.limit]
        argv += ["--ringlet", arguments.ringlet, *(word for mode in modes for word in ("--mode", mode))]
        argv += [*(arguments.mirror or []), *(["--between", arguments.between] if arguments.between else []), program]
        child = subprocess.Popen([str(word) for word in argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        started.append(child)
        print(child.communicate()[0].decode(errors="replace"), end="", flush=True)
        outcomes = [Outcome(**each) for each in json.loads(found.read_text())] if found.exists() else []
        return outcomes, child.returncode

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        try:
            ran = list(pool.map(run, arguments.programs))
        finally:
            stopped.append(True)
            for child in started:
                child.terminate()
    outcomes = [outcome for each, _ in ran for outcome in each]
    # One that ended in the middle has not told what it found.
    return outcomes, any(status not in (0, 77) for _, status in ran)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)} (default: all)")
    parser.add_argument("--mode", action="append", choices=harness.MODES, help="may be repeated (default: all)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="of all data and sizes")
    parser.add_argument("--limit", type=int, default=harness.CLIENT_SECONDS, help="seconds for one client")
    parser.add_argument("--ringlet", default=harness.ROOT / "target/release/ringlet", help="the command to test")
    parser.add_argument("--jobs", type=int, default=1, help="so many programs side by side (default: one)")
    harness.add_mirror(parser)
    between.add(parser)
    parser.add_argument("--outcomes", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.programs) - set(PROGRAMS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    # (Datagram lanes have no adapter.)
    over_mirrors = arguments.mirror is not None or arguments.between is not None
    everything = [each for each in PROGRAMS if not over_mirrors or each != "datagrams"]
    arguments.programs = arguments.programs or everything
    modes = list(dict.fromkeys(arguments.mode or (["both"] if over_mirrors else harness.MODES)))
    if arguments.between:
        between.needed(arguments)
    outcomes = []

    def report(outcome):
        outcomes.append(outcome)
        took = f"{outcome.seconds:6.1f} s"
        print(f"{outcome.result:8}{outcome.program:11}{outcome.mode:9}{took}  {outcome.check}", flush=True)
        if outcome.detail:
            print("    " + outcome.detail.replace("\n", "\n    "), flush=True)

    if not arguments.outcomes:
        print(f"seed {arguments.seed}", flush=True)
    harness.adopt_orphans()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="ringlet-programs-"))
    directory.chmod(0o755)
    broken = False
    try:
        ringlet = Ringlet(arguments.ringlet, directory, arguments.mirror) if modes != ["baseline"] else None
        if arguments.jobs > 1:
            outcomes, broken = side_by_side(arguments, modes, directory)
        elif arguments.mirror is not None:
            inside.enter()
        for program in arguments.programs if arguments.jobs == 1 else []:
            for mode in modes:
                place, began = directory / f"{program}-{mode}", len(outcomes)

                def once_more(name, given=(program, mode, place, ringlet, report, arguments)):
                    run_program(*given, None if name in AROUND else name)

                run_program(program, mode, place, ringlet, report, arguments)
                harness.play_once_more(outcomes, began, once_more)
                shutil.rmtree(place, ignore_errors=True)
    except Failed as problem:
        sys.exit(str(problem))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if arguments.outcomes:
        arguments.outcomes.write_text(json.dumps([outcome._asdict() for outcome in outcomes]))
    else:
        print_summary(outcomes, modes)
    results = {outcome.result for outcome in outcomes}
    # Where none of the programs is installed, nothing was proved.
    sys.exit(1 if "failed" in results or broken else 0 if "passed" in results else 77)


def peer(module, function, args):
    """The other end of a check: see `Test.peer_argv`."""
    print(json.dumps(getattr(importlib.import_module(module), function)(*json.loads(args))), flush=True)


if sys.argv[1:2] == ["peer"]:
    peer(*sys.argv[2:])
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    main()
