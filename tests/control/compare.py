"""`ringlet compare` of two small programs: their connection moves under ringlet and not on the kernel, and where it doesn't, the reason is told."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

from harness import CLIENT_SECONDS, ROOT, command_of, require, wait_until

COMPARISONS = ROOT / "tests" / "compare"
TALK = COMPARISONS / "talk.py"
ROUNDS = 3
PINGS = 3000
# For a connection that is to be looked at.
MANY_PINGS = 6_000


def scenes(ground):
    with ground.scene("three rounds"):
        moved(ground)
    with ground.scene("nothing moves"):
        unmoved(ground)
    with ground.scene("one end under ringlet"):
        one_end(ground)
    with ground.scene("a server that was killed"):
        killed_server(ground)
    with ground.scene("what can't be ended is left"):
        left_behind(ground)
    with ground.scene("the comparisons of this tree can be read"):
        files(ground)


def run(ground, *words, status=0, **environment):
    argv = [str(word) for word in (ground.ringlet.command, "compare", "--rounds", ROUNDS, *words)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=CLIENT_SECONDS, env={**os.environ, **environment})
    require(done.returncode == status, f"exit status {done.returncode}, not {status}\n{done.stderr}")
    return done


def compared(ground, *words, pings=PINGS, **options):
    """The rows of the kernel and of ringlet, all runs, and what was complained of."""
    talk = f"{sys.executable} {TALK}"
    ends = ["--server", f"{talk} server {{port}}", "--client", f"{talk} client {{port}} pings {pings}"]
    done = run(ground, *ends, "--requests", pings, "--figure", "rate ([0-9.]+)", "--json", "-", *words, **options)
    (result,) = json.loads(done.stdout)["results"]
    rows = {row["contender"]: row for row in result["rows"]}
    return rows["kernel"], rows["ringlet"], result["runs"], done.stderr


def moved(ground):
    picture = f"{ground.directory}/ratios.png"
    kernel, ringlet, runs, _ = compared(ground, "--plot", picture)
    for row in (kernel, ringlet):
        require(row["rounds"] == ROUNDS, f"{row['rounds']} rounds")
        require(0 < row["value"]["least"] <= row["value"]["median"] <= row["value"]["most"], f"{row}")
        require(row["cpu_seconds"]["least"] > 0, f"{row}")
    require(kernel["ratio"] is None and kernel["moved_ends"] == 0, f"{kernel}")
    require(ringlet["ratio"]["median"] > 0 and ringlet["moved"] is True and ringlet["moved_ends"] >= 2, f"{ringlet}")
    require(len(runs) == 2 * ROUNDS, f"{len(runs)} runs")
    for each in runs:
        require((each["moved_ends"] >= 2) == (each["contender"] == "ringlet"), f"{each}")
        require(each["requests"] == PINGS and each["server_cpu_seconds"] > 0 and each["client_cpu_seconds"] > 0, f"{each}")
    with open(picture, "rb") as drawn:
        require(drawn.read(4) == b"\x89PNG", "no picture")


def unmoved(ground):
    reasons = {"ringlet is turned off": {"RINGLET_ENABLED": "off"}, " off: ringlet is switched off for this address": {"RINGLET_EXCEPT": "127.0.0.1"}}
    for told, environment in reasons.items():
        kernel, ringlet, _, complaint = compared(ground, pings=MANY_PINGS, status=1, **environment)
        require(ringlet["moved"] is False and ringlet["rounds"] == 1, f"{ringlet}")
        require("no connection came into shared memory" in complaint and told in complaint, complaint)


def one_end(ground):
    _, ringlet, _, _ = compared(ground, "--wrap", "server")
    require(ringlet["moved"] is None and ringlet["moved_ends"] == 0 and ringlet["rounds"] == ROUNDS, f"{ringlet}")


def killed_server(ground):
    """The client does not mind that its server was killed, but we do."""
    words = ["--server", "sh -c 'echo $$ > {dir}/new; mv {dir}/new {dir}/pid; exec sleep 60'", "--ready", "{dir}/pid"]
    # It can be waited for from when it is a zombie.
    client = ["--client", "sh -c 'read pid < {dir}/pid; kill -9 $pid; until grep -q \") Z\" /proc/$pid/stat; do :; done'"]
    complaint = run(ground, *words, *client, status=1).stderr
    require("the server had ended with signal: 9" in complaint, complaint)


def left_behind(ground):
    """What has become another user's, as by sudo, can't be ended: nobody waits for it for ever."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        become = f"{directory}/become"
        shutil.copy(shutil.which("setpriv"), become)
        os.chmod(become, 0o4755)
        is_roots = 'until grep -q "^Uid:.0.0" /proc/$!/status; do :; done'
        argv = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", ground.ringlet.command, "compare"]
        argv += ["--client", f"sh -c '{become} --reuid 0 sleep 60 & {is_roots}; exit 1'"]
        done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, timeout=CLIENT_SECONDS, cwd="/")
        left = re.search("left behind.*: ([0-9]+)$", done.stderr, re.MULTILINE)
        require(done.returncode == 1 and left, f"{done.returncode} {done.stderr}")
        os.kill(int(left[1]), signal.SIGKILL)
        wait_until(lambda: not command_of(int(left[1])), CLIENT_SECONDS, "it to be gone")


def files(ground):
    found = sorted(COMPARISONS.glob("*.toml"))
    require(found, "there is none")
    for file in found:
        complaint = run(ground, file, "--only", "no such name", status=1).stderr
        require("no comparison is called so" in complaint, f"{file}: {complaint}")
