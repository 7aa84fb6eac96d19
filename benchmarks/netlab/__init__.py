"""A lab for slow links: ranks in network namespaces of their own, joined by rate-limited links.

    python -m benchmarks.netlab --ranks 2 --rate 1gbit -- python train.py

    with Lab(ranks=2, rate="1gbit") as lab:
        code = lab.run(["python", "train.py"])

Needs root on Linux with iproute2. Links are limited by the kernel (`tc tbf`, on both ends), not by sleeps. Latency
cannot be added: that takes `netem`, which the kernel of the project's machines does not have.
"""

from benchmarks.netlab.lab import Lab, LabError, exit_on_signals
from benchmarks.netlab.rate import Rate

__all__ = ["Lab", "LabError", "Rate", "exit_on_signals"]
