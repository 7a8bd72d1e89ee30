"""Several runs, and benchmarks, on one page: `python -m zeco_train.report PATH …`.

A PATH is the folder of a run, a folder of such folders, or the results.json of a benchmark. The report is a PNG and a
self-contained HTML page: throughput by backend, length and devices, loss curves and their differences, and the step
time lost to communication and data loading.
"""
