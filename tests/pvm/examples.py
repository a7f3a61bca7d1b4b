"""PVM's own example programs, as Debian builds them, and what each says where it went well."""

import re

from harness import STOP_SECONDS, require, status_word, wait_until
from machine import LIMIT_SECONDS

EXAMPLES = {}


def example(function):
    EXAMPLES[function.__name__] = function
    return function


def says(output, pattern, times=1):
    found = re.findall(pattern, output, re.M)
    require(len(found) == times, f"{pattern!r} {len(found)} times, not {times}:\n{output[-3000:]}")
    return found


def spawn(machine, count, *words):
    """So many tasks, shared out among the hosts, and what they print."""
    output = machine.run(["spawn", count, *words])
    says(output, r"\] EOF$", count)
    return output


@example
def hello(machine):
    says(machine.run(["hello.pvm"]), r"^from t\w+: hello, world from ")


@example
def master(machine):
    """Each worker sums up, and is told by a neighbour."""
    for words, pattern in (
        (["master1"], r"^I got (\S+) from \d+; \(expecting (\S+)\)"),
        (["fmaster1"], r"^ I got +(\S+) from +\d+ \(expected +(\S+) \)"),
    ):
        tasks = 3 * len(machine.nodes)
        for got, expected in says(machine.run(words), pattern, tasks):
            require(got == expected, f"{words}: {got}, not {expected}")


@example
def spmd(machine):
    for program in "spmd", "fspmd":
        says(spawn(machine, 4, program), r"token ring done")


@example
def bwtest(machine):
    """Up to 6.4 MB by each way to pack."""
    for how in "dipr":
        output = spawn(machine, 2, f"{how}bwtest")
        says(output, r"t\w+: 100000 doubles received correctly", 2)
        says(output, r"Roundtrip T = ", 7)


@example
def timing(machine):
    """On a direct route. (It ends with status 1 always.)"""
    says(machine.run(["timing"], expected=(1,)), r"^done$")


@example
def hitc(machine):
    output = machine.run(["hitc"])
    says(output, r"I got result from tid:", 10 * len(machine.nodes))
    says(output, r"^ Program Finished$")


@example
def groups(machine):
    for words in ["gexample"], ["fgexample"]:
        output = machine.run(words, said="100\n4\n")
        says(output, r"The 1-Norm is +5050\b")
        says(output, r"The product of column 1 is +9\.332\d+[eE]\+157")
    for program in "frsg", "trsg":
        # (One of them ends with status 1 always.)
        output = machine.run([program], said="4\n5\n", expected=(0, 1))
        says(output, r"Test OK: Sum of Squares of first +20 +integers is +2870\b")
        says(output, r"Test Ok: Received \( *5\.0+ *, *2\.0+ *\)")


@example
def barriers(machine):
    for words, pattern in (["gexamp", 4], r"^gexamp 0: sync$"), (["ge", 4], r"^group ge size 4 gid 0: sync$"), (["thb", 4], r"^done\.$"):
        says(machine.run(words), pattern)
    machine.run(["gs.pvm", 4])
    says(machine.run(["joinleave", 1000]), r"^Joined \d+00 times$", 10)
    for program in "tjf", "tjl":
        says(machine.run([program]), r"^joined group\d+$", 32)
    says(machine.run(["tst"]), r"^left prognosis 0, negative 0$")


@example
def contexts(machine):
    says(machine.run(["inherita", "inherit1"]), r"END - sent from inherit1")
    says(machine.run(["inheritb"]), r"received from (?:1st|2nd) inherit2", 2)


@example
def mailboxes(machine):
    says(machine.run(["lmbi", 3, "p", "e"]), r"^lmbi: just inserted entry <t\w+lmbi\d> at index 0", 3)
    for name in says(machine.run(["gmbi", "*lmbi*"]), r"class name: <(t\w+lmbi\d)>", 3):
        # Their owner has ended, and nobody else may.
        says(machine.run(["rme", name, 0], expected=(255,)), r"Key locked by another task, can't delete\.")


def serves(machine, words, name, clients):
    """A server that is found by name, on the last host, and its clients on the first."""
    server = machine.start(words, number=-1)
    try:
        wait_until(lambda: f"<{name}>" in machine.run(["gmbi"]), LIMIT_SECONDS, f"{words} to be there: {server.tail()}")
        clients()
        status = server.wait(LIMIT_SECONDS)
        require(status in (0, 1), f"{words}: {status_word(status)}\n{server.tail()}")
    finally:
        server.kill()
    server.wait(STOP_SECONDS)
    return server.finished_output().decode(errors="replace")


@example
def services(machine):
    def clients():
        says(machine.run(["task1", "service", 0, "d"]), r"welcome to my server - you are service request number 1")
        machine.run(["task_end", "service", 0])

    says(serves(machine, ["task0", "service", "d"], "service", clients), r"handled 2 service requests")


@example
def handlers(machine):
    """Of messages, loaded into a program that runs, and looked at."""
    output = serves(machine, ["mhf_server"], "mhf_server", lambda: machine.run(["mhf_tickle"], said="0\n9\n"))
    says(output, r"PMH: Are you talking to me!!!")
    says(output, r"dhandles\[ 0\]\.mhid", 3)
