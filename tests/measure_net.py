"""What the network layer costs: round trips over loopback between two processes, beside raw TLS and stock libp2p.

    python -m tests.measure_net [--seconds 2]

Absolute times drift by half on shared machines; the ratios of one run hold. Configurations take turns, message sizes
inside, so that all of them meet the same disturbances. One round trip is a message there and the same bytes back, on
one persistent stream.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import ipaddress
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import libp2p
import structlog
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from libp2p.crypto.x25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as StockNoise
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr

from swarmnode.identity import Identity
from swarmnode.net.interface import Stream
from swarmnode.net.libp2p_host import open_libp2p_network

SIZES = (64, 8 << 10, 64 << 10, 1 << 20, 4 << 20)
KINDS = ("tcp", "tls", "stock", "ours")
PROTOCOL = "/measure/1"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
RoundTrip = Callable[[bytes], Awaitable[None]]


def certificate() -> tuple[bytes, bytes]:
    """A self-signed certificate for loopback and its key, PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "measure")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return signed.public_bytes(serialization.Encoding.PEM), key.private_bytes(*form)


# --- The side that answers, in a process of its own -------------------------------------------------------------------


async def echo(receive_exactly: Callable[[int], Awaitable[bytes]], send: Callable[[bytes], Awaitable[None]]) -> None:
    while True:
        prefix = await receive_exactly(4)
        await send(prefix + await receive_exactly(int.from_bytes(prefix, "little")))


async def answer_sockets(context: ssl.SSLContext | None) -> None:
    async def handle(stream: trio.SocketStream) -> None:
        wrapped = stream if context is None else trio.SSLStream(stream, context, server_side=True)
        await echo(exact_reader(wrapped), wrapped.send_all)

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    print(listeners[0].socket.getsockname()[1], flush=True)
    await trio.serve_listeners(handle, listeners)


async def answer_stock() -> None:
    host = stock_host()

    async def handle(stream: Any) -> None:
        with contextlib.suppress(Exception):  # one that escapes would end the host
            await echo(exact_reader_of_read(stream.read), stream.write)
        await stream.reset()

    host.set_stream_handler(TProtocol(PROTOCOL), handle)
    async with host.run(listen_addrs=[Multiaddr(LOOPBACK)]):
        print(host.get_addrs()[0], flush=True)
        await trio.sleep_forever()


async def answer_ours() -> None:
    async def handle(stream: Stream) -> None:
        await echo(stream.receive_exactly, stream.send)

    async with open_libp2p_network(Identity.generate(), [LOOPBACK]) as network:
        network.serve(PROTOCOL, handle, max_streams_per_peer=4)
        print(network.addresses[0], flush=True)
        await trio.sleep_forever()


async def serve(kind: str, folder: Path) -> None:
    if kind == "tls":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
        await answer_sockets(context)
    elif kind == "tcp":
        await answer_sockets(None)
    elif kind == "stock":
        await answer_stock()
    else:
        await answer_ours()


# --- The side that asks -----------------------------------------------------------------------------------------------


def stock_host() -> Any:
    key_pair = libp2p.create_new_ed25519_key_pair()
    noise = StockNoise(key_pair, noise_privkey=create_new_key_pair().private_key)
    return libp2p.new_host(key_pair=key_pair, sec_opt={NOISE: noise}, muxer_opt={TProtocol("/yamux/1.0.0"): Yamux})


def exact_reader(stream: Any) -> Callable[[int], Awaitable[bytes]]:
    return exact_reader_of_read(stream.receive_some)


def exact_reader_of_read(read: Callable[[int], Awaitable[bytes]]) -> Callable[[int], Awaitable[bytes]]:
    """Reads in large chunks and keeps the rest, as anybody would who cares about speed."""
    ahead = bytearray()

    async def receive_exactly(n: int) -> bytes:
        while len(ahead) < n:
            data = await read(1 << 20)
            if not data:
                raise EOFError
            ahead.extend(data)
        taken = bytes(memoryview(ahead)[:n])
        del ahead[:n]
        return taken

    return receive_exactly


def round_trip_of(receive: Callable[[int], Awaitable[bytes]], send: Callable[[bytes], Awaitable[None]]) -> RoundTrip:
    async def round_trip(data: bytes) -> None:
        await send(len(data).to_bytes(4, "little") + data)
        if await receive(4 + len(data)) != len(data).to_bytes(4, "little") + data:
            raise ValueError("other bytes came back")

    return round_trip


@asynccontextmanager
async def asker(kind: str, target: str, folder: Path) -> AsyncIterator[RoundTrip]:
    if kind in ("tcp", "tls"):
        stream: Any = await trio.open_tcp_stream("127.0.0.1", int(target))
        if kind == "tls":
            context = ssl.create_default_context(cafile=str(folder / "certificate.pem"))
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            stream = trio.SSLStream(stream, context, server_hostname="127.0.0.1")
        yield round_trip_of(exact_reader(stream), stream.send_all)
        with trio.move_on_after(0):
            await stream.aclose()
    elif kind == "stock":
        host = stock_host()
        async with host.run(listen_addrs=[]):
            info = info_from_p2p_addr(Multiaddr(target))
            await host.connect(info)
            stream = await host.new_stream(info.peer_id, [TProtocol(PROTOCOL)])
            yield round_trip_of(exact_reader_of_read(stream.read), stream.write)
            await host.close()
    else:
        async with open_libp2p_network(Identity.generate(), []) as network:
            ours = await network.open_stream(await network.connect(target), PROTOCOL)
            yield round_trip_of(ours.receive_exactly, ours.send)


async def measure(seconds: float, folder: Path) -> dict[str, dict[int, float]]:
    """Median round trip in ms by configuration and size."""
    times: dict[str, dict[int, list[float]]] = {kind: {size: [] for size in SIZES} for kind in KINDS}
    async with AsyncExitStack() as stack:
        askers = {}
        for kind in KINDS:
            command = [sys.executable, "-m", "tests.measure_net", "--serve", kind, "--folder", str(folder)]
            server = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs yet
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            stack.callback(server.wait)
            stack.callback(server.kill)
            assert server.stdout is not None
            stack.callback(server.stdout.close)
            askers[kind] = await stack.enter_async_context(asker(kind, server.stdout.readline().strip(), folder))
        for turn in range(4):
            for kind, round_trip in askers.items():
                for size in SIZES:
                    data = os.urandom(size)
                    until = time.perf_counter() + seconds / 4
                    while time.perf_counter() < until or len(times[kind][size]) < 3 * (turn + 1):
                        start = time.perf_counter()
                        await round_trip(data)
                        times[kind][size].append((time.perf_counter() - start) * 1e3)
    return {kind: {size: statistics.median(of) for size, of in sizes.items()} for kind, sizes in times.items()}


def report(medians: dict[str, dict[int, float]]) -> None:
    print("round trip, median ms (ratio to TLS)")
    print("size      " + "".join(f"{kind:>18}" for kind in KINDS))
    for size in SIZES:
        cells = [f"{medians[kind][size]:9.3f} ({medians[kind][size] / medians['tls'][size]:5.2f})" for kind in KINDS]
        print(f"{size:<10}" + "".join(f"{cell:>18}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description="Round trips of the network layer beside TLS and stock libp2p.")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each configuration and size")
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("warning"))
    if options.serve:
        trio.run(serve, options.serve, options.folder)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, data in zip(("certificate.pem", "key.pem"), certificate(), strict=True):
            (folder / file).write_bytes(data)
        report(trio.run(measure, options.seconds, folder))


if __name__ == "__main__":
    main()
