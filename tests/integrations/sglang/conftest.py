import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    pytest.importorskip("sglang.srt.plugins")
    from serving_models import TinyModel

    return TinyModel(tmp_path_factory.mktemp("tiny"))
