"""Protocols over `ringlet eth`, by programs that nobody here wrote."""

import os
import pathlib
import re
import shutil
import sys
import tempfile

from harness import Skipped, require, wait_until
from networks import LIMIT_SECONDS

# What each needs, by Debian package.
NEEDED = {
    "dnsmasq": "dnsmasq-base", "udhcpc": "udhcpc", "NPtcp": "netpipe-tcp", "ganesha.nfsd": "nfs-ganesha", "nfs-cp": "libnfs-utils",
    "/usr/lib/python3/dist-packages/zeroconf": "python3-zeroconf",
}
DEBIANS = "/usr/bin/python3"
# NetPIPE's largest message.
MOST = 64 << 10
PROTOCOLS = {}


def scene(function):
    def play(ground):
        if packages := sorted({package for what, package in NEEDED.items() if shutil.which(what) is None and not os.path.exists(what)}):
            raise Skipped(f"not installed (Debian packages): {', '.join(packages)}")
        function(ground)

    PROTOCOLS[function.__name__] = play
    return function


@scene
def dhcp(ground):
    """dnsmasq gives out addresses, and udhcpc gets one: broadcasts from an address that nobody has yet."""
    server, client = ground.hosts(2)
    folder = pathlib.Path(ground.directory)
    lease = folder / "lease"
    told = folder / "told"
    told.write_text(f'#!/bin/sh\n[ "$1" != bound ] || echo "$ip $router $dns" >{lease}\n')
    told.chmod(0o755)
    words = ["--keep-in-foreground", "--no-resolv", "--no-hosts", "--conf-file=/dev/null", f"--pid-file={folder}/pid", f"--dhcp-leasefile={folder}/leases"]
    words += ["--bind-interfaces", "--interface=vnet0", "--user=root", "--dhcp-range=10.7.0.100,10.7.0.100,2m"]
    dnsmasq = server.start("dnsmasq", *words)
    client.run("ip", "address", "flush", "dev", "vnet0")
    client.run("udhcpc", "-f", "-q", "-n", "-t", "10", "-T", "2", "-i", "vnet0", "-s", told)
    require(lease.read_text().split() == ["10.7.0.100", server.ip, server.ip], f"{lease.read_text()}{dnsmasq.tail()}")
    client.run("ip", "address", "add", "10.7.0.100/24", "dev", "vnet0")
    client.ping(server.ip)


@scene
def netpipe(ground):
    """NetPIPE's messages of each size around each power of two, whose bytes it compares."""
    one, other = ground.hosts(2)
    receives = other.start("NPtcp", "-i", "-u", MOST, "-n", 100)
    # (It tries once.)
    wait_until(lambda: ":5002 " in other.run("ss", "-tln") or receives.poll() is not None, LIMIT_SECONDS, f"NPtcp: {receives.tail()}")
    # (It says what it finds where errors go, and has no status for them.)
    said = one.run("sh", "-c", f"cd {ground.directory} && NPtcp -h {other.ip} -i -u {MOST} -n 100 2>&1")
    right = re.findall(r"(\d+) bytes +\d+ times --> +Integrity check passed", said)
    require(right and int(right[-1]) > MOST // 2 and len(right) == said.count("-->"), said)


GANESHA = """
NFS_CORE_PARAM { Protocols = 4; NFS_Port = 2049; Enable_RQUOTA = false; Enable_NLM = false; }
NFSV4 { Graceless = true; RecoveryRoot = "%(folder)s/recovery"; }
EXPORT {
    Export_Id = 1; Path = "%(files)s"; Pseudo = "/export"; Access_Type = RW; Squash = None; SecType = "sys"; Protocols = 4;
    FSAL { Name = VFS; }
}
"""


# By libnfs, in pieces: by NFS 4 its `nfs_creat` opens for reading only, and a request of 4,096 bytes does not fit into its buffer (4.0.0; so nfs-cp
# can't write there over any network).
PIECE = 3000
WRITES = """
import ctypes, os, sys
url, name, source, piece = sys.argv[1].encode(), sys.argv[2].encode(), sys.argv[3], int(sys.argv[4])
nfs, pointer, size = ctypes.CDLL("libnfs.so.13"), ctypes.c_void_p, ctypes.c_uint64
nfs.nfs_init_context.restype = nfs.nfs_parse_url_dir.restype = pointer
nfs.nfs_get_error.restype = ctypes.c_char_p
context = pointer(nfs.nfs_init_context())
nfs.nfs_set_version(context, 4)
def right(status):
    assert status >= 0, nfs.nfs_get_error(context)
    return status
parts = ctypes.cast(nfs.nfs_parse_url_dir(context, url), ctypes.POINTER(ctypes.c_char_p))
right(nfs.nfs_mount(context, parts[0], parts[1]))
file, sent = pointer(), open(source, "rb").read()
right(nfs.nfs_creat(context, name, 0o644, ctypes.byref(file)))
right(nfs.nfs_close(context, file))
right(nfs.nfs_open(context, name, os.O_RDWR, ctypes.byref(file)))
for at in range(0, len(sent), piece):
    part = sent[at : at + piece]
    assert right(nfs.nfs_pwrite(context, file, size(at), size(len(part)), part)) == len(part), "less was written"
right(nfs.nfs_fsync(context, file))
right(nfs.nfs_close(context, file))
"""


@scene
def nfs(ground):
    """A file is read from an NFS server, by NFS 4, and another one written to it."""
    server, client = ground.hosts(2)
    # (A file system that has handles, as a container's may not.)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as files:
        folder = pathlib.Path(ground.directory)
        (folder / "recovery").mkdir()
        settings, sent, got, log = folder / "settings", pathlib.Path(files) / "file", folder / "got", folder / "log"
        settings.write_text(GANESHA % {"folder": folder, "files": files})
        sent.write_bytes(os.urandom(8 << 20))
        serves = server.start("ganesha.nfsd", "-F", "-f", settings, "-L", log, "-p", folder / "pid")

        def is_served():
            require(serves.poll() is None, f"it ends: {serves.tail()}{log.read_text() if log.exists() else ''}")
            return ":2049 " in server.run("ss", "-tln")
        wait_until(is_served, LIMIT_SECONDS, "NFS to be served")
        client.run("nfs-cp", f"nfs://{server.ip}/export/file?version=4", got)
        require(sent.read_bytes() == got.read_bytes(), f"other bytes: {got.stat().st_size}")
        client.run(sys.executable, "-c", WRITES, f"nfs://{server.ip}/export?version=4", "/written", got, PIECE)
        require(sent.read_bytes() == (pathlib.Path(files) / "written").read_bytes(), "other bytes were written")
        serves.kill()


ANNOUNCES = """
import socket, sys, zeroconf
with_address = zeroconf.ServiceInfo("_ringlet._tcp.local.", "one._ringlet._tcp.local.", addresses=[socket.inet_aton(sys.argv[1])], port=4711, server="one.local.")
speaker = zeroconf.Zeroconf(interfaces=[sys.argv[1]])
speaker.register_service(with_address)
print("ready", flush=True)
sys.stdin.read()
"""
ASKS = """
import socket, sys, zeroconf
speaker = zeroconf.Zeroconf(interfaces=[sys.argv[1]])
found = speaker.get_service_info("_ringlet._tcp.local.", "one._ringlet._tcp.local.", timeout=30000)
print(found and (found.port, [socket.inet_ntoa(each) for each in found.addresses]), flush=True)
"""


@scene
def mdns(ground):
    """A service is announced by multicast DNS, and found by two others."""
    one, other, third = ground.hosts(3)
    for host in (one, other, third):
        host.run("ip", "route", "add", "224.0.0.0/4", "dev", "vnet0")
    announces = one.start(DEBIANS, "-c", ANNOUNCES, one.ip)
    require(announces.line(LIMIT_SECONDS) == "ready", announces.tail())
    for host in (other, third):
        said = host.run(DEBIANS, "-c", ASKS, host.ip)
        require(f"4711, ['{one.ip}']" in said, said)
