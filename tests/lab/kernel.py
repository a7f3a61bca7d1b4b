"""Debian's kernel, unpacked from its package and not installed; and what a guest boots with."""

import contextlib
import pathlib
import re
import shutil
import subprocess

from harness import Failed, require

PACKAGE = "linux-image-amd64"  # (That of clouds has neither 9p nor rdma_rxe.)
COMMAND_SECONDS = 600
# Most of a kernel's drivers are for devices that no guest has.
LEFT_OUT = [f"*/kernel/{each}" for each in "sound drivers/gpu drivers/media drivers/iio drivers/staging drivers/net/wireless drivers/hid drivers/usb".split()]
# Until the host's files are there.
EARLY = "virtio_pci 9pnet_virtio 9p".split()


def run(*words, directory=None, **more):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=COMMAND_SECONDS, cwd=directory, **more)
    require(done.returncode == 0, f"{' '.join(map(str, words))}: {done.stdout}{done.stderr}")
    return done.stdout


class Kernel:
    """In a directory that is kept: the package is fetched once."""

    def __init__(self, kept):
        self.kept = kept
        found = re.search(r"Depends: (linux-image-(\S+))", run("apt-cache", "depends", PACKAGE))
        require(found, f"apt knows no {PACKAGE}: apt-get update")
        package, self.version = found.groups()
        self.root = kept / self.version
        if not (self.root / "whole").exists():
            self._unpack(package)

    def _unpack(self, package):
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        download = ["apt-get", "-o", "APT::Sandbox::User=root", "download", package]
        try:
            run(*download, directory=self.root)
        except Failed:
            # Lists that are old name what is not there any more.
            run("apt-get", "update")
            run(*download, directory=self.root)
        [archive] = self.root.glob("*.deb")
        left_out = [f"--exclude={each}" for each in LEFT_OUT]
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as files:
            run("tar", "x", *left_out, "--wildcards", "./boot/vmlinuz*", "./lib/modules/*", directory=self.root, stdin=files.stdout)
        archive.unlink()
        run("depmod", "-b", self.root, self.version)
        (self.root / "whole").touch()

    def image(self):
        return self.root / f"boot/vmlinuz-{self.version}"

    def early(self):
        """Files of the modules, each behind those that it needs."""
        told = [run("modprobe", "-d", self.root, "-S", self.version, "--show-depends", module) for module in EARLY]
        return list(dict.fromkeys(pathlib.Path(path) for path in re.findall(r"^insmod (\S+)", "".join(told), re.MULTILINE)))

    def initramfs(self, place, first, command):
        """`first` is the first process; it finds the modules' names, in order, in a file, and what is to be run in another."""
        root = place / "initramfs"
        for directory in "bin", "modules":
            (root / directory).mkdir(parents=True)
        shutil.copy2(shutil.which("busybox"), root / "bin/busybox")
        shutil.copy2(first, root / "init")
        modules = self.early()
        for module in modules:
            shutil.copy2(module, root / "modules")
        (root / "order").write_text("".join(f"{module.name}\n" for module in modules))
        (root / "command").write_text("".join(f"{word}\n" for word in command))
        names = "\n".join(str(each.relative_to(root)) for each in [root, *root.rglob("*")])
        archive = place / "initramfs.cpio"
        with archive.open("wb") as to:
            subprocess.run(["cpio", "--create", "--format=newc", "--quiet"], input=names.encode(), stdout=to, cwd=root, check=True, timeout=COMMAND_SECONDS)
        with contextlib.suppress(OSError):
            shutil.rmtree(root)
        return archive
