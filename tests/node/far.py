"""Two ends on two hosts, whose services carry their connection: over rails in memory that both hosts reach, in disorder by seed, and over libfabric's tcp provider."""

import contextlib
import os
import pathlib
import re
import resource
import signal
import subprocess
import time

from carried import is_alive, on_ring
from cluster import Apart, dial, drop, gone, hello, tls, word
from ground import ANSWER_SECONDS
from harness import Failed, require
from nodes import ALLOWED, PORT, by_libfabric, carried, fabric, in_memory, process, two_hosts
from world import inside, note, until

STILL_SECONDS = 7
# Until TCP asks seldom; and looks of which a thousand in a second would be far too many.
UNSAID_SECONDS = 7
WATCHED_SECONDS = 3
ASKED_MOST = 1000
FLOOD_BYTES = 16 << 20


def switches(pid):
    """How often its threads have slept."""
    text = "".join(each.read_text() for each in pathlib.Path(f"/proc/{pid}/task").glob("*/status"))
    return sum(int(count) for count in re.findall(r"\nvoluntary_ctxt_switches:\s+(\d+)", text))



def scenes(ground):
    def scene(name, play, rails=in_memory):
        if os.environ.get("SCENE", "") not in name:
            return
        with ground.scene(name), rails() as said, two_hosts(ground, ALLOWED, said) as (a, b):
            try:
                for host in a, b:
                    until(lambda host=host: fabric(host)["nodes"] == 1, f"a rail that carries: {host.service.told()}")
                play(name, a, b)
            except BaseException:
                for host in a, b:
                    print(f"{host.name}: {host.service.told()}")
                raise
            a.lives()
            b.lives()

    def meet(a, b, **more):
        ends = Apart(ground, b, a, **more)
        on_ring(ends)
        return ends

    def traded(ends, there=3_000_000, back=2_000_000):
        ends.trade(there, back)
        ends.traded()
        require(not ends.problem, f"{ends.problem}; {ends.told()}")

    def moves(name, a, b):
        ends = meet(a, b)
        require((carried(a), carried(b)) == (1, 1), f"{fabric(a)}, {fabric(b)}")
        traded(ends)
        other = meet(b, a)
        traded(other)
        require((carried(a), carried(b)) == (2, 2), f"{fabric(a)}, {fabric(b)}")
        for each in ends, other:
            each.finish()
        until(lambda: (carried(a), carried(b)) == (0, 0), "nothing to be carried any more")
        note(name, "carried")

    def translated(name, a, b):
        """Both addresses and the port are rewritten."""
        subprocess.run(inside(a.container.name, "ip", "address", "add", f"{a.second}/24", "dev", "eth0"), check=True, timeout=60)

        def prepare(port):
            nat = [(b, f"chain in {{ type nat hook prerouting priority -100; tcp dport 4444 redirect to :{port}\n}}"),
                   (a, f"chain out {{ type nat hook postrouting priority 100; tcp dport 4444 snat to {a.second}\n}}")]
            for host, chain in nat:
                subprocess.run(inside(host.container.name, "nft", f"table ip nat {{\n{chain}\n}}"), check=True, timeout=60)

        ends = meet(a, b, dial=(b.ip, 4444), prepare=prepare)
        traded(ends)
        ends.finish()
        note(name, "carried")

    def killed(name, a, b):
        """Both ends go on in the kernel, lose nothing, and are carried again."""
        for turn in range(6):
            ends = meet(a, b)
            pids = {host.name: process(host) for host in (a, b)}
            ends.trade(20_000_000, 20_000_000)
            os.kill(pids["ab"[turn % 2]], signal.SIGKILL)
            ends.traded()
            require(not ends.problem, f"{ends.problem}; {ends.told()}")
            traded(ends, 300_000, 300_000)
            # (And then it is carried again, once there is a rail.)
            on_ring(ends)
            traded(ends, 300_000, 300_000)
            ends.finish()
            for host in a, b:
                until(lambda host=host: fabric(host)["nodes"] == 1 and carried(host) == 0, f"a rail that carries again: {fabric(host)}")
        require((fabric(a)["lost"], fabric(b)["lost"]) == (3, 3), f"{fabric(a)}, {fabric(b)}")
        note(name, "carried", "again")

    def hung(name, a, b):
        """One that goes on no more is ended, and another one started."""
        for turn, host in enumerate((a, b)):
            ends = meet(a, b)
            pid = process(host)
            ends.trade(20_000_000, 20_000_000)
            os.kill(pid, signal.SIGSTOP)
            ends.traded()
            require(not ends.problem, f"{ends.problem}; {ends.told()}")
            until(lambda: not is_alive(pid), "what hangs to be ended")  # noqa: B023
            traded(ends, 300_000, 300_000)
            ends.finish()
            for each in a, b:
                until(lambda each=each: fabric(each)["nodes"] == 1 and carried(each) == 0, f"a rail that carries again: {fabric(each)}")
            require((fabric(a)["lost"], fabric(b)["lost"]) == (1, turn), f"{fabric(a)}, {fabric(b)}")
        again = meet(a, b)
        traded(again)
        again.finish()
        note(name, "kernel", "no-adapter")

    def still(name, a, b):
        """Services and what carries stand still together, as on a machine that is suspended, for longer than any of them waits for another."""
        ends = meet(a, b)
        traded(ends)
        pids = [pid for host in (a, b) for pid in (host.service.process.pid, process(host))]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(STILL_SECONDS)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        on_ring(ends)
        traded(ends)
        for host in a, b:
            require(fabric(host)["lost"] == 0 and host.count("unreachable") == 0, f"{host.service.told()}")
            require(carried(host) == 1, f"{fabric(host)}")
        ends.finish()
        note(name, "carried")

    def killed_early(name, a, b):
        """While they are found, have a channel made, join, or move."""
        for turn in range(16):
            for host in a, b:
                until(lambda host=host: fabric(host)["nodes"] == 1, f"a rail that carries: {fabric(host)}")
            pid = process(a if turn % 2 else b)
            ends = Apart(ground, b, a)
            ends.tell(ends.server, "echo 300")
            ends.tell(ends.client, "ask 300")
            for _ in range(turn):
                carried(a)
            os.kill(pid, signal.SIGKILL)
            ends.answer(ends.client, "ask")
            ends.answer(ends.server, "echo")
            traded(ends, 500_000, 500_000)
            ends.finish()
        note(name, "either", "byte-exact")

    def service_killed(name, a, b):
        for turn in range(4):
            host = (a, b)[turn % 2]
            ends = meet(a, b)
            pid = process(host)
            ends.trade(20_000_000, 20_000_000)
            os.kill(host.service.process.pid, signal.SIGKILL)
            host.service.process.wait(ANSWER_SECONDS)
            ends.traded()
            require(not ends.problem, f"{ends.problem}; {ends.told()}")
            until(lambda: not is_alive(pid), "what carries to end with its service")  # noqa: B023
            traded(ends, 300_000, 300_000)
            ends.finish()
            host.service.stop()
            host.service.start()
            require(host.service.runs(), f"it does not start again: {host.service.told()}")
            for each in a, b:
                until(lambda each=each: fabric(each)["nodes"] == 1, f"a rail that carries: {each.service.told()}")
        note(name, "kernel", "no-adapter")

    def parted(name, a, b):
        """No packet passes between the hosts for a while; what the rails carry passes still."""
        ends = meet(a, b)
        ends.trade(20_000_000, 20_000_000)
        drop(a, b, True)
        for host, other in (a, "b"), (b, "a"):
            until(lambda host=host, other=other: host.state(other) == "unreachable", "both to declare it")
        until(lambda: (carried(a), carried(b)) == (0, 0), "both to take their memory back")
        drop(a, b, False)
        ends.traded()
        require(not ends.problem, f"{ends.problem}; {ends.told()}")
        traded(ends, 300_000, 300_000)
        ends.finish()
        for host in a, b:
            until(lambda host=host: fabric(host)["nodes"] == 1, f"a rail that carries again: {fabric(host)}")
        again = meet(a, b)
        traded(again)
        again.finish()
        note(name, "kernel", "no-adapter")

    def unsaid(name, a, b):
        """Nothing passes to the other node's port for a while: who may not send yet asks now and then, and loses nothing."""
        ends = meet(a, b)
        for host in a, b:
            rules = ["table ip cut {", "chain incoming {", "type filter hook input priority 0;", f"tcp sport {PORT} drop", f"tcp dport {PORT} drop", "}", "}"]
            subprocess.run(inside(host.container.name, "nft", "\n".join(rules)), check=True, timeout=60)
        until(lambda: (carried(a), carried(b)) == (0, 0), "both to take their memory back")
        ends.trade(20_000_000, 20_000_000)
        until(lambda: {row["reason"] for row in ends.rows()} == {"no-adapter"}, f"both to go back: {ends.told()}")
        time.sleep(UNSAID_SECONDS)
        before = {each.pid: switches(each.pid) for each in (ends.client, ends.server)}
        time.sleep(WATCHED_SECONDS)
        for pid, had in before.items():
            asked = switches(pid) - had
            require(asked < ASKED_MOST, f"{pid} has slept {asked} times in {WATCHED_SECONDS} s, each for a look")
        for host in a, b:
            drop(host, None, False)
        ends.traded()
        require(not ends.problem, f"{ends.problem}; {ends.told()}")
        traded(ends, 300_000, 300_000)
        ends.finish()
        note(name, "kernel", "no-adapter")

    def exhausted(name, a, b):
        """What carries can have no more memory, at either host: nobody waits for it, and it goes on when it can."""
        ends = meet(a, b)
        for host in a, b:
            pid = process(host)
            most = resource.prlimit(pid, resource.RLIMIT_AS)
            resource.prlimit(pid, resource.RLIMIT_AS, (1, most[1]))
            for _ in range(3):
                other = Apart(ground, b, a)
                other.talk(2000)
                traded(other, 300_000, 300_000)
                require("ring" not in [row["path"] for row in other.rows()], f"{other.told()}")
                other.finish()
            resource.prlimit(pid, resource.RLIMIT_AS, most)
            require(process(host) == pid, "what carries has died")
        traded(ends)
        ends.finish()
        again = meet(a, b)
        traded(again)
        again.finish()
        until(lambda: (carried(a), carried(b)) == (0, 0), f"nothing to be carried any more: {fabric(a)}, {fabric(b)}")
        note(name, "carried")

    def ends_killed(name, a, b):
        """The other one sees what TCP shows, and nothing is kept."""
        for turn in range(6):
            ends = meet(a, b)
            dies, lives = (ends.client, ends.server) if turn % 2 else (ends.server, ends.client)
            ends.trade(30_000_000, 30_000_000)
            dies.kill()
            said = ""
            try:
                ends.answer(lives, "trade")
            except Failed as problem:
                said = str(problem)
            require(any(word in said for word in ("ConnectionResetError", "BrokenPipeError", "the end of the stream")), f"the other end: {said}")
            lives.kill()
            until(lambda: (carried(a), carried(b)) == (0, 0), f"nothing to be carried any more: {fabric(a)}, {fabric(b)}")
            for each in dies, lives:
                ground.put_away(each)
        note(name, "carried")

    def strangers(name, a, b):
        """Who calls for a channel that nobody expects, or says half of it, gets none; honest ones do meanwhile."""
        calls = []
        for text in b"RLc2" + os.urandom(16), b"RLc2" + os.urandom(3), b"R", b"RLc1" + os.urandom(16):
            calls.append(dial(b, a))
            calls[-1].sendall(text)
        ends = meet(b, a)
        traded(ends)
        ends.finish()
        for each in calls:
            gone(each)
        until(lambda: a.count("not-expected") == 1 and a.count("too-slow") >= 2, f"{a.service.told()}")
        note(name, "refused")

    def flooded(name, a, b):
        """A node passes more than what carries takes, which stands still just then: its session is over, and nobody else's."""
        pid, incarnation = process(b), a.service.status()["cluster"]["incarnation"]
        a.service.stop()
        until(lambda: b.state("a") == "unreachable", "b to miss a")
        os.kill(pid, signal.SIGSTOP)
        stream = tls(a, b, a.identity, "b")
        stream.sendall(hello("a", incarnation))
        with contextlib.suppress(OSError):
            for _ in range(FLOOD_BYTES // 60_000):
                stream.sendall(word(b"\1" + bytes(60_000), 1))
        until(lambda: "given-up" in b.peers()["a"]["why"], f"b to give the session up: {b.service.told()}")
        stream.close()
        os.kill(pid, signal.SIGCONT)
        a.service.start()
        for host in a, b:
            until(lambda host=host: fabric(host)["nodes"] == 1, f"a rail that carries: {host.service.told()}")
        require(fabric(b)["lost"] == 0 and process(b) == pid, f"what carries is lost for all: {fabric(b)}")
        ends = meet(a, b)
        traded(ends)
        ends.finish()
        note(name, "carried")

    def redis(name, a, b):
        argv = ["redis-server", "--port", "6379", "--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--dir", ground.directory]
        server = ground.start("server", [*b.before(), *argv])
        ask = [*a.before(), "redis-cli", "-h", b.ip, "ping"]
        until(lambda: subprocess.run(ask, capture_output=True).stdout == b"PONG\n", "redis to listen")
        bench = [*a.before(), "redis-benchmark", "-h", b.ip, "-t", "set,get", "-c", "8", "-n", "50000", "-q"]
        ground.ringlet.carried = True
        try:
            ground.client(bench, ring=(6379, 16))
        finally:
            ground.ringlet.carried = False
        require(server.poll() is None, "redis died")
        note(name, "carried")

    scene("two ends on two hosts, both ways", moves)
    scene("two ends on two hosts, both addresses rewritten", translated)
    scene("over rails in disorder that fail", moves, lambda: in_memory(ground.random.randrange(1 << 32)))
    scene("over libfabric's tcp provider", moves, by_libfabric)
    scene("redis-benchmark and redis on two hosts", redis)
    scene("what carries between hosts is killed", killed)
    scene("what carries between hosts hangs", hung)
    scene("two hosts stand still for a while", still)
    scene("what carries between hosts is killed while two come together", killed_early)
    scene("over libfabric, what carries is killed", killed, by_libfabric)
    scene("the service of a host is killed", service_killed)
    scene("no packet passes between two hosts for a while", parted)
    scene("nothing passes between two nodes for a while, but what they carry", unsaid)
    scene("what carries between hosts has no memory left", exhausted)
    scene("an end on another host is killed", ends_killed)
    scene("strangers call for channels", strangers)
    scene("a node passes more than is taken", flooded)
