"""The sections of the configuration: each knob with its type, range, default and what a person needs to decide it.

What stands under a knob here is what `swarmnode config --default` prints above it.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, ClassVar, Literal, Self

from multiaddr import Multiaddr
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from backends.variants import VARIANTS
from capabilities.errors import UsageError
from scheduler.availability import Window
from swarmnode.http_address import check_host, check_key, check_listen, check_origin, http_address

MIB = 1 << 20


def _check_name(value: str) -> str:
    if value and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", value):
        raise ValueError("must be 1 to 63 letters, digits, dots, dashes or underscores")
    return value


def _check_listen(value: str) -> str:
    return _check_address(value, r"/ip[46]/[^/]+/tcp/\d+", "/ip4/0.0.0.0/tcp/11436")


def _check_leader(value: str) -> str:
    # The peer id is not optional: it is the key that the other side must prove.
    example = "/ip4/192.0.2.7/tcp/11436/p2p/12D3KooW..."
    return value and _check_address(value, r"/(ip|dns)[46]?/[^/]+/tcp/\d+/p2p/\w+", example)


def _check_address(value: str, pattern: str, example: str) -> str:
    try:
        Multiaddr(value)
    except Exception as error:
        raise ValueError(f"must be an address such as {example}") from error
    if not re.fullmatch(pattern, value):
        raise ValueError(f"must be a TCP address such as {example}")
    return value


def _check_hours(value: tuple[str, ...]) -> tuple[str, ...]:
    for text in value:
        try:
            Window.parse(text)
        except UsageError as error:
            raise ValueError(f"must be times to work in: {error.message}. {error.hint}") from None
    return value


def _check_mbit(value: float) -> float:
    if 0 < value < 1:
        raise ValueError("must be 0 (no limit) or at least 1: whoever fetches gives up on a slower source")
    return value


def _check_kernel(value: str) -> str:
    names = [variant.name for variant in VARIANTS]
    if value and value not in names:
        raise ValueError(f"must be one of {', '.join(names)}")
    return value


def _check_factory(value: str) -> str:
    if value and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
        raise ValueError("must be module:Class")
    return value


Combine = Literal["router-order", "partial-sum"]
"""How a layer's expert rows become a token's: see LeaderConfig.combine."""

ListenAddress = Annotated[str, AfterValidator(_check_listen)]
ApiKey = Annotated[str, AfterValidator(check_key)]
Origin = Annotated[str, AfterValidator(check_origin)]
HostName = Annotated[str, AfterValidator(check_host)]


class Section(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


class NodeConfig(Section):
    """This daemon and what it may use of the machine."""

    name: Annotated[str, AfterValidator(_check_name)] = ""
    """What people see in `swarmctl status`. Empty: the machine's host name. It identifies nothing; the peer's key
    does."""

    listen: Annotated[tuple[ListenAddress, ...], Field(strict=False, max_length=8)] = ("/ip4/0.0.0.0/tcp/11436",)
    """TCP addresses to accept peers on. A fixed port, so that an address written down once stays right; port 0 takes
    any free one, for several daemons on one machine. A worker needs none: it dials out, so an empty list works behind
    any firewall, but then nobody can fetch experts from it who is not connected already."""

    memory_mib: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    """Memory that experts may take. 0: three quarters of what is available when the daemon starts. A worker needs about
    250 MiB besides. More than the machine has makes it swap, and one swapping worker slows every token of the swarm."""

    disk_mib: Annotated[int, Field(ge=0, le=1 << 30)] = 0
    """Disk that fetched experts may take. 0: half of what is free when the daemon starts, without them; what they take
    already stays theirs. It is a cache: what was used longest ago goes first, and everything can be fetched again."""

    host: Annotated[str, AfterValidator(_check_name)] = ""
    """What stands for this machine when copies of an expert are put on different ones. Empty: its machine id. Set it
    where machines share an id (cloned images), or where daemons on one machine are to count as apart."""

    def memory_bytes(self, available_bytes: int) -> int:
        """The budget for experts, given the memory that is available now."""
        return self.memory_mib * MIB or available_bytes * 3 // 4

    def disk_bytes(self, free_bytes: int, held_bytes: int = 0) -> int:
        """The budget of the shard cache, given the space that is free now and what cache and trunks take of the disk.

        Those count as free, or each start would halve the budget; and whoever else fills the disk costs no expert.
        """
        return self.disk_mib * MIB or max(held_bytes, (free_bytes + held_bytes) // 2)


class SwarmConfig(Section):
    """The swarm that this daemon belongs to."""

    role: Literal["member", "leader", "worker"] = "member"
    """member: whatever the swarm needs that this daemon belongs to: `swarmctl init` makes one, `swarmctl join TOKEN`
    enters one, and its backbone elects the leader. The other two are for a fixed set of machines without elections:
    leader holds the trunk, routes, samples; worker holds experts and computes them for the leader named below. All take
    prompts."""

    leader: Annotated[str, AfterValidator(_check_leader)] = ""
    """Workers: where the leader is and which key it must prove. `swarmctl status` there prints both parts, its address
    and its peer id: /ip4/192.0.2.7/tcp/11436/p2p/12D3KooW..."""

    workers_expected: Annotated[int, Field(ge=0, le=256)] = 0
    """Leader: experts are first dealt out once this many workers have joined. 0: to those who are there when nobody has
    joined for settle_s. Set it where the number is known: each worker that comes later has the experts dealt out anew,
    and those that change hands are fetched again."""

    settle_s: Annotated[float, Field(ge=0.1, le=600)] = 3.0
    """Leader: how long to wait for one more worker before experts are dealt out (the first time only if
    workers_expected is 0). Workers dial again within two seconds, so three see all that are up."""

    replicas: Annotated[int, Field(ge=1, le=8)] = 2
    """Leader: copies of each expert, on different machines, where memory allows. With two, any one machine may be lost
    in the middle of an answer. A third costs as much memory as the second and is needed far less."""

    mdns: bool = True
    """Members find each other on the local network by multicast DNS. What is announced names neither the swarm nor its
    key to strangers. Off: only by the addresses that are known from the invite and from other members."""

    @model_validator(mode="after")
    def _role_fits(self) -> Self:
        if self.role == "worker" and not self.leader:
            raise ValueError('a worker must know its leader: set leader = "/ip4/ADDRESS/tcp/PORT/p2p/PEER_ID"')
        if self.role != "worker" and self.leader:
            raise ValueError('leader is for workers: set role = "worker", or leave it empty')
        return self


class LeaderConfig(Section):
    """Serving prompts. Only the leader reads this."""

    model: Annotated[str, Field(max_length=128)] = ""
    """Which model to serve, by its name in `swarmctl model list`. Empty: the only one."""

    context_tokens: Annotated[int, Field(ge=16, le=1 << 20)] = 4096
    """Prompt and answer together, for each request. Memory for it is reserved at start: layers * key and value width *
    2 bytes * context_tokens * parallel. What a model advertises (often 131072) would take gigabytes for nothing, so it
    is set here."""

    parallel: Annotated[int, Field(ge=1, le=256)] = 8
    """Requests that generate at the same time. Expert weights are read once for all of them, so eight together give two
    to three times the tokens of one; each waits a little longer. Each costs a context's memory."""

    queue_limit: Annotated[int, Field(ge=0, le=4096)] = 64
    """Requests that wait for a place. More are refused at once (`overloaded`): better to hear no than to wait for
    minutes."""

    batch_tokens: Annotated[int, Field(ge=1, le=4096)] = 512
    """Tokens of prompts in one step. Larger: prompts are read faster. Smaller: running answers pause less while a long
    prompt is read, and frames to workers are smaller (batch_tokens * width * 4 bytes)."""

    fast: bool = False
    """true: flash attention, a shared cache, and weights repacked wherever that is faster. `swarmctl bench` measures
    what it gains here. The price is batch invariance: a token's last bits then depend on who else is served, and an
    answer can differ from itself when it is repeated."""

    request_deadline_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """From acceptance to the last token. A request that is not done by then ends with `deadline_exceeded`: without an
    end a forgotten client would hold its place for ever."""

    activations: Literal["auto", "f32", "q8_0"] = "auto"
    """How activations travel to workers. q8_0 takes 3.76 times fewer bytes, and the same bits come out where the
    workers' kernels would round them the same way (Q4_0 and Q8_0 weights on CPUs). auto: q8_0 exactly there, f32
    elsewhere."""

    combine: Combine = "router-order"
    """How a token's expert rows are added up. router-order: workers send a row for each expert, and llama.cpp adds them
    as it would on one machine, to the same bits. partial-sum: a worker adds its own rows first and sends one a token,
    so for n chosen experts it sends up to n times fewer bytes back (4 * width instead of 4 * width * n): for slow
    uplinks. The last bits then depend on which worker holds which experts, though not on timing or on who else is
    served, and a few architectures refuse it."""

    park_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """How long a request waits for experts that nobody can compute: until their holder is back or others have loaded
    them, which takes about as long. It keeps its place meanwhile. 0: it fails at once."""

    own_copy: bool = True
    """What no worker can compute at this moment, the leader computes from the model's file, if it has it. That is slow,
    since experts are read when they are needed, but an answer goes on. false: it waits for the workers."""

    audits: bool = True
    """A share of what workers answer is recomputed here, beside the work: who cheats is found. A process of its own
    does it, which takes 200 MiB while requests run, reads experts from the disk, and costs a few tokens of a hundred on
    a machine whose cores have no time to spare (`swarmctl bench`, with and without `--no-audits`). false: only where
    every worker is your own."""


class ComputeConfig(Section):
    """How this daemon computes."""

    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Compute threads. 0: what the machine has left, that is its cores less one for the event loops, less the threads
    of daemons that run already. Threads that share a core wait for each other in turns (38 ms a token became 190 to
    800), so a number here is cut to what is left, but never below one."""

    backend: Literal["ggml", "numpy"] = "ggml"
    """ggml: llama.cpp's own kernels. numpy: a slow reference to check other backends against."""

    device: Annotated[str, Field(max_length=64)] = ""
    """ggml's name of the device to compute on, for example CPU, CUDA0 or Vulkan0. Empty: the first GPU that the
    installed llama-cpp-python was built for, else the CPU."""

    kernel: Annotated[str, AfterValidator(_check_kernel)] = ""
    """Kernels of another build, by their name in `swarmctl kernels list`, for example haswell or vulkan. They compute
    experts in a process of their own. Empty: those of the installed llama-cpp-python."""

    factory: Annotated[str, AfterValidator(_check_factory)] = ""
    """module:Class of another expert backend, used in place of the above: for backends that live outside this project,
    and for tests. What is named here runs with all rights of the daemon. [backend] factory is read, too."""


class LimitsConfig(Section):
    """When and how much this machine works for the swarm. While it may not, its experts go to others and it does not
    lead; `swarmctl status` says why. Prompts can be asked all the time. Memory and disk have theirs under [node]."""

    hours: Annotated[tuple[str, ...], AfterValidator(_check_hours), Field(strict=False, max_length=32)] = ()
    """Local times to work in, as ["22:00-07:00", "sat,sun 00:00-24:00"]. Empty: always."""

    idle_minutes: Annotated[float, Field(ge=0, le=1440)] = 0.0
    """Work only after nobody has used the machine for so long. 0: also beside its user, at low priority."""

    on_battery: bool = False
    """Work on battery, too."""

    on_metered: bool = False
    """Work where the network costs by the byte, too (as NetworkManager says)."""

    cpu_percent: Annotated[float, Field(ge=1, le=100)] = 100.0
    """Share of the time in which experts are computed: the kernels rest after each dispatch. Fewer threads ([compute]
    threads) leave cores free instead."""

    upload_mbit: Annotated[float, Field(ge=0, le=1e6), AfterValidator(_check_mbit)] = 0.0
    """Experts and trunks sent to others, in Mbit/s. 0: no limit. What a token takes is small and not held back."""

    download_mbit: Annotated[float, Field(ge=0, le=1e6), AfterValidator(_check_mbit)] = 0.0
    """Experts and trunks fetched, in Mbit/s. 0: no limit."""

    def windows(self) -> tuple[Window, ...]:
        return tuple(map(Window.parse, self.hours))


class RequestsConfig(Section):
    """What this node keeps of the prompts that it asks. Only its own; leaders and workers keep nothing."""

    keep: Annotated[int, Field(ge=0, le=10_000)] = 100
    """So many of the last requests and answers, in files that only this user can read, for `swarmctl verify`. 0: none.
    `swarmctl forget` removes them."""


class ApiConfig(Section):
    """The HTTP interface: an API for OpenAI's clients, and what pages and monitors read (docs/api.md)."""

    listen: Annotated[str, AfterValidator(check_listen)] = "127.0.0.1:11435"
    """Address and port. Port 0 takes any free one, for several daemons on one machine; `swarmctl status --json` says
    which. A port that is taken does not stop the daemon: it says so in `swarmctl status` and tries again. An address
    that other machines reach needs keys, and a reverse proxy that adds TLS: keys and text travel in the clear here.
    "off": no HTTP."""

    keys: Annotated[tuple[ApiKey, ...], Field(strict=False, max_length=64)] = ()
    """API keys, 16 characters or more: `openssl rand -hex 24` makes one. Where there are any, every request needs one
    (`Authorization: Bearer KEY`). None: whoever reaches the address may ask, so it must be this machine's own."""

    origins: Annotated[tuple[Origin, ...], Field(strict=False, max_length=64)] = ()
    """Origins of web pages that may ask from a browser, for example "https://chat.example.org". The daemon's own page
    always may. Every page of such an origin then asks with your machine's rights."""

    hosts: Annotated[tuple[HostName, ...], Field(strict=False, max_length=64)] = ()
    """Further names that requests to a loopback address may call it by, for example behind a reverse proxy. Others are
    refused: a page on the internet can point its own name at this machine."""

    parallel: Annotated[int, Field(ge=1, le=256)] = 12
    """Answers at the same time, for all clients of this daemon together. More wait here, and whoever has least under
    way goes first. The leader takes 16 from one peer: with 12, `swarmctl ask` always finds a place."""

    waiting_per_client: Annotated[int, Field(ge=1, le=4096)] = 64
    """Answers that one client may have under way or waiting; more are refused (429). A client is an API key, or without
    keys an address."""

    answers_per_minute: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Answers that one client may begin in a minute; a burst may have them all at once. 0: as many as it likes."""

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port; None: off."""
        return http_address(self.listen)

    @property
    def host(self) -> str:
        return "" if self.address is None else self.address[0]

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this machine reach the address."""
        return self.host == "localhost" or (bool(self.host) and ipaddress.ip_address(self.host).is_loopback)

    @model_validator(mode="after")
    def _keys_where_others_reach(self) -> Self:
        if self.address is not None and not self.is_loopback and not self.keys:
            raise ValueError(
                'listen is an address that other machines reach, so it needs a key: set keys = ["KEY"] with what'
                " `openssl rand -hex 24` prints, or listen on 127.0.0.1"
            )
        return self


class LogConfig(Section):
    """Logs go to standard error, and into the data folder. They never hold prompts, answers or tokens."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """info tells of joins, assignments and requests; debug also of each step."""

    format: Literal["auto", "human", "json"] = "auto"
    """On standard error. auto: human on a terminal, JSON lines otherwise."""

    file_mib: Annotated[int, Field(ge=0, le=1 << 16)] = 16
    """What logs in the data folder may take, for `swarmctl logs`; the oldest quarter goes when it is full. One
    kind of fault, at the highest rate that is logged, takes over two hours for that. 0: no file."""
