"""Virtual machines of PVM: a daemon on each host, and programs on them."""

import contextlib
import os
import pathlib
import re
import shlex
import subprocess

from harness import STOP_SECONDS, Process, descendants, name_of, require, status_word, wait_until

ROOT = "/usr/lib/pvm3"
LIMIT_SECONDS = 240  # for a program to end, which only a fault meets


class Node:
    """Where a daemon runs: its address, and what is put before its programs."""

    def __init__(self, address, before=()):
        self.address, self.before = address, [str(word) for word in before]

    def again(self):
        """For another machine."""
        return Node(self.address, self.before)


class Machine:
    """The daemon of the first node is started, and starts the others by `PVM_RSH`, as with ssh. `wrap` puts a command under ringlet, or not."""

    def __init__(self, place, nodes, wrap, path):
        self.nodes, self._wrap, self._path = nodes, wrap, path
        self.place = pathlib.Path(place)
        self.place.mkdir()
        for number, node in enumerate(nodes):
            # (Each daemon says in a file there how its tasks find it.)
            node.directory = self.place / str(number)
            node.directory.mkdir()
        self._shell = self._write("rsh", 0o755, self._to_others())
        self._hosts = self._write("hosts", 0o644, "".join(f"& {node.address} ep={path}:/usr/bin wd={node.directory}\n" for node in nodes))

    def _write(self, name, mode, text):
        path = self.place / name
        path.write_text(text)
        path.chmod(mode)
        return path

    def _to_others(self):
        """PVM_RSH HOST [-l USER] [-n] COMMAND..."""
        cases = [
            f"{node.address}) directory={shlex.quote(str(node.directory))}; set -- {shlex.join(node.before)} sh -c \"$command\" ;;"
            for node in self.nodes
        ]
        return "\n".join(
            [
                "#!/bin/sh",
                "host=$1; shift",
                "while :; do case $1 in -l) shift 2 ;; -n) shift ;; *) break ;; esac; done",
                "command=$*",
                "case $host in",
                *cases,
                "*) echo no such host: $host >&2; exit 1 ;;",
                "esac",
                'PVM_TMP=$directory exec "$@"\n',
            ]
        )

    def _environment(self, node):
        return {
            "PVM_ROOT": ROOT,
            "PVM_ALLOW_ROOT": "1",
            "PVM_RSH": str(self._shell),
            "PVM_TMP": str(node.directory),
            "PATH": f"{self._path}:{os.environ['PATH']}",
        }

    def argv(self, node, words):
        return [*node.before, *self._wrap([str(word) for word in words])]

    def start(self, words, number=0, **options):
        node = self.nodes[number]
        return Process(self.argv(node, words), str(node.directory), env=self._environment(node), **options)

    def run(self, words, number=0, said="", expected=(0,)):
        """A program to its end: what it has printed."""
        node = self.nodes[number]
        process = subprocess.Popen(
            self.argv(node, words),
            cwd=node.directory,
            env={**os.environ, **self._environment(node)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(said.encode(), timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            require(False, f"{words} does not end:\n{output[-2000:].decode(errors='replace')}\n{self.told()}")
        output = output.decode(errors="replace")
        require(process.returncode in expected, f"{words}: {status_word(process.returncode)}\n{output[-2000:]}\n{self.told()}")
        return output

    def told(self):
        """The daemons' own logs."""
        return "\n".join(log.read_text(errors="replace")[-1500:] for log in sorted(self.place.glob("*/pvml.*")))

    def __enter__(self):
        self._daemon = self.start(["pvmd", f"-n{self.nodes[0].address}", self._hosts])
        try:
            # (The console would start a daemon of its own where there is none.)
            wait_until(self._is_there, LIMIT_SECONDS, "a daemon")
            added = self.run(["pvm"], said="".join(f"add {node.address}\n" for node in self.nodes[1:]) + "conf\n")
            require(re.search(rf"^{len(self.nodes)} hosts?,", added, re.M), f"the machine has not all hosts:\n{added}")
        except BaseException as problem:
            self._daemon.kill()
            problem.add_note(f"{self._daemon.tail()}\n{self.told()}")
            raise
        return self

    def _is_there(self):
        require(self._daemon.poll() is None, "the daemon has ended")
        return any(file.stat().st_size for file in self.nodes[0].directory.glob("pvmd.*"))

    def __exit__(self, kind, *_):
        with contextlib.ExitStack() as held:
            held.callback(self._daemon.kill)
            # (It ends all that the console knows of, and then itself: what says so is often cut off.)
            self.run(["pvm"], said="halt\n", expected=range(-64, 256))
            ended = self._daemon.wait(STOP_SECONDS)
            if kind is None:
                require(ended is not None, f"the daemon does not end when it is told to halt\n{self.told()}")

    def daemons(self):
        """The pids of all of them."""
        return {pid for pid in descendants(os.getpid()) if name_of(pid) == "pvmd" and self._is_ours(pid)}

    def _is_ours(self, pid):
        with contextlib.suppress(OSError):
            return str(self.place).encode() in pathlib.Path(f"/proc/{pid}/environ").read_bytes()
        return False
