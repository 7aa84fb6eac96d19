"""All GPU benchmarks: `python -m benchmarks.gpu`."""

from benchmarks.gpu import overhead

overhead.main()
