"""torchrun without garbage collection, which takes a third of its CPU time: it imports torch, and then only waits."""

import gc

gc.disable()

from torch.distributed.run import main  # noqa: E402

if __name__ == "__main__":
    main()
