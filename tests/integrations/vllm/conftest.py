import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))


#: Two files run at a time, and none of these may be left for the end.
LONGEST = ("test_serve.py", "test_processes.py", "test_smollm2_agreement.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    pytest.importorskip("vllm.config")
    from engines import TinyModel

    return TinyModel(tmp_path_factory.mktemp("tiny"))
