"""`ringlet bench --only many,idle`: its connections move under ringlet, and every figure is there for the kernel and for it."""

import json
import subprocess

from harness import CLIENT_SECONDS, require

WAYS = ["many-epoll", "many-edge", "many-poll", "many-select", "many-turns", "many-bursts", "many-udp", "many-udp-turns", "many-udp-bursts", "idle-epoll", "idle-poll", "idle-select"]
CONNECTIONS = (1, 40)


def scenes(ground):
    with ground.scene("many connections and idle ones"):
        many(ground)


def many(ground):
    words = ["bench", "--quick", "--only", "many,idle", "--connections", ",".join(map(str, CONNECTIONS)), "--rounds", 1, "--json", "-"]
    argv = [str(word) for word in (ground.ringlet.command, *words)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=CLIENT_SECONDS)
    require(done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}")
    rows = json.loads(done.stdout)["rows"]
    for way in WAYS:
        figures = 1 if way.startswith("idle") else 3
        kernel = [row for row in rows if row["case"] == way and row["transport"] in ("tcp", "udp")]
        ringlet = [row for row in rows if row["case"] == way and row["transport"] == "ringlet"]
        require(len(kernel) == len(ringlet) == figures * len(CONNECTIONS), f"{way}: {kernel} {ringlet}")
        require(all(row["median"] > 0 for row in kernel + ringlet), f"{way}: {kernel} {ringlet}")
        require(all(row["path"] == "kernel" for row in kernel), f"{way}: {kernel}")
        # Some may be late on a busy machine; datagram sockets that rest say that they move.
        require(all(row["path"].split()[-1] in ("ring", "moving") and row["ratio_to_tcp"] > 0 for row in ringlet), f"{way}: {ringlet}")
