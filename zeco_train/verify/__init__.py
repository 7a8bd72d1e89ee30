"""Is sequence parallelism exact on this machine? `torchrun --nproc-per-node N -m zeco_train.verify [KEY=VALUE …]`.

Every backend's outputs, gradients and states on every rank, against float64 on the CPU and against one device at the
same precision. Start at `command.py`.
"""
