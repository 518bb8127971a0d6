"""Test set-up that must run before torch starts."""

import os

# Some hosts advertise AMX without allowing it; oneDNN's bf16 matmul then dies with SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
