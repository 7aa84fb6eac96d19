"""Which commands build a lab: pure text, nothing is run here.

Two ranks are joined by one pair of veth devices. Any other number hangs off a bridge in a namespace of its own:

    rank 0 [lab0]==[port0]      [port1]==[lab0] rank 1
                     \\          /
                       [switch]                            hub
                          |
                       [port2]==[lab0] rank 2

Every end of every link limits what it sends, so a link has the rate in each direction.
"""

from __future__ import annotations

from benchmarks.netlab.rate import Rate

Command = list[str]

DEVICE = "lab0"
MAX_RANKS = 250
_BRIDGE = "switch"

# Of packets that wait for their turn a link keeps this many ms. TCP holds back by itself before that.
_QUEUE_MS = 50
# The machine's own choice would change the figures (BBR, pacing by timers, moves half as many bytes per CPU second).
# Reno is the one that every kernel has and lets a namespace choose; links here lose next to nothing, which suits it.
_CONGESTION_CONTROL = "reno"


def address(rank: int) -> str:
    """Where the rank is reached inside the lab; namespaces are closed, so every lab uses the same addresses."""
    return f"10.77.0.{rank + 1}"


def namespaces(name: str, num_ranks: int) -> list[str]:
    """Those of the ranks, in order, then the hub's where there is one."""
    ranks = [f"{name}-rank{rank}" for rank in range(num_ranks)]
    return ranks if num_ranks == 2 else [*ranks, f"{name}-hub"]


def link_commands(name: str, num_ranks: int, rate: Rate) -> list[Command]:
    """What joins the namespaces, once they exist."""
    spaces = namespaces(name, num_ranks)
    commands: list[Command] = []
    if num_ranks == 2:
        commands += [_veth(spaces[0], DEVICE, spaces[1], DEVICE)]
    else:
        commands += _hub(spaces[:-1], spaces[-1], rate)
    for rank, space in enumerate(spaces[:num_ranks]):
        commands += [
            ["ip", "netns", "exec", space, "sh", "-c", _set_congestion_control()],
            ["ip", "-n", space, "link", "set", "lo", "up"],
            ["ip", "-n", space, "address", "add", f"{address(rank)}/24", "dev", DEVICE],
            ["ip", "-n", space, "link", "set", DEVICE, "up"],
            *_limit(space, DEVICE, rate),
        ]
    return commands


def _hub(ranks: list[str], hub: str, rate: Rate) -> list[Command]:
    commands: list[Command] = [
        ["ip", "-n", hub, "link", "set", "lo", "up"],
        ["ip", "-n", hub, "link", "add", _BRIDGE, "type", "bridge"],
        ["ip", "-n", hub, "link", "set", _BRIDGE, "up"],
    ]
    for rank, space in enumerate(ranks):
        port = f"port{rank}"
        commands += [
            _veth(space, DEVICE, hub, port),
            ["ip", "-n", hub, "link", "set", port, "master", _BRIDGE],
            ["ip", "-n", hub, "link", "set", port, "up"],
            *_limit(hub, port, rate),
        ]
    return commands


def _veth(space: str, device: str, peer_space: str, peer: str) -> Command:
    # Born inside the namespaces: the machine's own list of devices is never touched.
    return ["ip", "-n", space, "link", "add", device, "type", "veth", "peer", "name", peer, "netns", peer_space]


def _limit(space: str, device: str, rate: Rate) -> list[Command]:
    if rate.bits_per_s is None:
        return []
    limit = ["rate", f"{rate.bits_per_s}bit", "burst", str(rate.burst_bytes), "latency", f"{_QUEUE_MS}ms"]
    return [["tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", *limit]]


def _set_congestion_control() -> str:
    return f"echo {_CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control"
