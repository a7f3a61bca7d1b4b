"""Programs in C over Active Messages, compiled against am.h and the library, and started by `ringlet am-run`.

    python3 tests/am [--ringlet PATH] [--deaths N] [NAME...]
"""

import argparse
import os
import random
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIMIT = 240

sys.path.insert(0, str(HERE.parent))

from harness import has_failed  # noqa: E402

failures = []
chosen = []


def step(name):
    def register(function):
        if not chosen or name in chosen:

            def play():
                began = time.monotonic()
                try:
                    said = function() or ""
                    print(f"{name:24} ok   {time.monotonic() - began:5.1f} s  {said}", flush=True)
                except (AssertionError, subprocess.TimeoutExpired) as error:
                    where = traceback.extract_tb(error.__traceback__)[1]
                    print(f"{name:24} FAILED  {where.lineno}: {error or where.line}", flush=True)
                    return True
                return False

            if has_failed(name, play):
                failures.append(name)
        return function
    return register


def run(command, expected=0, limit=LIMIT):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=limit)
    assert done.returncode == expected, f"{command}: status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ringlet", type=Path, default=ROOT / "target/release/ringlet")
    parser.add_argument("--deaths", type=int, default=40)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    chosen.extend(options.names)
    ringlet = options.ringlet.resolve()
    with tempfile.TemporaryDirectory() as directory:
        check(ringlet, Path(directory), options.deaths)
    for name in failures:
        print(f"FAILED: {name}")
    return bool(failures)


def check(ringlet, work, deaths):
    root = work / "root/usr"
    run(["make", "-s", "-C", ROOT, "install", f"DESTDIR={work}/root", "PREFIX=/usr"], limit=600)
    installed = [f"-I{root}/include", f"-L{root}/lib", "-lringlet", f"-Wl,-rpath,{root}/lib", "-lpthread"]

    def build(name, compiler="cc", flags=("-std=gnu11",)):
        program = work / f"{name}-{compiler}"
        run([compiler, *flags, "-O2", "-Wall", "-Wextra", "-Werror", HERE / f"{name}.c", *installed, "-o", program],
            limit=120)
        return program

    def job(count, program, *arguments, expected=0):
        return run([ringlet, "am-run", "--timeout", f"{LIMIT - 40}s", "-n", count, "--", program, *arguments], expected)

    for name, sizes in [("pingpong", [2]), ("ring", [1, 2, 5]), ("bulk", [1, 2, 4]), ("many", [1, 4, 9]),
                        ("errors", [2])]:
        @step(name)
        def _(name=name, sizes=sizes):
            program = build(name)
            for size in sizes:
                job(size, program)
            if name == "bulk":
                job(2, program, "shared")
            return f"{sizes} processes"

    @step("udpam")
    def _():
        program = build("udpam")
        run([program])
        # Two processes: what is sent before the other one is there waits for it.
        pairs = ["61116", "61117"], ["61117", "61116"]
        ends = [subprocess.Popen([program, "127.0.0.1", *ports], stdout=subprocess.PIPE, text=True) for ports in pairs]
        said = [end.communicate(timeout=LIMIT)[0] for end in ends]
        assert said == ["all\n"] * 2 and not any(end.returncode for end in ends), said
        return "2 processes"

    for name in ["bundles", "crossing", "now"]:
        @step(name)
        def _(name=name):
            run([build(name)])

    @step("amudp")
    def _():
        program = build("amudp")
        run([program])
        environment = ["env", "AMUDP_TEST=a=b", "setarch", "-R"]
        # The two processes know each other's addresses, as they are all the same.
        for count, word, code in [(2, "job", 0), (3, "exit", 5)]:
            launched = [*environment, ringlet, "am-run", "--timeout", f"{LIMIT - 40}s", "-n", count, "--", program]
            said = [run([*launched, word], code), run([*launched, count, "L", word], code)]
            # It launches itself as AMUDP's programs do.
            said.append(run([*environment, program, count, "L", word], code))
            said.append(run(["env", "SSH_SERVERS=localhost 127.0.0.1 localhost", *environment, program, count, "S", word], code))
            assert said == [""] * 4, said

    @step("spawn functions")
    def _():
        program, ssh = build("spawn"), work / "ssh"
        # What a client of ssh does, on this host: all but the last of its arguments are for it.
        ssh.write_text('#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = down ] && exit 7; shift; done\nexec sh -c "$1"\n')
        ssh.chmod(0o755)

        def spawned(words, *settings, expected=0):
            command = ["timeout", LIMIT - 40, "env", "AMUDP_TEST=a=b", "AMUDP_MASTERIP=127.0.0.1", *settings, program, *words]
            said = run(command, expected)
            return sorted(said.splitlines())

        def all_of(count):
            return [f"{rank} of {count}" for rank in range(count)]

        def by_ssh(servers):
            return f"SSH_CMD={ssh} -o 'It is'", "SSH_OPTIONS=-v", f"GASNET_SSH_SERVERS={servers}", f"SSH_REMOTE_PATH={work}"

        assert spawned(["own"], "GASNET_WORKER_RANK=OWN_NUMBER", expected=5) == all_of(4)
        assert spawned([3, "L", "job"], expected=5) == all_of(3)
        assert spawned([3, "job"], "AMUDP_SPAWNFN=L", expected=5) == all_of(3)
        assert spawned([3, "S", "job"], *by_ssh("one two,three four"), expected=5) == all_of(3)
        assert spawned([2, "job"], *by_ssh("one two"), expected=5) == all_of(2)
        simple = "CSPAWN_CMD=test '%D %N %M %P %%' = \"$PWD 3 one two three $PROGRAM %%\" && for host in %M; do %C & done; wait"
        assert spawned([3, "C", "job"], simple, f"PROGRAM={program}", "CSPAWN_SERVERS=one,two three four", expected=5) == all_of(3)
        # Processes that are started without what %C gives them are no launchers again, whose own would be, without end (here until the second).
        assert spawned(["plain"], "AMUDP_WORKER_RANK=OWN_NUMBER", expected=5) == all_of(4)
        for words, command in [["custom"], "%P custom"], [[4, "C", "job"], "%P 4 C job"], [[4, "C", "job"], "%P job"]:
            starts = f"echo >> {work}/starts; [ $(wc -l < {work}/starts) -gt 1 ] && exit 9; {command} & {command} & %C & {command} & wait"
            assert spawned(words, f"CSPAWN_CMD={starts}", expected=5) == all_of(4), words
            assert (work / "starts").read_text() == "\n", words
            (work / "starts").unlink()
        launcher = root / "bin/amudprun"

        def launched(words, *settings, expected=5):
            command = ["env", "AMUDP_TEST=a=b", "AMUDP_MASTERIP=127.0.0.1", *settings, launcher, *words]
            return sorted(run(command, expected).splitlines())

        assert launched(["-np", 3, "-spawn", "L", "-depth", 4, "-v", program, "job"]) == all_of(3)
        assert launched(["-n", 2, program, "job"]) == all_of(2)
        assert launched(["--np", 2, "-spawn", "S", program, "job"], *by_ssh("one two")) == all_of(2)
        assert launched(["-N", 2, program, "job"], "AMUDP_SPAWNFN=C", "CSPAWN_CMD=%C & %C; wait") == all_of(2)
        assert launched(["-spawn", "L", program, 2, "job"]) == all_of(2)
        for words in ["-np"], ["-np", "0", program], ["-spawn", "X", program], ["-np", 2], ["-o", program]:
            assert "usage" in launched(words, expected=125)[-1]
        # Who never looks is ended; who fails ends the job; who can't be started is told of.
        assert spawned([3, "S", "stuck"], *by_ssh("one two three"), expected=5) == ["0 of 3"]
        assert spawned([3, "L", "blocked"]) == ["1 ends with 0", "2 ends with 0"]
        spawned([3, "S", "leaves"], *by_ssh("one two three"), expected=9)
        assert "ended with 7 before" in " ".join(spawned([3, "S", "job"], *by_ssh("one down three"), expected=7))
        for _ in range(20):
            spawned([2, "S", "job"], "SSH_CMD=false", "SSH_SERVERS=one two", expected=1)
        assert "names 2 hosts for 3 processes" in " ".join(spawned([3, "S", "job"], *by_ssh("one two"), expected=3))
        assert "CSPAWN_CMD is not set" in " ".join(spawned([3, "C", "job"], expected=3))
        assert "the spawn function has failed" in " ".join(spawned(["fails"], expected=3))
        assert "others do not" in " ".join(spawned([2, "C", "job"], "CSPAWN_CMD=%C & AMUDP_WORKER_RANK=1 %C; wait", expected=125))
        assert "not 0 to 1" in " ".join(spawned([2, "S", "job"], "WORKER_RANK=1", *by_ssh("one two"), expected=125))
        # What to ssh would be an option is no host. (Its command would be executed.)
        assert "is no host" in " ".join(spawned([2, "S", "job"], *by_ssh("one -oProxyCommand"), expected=3))
        (work / "a=b").mkdir()
        shutil.copy(program, work / "a=b/spawn")
        for way in [["S", "job"], *by_ssh("one two")], [["C", "job"], "CSPAWN_CMD=%C & %C; wait"]:
            command = ["env", "AMUDP_TEST=a=b", "AMUDP_MASTERIP=127.0.0.1", *way[1:], "sh", "-c", 'exec "$0" "$@"', work / "a=b/spawn", 2, *way[0]]
            assert sorted(run(command, 5).splitlines()) == all_of(2)
        # Without a secret, and one too many.
        nothing = "SSH_CMD=sh -c 'exec sh -c \"$1\" </dev/null'"
        assert "no secret" in " ".join(spawned([2, "S", "job"], nothing, "SSH_SERVERS=one two", expected=3))
        # A program that wants to know of none of its children is a launcher of which nothing is lost, by either way.
        ignores = ["python3", "-c", "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execvp(sys.argv[1], sys.argv[1:])"]
        for code in 0, 7:
            run([*ignores, ringlet, "am-run", "-n", 2, "--", "sh", "-c", f"exit {code}"], code)
        run(["env", "CSPAWN_CMD=exit 9", "AMUDP_MASTERIP=127.0.0.1", *ignores, program, 2, "C", "job"], 9)
        # The secret is in no list of processes.
        listed = work / "listed"
        ssh.write_text(f'#!/bin/sh\necho "$*" >> {listed}\nwhile [ $# -gt 1 ]; do shift; done\nexec sh -c "$1"\n')
        spawned([2, "S", "job"], *by_ssh("one two"), expected=5)
        assert listed.read_text().count("RINGLET_AM_LAUNCHER=127.0.0.1:") == 2 and not re.search("[0-9a-f]{32}", listed.read_text())

    @step("strangers, and leavers")
    def _():
        program, told = build("spawn"), work / "command"
        # What starts the processes has ended when they come: they are waited for, and nobody else.
        source = work / "ends.c"
        source.write_text('#include "check.h"\nint main(int c, char **v) { start(&c, &v); OK(AMX_SPMDBarrier()); return 0; }\n')
        run(["cc", f"-I{HERE}", source, *installed, "-o", work / "ends"])
        one = "(while kill -0 $$ 2>/dev/null; do sleep 0.01; done; %C) &"
        run(["env", f"CSPAWN_CMD={one} {one}", "AMUDP_MASTERIP=127.0.0.1", work / "ends", 2, "C"])
        # Strangers who say nothing, and come again when they are sent away, keep nobody out.
        environment = {**os.environ, "AMUDP_TEST": "a=b", "AMUDP_MASTERIP": "127.0.0.1", "CSPAWN_CMD": f"cat > {told} <<'END'\n%C\nEND\n"}
        launcher = subprocess.Popen([program, "8", "C", "job"], env=environment, stderr=subprocess.DEVNULL)
        stop, processes, stranger = threading.Event(), [], None
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        try:
            begins = time.monotonic()
            while not (found := re.search(r"LAUNCHER=[0-9.]+:([0-9]+),", told.read_text() if told.exists() else "")):
                assert time.monotonic() - begins < LIMIT, "no launcher"
                time.sleep(0.01)

            def come():
                """So many at all times, none of whom says anything."""
                ready, here = select.poll(), {}
                while not stop.is_set():
                    while len(here) < 2000:
                        each = socket.socket()
                        each.setblocking(False)
                        each.connect_ex(("127.0.0.1", int(found[1])))
                        here[each.fileno()] = each
                        ready.register(each, select.POLLIN)
                    for gone, _ in ready.poll(10):
                        ready.unregister(gone)
                        here.pop(gone).close()

            stranger = threading.Thread(target=come)
            stranger.start()
            processes += [subprocess.Popen(["sh", told], stdout=subprocess.DEVNULL) for _ in range(8)]
            assert launcher.wait(LIMIT / 4) == 5
        finally:
            stop.set()
            for each in launcher, *processes:
                each.kill()
            if stranger:
                stranger.join()
        # A child by fork is none of the job's.
        forks = build("forks")
        job(2, forks, "ends", expected=5)
        job(2, forks, "again")
        command = ["env", "CSPAWN_CMD=exec 3<&0; %C <&3 & %C & %C & wait", "AMUDP_MASTERIP=127.0.0.1", forks, "3", "C", "stays"]
        job_of_three = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        said = sorted(job_of_three.stdout.readline() for _ in range(2))
        assert said == ["1 hears of it\n", "2 hears of it\n"], said
        job_of_three.stdin.close()
        assert job_of_three.wait(LIMIT) == 0
        # Who waits for room at one that never polls ends with the job as others do: by its callback, not by a signal.
        source = work / "room.c"
        source.write_text('#include "check.h"\nstatic void told(int code) { printf("%d told %d\\n", rank, code); fflush(stdout); }\n'
                          'int main(int c, char **v) { start(&c, &v); OK(AMX_SPMDSetExitCallback(told)); OK(AMX_SPMDBarrier());'
                          ' if (rank == 1) { OK(AMX_SPMDBarrier()); AMX_SPMDExit(5); }'
                          ' if (rank == 2) { OK(AMX_SPMDBarrier()); pause(); }'
                          ' while (AM_RequestXferAsync0(ep, 2, 0, 1, v, 1) == AM_OK); OK(AMX_SPMDBarrier());'
                          ' OK(AM_SetEventMask(eb, AM_CANSEND)); return AM_WaitSema(eb); }\n')
        run(["cc", f"-I{HERE}", source, *installed, "-o", work / "room"])
        said = job(3, work / "room", expected=5)
        # (The third one may hear of it before it stands still.)
        assert "0 told 5\n" in said and "1 told 5\n" in said, said
        # Its tag is seen by nobody: other users see its socket's name.
        source = work / "tag.c"
        source.write_text('#include "check.h"\nint main(int c, char **v) { start(&c, &v); tag_t tag; OK(AM_GetTag(ep, &tag));'
                          ' printf("%016llx\\n", (unsigned long long)tag); fflush(stdout); getchar(); return 0; }\n')
        run(["cc", f"-I{HERE}", source, *installed, "-o", work / "tag"])
        process = subprocess.Popen([work / "tag"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        tag, seen = process.stdout.readline().strip(), Path("/proc/net/unix").read_text()
        process.communicate()
        assert len(tag) == 16 and "@ringlet-am/" in seen
        assert tag not in seen and bytes.fromhex(tag)[::-1].hex() not in seen

    @step("old C, and C++")
    def _():
        build("bulk", flags=("-std=gnu99",))
        source = work / "plus.cc"
        source.write_text('#include <am.h>\nint main() { eb_t eb; ep_t ep; en_t name; AM_Init();\n'
                          'AM_AllocateBundle(AM_SEQ, &eb); AM_AllocateEndpoint(eb, &ep, &name);\n'
                          'AM_Map(ep, 0, name, 1); AM_Request2(ep, 7, 1, 1, 2); return AM_Terminate(); }\n')
        run(["c++", "-Wall", "-Wextra", "-Werror", source, *installed, "-o", work / "plus"], limit=120)
        run([work / "plus"])

    @step("deaths")
    def _():
        program = build("death")
        for _ in range(deaths):
            delay = random.choice([0, 100, 1000, 10000, 50000])
            run([program, random.randint(0, delay), random.choice([0, 8, 500, 8000]), random.randint(0, 1)])
        return f"{deaths} kills"

    @step("no system calls")
    def _():
        if not shutil.which("strace"):
            return "NOT LOOKED AT: no strace here"
        program = build("pingpong")

        def calls(rounds):
            log = work / "strace"
            run([ringlet, "am-run", "-n", 2, "--", "strace", "-f", "-c", "-o", log, program, rounds, "poll"])
            lines = [line.split() for line in log.read_text().splitlines()]
            return {line[-1]: int(line[3]) for line in lines if len(line) >= 5 and line[3].isdigit()}
        few, many = calls(1000), calls(200000)
        # A process that waits long for the other offers its processor; a message costs no call.
        more = {name: many[name] - few.get(name, 0) for name in many if name != "total"}
        count = sum(n for name, n in more.items() if n > 0 and name != "sched_yield")
        assert count < 2000, f"{count} system calls more for 200,000 rounds: {more}"
        return f"{count} calls for 199,000 rounds more"

    @step("the launcher")
    def _():
        said = run([ringlet, "am-run", "-n", 3, "-p", "--", "sh", "-c", "echo $RINGLET_AM_RANK/$RINGLET_AM_SIZE"])
        assert sorted(said.splitlines()) == ["[0] 0/3", "[1] 1/3", "[2] 2/3"], said
        # One that fails ends the others, and its status is the job's.
        began = time.monotonic()
        run([ringlet, "am-run", "-n", 4, "--", "sh", "-c",
             '[ "$RINGLET_AM_RANK" = 2 ] && exit 7; exec sleep 1000'], 7)
        run([ringlet, "am-run", "-n", 2, "--", "sh", "-c",
             '[ "$RINGLET_AM_RANK" = 1 ] && kill -9 $$; trap "" TERM; exec sleep 1000'], 128 + 9)
        run([ringlet, "am-run", "-t", "200ms", "-n", 2, "--", "sleep", "1000"], 124)
        run([ringlet, "am-run", "--", "/nowhere/at/all"], 125)
        assert time.monotonic() - began < 500
        # A signal goes to all.
        running = [ringlet, "am-run", "-n", "2", "--", "sh", "-c", "echo up; exec sleep 1000"]
        launcher = subprocess.Popen(running, stdout=subprocess.PIPE)
        assert [launcher.stdout.readline() for _ in range(2)] == [b"up\n"] * 2
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(LIMIT) == 128 + signal.SIGINT
        # What was ignored as the launcher began (nohup) is.
        ignores = "import os, signal, sys; [signal.signal(each, signal.SIG_IGN) for each in (1, 2)]; os.execvp(sys.argv[1], sys.argv[1:])"
        running = ["python3", "-c", ignores, ringlet, "am-run", "-n", "2", "--", "sh", "-c", "echo up; read line; exit 3"]
        launcher = subprocess.Popen(running, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert launcher.stdout.readline() == b"up\n"
        for each in signal.SIGHUP, signal.SIGINT:
            launcher.send_signal(each)
        launcher.stdin.close()
        assert launcher.wait(LIMIT) == 3
        # A process that stands still takes nobody's part away, its own least of all.
        stands = work / "stands.py"
        stands.write_text(f"""import os, pathlib, socket, struct, sys, time
rank, size = (int(os.environ["RINGLET_AM_" + name]) for name in ("RANK", "SIZE"))
launcher = socket.socket(fileno=int(os.environ["RINGLET_AM_FD"]))
got = [pathlib.Path({str(work)!r}, f"got-{{each}}") for each in range(size)]
length = 1 << 20
launcher.sendall(struct.pack("<I", length) + bytes([rank]) * length)
while rank == 1 and not (got[0].exists() and got[2].exists()):
    time.sleep(0.01)
for each in range(size):
    part = b""
    while len(part) < 4 + length:
        more = launcher.recv(4 + length - len(part))
        assert more, "a part is missing"
        part += more
    assert part == struct.pack("<I", length) + bytes([each]) * length
got[rank].touch()
""")
        run([ringlet, "am-run", "-t", "60s", "-n", 3, "--", "python3", stands])
        # Where no process or thread more may be there, that is said, at whichever the limit comes, and nothing is left.
        if os.geteuid() == 0:
            own = work / "own"
            own.mkdir(mode=0o755)
            work.chmod(0o755)
            shutil.copy(ringlet, own)
            user, ends = 54321, []
            for most in range(1, 40):
                limited = ["setpriv", f"--reuid={user}", "--clear-groups", "prlimit", f"--nproc={most}", own / "ringlet"]
                done = subprocess.run([*limited, "am-run", "-p", "-n", "4", "--", "sleep", "0"], capture_output=True, text=True, timeout=LIMIT)
                assert done.returncode in (0, 125) and "panicked" not in done.stderr, (most, done)
                ends.append(done.returncode)
                while subprocess.run(["pgrep", "-u", str(user)], capture_output=True).returncode == 0:
                    time.sleep(0.01)
            assert ends[0] == 125 and ends[-1] == 0, ends
        # A line that does not end comes in pieces.
        said = run([ringlet, "am-run", "-p", "-n", 1, "--", "sh", "-c", "head -c 200000 /dev/zero | tr '\\0' x"])
        lines = said.splitlines()
        assert len(lines) == 4 and all(line.startswith("[0] ") for line in lines) and said.count("x") == 200000, [len(line) for line in lines]
        # Who waits for a process that has ended does not wait for ever.
        early = work / "early.c"
        early.write_text('#include "check.h"\nint main(int c, char **v) { start(&c, &v);'
                         ' if (rank == 0) exit(0); return AMX_SPMDBarrier() == AM_ERR_RESOURCE ? 0 : 3; }\n')
        run(["cc", f"-I{HERE}", early, *installed, "-o", work / "early"])
        job(3, work / "early")
        # Output that somebody holds whom a process has left is waited for as long as the program may take, or until a signal.
        for limit, status in [(["-t", "300ms"], 124), ([], 128 + signal.SIGINT)]:
            left = [ringlet, "am-run", "-p", "-n", "1", *limit, "--", "sh", "-c", "sleep 1000 & echo $!; exit 0"]
            launcher = subprocess.Popen(left, stdout=subprocess.PIPE, text=True)
            sleeper = int(launcher.stdout.readline().removeprefix("[0] "))
            try:
                launcher.send_signal(signal.SIGINT if not limit else 0)
                assert launcher.wait(LIMIT) == status, launcher.returncode
            finally:
                os.kill(sleeper, signal.SIGKILL)
                launcher.kill()

    @step("scripts, and what a process starts")
    def _():
        source = work / "starts.c"
        source.write_text('#include "check.h"\nint main(int c, char **v) { start(&c, &v);'
                          ' if (c > 2) { printf("%d\\n", (int)getpid()); fflush(stdout); for (;;) OK(AM_Poll(eb)); }'
                          ' if (c > 1) return size != 1;'
                          ' char inner[4096]; snprintf(inner, sizeof inner, "%s inner", v[0]);'
                          ' OK(AMX_SPMDBarrier()); int status = rank ? 0 : system(inner); OK(AMX_SPMDBarrier());'
                          ' CHECK(AMX_SPMDIsWorker(v)); return status != 0; }\n')
        run(["cc", f"-I{HERE}", source, *installed, "-o", work / "starts"])
        # A program that one of a job's starts is a job of its own.
        job(2, work / "starts")
        # Who is a script's child, and polls, ends with the launcher.
        running = [ringlet, "am-run", "-n", "2", "--", "sh", "-c", f"{work}/starts and polls; true"]
        launcher = subprocess.Popen(running, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.kill()
        try:
            said = launcher.communicate(timeout=LIMIT)[1]
        except subprocess.TimeoutExpired:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            raise
        assert "launcher has ended" in said, said


sys.exit(main())
