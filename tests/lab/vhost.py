"""A guest whose network card is a port of `ringlet eth`, by vhost-user: the other port is a device in a network namespace of this machine."""

import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent / "eth"), str(HERE.parent / "faults")]

import networks  # noqa: E402
from guest import MEMORY, Guest  # noqa: E402
from harness import require, wait_until  # noqa: E402

IP, MAC = "10.7.0.2", "02:00:00:00:00:02"
SIZES = (0, 56, 1472, 9000, 65000)


def card(socket):
    """A network card whose rings another process drives; it maps the guest's memory for that."""
    memory = ["-object", f"memory-backend-memfd,id=memory,size={MEMORY},share=on", "-machine", "memory-backend=memory"]
    other = ["-chardev", f"socket,id=port,path={socket},reconnect=1", "-netdev", "vhost-user,id=net,chardev=port"]
    # (Without KVM, QEMU 7.2 falls over interrupts by MSI-X of a ring that another process drives.)
    return [*memory, *other, "-device", f"virtio-net-pci,netdev=net,mac={MAC},vectors=0"]


def back_end(place, network):
    socket = pathlib.Path(place.directory) / "guest.sock"
    back = place.start([place.command, "eth", "vhost", "--socket", socket, "--network", network, "--mac", MAC])
    require((back.line(networks.LIMIT_SECONDS) or "").startswith("ready"), back.tail())
    return back, socket


def scenes(ground):
    with (
        ground.scene("a guest's network card by vhost-user"),
        tempfile.TemporaryDirectory(prefix="ringlet-vhost-") as directory,
        networks.ground(ground.options.ringlet, directory) as place,
    ):
        network = place.network("--addresses", "static")
        host = place.host(network, 1)
        back, socket = back_end(place, network)
        # (As many addresses as QEMU's guest has memory for: of any MTU.)
        with Guest(ground, "vhost", ["vhost"], card(socket)) as guest:
            guest.until("up")
            host.await_carrier(True)
            for size in SIZES:
                host.ping(IP, "-s", size)
            served = host.start("iperf3", "-s", "-B", host.ip)
            wait_until(lambda: f"{host.ip}:5201" in host.run("ss", "-Hltn"), networks.LIMIT_SECONDS, "iperf3 to listen")
            guest.say("measure")
            guest.until("measured")
            served.kill()
            lost = {why: count for why, count in host.state()["totals"]["dropped"].items() if count and why != "no other port"}
            print(f"    dropped by the device's port: {lost or 'nothing'}", flush=True)
            # The back end is killed, and begun anew: QEMU finds it, and the guest's driver hears nothing of it but that its link was down.
            back.kill()
            host.await_carrier(False)
            back_end(place, network)
            host.await_carrier(True)
            host.ping(IP, "-s", 9000)
            guest.say("end")
            require(guest.until("ended") == "0", "a scene in the guest has failed")
        host.await_carrier(False)
