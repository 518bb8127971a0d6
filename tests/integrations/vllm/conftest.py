import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

collect_ignore = [] if importlib.util.find_spec("vllm") else ["engines.py"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    pytest.importorskip("vllm")
    from engines import TinyModel

    return TinyModel(tmp_path_factory.mktemp("tiny"))
