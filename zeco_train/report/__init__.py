"""Several runs, and benchmarks, on one page: `python -m zeco_train.report PATH …`.

A PATH is the folder of a run, a folder of such folders, or the results.json of a benchmark. The report is a picture
and one HTML page that needs no network: throughput by backend, length and devices, loss curves and how they differ, and
what steps lose to communication and data.
"""
