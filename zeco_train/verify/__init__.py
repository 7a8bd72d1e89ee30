"""Is sequence parallelism exact on this machine? `torchrun --nproc-per-node N -m zeco_train.verify [KEY=VALUE …]`.

Compares every backend's outputs, gradients and states, on every rank, with float64 on the CPU and with one device at
the same precision. Start at `__main__.py`.
"""
