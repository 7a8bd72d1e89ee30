"""Keeps the tests out of the user's folders; import it before packages that read these variables when imported.

Homes and caches lie in a folder of the tests, which is kept between their runs: compiling again would take minutes.
Also halts garbage collection until all tests are collected: what imports and collection make stays.
"""

from __future__ import annotations

import gc
import os
import site
import tempfile
from pathlib import Path

from zeco_train.system.code_cache import private_folder

gc.disable()
# Threads of several processes would wait for each other in loops, for six times the CPU time of small tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where the user may have put them; without these variables, they lie below the home.
_NAMED = {"ZECO_CACHE", "NETRC", "MPLCONFIGDIR", "TRITON_CACHE_DIR", "TRITON_HOME", "CUDA_CACHE_PATH"}
_NAMED |= {"TORCHINDUCTOR_CACHE_DIR", "TORCH_HOME", "TORCH_EXTENSIONS_DIR"}
_PREFIXES = ("XDG_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "WANDB_")

if "ZECO_TEST_HOME" not in os.environ:
    home = private_folder("tests", Path(tempfile.gettempdir(), f"zeco-tests-{os.geteuid()}"))
    # Packages of the user, which Python looks up below the home.
    os.environ["PYTHONUSERBASE"] = site.getuserbase()
    for name in [name for name in os.environ if name in _NAMED or name.startswith(_PREFIXES)]:
        del os.environ[name]
    # For commands that tests start in other folders.
    root = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    os.environ["HOME"] = os.environ["ZECO_TEST_HOME"] = str(home)
