"""What cargo makes for the guests: an example that measures rails, and tests. Copies lie in the directory that is kept."""

import json
import pathlib
import shutil
import subprocess

from harness import Failed, require

TREE = pathlib.Path(__file__).resolve().parents[2]
COMMAND_SECONDS = 1800
WANTED = {
    "rail": ["build", "--release", "-p", "ringlet-fabric", "--example", "rail"],
    "libfabric": ["test", "--no-run", "-p", "ringlet-fabric", "--test", "libfabric"],
    "carried": ["test", "--no-run", "-p", "ringlet-fabric", "--test", "carried"],
}


def programs(kept):
    if shutil.which("cargo") is None:
        raise Failed("the lab's tests are built by cargo, which is not here")
    for name, words in WANTED.items():
        argv = ["cargo", *words, "--message-format=json-render-diagnostics"]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, cwd=TREE, timeout=COMMAND_SECONDS)
        require(done.returncode == 0, f"{' '.join(argv)} has failed")
        told = [json.loads(line) for line in done.stdout.splitlines()]
        [made] = [each["executable"] for each in told if each.get("executable") and each["target"]["name"] == name]
        (kept / "programs").mkdir(exist_ok=True)
        shutil.copy2(made, kept / "programs" / name)
