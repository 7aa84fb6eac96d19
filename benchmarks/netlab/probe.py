"""What gloo does with a link: its speed, its CPU time, and the order in which queued all-reduces end.

    python -m benchmarks.netlab --rate 1gbit -- python -m benchmarks.netlab.probe

All sizes are issued at once and waited for by a thread each; the ends are ms after that. Two queued operations that end
together shared the link; ends at equal distances mean one after the other.
"""

from __future__ import annotations

import resource
import threading
import time

import torch
import torch.distributed as dist

ORDERS_MB = ([100, 1], [100, 100, 1], [25, 25, 25, 25], [1] * 8)
CHUNKS_MB = (100.0, 25.0, 4.0, 1.0, 0.25)
TOTAL_MB = 100


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _ends_ms([10])  # connects
    lines = [_cost_line(chunk_mb) for chunk_mb in CHUNKS_MB]
    for sizes_mb in ORDERS_MB:
        lines.append(f"queued {sizes_mb} MB: ended after {[round(end) for end in _ends_ms(sizes_mb)]} ms")
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


def _cost_line(chunk_mb: float) -> str:
    """One after the other, then all queued at once: wall time, link speed and CPU time of this rank."""
    chunks = [_tensor(chunk_mb) for _ in range(round(TOTAL_MB / chunk_mb))]
    # A ring sends this many bytes per rank and direction.
    sent_bytes = 2 * (dist.get_world_size() - 1) / dist.get_world_size() * TOTAL_MB * 1e6
    parts: list[str] = []
    for queued in (False, True):
        dist.barrier()
        started, cpu_s = time.perf_counter(), _cpu_s()
        works = [dist.all_reduce(chunk, async_op=queued) for chunk in chunks]
        for work in works:
            if work is not None:
                work.wait()
        wall_s, cpu_s = time.perf_counter() - started, _cpu_s() - cpu_s
        speed = sent_bytes * 8 / wall_s / 1e9
        parts.append(f"{wall_s * 1e3:.0f} ms, {speed:.2f} Gbit/s, {cpu_s * 1e3:.0f} ms CPU")
    return f"{TOTAL_MB} MB in chunks of {chunk_mb:g}: one by one {parts[0]}; queued {parts[1]}"


def _ends_ms(sizes_mb: list[int]) -> list[float]:
    tensors = [_tensor(size_mb) for size_mb in sizes_mb]
    ends_ms = [0.0] * len(tensors)
    dist.barrier()
    started = time.perf_counter()
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]

    def wait(index: int) -> None:
        work = works[index]
        assert work is not None
        work.wait()
        ends_ms[index] = (time.perf_counter() - started) * 1e3

    threads = [threading.Thread(target=wait, args=(index,)) for index in range(len(tensors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends_ms


def _tensor(size_mb: float) -> torch.Tensor:
    return torch.ones(round(size_mb * 1e6 / 4))


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
