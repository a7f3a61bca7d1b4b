"""A guest: QEMU, which emulates its processors, with Debian's kernel and this machine's files."""

import pathlib
import shutil
import tempfile
import time

from harness import Failed, Process, require

HERE = pathlib.Path(__file__).resolve().parent
TREE = HERE.parent.parent
# Emulated it boots in 20 s, on a machine that does nothing else. Only a hang takes so long:
GUEST_SECONDS = 1800
MEMORY = "2G"
CONSOLE_TAIL = 2000


class Guest:
    """Its second serial line is for `inside.py`: what that prints comes here, what is written here it reads. The kernel's log goes to the first."""

    def __init__(self, ground, name, words, devices=()):
        kernel = ground.options.kernel
        self.name, self.place = name, pathlib.Path(tempfile.mkdtemp(prefix=f"ringlet-guest-{name}-"))
        self.console = self.place / "console"
        command = [TREE, "/usr/bin/python3", "-B", HERE / "inside", kernel.root, pathlib.Path(ground.options.ringlet).resolve(), name, ground.seed, *words]
        # With one processor instructions that are locked would be emulated without being atomic.
        argv = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-accel", "tcg,thread=multi"]
        argv += ["-cpu", "max", "-smp", "2", "-m", MEMORY, "-kernel", kernel.image()]
        argv += ["-initrd", kernel.initramfs(self.place, HERE / "init", command)]
        argv += ["-append", "console=ttyS0 panic=-1 random.trust_cpu=on"]
        argv += ["-serial", f"file:{self.console}", "-chardev", "stdio,id=words,signal=off", "-serial", "chardev:words"]
        argv += ["-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap", *devices]
        self.deadline = time.monotonic() + GUEST_SECONDS
        self.process = Process([str(word) for word in argv], str(self.place))

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.kill()
        if kind:
            print(f"--- {self.name}, its console:\n{self.log()}\n---", flush=True)
        shutil.rmtree(self.place, ignore_errors=True)

    def log(self):
        return self.console.read_bytes()[-CONSOLE_TAIL:].decode(errors="replace") if self.console.exists() else ""

    def line(self):
        """The next line that it says."""
        while time.monotonic() < self.deadline:
            if (line := self.process.line(1)) is not None:
                return line
            if self.process.poll() is not None:
                raise Failed(f"{self.name}: QEMU has ended ({self.process.poll()}): {self.process.tail()}")
        raise Failed(f"{self.name} has not come to an end within {GUEST_SECONDS} s")

    def lines(self):
        """What it says until it says a word for us; then that is the last."""
        while True:
            line = self.line()
            yield line
            if line.startswith("lab: "):
                return

    def until(self, word):
        """Shows what it says until it says this; returns what stands behind it."""
        for line in self.lines():
            if not line.startswith("lab: "):
                print(f"    {self.name} | {line}", flush=True)
        require(line.startswith(f"lab: {word}"), f"{self.name} says {line!r} instead of {word!r}")
        return line.removeprefix(f"lab: {word}").strip()

    def say(self, word):
        self.process.write(word + "\n")

    def kill(self):
        self.process.kill()


def alone(ground, group):
    """A group that plays in one guest."""
    with ground.scene(f"{group}, in a guest"), Guest(ground, group, [group]) as guest:
        require(guest.until("ended") == "0", "a scene in the guest has failed")
